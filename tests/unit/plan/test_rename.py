"""What becomes of the names of a checkpoint: no bytes, no tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved import boxes, meta

from bcp.errors import CoverageError, InputError
from bcp.options import LoadOptions
from bcp.plan.box import Box
from bcp.plan.layout import Layout
from bcp.plan.read.renamed import RenamedLayout, renamed
from bcp.plan.read.renames import AssembledTensor, Moved
from bcp.plan.shards import KINDS, TensorMeta, TensorTable

BOTH = ("model", "optimizer")


def layout_of(*metas: TensorMeta, objects: Sequence[tuple[str, str]] = ()) -> Layout:
    """Return a layout that has these names and nothing else."""
    none = np.zeros(0, dtype=np.int64)
    tensors = TensorTable.build(sorted(metas, key=lambda each: (KINDS.index(each.kind), each.fqn)))
    given: dict[str, Any] = {**dict.fromkeys(Layout.__slots__, none), "tensors": tensors, "objects": sorted(objects)}
    return Layout(**given)


def adam(fqn: str, shape: tuple[int, ...], *more: str) -> list[TensorMeta]:
    """Return a parameter and its states."""
    states = [meta(f"state.{fqn}.{key}", shape, kind="optimizer") for key in ("exp_avg", *more)]
    return [meta(fqn, shape), *states, meta(f"state.{fqn}.step", (), kind="optimizer")]


def own(found: RenamedLayout) -> dict[tuple[str, str], Any]:
    """Return the checkpoint's own name for every name of the target; several where a tensor is put together."""
    names = found.layout.tensors.fqn
    tensors = {name: [names[row] for row in found.sources(row)] for name, row in found.saved.rows.items()}
    return {name: each[0] if len(each) == 1 else each for name, each in tensors.items()} | {
        name: found.layout.objects[row][1] for name, row in found.objects.items()
    }


class Blocks:
    """A rename that says for some names what becomes of them; others stay."""

    def __init__(self, **moved: Sequence[Moved]) -> None:
        self.moved = moved

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        return self.moved.get(fqn, [Moved.whole(fqn, shape)])


def rows(fqn: str, count: int, shape: tuple[int, ...], at: int, source: int = 0) -> Moved:
    """Move rows of a matrix."""
    lengths, zeros = (count, *shape[1:]), (0,) * (len(shape) - 1)
    return Moved(Box((source, *zeros), lengths), fqn, shape, (at, *zeros))


# -- names -------------------------------------------------------------------------------------------


LAYER = layout_of(
    *adam("layers.0.w", (4, 2)),
    *adam("layers.0.w.bias", (4,)),
    meta("odd", (2,), kind="optimizer"),
    objects=[("model", "layers.0._extra_state"), ("optimizer", "param_groups.layers.0.w.lr"), ("optimizer", "note")],
)


@pytest.mark.parametrize(
    "rename",
    [
        {"layers.0.w": "h.0.v", "layers.0.w.bias": "h.0.v.bias", "layers.0._extra_state": "h.0._extra_state"},
        [(r"^layers\.", "h."), (re.compile(r"\.w\b"), ".v")],
        lambda fqn: fqn.replace("layers.", "h.").replace(".w", ".v"),
    ],
    ids=["dict", "regex", "callable"],
)
def test_states_hyper_parameters_and_objects_follow_their_parameter(rename: Any) -> None:
    assert own(renamed(LAYER, rename, BOTH)) == {
        ("model", "h.0.v"): "layers.0.w",
        ("model", "h.0.v.bias"): "layers.0.w.bias",
        ("optimizer", "state.h.0.v.exp_avg"): "state.layers.0.w.exp_avg",
        ("optimizer", "state.h.0.v.step"): "state.layers.0.w.step",
        ("optimizer", "state.h.0.v.bias.exp_avg"): "state.layers.0.w.bias.exp_avg",
        ("optimizer", "state.h.0.v.bias.step"): "state.layers.0.w.bias.step",
        ("optimizer", "odd"): "odd",
        ("model", "h.0._extra_state"): "layers.0._extra_state",
        ("optimizer", "param_groups.h.0.v.lr"): "param_groups.layers.0.w.lr",
        ("optimizer", "note"): "note",
    }


def test_without_a_rename_all_names_stay() -> None:
    found = renamed(LAYER, None, BOTH)
    assert all(new[1] == old for new, old in own(found).items())
    assert len(own(found)) == len(LAYER.tensors) + len(LAYER.objects)
    assert found.saved.tensors is LAYER.tensors


def test_the_longest_parameter_counts_and_keys_may_have_dots() -> None:
    layout = layout_of(
        meta("a", (2,)),
        meta("a.b", (2,)),
        meta("state.a.b.c", (2,), kind="optimizer"),
        meta("state.a.deep.down", (2,), kind="optimizer"),
        meta("state.lost.key", (2,), kind="optimizer"),
    )
    found = own(renamed(layout, {"a": "x", "a.b": "y", "lost": "z"}, BOTH))
    names = {"state.y.c": "state.a.b.c", "state.x.deep.down": "state.a.deep.down", "state.z.key": "state.lost.key"}
    assert {name: old for (kind, name), old in found.items() if kind == "optimizer"} == names


def test_planners_see_shapes_and_ties_by_the_new_names() -> None:
    layout = layout_of(meta("a", (4, 2)), meta("b", (4, 2), tied_to="a"))
    saved = renamed(layout, {"a": "x", "b": "y"}, BOTH).saved
    assert saved.meta(("model", "y")) == replace(layout.tensors[1], fqn="y", tied_to="x")
    assert [name for _, name in saved.names("model")] == ["x", "y"]


def test_states_of_a_tied_parameter_are_found_by_all_its_names() -> None:
    layout = layout_of(
        meta("head", (4, 2)),
        meta("tok", (4, 2), tied_to="head"),
        meta("state.head.exp_avg", (4, 2), kind="optimizer"),
        objects=[("optimizer", "param_groups.head.lr")],
    )
    found = own(renamed(layout, {"head": "output", "tok": "embedding"}, BOTH))
    for name in ("output", "embedding"):
        assert found["optimizer", f"state.{name}.exp_avg"] == "state.head.exp_avg"
        assert found["optimizer", f"param_groups.{name}.lr"] == "param_groups.head.lr"


def test_tied_names_may_become_one() -> None:
    layout = layout_of(*adam("head", (4, 2)), meta("tok", (4, 2), tied_to="head"))
    found = own(renamed(layout, {"head": "embedding", "tok": "embedding"}, BOTH))
    assert found["model", "embedding"] in ("head", "tok")
    assert found["optimizer", "state.embedding.exp_avg"] == "state.head.exp_avg"


def test_tied_names_may_become_one_block() -> None:
    layout = layout_of(*adam("head", (4, 2)), meta("tok", (4, 2), tied_to="head"))
    padded = [replace(rows("embedding", 4, (6, 2), 0), padded=True)]
    found = own(renamed(layout, Blocks(head=padded, tok=padded), BOTH))
    assert found["model", "embedding"] == "head"
    assert found["optimizer", "state.embedding.exp_avg"] == "state.head.exp_avg"


def test_none_leaves_a_tensor_out_with_all_that_belongs_to_it() -> None:
    layout = layout_of(*adam("a", (2,)), *adam("b", (2,)), objects=[("optimizer", "param_groups.a.lr")])
    found = renamed(layout, {"a": None}, BOTH)
    assert {name for _, name in own(found)} == {"b", "state.b.exp_avg", "state.b.step"}
    names = [*layout.tensors.fqn, *(path for _, path in layout.objects)]
    assert {names[row] for row in found.left_out} == {"a", "state.a.exp_avg", "state.a.step", "param_groups.a.lr"}


def test_weird_names_are_only_names() -> None:
    layout = layout_of(meta("a", (2,)))
    assert own(renamed(layout, {"a": "../../etc/passwd\n"}, BOTH)) == {("model", "../../etc/passwd\n"): "a"}


@pytest.mark.parametrize("rename", [{"a": "b"}, [("a", "b")], lambda _: "b"], ids=["dict", "regex", "callable"])
def test_two_names_that_become_one_are_refused(rename: Any) -> None:
    with pytest.raises(InputError, match="both 'a' and 'b' of the checkpoint 'b'"):
        renamed(layout_of(meta("a", (2,)), meta("b", (2,))), rename, BOTH)


def test_leaves_that_belong_to_no_parameter_cannot_be_run_into_either() -> None:
    layout = layout_of(
        meta("a", (2,)), meta("state.a.x", (2,), kind="optimizer"), meta("state.b.x", (2,), kind="optimizer")
    )
    with pytest.raises(InputError, match=r"two optimizer leaves of the checkpoint 'state\.b\.x'|both 'a' and 'b'"):
        renamed(layout, {"a": "b"}, BOTH)


def test_a_key_that_names_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"rename has 1 names that the checkpoint's model lacks: lyers\.0\.w"):
        renamed(LAYER, {"lyers.0.w": "x"}, BOTH)


def fails(_: str) -> str:
    raise KeyError("oh")


@pytest.mark.parametrize(
    ("rename", "match"),
    [
        (fails, r"rename raised KeyError for 'layers\.0\.w', \[4, 2\]: 'oh'"),
        (lambda _: 5, "return a name, or None"),
        ({"layers.0.w": 5}, "return a name, or None"),
        (Blocks(**{"layers.0.w": ["x"]}), "rename returned 'x' for"),  # type: ignore[list-item]
        (Blocks(**{"layers.0.w": 3}), r"rename raised TypeError for"),  # type: ignore[arg-type]
    ],
)
def test_what_a_rename_returns_is_checked(rename: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        renamed(LAYER, rename, BOTH)


@pytest.mark.parametrize("rename", ["ab", 5, [("(", "x")], [("a", r"\1")], ["abc"], [1]])
def test_what_is_no_rename_is_refused_at_once(rename: Any) -> None:
    with pytest.raises(InputError, match="is no dict of names"):
        LoadOptions(rename=rename)


@pytest.mark.parametrize("rename", [None, {}, [], {"a": None}, [("a", "b")], str.lower, Blocks()])
def test_what_is_a_rename_is_taken(rename: Any) -> None:
    assert LoadOptions(rename=rename).rename is rename


# -- blocks ------------------------------------------------------------------------------------------


def test_a_tensor_is_cut_with_its_states() -> None:
    layout = layout_of(*adam("qkv", (6, 3)), objects=[("optimizer", "param_groups.qkv.lr")])
    found = renamed(layout, Blocks(qkv=[rows("q", 4, (4, 3), 0), rows("k", 2, (2, 3), 0, source=4)]), BOTH)
    assert own(found) == {
        (kind, name.replace("qkv", new)): name
        for new in ("q", "k")
        for kind, name in [
            ("model", "qkv"),
            ("optimizer", "state.qkv.exp_avg"),
            ("optimizer", "state.qkv.step"),
            ("optimizer", "param_groups.qkv.lr"),
        ]
    }
    assert found.saved.meta(("optimizer", "state.k.exp_avg")).shape == (2, 3)
    assert found.saved.meta(("optimizer", "state.k.step")).shape == ()
    assert found.left_out == []


def test_tensors_are_joined_with_their_states() -> None:
    layout = layout_of(*adam("gate", (4, 3)), *adam("up", (4, 3)), objects=[("optimizer", "param_groups.up.lr")])
    found = renamed(layout, Blocks(gate=[rows("fc1", 4, (8, 3), 0)], up=[rows("fc1", 4, (8, 3), 4)]), BOTH)
    assert own(found) == {
        ("model", "fc1"): ["gate", "up"],
        ("optimizer", "state.fc1.exp_avg"): ["state.gate.exp_avg", "state.up.exp_avg"],
        ("optimizer", "state.fc1.step"): "state.gate.step",  # of the first
        ("optimizer", "param_groups.fc1.lr"): "param_groups.up.lr",
    }
    assert [layout.tensors.fqn[row] for row in found.left_out] == ["state.up.step"]


def test_states_of_another_shape_cannot_be_cut() -> None:
    layout = layout_of(meta("w", (4, 2)), meta("state.w.row", (4,), kind="optimizer"))
    halves = Blocks(w=[rows("a", 2, (2, 2), 0), rows("b", 2, (2, 2), 0, source=2)])
    with pytest.raises(InputError, match=r"'w', which is \[4, 2\], and its optimizer state 'state\.w\.row' is \[4\]"):
        renamed(layout, halves, BOTH)
    renamed(layout, halves, ["model"])


def test_states_that_some_sources_lack_are_refused() -> None:
    layout = layout_of(*adam("a", (2,)), meta("b", (2,)))
    joined = Blocks(a=[rows("c", 2, (4,), 0)], b=[rows("c", 2, (4,), 2)])
    with pytest.raises(InputError, match=r"'state\.c\.exp_avg' .* has no 'exp_avg' of b;"):
        renamed(layout, joined, BOTH)
    assert own(renamed(layout, joined, ["model"])) == {("model", "c"): ["a", "b"]}


def test_what_is_no_tensor_cannot_be_cut() -> None:
    layout = layout_of(objects=[("model", "extra")])
    with pytest.raises(InputError, match="rename cuts 'extra', which is no tensor"):
        renamed(layout, Blocks(extra=[Moved(Box((), ()), "x", (1,), (0,))]), BOTH)


@pytest.mark.parametrize(
    ("moved", "match"),
    [
        (Moved(Box((0,), (4,)), "x", (4,), (0,)), "numbers of dimensions differ"),
        (Moved(Box((0, 0), (4, 3)), "x", (4, 3), (0,)), "numbers of dimensions differ"),
        (Moved(Box((0, 0), (5, 3)), "x", (5, 3), (0, 0)), r"sticks out of the saved tensor"),
        (Moved(Box((-1, 0), (2, 3)), "x", (2, 3), (0, 0)), r"sticks out of the saved tensor"),
        (Moved(Box((0, 0), (0, 3)), "x", (2, 3), (0, 0)), r"is empty or sticks out"),
        (Moved(Box((0, 0), (4, 3)), "x", (4, 3), (1, 0)), r"its block \[1:5, 0:3\] sticks out of the target"),
        (Moved(Box((0, 0), (4, 3)), "x", (4, 3), (0, 0), transposed=True), r"\[0:3, 0:4\] sticks out of the target"),
        (Moved(Box((0, 0), (4, 3)), "x", (3,), (0,)), "only dimensions of length 1 can be left out"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(moved: Moved, match: str) -> None:
    with pytest.raises(InputError, match=match):
        renamed(layout_of(meta("w", (4, 3))), Blocks(w=[moved]), BOTH)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [4, 3]},
        {"shape": (1 << 63, 3)},
        {"at": (0.0, 0.0)},
        {"at": None},
        {"saved": None},
        {"saved": Box([0, 0], (4, 3))},  # type: ignore[arg-type]  # what users may write
    ],
    ids=str,
)
def test_blocks_of_other_types_are_refused(wrong: dict[str, Any]) -> None:
    moved = replace(Moved.whole("x", (4, 3)), transposed=True, **wrong)
    with pytest.raises(InputError, match=r"rename answers Moved\(.* for 'w', which is \[4, 3\]: .* tuples of ints"):
        renamed(layout_of(meta("w", (4, 3))), Blocks(w=[moved]), BOTH)


def test_one_dimension_cannot_be_transposed() -> None:
    with pytest.raises(InputError, match="numbers of dimensions differ"):
        Moved(Box((0,), (4,)), "x", (4,), (0,), transposed=True).check("w", (4,))


def test_blocks_that_disagree_on_the_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"'x' of 'w', and says both \[4, 3\] and \[5, 3\] of its shape"):
        AssembledTensor.of([("w", rows("x", 2, (4, 3), 0)), ("w", rows("x", 3, (5, 3), 2))])


def test_a_gap_is_refused_unless_it_is_padding() -> None:
    half = rows("x", 2, (4, 3), 0)
    with pytest.raises(CoverageError, match=r"'x', which is \[4, 3\], of 'w', and these give it 6 of its 12 elements"):
        AssembledTensor.of([("w", half)])
    assert AssembledTensor.of([("w", replace(half, padded=True))]).shape == (4, 3)


@pytest.mark.parametrize("padded", [False, True])
def test_an_overlap_is_refused(padded: bool) -> None:  # noqa: FBT001 -- a parameter
    parts = [("v", rows("x", 3, (4, 3), 0)), ("w", replace(rows("x", 1, (4, 3), 2), padded=padded))]
    with pytest.raises(CoverageError, match=r"overlap: \[0:3, 0:3\], from 'v'; and \[2:3, 0:3\], from 'w'"):
        AssembledTensor.of(parts)


@given(st.data())
def test_only_tilings_pass(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    tiling = boxes(data.draw, Box.whole(shape), 8)
    parts = [("w", Moved(Box((0,) * len(shape), box.lengths), "x", shape, box.offsets)) for box in tiling]
    assert AssembledTensor.of(parts).shape == shape
    with pytest.raises(CoverageError, match="give it"):
        AssembledTensor.of(parts[1:]) if len(parts) > 1 else AssembledTensor.of(
            [("w", replace(rows("x", 1, (2,), 0), at=(0,)))]
        )
    with pytest.raises(CoverageError, match="overlap"):
        AssembledTensor.of([*parts, data.draw(st.sampled_from(parts))])
