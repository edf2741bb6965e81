"""Bytes of one file into many buffers: cached pages from the page cache, others past it. Everything here blocks."""

from __future__ import annotations

import mmap
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

from bcp.backends.direct import DirectFile, bounce
from bcp.backends.keys import scatter
from bcp.backends.libc import address, in_page_cache
from bcp.backends.shared import certain, is_shared

__all__ = ["ReadWay", "fill"]

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
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = min(max(os.fstat(fd).st_size - start, 0), targets.nbytes)
        if there == 0 or there < targets.nbytes:
            return there
        at = 0
        for stop, cached in _runs(fd, start, targets.nbytes, way):
            if not cached:
                at = _read_direct(fd, start, targets, at, stop)
            at = _read_cached(fd, start, targets, at, stop)
            if at < stop:
                break
        return at
    finally:
        os.close(fd)


class _Targets:
    """Buffers that lie one after the other; positions in them count from the first byte of the first one."""

    def __init__(self, outs: Sequence[memoryview]) -> None:
        """Take flat buffers, empty ones too."""
        self._outs = outs
        self._ends = list(accumulate(map(len, outs)))
        self.nbytes = self._ends[-1] if outs else 0

    def between(self, start: int, stop: int, most: int = sys.maxsize) -> list[memoryview]:
        """Return the parts of the buffers between two positions, ``start < stop``, or the first ``most`` of them."""
        first = bisect_right(self._ends, start)
        last = min(bisect_left(self._ends, stop), first + most - 1)
        found = list(self._outs[first : last + 1])
        found[-1] = found[-1][: len(found[-1]) - max(self._ends[last] - stop, 0)]
        found[0] = found[0][start - self._ends[first] + len(self._outs[first]) :]
        return found


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


def _read_cached(fd: int, start: int, targets: _Targets, at: int, stop: int) -> int:
    """Read through the page cache from position ``at``; return the position that was reached."""
    while at < stop:
        count = os.preadv(fd, targets.between(at, stop, _BUFFERS), start + at)
        if count == 0:
            break
        at += count
    return at


def _read_direct(fd: int, start: int, targets: _Targets, at: int, stop: int) -> int:
    """Read past the page cache from position ``at``; return the position that was reached."""
    file = DirectFile.reopen(fd, os.O_RDONLY)
    if file is None:
        return at
    try:
        for end, view in _spans(file, start, targets, at, stop):
            if view is None:
                at = _read_copied(file, start, targets, at, end)
            else:
                at += file.read(start + at, view, len(view))
            if at < end:
                break
        return at
    finally:
        file.close()


def _spans(
    file: DirectFile, start: int, targets: _Targets, at: int, stop: int
) -> Iterator[tuple[int, memoryview | None]]:
    """Cut a range where a buffer's own memory can be read into: (position of the end, that memory).

    Whole pages only: if another thread writes to a page meanwhile, a fork may lose the bytes read into it (open(2)).
    """
    done = at
    for view in targets.between(at, stop):
        first = at + -(start + at) % file.block
        at += len(view)
        last = at - (start + at) % file.block
        if last - first >= _STRAIGHT_BYTES:
            blocks = view[len(view) - (at - first) : len(view) - (at - last)]
            if address(blocks) % max(file.memory, mmap.PAGESIZE) == 0:
                if done < first:
                    yield first, None
                yield last, blocks
                done = last
    if done < stop:
        yield stop, None


def _read_copied(file: DirectFile, start: int, targets: _Targets, at: int, stop: int) -> int:
    """Read whole blocks into other memory and copy the wanted bytes; return the position that was reached."""
    with bounce() as buffer:
        while at < stop:
            before = (start + at) % file.block
            wanted = min(before + stop - at, len(buffer))
            blocks = buffer.data[: wanted + -wanted % file.block]
            found = min(file.read(start + at - before, blocks, wanted), wanted)
            if found <= before:
                break
            scatter(buffer.data[before:found], targets.between(at, at + found - before))
            at += found - before
    return at
