from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import bcp
from bcp.backends import MemoryBackend
from bcp.coordinators import memory_coordinators
from bcp.metadata import METADATA_KEY


def entries(root: Path) -> list[str]:
    """Return everything below a directory, directories too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def model(value: float = 1.0, count: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((count,), value)}}


# -- what cannot be saved ----------------------------------------------------------------------------


@pytest.mark.parametrize("states", [nn.Linear(2, 2), None, [torch.ones(2)], 5], ids=["module", "None", "list", "int"])
def test_states_that_are_no_mapping_are_refused(tmp_path: Path, states: Any) -> None:
    with pytest.raises(bcp.InputError, match="model, optimizer, dataloader, extra_states"):
        bcp.save(tmp_path / "c", states)
    assert entries(tmp_path) == []


def test_a_module_that_is_still_lazy_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(bcp.StateError, match=r"model tensor 'weight' on rank 0 is uninitialized; run one forward"):
        bcp.save(tmp_path / "c", {"model": nn.LazyLinear(3)})
    assert entries(tmp_path) == []


def test_a_graph_that_cannot_run_leaves_not_even_a_directory(tmp_path: Path) -> None:
    options = bcp.SaveOptions(edit=lambda graph: graph.after("nowhere", bcp.Stage("x", anyio.sleep)))
    with pytest.raises(bcp.InputError, match=r"no stage named 'nowhere'; there are \[d2h, serialize, checksum, upload"):
        bcp.save(tmp_path / "c", model(), options=options)
    assert entries(tmp_path) == []


# -- what cannot be loaded ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "extra_states"])
def test_a_data_file_that_is_gone_is_corruption(tmp_path: Path, kind: str) -> None:
    states = model() | {"extra_states": {"step": 1}}
    bcp.save(tmp_path, states)
    (file,) = (tmp_path / kind).iterdir()
    file.unlink()
    with pytest.raises(bcp.CorruptError, match=f"{kind}/{file.name}"):
        bcp.load(tmp_path, states)


def two_groups(*, apart: bool) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups: Any = [{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[1].parameters(), "lr": 1e-2}]
    return {"model": net, "optimizer": torch.optim.SGD(groups if apart else net.parameters(), lr=1e-3)}


def test_hyper_parameters_that_do_not_fit_into_one_group_touch_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, two_groups(apart=True))
    target = two_groups(apart=False)
    before = [parameter.detach().clone() for parameter in target["model"].parameters()]
    with pytest.raises(bcp.MismatchError, match=r"lr=0\.001, and .*, saved with lr=0\.01"):
        bcp.load(tmp_path, target)
    assert all(torch.equal(*pair) for pair in zip(before, target["model"].parameters(), strict=True))


@pytest.mark.parametrize("saved", [True, False])
def test_strict_looks_at_leaves_that_are_not_tensors(tmp_path: Path, *, saved: bool) -> None:
    with_epoch = {"model": {"w": torch.ones(2), "epoch": 5}}
    without = {"model": {"w": torch.ones(2)}}
    bcp.save(tmp_path, with_epoch if saved else without)
    target = without if saved else with_epoch
    with pytest.raises(bcp.FqnMismatchError, match="model: epoch"):
        bcp.load(tmp_path, target)
    report = bcp.load(tmp_path, target, strict=False)
    assert (report.unexpected if saved else report.missing) == ("model: epoch",)


# -- ranks -------------------------------------------------------------------------------------------


class Bucket(MemoryBackend):
    """A backend as users write them: without a repr."""

    __repr__ = object.__repr__


@pytest.mark.anyio
async def test_every_rank_has_a_backend_object_of_its_own() -> None:
    outcomes: list[Any] = [None, None]
    coordinators = memory_coordinators(2)

    async def save(rank: int) -> None:
        outcomes[rank] = await bcp.asave(Bucket("two ranks"), model(), coordinator=coordinators[rank])

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(save, 0)
            group.start_soon(save, 1)
        assert METADATA_KEY in [info.key for info in await Bucket("two ranks").list()]
    finally:
        MemoryBackend.forget("two ranks")
