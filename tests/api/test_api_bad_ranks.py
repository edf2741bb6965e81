"""Ranks that do not fit together are all told so, and nothing is written. Here ranks are tasks of one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import MIB, files, metadata, model
from torch.distributed import HashStore

import bcp
from bcp.backends import MemoryBackend
from bcp.coordinators import GrpcCoordinator, SoloCoordinator, memory_coordinators
from bcp.coordinators.tree.coordinator import FANOUT
from bcp.coordinators.tree.rendezvous import StoreRendezvous
from bcp.format.metadata import METADATA_KEY
from bcp.protocols import Coordinator

QUICKLY = 2.0
"""Seconds of silence after which a rank is given up, in tests where one is silent."""


async def outcomes(coordinators: list[Coordinator], call: Callable[[Coordinator], Awaitable[Any]]) -> list[Any]:
    """Let every rank call, all at once; return what each returned or raised."""
    found: list[Any] = [None] * len(coordinators)

    async def run(place: int) -> None:
        try:
            found[place] = await call(coordinators[place])
        except Exception as error:  # noqa: BLE001 -- the tests look at whatever it is
            found[place] = error

    async with anyio.create_task_group() as group:
        for place in range(len(coordinators)):
            group.start_soon(run, place)
    return found


def saver(path: Any, *, timeout: float = 60.0, **how: Any) -> Callable[[Coordinator], Awaitable[Any]]:
    """Return a save of the same model on every rank."""
    options = bcp.SaveOptions(timeout=timeout, **how)
    return lambda ranks: bcp.asave(path, model(), coordinator=ranks, options=options)


class Bucket(MemoryBackend):
    """A backend as users write them: without a repr."""

    __repr__ = object.__repr__


@pytest.mark.anyio
async def test_every_rank_has_a_backend_object_of_its_own() -> None:
    try:
        await outcomes(memory_coordinators(2), lambda ranks: bcp.asave(Bucket("two ranks"), model(), coordinator=ranks))
        assert METADATA_KEY in [info.key for info in await Bucket("two ranks").list()]
    finally:
        MemoryBackend.forget("two ranks")


@pytest.mark.anyio
async def test_ranks_that_save_with_different_options_are_told_so(tmp_path: Path) -> None:
    def call(ranks: Coordinator) -> Awaitable[Any]:
        return saver(tmp_path, part_bytes=(1 + ranks.rank) * MIB)(ranks)

    for error in await outcomes(memory_coordinators(2), call):
        assert isinstance(error, bcp.InputError)
        assert f"part_bytes={MIB}" in str(error)
        assert f"part_bytes={2 * MIB}" in str(error)
    assert files(tmp_path) == {}


@pytest.mark.anyio
async def test_ranks_that_disagree_on_how_many_they_are(tmp_path: Path) -> None:
    store = HashStore()
    ranks: list[Coordinator] = [
        GrpcCoordinator(rank, size, StoreRendezvous(store, "tree", rank, size, FANOUT))
        for rank, size in ((0, 2), (1, 3))
    ]
    for error in await outcomes(ranks, saver(tmp_path, timeout=QUICKLY)):
        assert isinstance(error, (bcp.InputError, bcp.PeerError)), error
        assert "2" in str(error)
    assert files(tmp_path) == {}


@pytest.mark.anyio
async def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    (error,) = await outcomes(memory_coordinators(2)[:1], saver(tmp_path, timeout=QUICKLY))
    assert isinstance(error, bcp.PeerError)
    assert error.rank == 1
    assert files(tmp_path) == {}


@pytest.mark.anyio
async def test_ranks_whose_tensors_differ_are_told_which(tmp_path: Path) -> None:
    def call(ranks: Coordinator) -> Awaitable[Any]:
        return bcp.asave(tmp_path, model(count=5 + ranks.rank), coordinator=ranks)

    for error in await outcomes(memory_coordinators(2), call):
        assert isinstance(error, bcp.StateError)
        assert all(word in str(error) for word in ("'w'", "5", "6", "rank 1"))
    assert files(tmp_path) == {}


@pytest.mark.anyio
async def test_a_bad_leaf_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    def call(ranks: Coordinator) -> Awaitable[Any]:
        states = {"model": {"w": torch.empty(3, device="meta" if ranks.rank == 1 else "cpu")}}
        return bcp.asave(tmp_path, states, coordinator=ranks)

    first, second = await outcomes(memory_coordinators(2), call)
    assert isinstance(first, bcp.PeerError)
    assert first.rank == 1
    assert isinstance(second, bcp.StateError)
    assert "'w'" in str(first)
    assert files(tmp_path) == {}


def test_a_launcher_without_a_process_group_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(bcp.InputError, match=r"WORLD_SIZE=8, but torch\.distributed is not initialised: call"):
        bcp.save(tmp_path, model())
    assert files(tmp_path) == {}
    bcp.save(tmp_path, model(), coordinator=SoloCoordinator())
    assert metadata(tmp_path).layout.world_size == 1
