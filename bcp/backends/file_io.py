"""One file on its way to disk: written in parts, whole and durable before it has its name. Everything here blocks.

Direct I/O: bytes between memory and disk past the page cache, which takes aligned memory, offsets and lengths.

Bytes of one file into many buffers: cached pages from the page cache, others past it. Everything here blocks.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

import numpy as np

from bcp.backends.files import (
    Bytes,
    address,
    certain,
    create_empty,
    direct_alignment,
    fallocate,
    in_page_cache,
    is_shared,
    open_regular,
    remove,
    rename_written,
    sync_directory,
    temp_path,
)
from bcp.backends.keys import scatter

__all__ = ["ReadWay", "TempFile", "WriteWay", "bounce", "fill", "fill_pieces"]

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)  # EFAULT: memory of a device driver that cannot be pinned
_LARGEST_BLOCK = 64 << 10  # of a file system; an st_blksize above that is a size it likes, not a block

_BOUNCE_BYTES = 4 << 20
# Cold reads of 2 GiB through bounce memory in 4 threads, in GB/s, medians of 9 interleaved rounds: 2 MiB 1.08,
# 4 MiB 1.13, 8 MiB 1.13; straight into place 1.13. In pages of 4 KiB 0.72: to the disk every page is a segment.
_HUGE_PAGE = 2 << 20
_KEPT = 4  # as many as a save or load has threads; with new memory for every 32 MiB it was 1.04 GB/s


class DirectFile:
    """A file that is open for direct I/O, as far as its file system goes along. Many threads may use it at once.

    A file system may refuse when the file is opened, or only when bytes are to move. Then nothing more is done here:
    the methods say how far they came, and the rest is the caller's to do, through the page cache.
    """

    def __init__(self, fd: int, memory: int, block: int) -> None:
        self._fd = fd
        self.refused = False  # whether direct I/O has turned out to be impossible
        self.memory = memory  # addresses are multiples of it
        # offsets and lengths are multiples of it. It is at least a page and a block of the file system, so direct
        # writes and writes through the page cache never share one.
        self.block = block

    def __repr__(self) -> str:
        refused = ", refused" if self.refused else ""
        return f"<DirectFile {self._fd}: memory {self.memory}, block {self.block}{refused}>"

    @classmethod
    def reopen(cls, fd: int, flags: int) -> DirectFile | None:
        """Open an open file a second time, even if it was renamed; None if the file system refuses."""
        alignment = _alignment(fd)  # before there is a descriptor that an error would leave open
        try:
            return cls(os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC), *alignment)
        except OSError as error:
            if error.errno in (*_REFUSALS, errno.ENOENT):  # or there is no /proc
                return None
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def write(self, offset: int, data: memoryview) -> tuple[int, int]:
        """Write the blocks that ``data`` covers whole, from any memory; return which bytes of ``data`` were written.

        Before them remains less than a block, and behind them too, unless the file system refused.
        """
        first = -offset % self.block
        last = len(data) - (offset + len(data)) % self.block
        if first >= last or self.refused:
            return 0, 0
        blocks = data[first:last]
        write = self._write_copied if address(blocks) % self.memory else self._write
        return first, first + write(offset + first, blocks)

    def _write_copied(self, offset: int, blocks: memoryview) -> int:
        """Write whole blocks from memory that is not aligned; return how many bytes were written."""
        source, position = np.frombuffer(blocks, np.uint8), 0
        with bounce() as buffer:
            while position < len(source) and not self.refused:
                count = min(len(source) - position, len(buffer))
                np.copyto(buffer[:count], source[position : position + count])
                position += self._write(offset + position, buffer.data[:count])
        return position

    def _write(self, offset: int, blocks: memoryview) -> int:
        """Write whole blocks from aligned memory; return how many bytes were written."""
        position = 0
        while position < len(blocks) and not self.refused:
            with self._refusal():
                position += self._whole_blocks(os.pwrite(self._fd, blocks[position:], offset + position))
        return position

    def read(self, offset: int, out: memoryview, wanted: int) -> int:
        """Read from an aligned offset into aligned memory until ``wanted`` bytes are there; return how many are.

        There may be more, up to the length of ``out``, a number of blocks. If there are fewer the file ends, or the
        file system refused.
        """
        position = 0
        while position < wanted and not self.refused:
            with self._refusal():
                count = os.preadv(self._fd, [out[position:]], offset + position)
                position += count if position + count >= wanted else self._whole_blocks(count)
        return position

    def _whole_blocks(self, count: int) -> int:
        """Return how many of the bytes that were moved count: where it goes on has to be aligned."""
        whole = count - count % self.block
        self.refused |= whole == 0
        return whole

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        """Note that the file system refuses, and let every other error pass."""
        try:
            yield
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self.refused = True


_free: list[Bytes] = []


@contextmanager
def bounce() -> Iterator[Bytes]:
    """Borrow some MiB of aligned memory, for bytes whose own place is not aligned."""
    try:
        buffer = _free.pop()
    except IndexError:
        buffer = _huge_pages(_BOUNCE_BYTES)
    try:
        yield buffer
    finally:
        if len(_free) < _KEPT:
            _free.append(buffer)


def _huge_pages(nbytes: int) -> Bytes:
    """Return memory in huge pages, where there are any."""
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -address(whole.data) % _HUGE_PAGE
    return whole[skip : skip + nbytes]


def _alignment(fd: int) -> tuple[int, int]:
    """Return the alignments of direct I/O: for addresses, and for offsets and lengths."""
    page = max(mmap.PAGESIZE, 4096)
    memory, offset = direct_alignment(fd)
    block = os.fstat(fd).st_blksize
    return memory or page, max(page, offset, block if block <= _LARGEST_BLOCK else 0)


ReadWay = Literal["auto", "direct", "buffered"]
"""Past the page cache what is not in it; past it; through it."""

_BUFFERS = os.sysconf("SC_IOV_MAX")  # in one system call
_PIECE_BYTES = 4 << 20
# One page says for so many bytes whether they are in memory: 45 us for 32 MiB, which take 4 ms and more to read. With
# RWF_NOWAIT the kernel reads ahead for what it has not got, 8 MiB here.
_SMALL_BYTES = 1 << 20  # not worth the question
_STRAIGHT_BYTES = 1 << 20  # shorter buffers are filled by a copy, along with their neighbours


def fill(path: Path, start: int, outs: Sequence[memoryview], way: ReadWay) -> int:
    """Fill flat buffers one after the other from byte ``start`` of a file; return how many bytes there were."""
    return certain(path, partial(_fill, path, start, _Targets(outs), way))


def _fill(path: Path, start: int, targets: _Targets, way: ReadWay) -> int:
    fd = open_regular(path)
    try:
        nbytes = min(max(os.fstat(fd).st_size - start, 0), targets.nbytes)
        if nbytes == 0 or nbytes < targets.nbytes:
            return nbytes
        position = 0
        for stop, cached in _runs(fd, start, targets.nbytes, way):
            if not cached:
                position = _read_direct(fd, start, targets, position, stop)
            position = _read_cached(fd, start, targets, position, stop)
            if position < stop:
                break
        return position
    finally:
        os.close(fd)


def fill_pieces(path: Path, start: int, pieces: Sequence[Sequence[memoryview]], arrived: Callable[[int], None]) -> int:
    """Fill flat buffers through the page cache, piece by piece; return how many bytes there were.

    ``arrived`` is called with the number of each piece that is full, while its bytes are in the processor's cache.
    """
    fd = open_regular(path)
    try:
        done = 0
        for number, piece in enumerate(pieces):
            targets = _Targets(piece)
            count = _read_cached(fd, start + done, targets, 0, targets.nbytes)
            done += count
            if count < targets.nbytes:
                break
            arrived(number)
        return done
    finally:
        os.close(fd)


class _Targets:
    """Buffers that lie one after the other; positions in them count from the first byte of the first one."""

    def __init__(self, outs: Sequence[memoryview]) -> None:
        self._outs = outs
        self._ends = list(accumulate(map(len, outs)))
        self.nbytes = self._ends[-1] if outs else 0

    def between(self, start: int, stop: int, most: int = sys.maxsize) -> list[memoryview]:
        """Return the parts of the buffers between two positions, ``start < stop``, or the first ``most`` of them."""
        first = bisect_right(self._ends, start)
        last = min(bisect_left(self._ends, stop), first + most - 1)
        views = list(self._outs[first : last + 1])
        views[-1] = views[-1][: len(views[-1]) - max(self._ends[last] - stop, 0)]
        views[0] = views[0][start - self._ends[first] + len(self._outs[first]) :]
        return views


def _runs(fd: int, start: int, nbytes: int, way: ReadWay) -> Iterator[tuple[int, bool]]:
    """Cut a range of a file where it begins or ceases to be in memory; yields (position of the end, if it is)."""
    if way != "auto" or nbytes < _SMALL_BYTES or is_shared(fd):
        yield nbytes, way != "direct"
        return
    skip = start % mmap.ALLOCATIONGRANULARITY
    try:
        pieces = in_page_cache(fd, start - skip, nbytes + skip, _PIECE_BYTES)
    except (OSError, ValueError):  # a file system without mmap, or the file has just been cut
        pieces = [True]
    count = 0
    for cached, group in groupby(pieces):
        count += len(list(group))
        yield nbytes if count == len(pieces) else count * _PIECE_BYTES - skip, cached


def _read_cached(fd: int, start: int, targets: _Targets, position: int, stop: int) -> int:
    """Read through the page cache from ``position`` on; return the position that was reached."""
    while position < stop:
        count = os.preadv(fd, targets.between(position, stop, _BUFFERS), start + position)
        if count == 0:
            break
        position += count
    return position


def _read_direct(fd: int, start: int, targets: _Targets, position: int, stop: int) -> int:
    """Read past the page cache from ``position`` on; return the position that was reached."""
    file = DirectFile.reopen(fd, os.O_RDONLY)
    if file is None:
        return position
    try:
        for end, view in _spans(file, start, targets, position, stop):
            if view is None:
                position = _read_copied(file, start, targets, position, end)
            else:
                position += file.read(start + position, view, len(view))
            if position < end:
                break
        return position
    finally:
        file.close()


def _spans(
    file: DirectFile, start: int, targets: _Targets, position: int, stop: int
) -> Iterator[tuple[int, memoryview | None]]:
    """Cut a range where a buffer's own memory can be read into: (position of the end, that memory).

    Whole pages only: if another thread writes to a page meanwhile, a fork may lose the bytes read into it (open(2)).
    """
    done = position
    for view in targets.between(position, stop):
        first = position + -(start + position) % file.block
        position += len(view)
        last = position - (start + position) % file.block
        if last - first >= _STRAIGHT_BYTES:
            blocks = view[len(view) - (position - first) : len(view) - (position - last)]
            if address(blocks) % max(file.memory, mmap.PAGESIZE) == 0:
                if done < first:
                    yield first, None
                yield last, blocks
                done = last
    if done < stop:
        yield stop, None


def _read_copied(file: DirectFile, start: int, targets: _Targets, position: int, stop: int) -> int:
    """Read whole blocks into other memory and copy the wanted bytes; return the position that was reached."""
    with bounce() as buffer:
        while position < stop:
            before = (start + position) % file.block
            wanted = min(before + stop - position, len(buffer))
            blocks = buffer.data[: wanted + -wanted % file.block]
            count = min(file.read(start + position - before, blocks, wanted), wanted)
            if count <= before:
                break
            scatter(buffer.data[before:count], targets.between(position, position + count - before))
            position += count - before
    return position


WriteWay = Literal["direct", "early", "buffered"]
"""Past the page cache; through it, with the kernel told to write out at once; through it."""

_EARLY_BYTES = 8 << 20
# 2 GiB in 4 threads, durable, GB/s, medians of 7 interleaved rounds: direct 1.49; early with fadvise 1.10 (8 MiB), 1.16
# (32 MiB), with sync_file_range 1.05, 0.83, all of them between 0.5 and 1.7; buffered 0.83. CPU 0.02, 0.9 and 1.1 s.


class TempFile:
    """A file that is written under a temporary name and takes its final one when it is whole and durable.

    All methods block. ``discard`` may be called at any time, also after ``create`` failed half-way.
    """

    def __init__(self, final: Path, choose: Callable[[Path, int | None], WriteWay]) -> None:
        """Remember the final name; nothing is created yet.

        ``create`` calls ``choose`` once, with the name and the number of bytes, or None if that is unknown.
        ``choose`` returns how to write such a file.
        """
        self._final = final
        self._choose = choose
        self._temp: Path | None = None
        self._fd: int | None = None
        self._way: WriteWay | None = None
        self._direct: DirectFile | None = None

    @property
    def way(self) -> WriteWay | None:
        """How it is being written: as chosen, or ``early`` where direct I/O is refused. None before ``create``."""
        refused = self._way == "direct" and (self._direct is None or self._direct.refused)
        return "early" if refused else self._way

    def create(self, nbytes: int | None) -> None:
        """Create the file, reserve its space, which finds a full disk early, and choose how to write it."""
        self._temp = temp_path(self._final)
        create_empty(self._temp)
        self._fd = os.open(self._temp, os.O_WRONLY | os.O_CLOEXEC)
        if nbytes:
            _reserve(self._fd, nbytes)
        self._way = self._choose(self._final, nbytes)
        if self._way == "direct":
            self._direct = DirectFile.reopen(self._fd, os.O_WRONLY)

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``; many threads may write at once.

        Blocks that are not written whole go through the page cache also when the others do not, so parts may meet
        anywhere.
        """
        if self._fd is None:
            raise OSError(errno.EBADF, "the object is finished, no part can be added")
        start, stop = self._direct.write(offset, data) if self._direct is not None else (0, 0)
        self._write_cached(self._fd, offset, data[:start])
        self._write_cached(self._fd, offset + stop, data[stop:])

    def _write_cached(self, fd: int, offset: int, data: memoryview) -> None:
        """Write through the page cache."""
        written = 0
        while written < len(data):
            piece = data[written : written + _EARLY_BYTES]
            count = os.pwrite(fd, piece, offset + written)
            if count == 0:
                raise OSError(errno.EIO, f"pwrite wrote nothing at byte {offset + written}")
            if self._way != "buffered":
                _write_out(fd, offset + written, count)
            written += count

    def sync(self) -> None:
        """Make the bytes durable. Their pages leave the page cache, unless the way is to use it."""
        assert self._fd is not None  # noqa: S101 -- sync follows create
        os.fsync(self._fd)
        if self._way != "buffered":
            _write_out(self._fd, 0, 0)

    def commit(self) -> None:
        """Make the bytes durable, then let the object appear, then make its name durable."""
        assert self._temp is not None  # noqa: S101 -- commit follows create
        assert self._fd is not None  # noqa: S101 -- as above
        self.sync()
        written = os.fstat(self._fd)
        self._close()
        rename_written(self._temp, self._final, written)
        self._temp = None
        sync_directory(self._final.parent)

    def discard(self) -> None:
        """Remove the temporary file, if it still exists; does nothing after ``commit``."""
        try:
            self._close()
        finally:
            if self._temp is not None:
                remove(self._temp)
                self._temp = None

    def _close(self) -> None:
        """Close the file once."""
        fd, self._fd = self._fd, None
        direct, self._direct = self._direct, None
        try:
            if direct is not None:
                direct.close()
        finally:
            if fd is not None:
                os.close(fd)


def _reserve(fd: int, nbytes: int) -> None:
    """Allocate a file's blocks where the file system can, and no signal interrupts it."""
    try:
        fallocate(fd, nbytes)
    except OSError as error:
        # EINTR is not tried again: tmpfs began anew each time in older kernels, with the next tick of a timer to come
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EINTR):
            raise


def _write_out(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to write these bytes out, and drop pages from memory that are on disk."""
    with suppress(OSError):  # advice; a file system without it is only slower
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
