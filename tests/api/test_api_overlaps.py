"""Targets that share memory: a load that cannot be right is refused, one that can be is done."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample_of
from torch import nn

import bcp

State = dict[str, torch.Tensor]


def saved(path: Path, **states: State) -> dict[str, State]:
    """Save tensors of random values, no two of which are equal, in the shapes and dtypes of these."""
    torch.manual_seed(0)
    values = {
        kind: {name: torch.rand(each.shape).mul(1e6).to(each.dtype).contiguous() for name, each in state.items()}
        for kind, state in states.items()
    }
    bcp.save(path, values)
    return values


# -- one target --------------------------------------------------------------------------------------

ITSELF: dict[str, Callable[[], torch.Tensor]] = {
    "unfold": lambda: torch.zeros(6).unfold(0, 3, 1),
    "unfold of rows": lambda: torch.zeros(6, 4).unfold(0, 3, 2),
    "as_strided": lambda: torch.zeros(12).as_strided((3, 3), (2, 1)),
    "as_strided, far": lambda: torch.zeros(13).as_strided((3, 3), (2, 4)),
    "expand": lambda: torch.zeros(3, 1).expand(3, 4),
    "bf16": lambda: torch.zeros(6, dtype=torch.bfloat16).unfold(0, 2, 1),
}


@pytest.mark.parametrize("make", ITSELF.values(), ids=ITSELF)
def test_a_target_with_elements_that_share_memory_is_refused(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    target = {"a": torch.zeros(3), "w": make()}
    saved(tmp_path, model=target)
    with pytest.raises(bcp.StateError, match=r"model tensor 'w' on rank 0 is .* whose elements share memory"):
        bcp.load(tmp_path, {"model": target})
    assert not target["a"].any()
    assert not target["w"].any()


# -- two targets -------------------------------------------------------------------------------------


def pair(one: torch.Tensor, other: torch.Tensor) -> State:
    return {"a": one, "b": other}


def half() -> State:
    memory = torch.zeros(6)
    return pair(memory[:4], memory[2:])


def transposed() -> State:
    memory = torch.zeros(4, 5)
    return pair(memory, memory.t())


def inside() -> State:
    memory = torch.zeros(4, 5)
    return pair(memory, memory[1:3, 2:])


def columns() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory[:, :4], memory[:, 3:])


def integers() -> State:
    memory = torch.zeros(8)
    return pair(memory, memory.view(torch.int32))


def halves() -> State:
    memory = torch.zeros(8)
    return pair(memory[:2], memory.view(torch.bfloat16)[3:])


def real() -> State:
    memory = torch.zeros(4, dtype=torch.complex64)
    return pair(memory, torch.view_as_real(memory))


def interleaved() -> State:
    memory = torch.zeros(20)
    return pair(memory[::3], memory[::5])


SHARED = {each.__name__: each for each in (half, transposed, inside, columns, integers, halves, real, interleaved)}


two = pytest.mark.parametrize("kinds", [("model", "model"), ("model", "optimizer")], ids=["one kind", "two kinds"])
shared = pytest.mark.parametrize("make", sample_of(SHARED, *list(SHARED)[::2]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def divided(target: State, kinds: tuple[str, str]) -> dict[str, State]:
    """Put two tensors into kinds."""
    states: dict[str, State] = {kind: {} for kind in kinds}
    for kind, (name, tensor) in zip(kinds, target.items(), strict=True):
        states[kind][name] = tensor
    return states


@two
@shared
def test_values_that_cannot_both_be_in_shared_memory_are_refused(
    tmp_path: Path, make: Callable[[], State], kinds: tuple[str, str]
) -> None:
    target = make()
    states = divided(target, kinds)
    saved(tmp_path, **states)
    names = [f"{kind} tensor {name!r}" for kind, name in zip(kinds, target, strict=True)]
    for strict in (True, False):
        with pytest.raises(bcp.MismatchError, match="share memory have different values") as caught:
            bcp.load(tmp_path, states, strict=strict)
        assert all(name in str(caught.value) for name in names)
    assert not any(tensor.any() for tensor in target.values())


@two
@shared
def test_values_that_were_saved_of_shared_memory_are_loaded(
    tmp_path: Path, make: Callable[[], State], kinds: tuple[str, str]
) -> None:
    source, target = make(), make()
    for memory in {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in source.values()
    }.values():
        memory.copy_(torch.arange(memory.nbytes(), dtype=torch.int64).mul(37).to(torch.uint8).untyped_storage())
    bcp.save(tmp_path, divided(source, kinds))
    report = bcp.load(tmp_path, divided(target, kinds))
    assert (report.missing, report.unexpected) == ((), ())
    for name, tensor in target.items():
        assert torch.equal(bits(tensor), bits(source[name]))


def beside() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory[:, :3], memory[:, 3:])


def other_rows() -> State:
    memory = torch.zeros(7, 3)
    return pair(memory[::2], memory[1::2])


def parts_of_complex() -> State:
    memory = torch.zeros(5, dtype=torch.complex64)
    return pair(memory.real, memory.imag)


def other_dtypes() -> State:
    memory = torch.zeros(8)
    return pair(memory[:4], memory.view(torch.int16)[8:])


APART = {each.__name__: each for each in (beside, other_rows, parts_of_complex, other_dtypes)}


@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_targets_between_each_other_are_loaded(tmp_path: Path, make: Callable[[], State]) -> None:
    target = make()
    values = saved(tmp_path, model=target)
    bcp.load(tmp_path, {"model": target})
    assert all(torch.equal(target[name], value) for name, value in values["model"].items())


def test_what_is_not_loaded_overlaps_nothing(tmp_path: Path) -> None:
    memory = torch.zeros(6)
    bcp.save(tmp_path, {"model": {"a": torch.ones(4)}})
    report = bcp.load(tmp_path, {"model": {"a": memory[:4], "b": memory[2:]}}, strict=False)
    assert report.missing == ("model: b",)
    assert memory.tolist() == [1, 1, 1, 1, 0, 0]


def test_any_two_views_of_one_buffer(tmp_path: Path) -> None:
    """A load is right or refused; it is refused if and only if addresses are there twice, by a brute-force oracle."""
    shapes = list(product((1, 2, 3), repeat=2))
    values = {f"{name}{rows}{columns}": torch.rand(rows, columns) for name in "ab" for rows, columns in shapes}
    bcp.save(tmp_path, {"model": values})
    choose, outcomes = random.Random(1), []  # noqa: S311 -- no secret
    while len(outcomes) < 100:
        buffer, target, used = torch.zeros(12), {}, list[int]()
        for name in "ab":
            (rows, columns), (down, right) = choose.choice(shapes), choose.choices(range(5), k=2)
            offset = choose.randrange(4)
            if offset + (rows - 1) * down + (columns - 1) * right < len(buffer):
                target[f"{name}{rows}{columns}"] = buffer.as_strided((rows, columns), (down, right), offset)
                used += [offset + y * down + x * right for y, x in product(range(rows), range(columns))]
        if len(target) < 2:
            continue
        try:
            bcp.load(tmp_path, {"model": target}, strict=False)
        except (bcp.StateError, bcp.MismatchError) as error:
            outcomes.append(type(error))
            assert len(set(used)) < len(used), target
        else:
            outcomes.append(None)
            assert len(set(used)) == len(used), target
            assert all(torch.equal(tensor, values[name]) for name, tensor in target.items())
        assert outcomes[-1] is None or not buffer.any(), "nothing is written"
    assert {None, bcp.StateError, bcp.MismatchError} == set(outcomes)


# -- two names of the same elements ------------------------------------------------------------------


def same() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory, memory)


def same_view() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory[:, 1:3], memory[:, 1:3])


def same_strided() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory.t(), memory.t())


def pointwise() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory.view(4, 6, 1, 1), memory)


def reshaped() -> State:
    memory = torch.zeros(4, 6)
    return pair(memory, memory.view(-1))


def brain() -> State:
    memory = torch.zeros(4, 6, dtype=torch.bfloat16)
    return pair(memory, memory)


TIED = {each.__name__: each for each in (same, same_view, same_strided, pointwise, reshaped, brain)}
kinds = pytest.mark.parametrize("kind", ["model", "optimizer"])


def states_of(target: State, kind: str) -> dict[str, Any]:
    """Put the second of two tensors into a kind."""
    return {"model": target} if kind == "model" else {"model": {"a": target["a"]}, "optimizer": {"b": target["b"]}}


@kinds
@pytest.mark.parametrize("make", TIED.values(), ids=TIED)
def test_equal_values_that_were_saved_apart_are_loaded(tmp_path: Path, make: Callable[[], State], kind: str) -> None:
    target, value = make(), torch.randn(24)
    value[:2] = torch.tensor([torch.nan, -0.0])
    apart = {name: value[: each.numel()].clone().to(each.dtype).view(each.shape) for name, each in target.items()}
    bcp.save(tmp_path, states_of(apart, kind))
    report = bcp.load(tmp_path, states_of(target, kind))
    assert (report.missing, report.unexpected) == ((), ())
    for name, tensor in target.items():
        torch.testing.assert_close(tensor, apart[name], rtol=0, atol=0, equal_nan=True)


@kinds
@pytest.mark.parametrize("make", TIED.values(), ids=TIED)
def test_other_values_that_were_saved_apart_are_a_mismatch(
    tmp_path: Path, make: Callable[[], State], kind: str
) -> None:
    target = make()
    apart = {name: torch.ones(each.shape, dtype=each.dtype) for name, each in target.items()}
    apart["b"].view(-1)[-1] = 2
    bcp.save(tmp_path, states_of(apart, kind))
    with pytest.raises(bcp.MismatchError, match=rf"model tensor 'a' and {kind} tensor 'b'"):
        bcp.load(tmp_path, states_of(target, kind))
    assert not target["a"].any()


def test_values_are_equal_only_bit_by_bit(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.tensor([0.0]), "b": torch.tensor([-0.0])}})
    with pytest.raises(bcp.MismatchError, match="different values"):
        bcp.load(tmp_path, {"model": dict.fromkeys("ab", torch.ones(1))})


def test_three_names_of_one_tensor(tmp_path: Path) -> None:
    values = {name: torch.arange(5.0) for name in "abc"}
    bcp.save(tmp_path / "equal", {"model": values})
    tied = torch.zeros(5)
    bcp.load(tmp_path / "equal", {"model": dict.fromkeys("abc", tied)})
    assert torch.equal(tied, values["a"])
    values["b"] = values["c"] = torch.zeros(5)
    bcp.save(tmp_path / "two", {"model": values})
    with pytest.raises(bcp.MismatchError, match=r"'a' and model tensor 'b' and model tensor 'c'; give"):
        bcp.load(tmp_path / "two", {"model": dict.fromkeys("abc", tied)})


def test_one_of_two_values_is_chosen_by_a_rename(tmp_path: Path) -> None:
    model = nn.ModuleDict({"tok": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    wanted = model["tok"].weight.detach().clone()
    bcp.save(tmp_path, {"model": model})
    model["tok"].weight = model["head"].weight
    with pytest.raises(bcp.MismatchError, match="rename="):
        bcp.load(tmp_path, {"model": model})
    bcp.load(tmp_path, {"model": model}, options=bcp.LoadOptions(rename={"head.weight": None}))
    assert torch.equal(model["head"].weight, wanted)


def test_cast_values_are_compared_as_they_are_loaded(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.arange(4.0), "b": torch.arange(4.0).double()}})
    tied = torch.zeros(4, dtype=torch.bfloat16)
    bcp.load(tmp_path, {"model": dict.fromkeys("ab", tied)}, options=bcp.LoadOptions(cast=True))
    assert tied.tolist() == [0, 1, 2, 3]
