from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import ODD, PAGE, StrictDisk, cached, can_drop, drop, memory, noise
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.backends import LocalBackend
from bcp.backends import file_io as direct
from bcp.backends import file_io as reading
from bcp.backends.file_io import ReadWay, fill
from bcp.errors import CorruptError

pytestmark = pytest.mark.anyio

WAYS: list[ReadWay] = ["auto", "direct", "buffered"]
KIB = 1 << 10
DATA = noise(1 << 20) + b"and a tail"
PIECE = 64 * KIB


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    """Let a file of 1 MiB see everything that one of many GiB does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_PIECE_BYTES", PIECE)
        patch.setattr(reading, "_SMALL_BYTES", 8 * KIB)
        patch.setattr(reading, "_STRAIGHT_BYTES", 16 * KIB)
        patch.setattr(direct, "_BOUNCE_BYTES", 32 * KIB)
        patch.setattr(direct, "_free", [])
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("files") / "object"
    file.write_bytes(DATA)
    return file


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> StrictDisk:
    return StrictDisk(monkeypatch)


def buffers(lengths: Sequence[int], shift: int) -> list[memoryview]:
    return [memory(bytes(length), shift=shift) for length in lengths]


def nothing_cached_but(monkeypatch: pytest.MonkeyPatch, *pieces: int) -> None:
    """Let no more than these pieces of what is read be in the page cache."""
    monkeypatch.setattr(
        reading,
        "in_page_cache",
        lambda _fd, _start, nbytes, step: [piece in pieces for piece in range(-(-nbytes // step))],
    )


@settings(max_examples=200, deadline=None)
@given(
    way=st.sampled_from(WAYS),
    cold=st.booleans(),
    warmed=st.integers(0, len(DATA)),
    start=st.integers(0, len(DATA)) | st.integers(0, 256).map(lambda pages: pages * PAGE),
    lengths=st.lists(st.integers(0, 100) | st.integers(0, 200 * KIB) | st.sampled_from([PAGE, 16 * PAGE]), max_size=12),
    shift=st.sampled_from([0, 1, ODD, 512]),
)
def test_scattered_reads_equal_slices(
    path: Path, way: ReadWay, *, cold: bool, warmed: int, start: int, lengths: list[int], shift: int
) -> None:
    if cold:
        drop(path)
        with path.open("rb") as file:
            os.pread(file.fileno(), 100, warmed)
    outs = buffers(lengths, shift)
    found = fill(path, start, outs, way)
    assert found == min(sum(lengths), len(DATA) - start)
    if found == sum(lengths):
        assert b"".join(outs) == DATA[start : start + found]


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(0, 300 * KIB) | st.integers(0, 75).map(lambda pages: pages * PAGE),
    lengths=st.lists(st.integers(0, 100) | st.integers(0, 80 * KIB) | st.just(16 * PAGE), max_size=8),
    shift=st.sampled_from([0, ODD]),
    after=st.integers(0, 6),
)
def test_any_buffers_on_a_disk_that_may_refuse_at_any_time(
    path: Path, start: int, lengths: list[int], shift: int, after: int
) -> None:
    outs = buffers(lengths, shift)
    with pytest.MonkeyPatch.context() as patch:
        StrictDisk(patch).after = after
        assert fill(path, start, outs, "direct") == sum(lengths)
    assert b"".join(outs) == DATA[start : start + sum(lengths)]


def test_aligned_memory_is_read_into_without_a_copy(
    path: Path, disk: StrictDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "bounce", lambda: pytest.fail("the bytes were copied"))
    monkeypatch.setattr(reading, "bounce", lambda: pytest.fail("the bytes were copied"))
    (out,) = buffers([100 * PAGE], 0)
    assert fill(path, 3 * PAGE, [out], "direct") == 100 * PAGE
    assert (disk.direct, disk.buffered) == ([(3 * PAGE, 100 * PAGE)], [])


def test_the_blocks_of_a_buffer_whose_edges_are_not_aligned_are_not_copied(path: Path, disk: StrictDisk) -> None:
    outs = [memory(bytes(100)), memory(bytes(10 * PAGE + 500), shift=100)]
    assert fill(path, 0, outs, "direct") == 10 * PAGE + 600
    assert b"".join(outs) == DATA[: 10 * PAGE + 600]
    assert disk.direct == [(0, PAGE), (PAGE, 9 * PAGE), (10 * PAGE, PAGE)]


def test_pages_that_are_not_wholly_the_buffers_are_copied_to(path: Path, disk: StrictDisk) -> None:
    disk.block = 512  # such a disk would take them
    out = memory(bytes(20 * PAGE), shift=512)
    assert fill(path, 0, [out], "direct") == 20 * PAGE
    assert out == DATA[: 20 * PAGE]
    assert disk.direct == [(0, 8 * PAGE), (8 * PAGE, 8 * PAGE), (16 * PAGE, 4 * PAGE)]


def test_what_is_in_the_page_cache_comes_from_there_and_the_rest_past_it(
    path: Path, disk: StrictDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_cached_but(monkeypatch, 1, 2)
    outs = buffers([4 * PIECE], 0)
    assert fill(path, 0, outs, "auto") == 4 * PIECE
    assert b"".join(outs) == DATA[: 4 * PIECE]
    assert (disk.direct, disk.buffered) == ([(0, PIECE), (3 * PIECE, PIECE)], [(PIECE, 2 * PIECE)])


@pytest.mark.parametrize(("no_open", "after"), [(errno.EINVAL, 0), (errno.ENOENT, 0), (0, 0), (0, 1)])
def test_where_direct_reads_are_refused_the_bytes_come_through_the_page_cache(
    path: Path, disk: StrictDisk, monkeypatch: pytest.MonkeyPatch, no_open: int, after: int
) -> None:
    nothing_cached_but(monkeypatch, 1)
    disk.no_open, disk.after = no_open, after
    outs = buffers([3 * PIECE], 0)
    assert fill(path, 0, outs, "auto") == 3 * PIECE
    assert b"".join(outs) == DATA[: 3 * PIECE]
    assert len(disk.direct) == after


def test_small_reads_do_not_ask_what_is_cached(path: Path, disk: StrictDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "in_page_cache", lambda *_: pytest.fail("asked"))
    assert fill(path, 0, buffers([4 * KIB, 100], 0), "auto") == 4 * KIB + 100
    assert disk.direct == []


def test_where_nobody_knows_what_is_cached_reads_go_through_the_page_cache(
    path: Path, disk: StrictDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> list[bool]:
        raise OSError(errno.ENODEV, "no mmap here")

    monkeypatch.setattr(reading, "in_page_cache", unknown)
    outs = buffers([PIECE], 0)
    assert fill(path, 5, outs, "auto") == PIECE
    assert b"".join(outs) == DATA[5 : 5 + PIECE]
    assert disk.direct == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [0, ODD])
def test_short_reads_are_finished(
    path: Path, disk: StrictDisk, monkeypatch: pytest.MonkeyPatch, way: ReadWay, shift: int
) -> None:
    preadv = disk.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, outs, offset: preadv(fd, [outs[0][: 2 * PAGE]], offset))
    outs = buffers([PIECE, 7, 3 * PIECE], shift)
    assert fill(path, PAGE, outs, way) == 4 * PIECE + 7
    assert b"".join(outs) == DATA[PAGE : PAGE + 4 * PIECE + 7]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [0, ODD])
async def test_a_file_that_is_cut_while_it_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, way: ReadWay, shift: int
) -> None:
    nothing_cached_but(monkeypatch)
    fstat = os.fstat
    grown = lambda fd: SimpleNamespace(st_size=len(DATA) + PIECE, st_blksize=fstat(fd).st_blksize)  # noqa: E731 -- short
    monkeypatch.setattr(os, "fstat", grown)
    start = len(DATA) - 3 * PAGE
    with pytest.raises(CorruptError, match=f"wanted {PIECE + 8} bytes from byte {start} and got {3 * PAGE};"):
        await LocalBackend(path.parent, reads=way).read_scattered("object", start, buffers([8, PIECE], shift))


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, newer = tmp_path / "object", tmp_path / "newer"
    path.write_bytes(DATA)
    newer.write_bytes(bytes(len(DATA)))

    def replace(_fd: int, _start: int, _nbytes: int, _step: int) -> list[bool]:
        newer.replace(path)
        return [False]

    monkeypatch.setattr(reading, "in_page_cache", replace)
    (out,) = buffers([len(DATA)], 0)
    assert fill(path, 0, [out], "auto") == len(DATA)
    assert out == DATA


@pytest.mark.parametrize("shift", [0, ODD])
async def test_direct_reads_leave_the_page_cache_alone(path: Path, shift: int) -> None:
    if not can_drop(path.parent):
        pytest.skip("this file system is the page cache")
    drop(path)
    outs = buffers([3 * PIECE, 1000, 5 * PIECE], shift)
    await LocalBackend(path.parent).read_scattered("object", 100, outs)
    assert b"".join(outs) == DATA[100 : 100 + 8 * PIECE + 1000]
    assert not any(cached(path))


def test_bounce_memory_is_used_again_and_only_some_of_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_free", [])
    with direct.bounce() as first, direct.bounce() as second:
        assert first.ctypes.data % PAGE == 0
        assert first is not second
    with direct.bounce() as again:
        assert again is first
    held = [direct.bounce() for _ in range(9)]
    for one in held:
        one.__enter__()
    for one in held:
        one.__exit__(None, None, None)
    assert len(direct._free) == 4
