"""All data files behind each other, in the blocks in which they are read and checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bcp.errors import CorruptError
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout

__all__ = ["VERSIONS", "BlockLine"]

VERSIONS = "run the same version of bcp on every rank"
COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class BlockLine:
    """The line of blocks: block ``b`` of file ``f`` is number ``base[f] + b``.

    A *run* is a number of blocks of one file, as a row (first block, last block + 1).

    Attributes:
        block_bytes: bytes of a block; the last one of a file may be shorter.
        base: int64[f + 1], where each file begins, and where the last one ends.
        nbytes: int64[f], bytes of each file's data section.
        kinds: where files of another kind begin than those before.
    """

    block_bytes: int
    base: Ints
    nbytes: Ints
    kinds: Ints

    @classmethod
    def of(cls, layout: Layout, block_bytes: int | None = None) -> BlockLine:
        """Put the files of a layout on a line; ``block_bytes``: what is read as one, if not the layout's blocks."""
        block = block_bytes or layout.block_bytes
        base = np.concatenate(([0], np.cumsum(-(-layout.file_nbytes // block))))
        kinds = base[np.flatnonzero(np.diff(layout.file_kind)) + 1]
        return cls(block, base, layout.file_nbytes, kinds)

    def runs(self, ranges: Ints) -> Ints:
        """int64[k, 2]: the runs of all blocks that hold some byte of these ranges, sorted, each as long as it can be.

        Args:
            ranges: rows (file, start, stop), disjoint, sorted.

        """
        file, start, end = ranges.T
        first, stop = self.base[file] + start // self.block_bytes, self.base[file] - (-end // self.block_bytes)
        new = np.diff(file, prepend=-1) != 0
        new[1:] |= first[1:] > stop[:-1]
        heads = np.flatnonzero(new)
        return np.stack((first[heads], stop[np.append(heads, len(new))[1:] - 1]), axis=1)

    def bytes_of(self, runs: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (file, start, stop) of runs, in bytes of the file's data section."""
        first, stop = runs.T
        file = np.searchsorted(self.base, first, side="right") - 1
        start = (first - self.base[file]) * self.block_bytes
        return file, start, np.minimum((stop - self.base[file]) * self.block_bytes, self.nbytes[file])

    def encode(self, runs: Ints) -> bytes:
        """Return the runs of one rank as bytes: their number, then the gap before each, and the length of each.

        The planes of an optimizer's states repeat each other: 300 runs, 2,400 bytes, are 240 bytes when compressed.
        """
        steps = np.diff(runs.ravel(), prepend=0).reshape(-1, 2)
        packed: bytes = pa.compress(steps.T.astype(self.word).tobytes(), codec="zstd", asbytes=True)
        return COUNT.pack(len(runs)) + packed

    def decode(self, data: bytes) -> Ints:
        """Return what :meth:`encode` was given, not checked yet: see :meth:`check`.

        Raises:
            CorruptError: these are no runs.

        """
        try:
            (count,) = COUNT.unpack_from(data)
            nbytes = 2 * min(count, int(self.base[-1])) * self.word.itemsize  # no more is allocated, whatever it says
            steps = np.frombuffer(pa.decompress(data[COUNT.size :], nbytes, codec="zstd", asbytes=True), self.word)
        except (struct.error, pa.ArrowException, OSError, ValueError) as error:
            raise CorruptError(f"a rank sent {len(data)} bytes that do not name blocks: {error}; {VERSIONS}") from error
        return np.cumsum(steps.reshape(2, -1).T, dtype=np.int64).reshape(-1, 2)

    def check(self, runs: Ints) -> None:
        """Check rows that come from another rank.

        Raises:
            CorruptError: a row is no run of this line.

        """
        first, stop = runs.T
        bad = (first < 0) | (stop <= first) | (stop > self.base[-1])
        if not bad.any():
            bad = stop > self.base[np.searchsorted(self.base, first, side="right")]
        if bad.any():
            row = runs[np.flatnonzero(bad)[0]].tolist()
            raise CorruptError(f"a rank names blocks {row}, which are not in one file; {VERSIONS}")

    @property
    def word(self) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
        """What the number of a block is sent as."""
        return np.dtype("<u4") if self.base[-1] < 1 << 32 else np.dtype("<u8")
