"""Direct I/O: bytes between memory and disk past the page cache, which takes aligned memory, offsets and lengths."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from bcp.backends.libc import Bytes, address, direct_alignment

__all__ = ["DirectFile", "bounce"]

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

    Attributes:
        block: what offsets and lengths are multiples of. At least a page, and a block of the file system: so what is
            written here and what goes through the page cache never share one.
        memory: what addresses are multiples of.
        refused: whether direct I/O has turned out to be impossible.
    """

    def __init__(self, fd: int, memory: int, block: int) -> None:
        """Take over the descriptor; :meth:`reopen` makes one."""
        self._fd = fd
        self.refused = False
        self.memory = memory
        self.block = block

    def __repr__(self) -> str:
        """Show the alignment, and whether the file system refused."""
        refused = ", refused" if self.refused else ""
        return f"<DirectFile {self._fd}: memory {self.memory}, block {self.block}{refused}>"

    @classmethod
    def reopen(cls, fd: int, flags: int) -> DirectFile | None:
        """Open an open file a second time, whatever its name is by now; None where the file system refuses."""
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
        source, at = np.frombuffer(blocks, np.uint8), 0
        with bounce() as buffer:
            while at < len(source) and not self.refused:
                count = min(len(source) - at, len(buffer))
                np.copyto(buffer[:count], source[at : at + count])
                at += self._write(offset + at, buffer.data[:count])
        return at

    def _write(self, offset: int, blocks: memoryview) -> int:
        """Write whole blocks from aligned memory; return how many bytes were written."""
        at = 0
        while at < len(blocks) and not self.refused:
            with self._refusal():
                at += self._whole_blocks(os.pwrite(self._fd, blocks[at:], offset + at))
        return at

    def read(self, offset: int, out: memoryview, wanted: int) -> int:
        """Read from an aligned offset into aligned memory until ``wanted`` bytes are there; return how many are.

        There may be more, up to the length of ``out``, a number of blocks. If there are fewer the file ends, or the
        file system refused.
        """
        at = 0
        while at < wanted and not self.refused:
            with self._refusal():
                count = os.preadv(self._fd, [out[at:]], offset + at)
                at += count if at + count >= wanted else self._whole_blocks(count)
        return at

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
    """Return what addresses, and what offsets and lengths, have to be multiples of."""
    page = max(mmap.PAGESIZE, 4096)
    memory, offset = direct_alignment(fd)
    block = os.fstat(fd).st_blksize
    return memory or page, max(page, offset, block if block <= _LARGEST_BLOCK else 0)
