"""A save that replaces the checkpoint at any request of a load: all ranks load the one or the other, whole."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch
from samples import sample

import bcp
from bcp.backends import MemoryBackend
from bcp.coordinators import SoloCoordinator, memory_coordinators
from bcp.options import LoadOptions, SaveOptions
from bcp.protocols import Coordinator
from bcp.testing.storage_fakes import CountingBackend

PLACE = "replaced"
WORDS = 3 << 18
"""Of a tensor of three blocks, which ranks read for each other in several rounds."""

CODEC = bcp.extend.Codec("zlib", encode=zlib.compress, decode=zlib.decompress)
pytestmark = pytest.mark.anyio


def states(value: float, rank: int = 0) -> dict[str, Any]:
    """Return tensors that all ranks want, some that are the rank's own, and a value."""
    own = {f"own{other}": torch.full((300,), value) for other in range(2) if other == rank}
    return {"model": {"w": torch.full((WORDS,), value), **own}, "extra_states": {"value": value}}


async def ranks_do(count: int, call: Callable[[Coordinator], Awaitable[Any]]) -> list[Any]:
    """Let every rank call, all at once; return their results."""
    results: list[Any] = [None] * count

    async def run(ranks: Coordinator) -> None:
        results[ranks.rank] = await call(ranks)

    async with anyio.create_task_group() as group:
        for ranks in memory_coordinators(count):
            group.start_soon(run, ranks)
    return results


async def save(value: float, codecs: list[bcp.extend.Codec]) -> None:
    options = SaveOptions(overwrite=True, codecs=codecs, record=False, part_bytes=1 << 20)
    await ranks_do(
        2, lambda ranks: bcp.asave(MemoryBackend(PLACE), states(value, ranks.rank), coordinator=ranks, options=options)
    )


class Overtaken(CountingBackend):
    """Lets another job replace the checkpoint before its request ``number``."""

    def __init__(self, number: int, codecs: list[bcp.extend.Codec]) -> None:
        super().__init__(MemoryBackend(PLACE))
        self.number, self.codecs = number, codecs
        self.count = 0

    async def before(self, operation: str, key: str) -> None:
        await super().before(operation, key)
        self.count += 1
        if self.count == self.number:
            await save(2.0, self.codecs)


async def load(backends: list[Overtaken], options: LoadOptions) -> set[float]:
    """Load on as many ranks as there are backends; return the one value of all that was loaded."""
    targets = [states(0.0, rank) for rank in range(len(backends))]
    if len(backends) == 1:
        targets[0]["model"]["own1"] = torch.zeros(300)
        reports = [await bcp.aload(backends[0], targets[0], coordinator=SoloCoordinator(), options=options)]
    else:
        reports = await ranks_do(
            2, lambda ranks: bcp.aload(backends[ranks.rank], targets[ranks.rank], coordinator=ranks, options=options)
        )
    assert len({report.operation for report in reports}) == 1
    found = {target["extra_states"]["value"] for target in targets}
    return found | {element for target in targets for w in target["model"].values() for element in w.unique().tolist()}


CASES = sample(
    itertools.product([1, 2], [False, True], ["plain", "codec"]),
    (2, True, "codec"),
)


@pytest.mark.parametrize(("world_size", "verify", "stored"), CASES)
async def test_a_save_at_any_request_of_a_load(
    world_size: int,
    verify: bool,  # noqa: FBT001 -- a parameter
    stored: str,
) -> None:
    codecs = [CODEC] if stored == "codec" else []
    options = LoadOptions(codecs=codecs, verify=verify, record=False, read_bytes=1 << 20, exchange_bytes=4096)
    try:
        await save(1.0, codecs)
        backends = [Overtaken(0, codecs) for _ in range(world_size)]
        assert await load(backends, options) == {1.0}
        overtaken = 0
        for rank, clean in enumerate(backends):
            for number in range(1, clean.count + 1):
                await save(1.0, codecs)
                trials = [Overtaken(number if other == rank else 0, codecs) for other in range(world_size)]
                assert await load(trials, options) in ({1.0}, {2.0})
                overtaken += 1
        assert overtaken >= 4
    finally:
        MemoryBackend.forget(PLACE)
