"""The stages of a save that leaves out what an earlier checkpoint of its run has.

``d2h`` -> ``serialize`` -> ``checksum`` -> ``keep`` -> ``place`` -> ``upload``

Checksums come before the storing here: they say which blocks are to be stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bcp.format.kept import KeptRun, runs_of
from bcp.pipeline import Pipeline, Stage
from bcp.plan.columns import Ints
from bcp.protocols import flat_view
from bcp.runtime.threads import in_thread
from bcp.stages.items import Blob, PartReceipt, WriteItem
from bcp.stages.save import SaveContext, blocks_of, d2h, digests_of, serialize, upload

__all__ = ["BaseFile", "Keeping", "Source", "keep_graph"]

Source = tuple[int, str, int, int, bool]
"""Step, operation, kind and rank of a file, and whether it is packed."""


@dataclass(frozen=True, slots=True, eq=False)
class BaseFile:
    """A data file of the earlier checkpoint, block by block.

    Attributes:
        checksums: one digest a block.
        length: int64[n], bytes of each block.
        sources: the files that have the blocks.
        source: int64[n], the file of each block, in ``sources``; -1 for a block that nothing may refer to.
        start: int64[n], first byte of each block there.
    """

    checksums: Sequence[bytes]
    length: Ints
    sources: Sequence[Source]
    source: Ints
    start: Ints

    def equal(self, first: int, checksums: Sequence[bytes], length: Ints) -> np.ndarray:
        """Return for each of some neighbouring blocks whether it is as here. bool[n]; ``first`` is their first row."""
        same = np.zeros(len(checksums), bool)
        count = max(min(len(checksums), len(self.checksums) - first), 0)
        rows = slice(first, first + count)
        same[:count] = (self.length[rows] == length[:count]) & (self.source[rows] >= 0)
        for row in np.flatnonzero(same).tolist():
            same[row] = self.checksums[first + row] == checksums[row]
        return same

    def runs(self, is_kept: np.ndarray) -> tuple[KeptRun, ...]:
        """Return where the kept blocks of a file lie."""
        kept = np.zeros(len(self.source), bool)
        kept[: len(is_kept)] = is_kept[: len(kept)]
        return runs_of(kept, self.sources, self.source, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a save may leave out.

    Attributes:
        files: files of the earlier checkpoint, by the keys of the packed files.
        first: number of the first block of each part in its file, by the part's name.
    """

    files: Mapping[str, BaseFile]
    first: Mapping[str, int]

    @classmethod
    def of(cls, files: Mapping[str, BaseFile], items: Sequence[WriteItem], block_bytes: int) -> Keeping:
        """Number the blocks of all parts of packed files; the parts of a file are in order."""
        counts: defaultdict[str, int] = defaultdict(int)
        first = {}
        for item in items:
            if item.key in files:
                first[item.name] = counts[item.key]
                counts[item.key] += len(blocks_of(item, block_bytes))
        return cls(files, first)


def keep_graph(
    context: SaveContext, keeping: Keeping, *, copy_workers: int, io_workers: int
) -> Pipeline[WriteItem, PartReceipt]:
    """Build the graph that stores the changed blocks of one rank's parts."""
    start: Pipeline[WriteItem, WriteItem] = Pipeline()
    graph = start.then(d2h(context, copy_workers)).then(serialize(context.block_bytes)).then(_checksum(context))
    return graph.then(_keep(keeping)).then(_place(keeping)).then(_upload(context, io_workers))


def _checksum(context: SaveContext) -> Stage[Blob, Blob]:
    """Digest every block, one part at a time, as the stage of the same name in other saves."""

    async def run(blob: Blob) -> Blob:
        await context.let_copies_go_first()
        return replace(blob, checksums=await in_thread(digests_of, blob))

    return Stage("checksum", run)


def _keep(keeping: Keeping) -> Stage[Blob, Blob]:
    """Leave out the blocks that the earlier checkpoint has. The first block of a file is always stored."""

    async def run(blob: Blob) -> Blob:
        item = blob.part.item
        base = keeping.files.get(item.key)
        if base is None:
            return blob
        first = keeping.first[item.name]
        is_kept = base.equal(first, blob.checksums, blob.blocks[:, 1])
        is_kept[: 1 if first == 0 else 0] = False
        return await in_thread(_without, blob, is_kept)

    return Stage("keep", run)


def _without(blob: Blob, is_kept: np.ndarray) -> Blob:
    """Move the other blocks together, in the staging memory of the part."""
    whole, end = flat_view(blob.data), 0
    data = memoryview(bytearray(whole)) if whole.readonly else whole
    for start, nbytes in blob.blocks[~is_kept].tolist() if is_kept.any() else [(0, blob.nbytes)]:
        if start != end:
            data[end : end + nbytes] = data[start : start + nbytes]
        end += nbytes
    return replace(blob, data=data[:end], is_kept=is_kept)


def _place(keeping: Keeping) -> Stage[Blob, Blob]:
    """Put what is left of packed files one behind the other, in plan order."""
    ends: defaultdict[str, int] = defaultdict(int)
    indices: defaultdict[str, int] = defaultdict(int)

    async def run(blob: Blob) -> Blob:
        key = blob.part.item.key
        if key not in keeping.files:
            return blob
        start, index = ends[key], indices[key]
        ends[key] += blob.nbytes
        indices[key] += blob.nbytes > 0
        return replace(blob, start=start, index=index)

    return Stage("place", run, ordered=True)


def _upload(context: SaveContext, workers: int) -> Stage[Blob, PartReceipt]:
    """Store what is left of a part, and give the staging memory back."""
    store = upload(context, workers)

    async def run(blob: Blob) -> PartReceipt:
        if blob.nbytes:
            await store.run(blob)
        context.memory.give(blob.part.buffer)
        part = blob.part.item.part
        return PartReceipt(part, blob.start, blob.nbytes, blob.blocks, blob.checksums, blob.is_kept)

    return Stage("upload", run, workers=workers)
