from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from disks import ODD, PAGE, StrictDisk, cached, can_drop, memory, names, noise
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.backends import LocalBackend
from bcp.backends import file_io as direct
from bcp.backends.file_io import TempFile, WriteWay
from bcp.errors import InputError, StorageError

pytestmark = pytest.mark.anyio

WAYS: list[WriteWay] = ["direct", "early", "buffered"]
MIB = 1 << 20
IN_MEMORY = Path("/dev/shm")  # noqa: S108 -- a file system of its own
SHAPES = {
    "nothing": [0],
    "one byte": [1],
    "less than a page": [4095],
    "a page": [PAGE],
    "a page and a byte": [PAGE + 1],
    "whole pages": [16 * PAGE, 32 * PAGE, 16 * PAGE],
    "whole pages and a tail": [16 * PAGE, 32 * PAGE, 5000],
    "parts that meet in a page": [10_000, 1, 30_000, 3, 5, 70_001],
    "more than a bounce memory": [9 * MIB + 17, 5],
}


async def write(backend: LocalBackend, data: bytes, cuts: list[int], *, shift: int, announced: bool = True) -> None:
    """Write all parts at once, the last one first."""
    nbytes = len(data) if announced else None
    offsets = [sum(cuts[:index]) for index in range(len(cuts))]
    async with backend.open_write("object", nbytes) as writer, anyio.create_task_group() as group:
        for index in reversed(range(len(cuts))):
            part = memory(data[offsets[index] : offsets[index] + cuts[index]], shift=shift)
            group.start_soon(writer.write_part, index, offsets[index], part)


async def write_in_turn(backend: LocalBackend, *parts: memoryview) -> None:
    async with backend.open_write("object", sum(map(len, parts))) as writer:
        for index, part in enumerate(parts):
            await writer.write_part(index, index * len(parts[0]), part)


def noting(seen: list[str], name: str) -> Callable[..., Any]:
    """Return a call of ``os`` that notes itself."""
    call = getattr(os, name)
    return lambda *args: (seen.append(name), call(*args))[1]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("shift", [0, ODD])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writes", ["auto", *WAYS])
async def test_every_way_writes_the_same_bytes(
    tmp_path: Path, writes: WriteWay, shape: str, shift: int, *, announced: bool
) -> None:
    data = noise(sum(SHAPES[shape]))
    await write(LocalBackend(tmp_path, writes=writes), data, SHAPES[shape], shift=shift, announced=announced)
    assert (tmp_path / "object").read_bytes() == data
    assert names(tmp_path) == ["object"]


@settings(max_examples=50, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40_000) | st.integers(0, 9).map(lambda pages: pages * PAGE), max_size=8),
    shift=st.sampled_from([0, 1, ODD, 512]),
    after=st.integers(0, 9),
)
def test_any_parts_on_a_disk_that_may_refuse_at_any_time(cuts: list[int], shift: int, after: int) -> None:
    data = noise(sum(cuts))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        disk = StrictDisk(patch)
        disk.after = after
        file = TempFile(Path(folder, "object"), lambda _final, _nbytes: "direct")
        file.create(len(data))
        at = 0
        for cut in cuts:
            file.write(at, memory(data[at : at + cut], shift=shift))
            at += cut
        file.commit()
        assert Path(folder, "object").read_bytes() == data


async def test_whole_blocks_go_straight_from_the_callers_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = StrictDisk(monkeypatch)
    monkeypatch.setattr(direct, "bounce", lambda: pytest.fail("the bytes were copied"))
    data = noise(64 * PAGE + 100)
    await write(LocalBackend(tmp_path, writes="direct"), data, [32 * PAGE, 32 * PAGE + 100], shift=0)
    assert sorted(disk.direct) == [(0, 32 * PAGE), (32 * PAGE, 32 * PAGE)]
    assert disk.buffered == [(64 * PAGE, 100)]


async def test_blocks_from_memory_that_is_not_aligned_are_copied_and_go_direct_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = StrictDisk(monkeypatch)
    await write(LocalBackend(tmp_path, writes="direct"), noise(64 * PAGE), [100, 64 * PAGE - 100], shift=ODD)
    assert disk.direct == [(PAGE, 63 * PAGE)]
    assert sorted(disk.buffered) == [(0, 100), (100, PAGE - 100)]


@pytest.mark.parametrize(("no_open", "after"), [(errno.EINVAL, 0), (errno.ENOENT, 0), (0, 0), (0, 1)])
async def test_where_direct_writes_are_refused_the_bytes_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_open: int, after: int
) -> None:
    disk = StrictDisk(monkeypatch)
    disk.no_open, disk.after = no_open, after
    data = noise(9 * MIB + 1)
    file = TempFile(tmp_path / "object", lambda _final, _nbytes: "direct")
    file.create(None)
    assert file.way == ("early" if no_open else "direct")
    for start in range(0, len(data), 3 * MIB):
        file.write(start, memory(data[start : start + 3 * MIB]))
    assert file.way == "early"
    file.commit()
    assert (tmp_path / "object").read_bytes() == data
    assert len(disk.direct) == after


@pytest.mark.skipif(not IN_MEMORY.is_dir(), reason="this machine has no file system in memory")
async def test_a_file_system_in_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("links") / "shm"
    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        root.symlink_to(folder)
        for writes in WAYS:
            data = noise(MIB + 5)
            await write(LocalBackend(root, writes=writes), data, [MIB, 5], shift=0)
            assert (root / "object").read_bytes() == data


@pytest.mark.parametrize("writes", WAYS)
async def test_a_disk_that_is_full_while_parts_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: WriteWay
) -> None:
    pwrite = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset >= MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    part = memory(noise(MIB))
    with pytest.raises(StorageError, match=r"write part 1 of 'object' failed: .*No space left.*free some space"):
        await write_in_turn(LocalBackend(tmp_path, writes=writes), part, part)
    assert names(tmp_path) == []


async def test_short_direct_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StrictDisk(monkeypatch)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[: 2 * PAGE], offset))
    data = noise(9 * PAGE)
    await write(LocalBackend(tmp_path, writes="direct"), data, [9 * PAGE], shift=0)
    assert (tmp_path / "object").read_bytes() == data
    assert [count for _, count in disk.direct] == [2 * PAGE] * 4 + [PAGE]


@pytest.mark.parametrize("writes", ["direct", "early"])
@pytest.mark.parametrize("shift", [0, ODD])
async def test_what_was_written_is_not_left_in_the_page_cache(tmp_path: Path, writes: WriteWay, shift: int) -> None:
    if not can_drop(tmp_path):
        pytest.skip("this file system is the page cache")
    await write(LocalBackend(tmp_path, writes=writes), noise(4 * MIB + 1), [MIB, 3 * MIB + 1], shift=shift)
    assert not any(cached(tmp_path / "object"))


async def test_durable_before_visible_also_when_written_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("pwrite", "fsync", "rename"):
        monkeypatch.setattr(os, name, noting(seen, name))
    await write(LocalBackend(tmp_path, writes="direct"), noise(MIB + 1), [MIB + 1], shift=0)
    assert seen == ["pwrite", "pwrite", "fsync", "rename", "fsync"]


async def test_it_is_asked_once_how_to_write(tmp_path: Path) -> None:
    asked: list[tuple[str, int | None]] = []

    def choose(final: Path, nbytes: int | None) -> WriteWay:
        asked.append((final.name, nbytes))
        return "buffered"

    file = TempFile(tmp_path / "object", choose)
    file.create(4)
    file.write(0, memoryview(b"ab"))
    file.write(2, memoryview(b"cd"))
    file.commit()
    assert asked == [("object", 4)]


@pytest.mark.parametrize("options", [{"writes": "mmap"}, {"reads": "early"}])
def test_unknown_ways_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"has to be one of .*'direct'"):
        LocalBackend(tmp_path, **options)  # type: ignore[arg-type]  # that is the test
