from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sharded_tensors as jobs
import torch
from exact import trained
from fsdp1 import Layout
from logical import differences, logical
from ranks import Ranks
from samples import sample

pytestmark = pytest.mark.dist

ALL = range(len(jobs.LAYOUTS))


@pytest.mark.parametrize(
    ("saved", "loaded", "shifts"), sample([(4, 4, ALL), (4, 2, ALL[::3]), (2, 4, ALL[1::3])], (4, 4, ALL))
)
def test_every_layout_loads_into_every_other(
    ranks4: Ranks, tmp_path: Path, saved: int, loaded: int, shifts: range
) -> None:
    ranks4.run(jobs.save_layouts, tmp_path / "0", saved)
    whole = {("model", fqn): tensor for fqn, tensor in jobs.whole_state().items()}
    assert not differences(logical(tmp_path / "0"), whole)
    assert ranks4.run(jobs.load_layouts, tmp_path / "0", loaded, list(shifts)) == [[]] * 4


@pytest.fixture(scope="module")
def fsdp(ranks4: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """Give the checkpoints of two steps, which are made once."""
    paths: dict[Layout, Path] = {}

    def path_of(layout: Layout) -> Path:
        if layout not in paths:
            paths[layout] = tmp_path_factory.mktemp("fsdp")
            ranks4.run(jobs.train, paths[layout], layout)
        return paths[layout]

    return path_of


HSDP = Layout(strategy="HYBRID_SHARD")


@pytest.mark.parametrize("layout", sample([Layout(), Layout(orig=False, size=2), HSDP], HSDP), ids=str)
def test_fsdp1_state_dicts_hold_what_the_module_holds(fsdp: Callable[[Layout], Path], layout: Layout) -> None:
    dicts, native = (logical(fsdp(layout) / name) for name in ("dicts", "native"))
    assert not differences(native, trained(2, layout.size, tied=False).state())
    assert not differences(dicts, native)


@pytest.mark.parametrize(
    ("before", "after"),
    sample(
        [(Layout(), Layout(orig=False, size=2)), (Layout(size=2), HSDP), (HSDP, Layout(orig=False))],
        (HSDP, Layout(orig=False)),
    ),
    ids=str,
)
def test_fsdp1_goes_on_from_its_state_dicts_in_another_layout(
    ranks4: Ranks, tmp_path: Path, fsdp: Callable[[Layout], Path], before: Layout, after: Layout
) -> None:
    ranks4.run(jobs.go_on, fsdp(before) / "dicts", tmp_path / "0", after)
    twin = trained(2, before.size, tied=False)
    twin.step(2, after.size)
    assert not differences(logical(tmp_path / "0"), twin.state())


def test_fsdp1_state_dicts_take_what_the_module_saved(
    ranks4: Ranks, tmp_path: Path, fsdp: Callable[[Layout], Path]
) -> None:
    ranks4.run(_go_on_loosely, fsdp(Layout()) / "native", tmp_path / "0", Layout(size=2))
    twin = trained(2, 4, tied=False)
    twin.step(2, 2)
    assert not differences(logical(tmp_path / "0"), twin.state())


def _go_on_loosely(source: Path, path: Path, layout: Layout) -> None:
    jobs.go_on(source, path, layout, strict=False)


@pytest.mark.parametrize("layout", [Layout(), Layout(orig=False)], ids=str)
def test_the_module_takes_what_fsdp1_state_dicts_saved(
    ranks4: Ranks, tmp_path: Path, fsdp: Callable[[Layout], Path], layout: Layout
) -> None:
    ranks4.run(jobs.copy_native, fsdp(Layout()) / "dicts", tmp_path / "0", layout)
    assert not differences(logical(tmp_path / "0"), trained(2, 4, tied=False).state())


@pytest.mark.parametrize("how", sample(["tp_fsdp2", "fsdp2", "plain"], "tp_fsdp2", "plain"))
def test_fsdp1_state_dicts_load_into_other_frameworks(
    ranks4: Ranks, tmp_path: Path, fsdp: Callable[[Layout], Path], how: str
) -> None:
    ranks4.run(jobs.copy_model, fsdp(Layout()) / "dicts", tmp_path / "0", how)
    model = {name: tensor for name, tensor in trained(2, 4, tied=False).state().items() if name[0] == "model"}
    assert not differences(logical(tmp_path / "0"), model)


def test_the_module_may_stand_beside_the_sharded_state_dict_of_its_optimizer(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(jobs.module_and_dict, tmp_path / "0")
    expected = trained(2, 4, tied=False).state()
    assert not differences(logical(tmp_path / "0"), expected)
    model = {name: tensor for name, tensor in expected.items() if name[0] == "model"}
    assert not differences(logical(tmp_path / "again"), model)


def test_modules_whose_state_dicts_have_them_are_loaded_in_place(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(jobs.modules, tmp_path / "0") == [(True, 1)] * 4
    whole = {("model", "0.table"): torch.arange(20.0).view(10, 2)}
    assert not differences(logical(tmp_path / "0"), whole)


def test_parameters_and_states_of_an_optimizer_may_be_sharded_tensors(ranks4: Ranks, tmp_path: Path) -> None:
    for right, (unstepped, stranger) in ranks4.run(jobs.parameters, tmp_path / "0"):
        assert right
        assert re.match("StateError: .* its parameter 'table' is a ShardedTensor, .* take one step", unstepped)
        assert re.match(r"StateError: states\['optimizer'\] has a parameter of shape \(9, 4\) that is not", stranger)
    whole = {
        ("model", "table"): torch.full((9, 4), 1.0),
        ("optimizer", "state.table.sum"): torch.full((9, 4), 2.0),
    }
    assert not differences(logical(tmp_path / "0"), whole)


def test_a_local_shard_may_be_a_sharded_tensor(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(jobs.nested, tmp_path / "0") == [True] * 4


def test_only_those_are_tied_that_share_all_their_shards(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(jobs.ties, tmp_path / "0") == [{}] * 4


@pytest.mark.parametrize(("how", "other"), [("S0", "S-1"), ("dealt", "plain"), ("plain", "grid"), ("S-1", "S-1")])
def test_a_tensor_may_be_the_whole_model(ranks4: Ranks, tmp_path: Path, how: str, other: str) -> None:
    for right, said in ranks4.run(jobs.root, tmp_path / "0", how, other):
        assert right
        assert re.search(r"FqnMismatchError: .* lacks: model: weight", said), said


REFUSED = {
    "meta": "is on the meta device",
    "shape": r"states a local shard of sizes \[1, 4\] at \[\d, 0\], but the shard has the shape \[2, 4\]",
    "outside": r"sizes \[1, 4\] at \[9, 0\], outside of its size \[9, 4\]; repair its metadata",
    "dimensions": r"outside of its size \[9, 4\]; repair",
    "dtypes": r"local shards have the dtypes torch.float16, torch.float32; give them one",
    "DTensor": r"the shard is a DTensor; pass its to_local\(\)",
    "sparse": "has the layout torch.sparse_coo; pass to_dense",
    "freed": "has 4 elements but no memory",
    "init_rrefs": r"with remote shards .*init_rrefs=False",
    "remote": r"with remote shards .*init_rrefs=False",
}


@pytest.mark.parametrize("case", jobs.BROKEN)
def test_those_that_cannot_be_read_are_refused_by_name(ranks4: Ranks, tmp_path: Path, case: str) -> None:
    kind = "optimizer" if case in ("meta", "remote") else "model"
    ranks4.run(jobs.save_good, tmp_path / "good", kind)
    for rank, (saving, loading, others) in enumerate(
        ranks4.run(jobs.refused, tmp_path / "bad", tmp_path / "good", case, kind)
    ):
        for said in (saving, loading):
            wanted = rf"StateError: {kind} tensor 'deep.0.table' on rank {rank} .*{REFUSED[case]}"
            assert re.match(wanted, said), said
        assert not any(map(torch.Tensor.any, others))
    assert not (tmp_path / "bad").exists()
