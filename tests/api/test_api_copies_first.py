from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import anyio
import pytest
import torch

import bcp
from bcp._save.snapshot import staging_nbytes
from bcp.backends import MemoryBackend
from bcp.events import Event, StageEvent
from bcp.protocols import Buffer, CpuAwareWriter, PartWriter

MIB = 1 << 20
PARTS = 8
_numbers = count()


class Writer:
    """Counts the parts that are written; says that this takes a core, or that it does not."""

    def __init__(self, store: Store, inner: PartWriter) -> None:
        self.store = store
        self.inner = inner

    @property
    def uses_cpu(self) -> bool:
        return self.store.uses_cpu

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        await self.inner.write_part(index, offset, data)
        self.store.parts += 1


class Store(MemoryBackend):
    def __init__(self, *, uses_cpu: bool) -> None:
        super().__init__(f"copies first {next(_numbers)}")
        self.uses_cpu = uses_cpu
        self.parts = 0

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        async with super().open_write(key, nbytes) as inner:
            yield Writer(self, inner)


class Held:
    """A stage in front of d2h that lets the last part in when something has come to pass; tells what had by then."""

    def __init__(self, store: Store, until: Callable[[Held], bool]) -> None:
        self.store = store
        self.until = until
        self.seen = 0
        self.stages: list[str] = []
        self.when_last: tuple[int, int] = (-1, -1)

    def observe(self, event: Event) -> None:
        if isinstance(event, StageEvent):
            self.stages.append(event.stage)

    async def run(self, item: Any) -> Any:
        self.seen += 1
        if self.seen == PARTS:
            with anyio.fail_after(60):
                while not self.until(self):  # noqa: ASYNC110 -- nobody tells
                    await anyio.sleep(0.001)
            for _ in range(50):  # whoever could go on by now does
                await anyio.sleep(0.001)
            self.when_last = self.store.parts, self.stages.count("checksum")
        return item

    def save(self, *, async_checkpoint: bool = True, **options: Any) -> None:
        tensors = {"w": torch.arange(PARTS * MIB // 4, dtype=torch.int32)}
        chosen = bcp.SaveOptions(
            part_bytes=MIB,
            edit=lambda graph: graph.before("d2h", bcp.extend.Stage("held", self.run)),
            observe=self.observe,
            **options,
        )
        pending = bcp.save(self.store, {"model": tensors}, async_checkpoint=async_checkpoint, options=chosen)
        if async_checkpoint:
            pending.wait()
        target = {"w": torch.zeros_like(tensors["w"])}
        bcp.load(self.store, {"model": target})
        assert target["w"].equal(tensors["w"])


def all_but_one_are_serialized(held: Held) -> bool:
    return held.stages.count("serialize") == PARTS - 1


def a_part_is_written(held: Held) -> bool:
    return held.store.parts > 0


def test_what_takes_a_core_waits_until_the_last_part_is_copied() -> None:
    held = Held(Store(uses_cpu=True), all_but_one_are_serialized)
    held.save()
    assert held.when_last == (0, 0)


def test_writers_without_a_core_write_beside_the_copies_and_checksums_wait() -> None:
    held = Held(Store(uses_cpu=False), lambda held: held.store.parts == PARTS - 1)
    held.save()
    assert held.when_last == (PARTS - 1, 0)


def test_codecs_wait_for_the_copies() -> None:
    held = Held(Store(uses_cpu=False), all_but_one_are_serialized)
    same = bcp.extend.Codec("same", encode=bytes, decode=bytes)
    tensors = {"w": torch.arange(PARTS * MIB // 4, dtype=torch.int32)}
    options = bcp.SaveOptions(
        part_bytes=MIB,
        codecs=[same],
        edit=lambda graph: graph.before("d2h", bcp.extend.Stage("held", held.run)),
        observe=held.observe,
    )
    bcp.save(held.store, {"model": tensors}, async_checkpoint=True, options=options).wait()
    assert held.when_last == (0, 0)
    assert held.stages.count("same") == PARTS


def test_nothing_waits_where_the_caller_waits_for_the_end() -> None:
    held = Held(Store(uses_cpu=True), a_part_is_written)
    held.save(async_checkpoint=False)
    assert held.when_last[0] > 0


def test_nothing_waits_where_there_is_no_memory_for_all_parts() -> None:
    held = Held(Store(uses_cpu=True), a_part_is_written)
    held.save(budget_bytes=3 * MIB)
    assert held.when_last[0] > 0


@pytest.mark.parametrize("uses_cpu", [False, True])
def test_writers_say_whether_they_use_a_core(uses_cpu: bool) -> None:  # noqa: FBT001 -- pytest's
    assert isinstance(Writer(Store(uses_cpu=uses_cpu), None), CpuAwareWriter)  # type: ignore[arg-type]  # not used


class Item:
    """A part, as far as staging memory is concerned."""

    def __init__(self, nbytes: int, header: int = 0, *, is_steady: bool = False) -> None:
        self.nbytes = nbytes
        self.header = bytes(header)
        self.is_steady = is_steady


@pytest.mark.parametrize(
    ("budget", "returns_after_snapshot", "wanted"),
    [
        (None, True, 20 * MIB + 4096),
        (None, False, 8 * MIB),
        (20 * MIB, True, 20 * MIB + 4096),  # as many as the data: the header comes on top
        (20 * MIB, False, 20 * MIB + 4096),
        (20 * MIB - 1, True, 20 * MIB - 1),
        (30 * MIB, True, 20 * MIB + 4096),
        (1, False, 1),
    ],
)
def test_a_budget_for_the_data_has_room_for_headers(
    budget: int | None,
    returns_after_snapshot: bool,  # noqa: FBT001 -- pytest's
    wanted: int,
) -> None:
    items: Any = [Item(MIB + 4096, 4096), *(Item(MIB) for _ in range(19))]
    options = bcp.SaveOptions(budget_bytes=budget, part_bytes=MIB)
    assert staging_nbytes(items, options, returns_after_snapshot=returns_after_snapshot) == wanted


def test_units_take_staging_memory_for_a_few_parts() -> None:
    changing: list[Any] = [Item(MIB) for _ in range(5)]
    options = bcp.SaveOptions(part_bytes=MIB)
    for steady, wanted in ((3, 8), (8, 13), (100, 13)):
        items = changing + [Item(MIB, is_steady=True) for _ in range(steady)]
        assert staging_nbytes(items, options, returns_after_snapshot=True) == wanted * MIB
