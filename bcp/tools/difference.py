"""Compare two checkpoints: names, shapes, dtypes, values, and all elements. Equal blocks are not read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bcp._text import shown
from bcp.backends.place import Path
from bcp.format.receipt import FileReceipt, Receipt
from bcp.options import LoadOptions
from bcp.pipeline import unwrap_stage_errors
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.contents import TensorInfo
from bcp.read.receipts import RANKS_AT_ONCE, fetch_receipts, file_of
from bcp.read.source import Source
from bcp.runtime.imports import imported
from bcp.tools.calls import called

if TYPE_CHECKING:
    from bcp.tools.elements import Counts

__all__ = ["ByteRange", "Difference", "TensorDifference", "ValueDifference", "adiff", "diff"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor of both checkpoints that differs.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``.
        name: fully qualified name.
        before: dtype and shape in the first checkpoint, as in ``"float32[2, 4]"``.
        after: the same in the second one.
        elements: the number of elements with other bits; 0 if dtype or shape differ, as nothing is compared then.
        numel: the number of all elements.
        largest: the largest absolute difference; None if it has none, as with other dtypes. It may be nan.
    """

    kind: str
    name: str
    before: str
    after: str
    elements: int = 0
    numel: int = 0
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value without tensors that differs.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``.
        name: its path, as in ``"param_groups.w.lr"``.
        before: the value in the first checkpoint, as JSON text; "" if there is none.
        after: the same in the second one.
    """

    kind: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The outcome of :func:`bcp.tools.diff`. True if the checkpoints differ.

    Attributes:
        first: path of the first checkpoint.
        second: path of the second one.
        removed: tensors of the first one alone, as (kind, name).
        added: tensors of the second one alone.
        tensors: tensors of both that differ.
        values: values that differ, or that one of them lacks.
        objects: opaque objects that differ, or that one of them lacks, as ``"extra_states of rank 0"``.
        equal: the number of tensors that are equal in shape, dtype and all bits.
        read_nbytes: bytes of tensors that were read from each checkpoint.
    """

    first: str
    second: str
    removed: tuple[tuple[str, str], ...] = ()
    added: tuple[tuple[str, str], ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    objects: tuple[str, ...] = ()
    equal: int = 0
    read_nbytes: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.tensors or self.values or self.objects)


def diff(
    first: Path,
    second: Path,
    *,
    role: str | None = None,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Difference:
    """Compare two checkpoints, whatever the parallelism of the jobs that saved them.

    Tensors are compared bit by bit. If both checkpoints have one layout and no codecs, as two steps of one job, their
    checksums are compared first, and only blocks with other checksums are read. Otherwise all common tensors are read.
    Opaque objects are compared by their checksums, so equal objects that were packed in another order differ. Files of
    other libraries are compared as checkpoints, too.

    Args:
        first: a checkpoint, as for :class:`bcp.Checkpoint`.
        second: another one.
        role: the role of the checkpoint below both paths, if they were saved with one.
        options: how to read, as for :class:`bcp.Checkpoint`: codecs are passed here.
        storage_options: for the file system of both URLs.

    Returns:
        All differences; the result is true if there are any.

    Raises:
        NotACheckpointError: one of the paths has no checkpoint.
        CorruptError: a file is missing or damaged.
        StorageError: storage failed.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = bcp.save("ckpt/a", {"model": model}, overwrite=True)
        >>> _ = model.bias.data.add_(0.5)
        >>> _ = bcp.save("ckpt/b", {"model": model}, overwrite=True)
        >>> (found,) = bcp.tools.diff("ckpt/a", "ckpt/b").tensors
        >>> found.name, found.elements, found.largest
        ('bias', 2, 0.5)

    """
    return called(
        lambda: adiff(first, second, role=role, options=options, storage_options=storage_options),
        f"compare {shown(str(first))} with {shown(str(second))}",
    )


async def adiff(
    first: Path,
    second: Path,
    *,
    role: str | None = None,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Difference:
    """Do the same as :func:`diff` from a coroutine."""
    both = [
        AsyncCheckpoint(path, role=role, options=options, storage_options=storage_options) for path in (first, second)
    ]
    async with both[0] as a, both[1] as b:
        pair = _Pair(a, b)
        changed, common = pair.by_name()
        counts, read_nbytes = await pair.compare(common)
        changed += [_counted(a[key], count) for key, count in counts.items()]
        names_a, names_b = set(a.tensors), set(b.tensors)
        return Difference(
            a.path,
            b.path,
            removed=tuple(sorted(names_a - names_b)),
            added=tuple(sorted(names_b - names_a)),
            tensors=tuple(sorted(changed, key=lambda each: (each.kind, each.name))),
            values=tuple(await pair.values()),
            objects=tuple(await pair.objects()),
            equal=len(names_a & names_b) - len(changed),
            read_nbytes=read_nbytes,
        )


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes that may differ between two checkpoints of one layout.

    Attributes:
        row: row of the file in the layout.
        first: key and receipt of the file in the first checkpoint.
        second: the same in the second one.
        start: first byte in the data section.
        stop: one past the last.
    """

    row: int
    first: tuple[str, FileReceipt]
    second: tuple[str, FileReceipt]
    start: int
    stop: int


class _Pair:
    """Two open checkpoints."""

    def __init__(self, a: AsyncCheckpoint, b: AsyncCheckpoint) -> None:
        self._both = a, b
        self._sources: tuple[Source, Source] = a.source, b.source

    def by_name(self) -> tuple[list[TensorDifference], list[tuple[int, int]]]:
        """Return tensors with other dtypes or shapes, and the rows of all others, in both layouts."""
        a, b = (each.tensors for each in self._both)
        changed, common = [], []
        for key in a:
            row, other = a.row(*key), b.row(*key)
            if row is None or other is None:
                continue
            one, two = a.info(row), b.info(other)
            if (one.dtype, one.shape) != (two.dtype, two.shape):
                changed.append(TensorDifference(one.kind, one.name, one.type_words, two.type_words))
            else:
                common.append((row, other))
        return changed, common

    async def compare(self, common: Sequence[tuple[int, int]]) -> tuple[Mapping[tuple[str, str], Counts], int]:
        """Count the elements that differ; return the counts by name, and the bytes that were read of each."""
        a, b = self._sources
        if self._is_one_layout():
            ranges = await _other_ranges(a, b)
            if not ranges:
                return {}, 0
            rows, nbytes = await imported("bcp.tools.elements").in_ranges(a, b, ranges)  # imports torch
        else:
            rows, nbytes = await imported("bcp.tools.elements").in_tensors(a, b, common)
        tensors, keys = self._both[0].tensors, list(self._both[0].tensors)
        found = {keys[row]: counts for row, counts in rows.items()}
        for row, _ in common:  # a tied tensor differs if the tensor with its data does
            kind, tied = keys[row][0], tensors.info(row).tied_to
            if tied and (kind, tied) in found:
                found[keys[row]] = found[kind, tied]
        return found, nbytes

    def _is_one_layout(self) -> bool:
        a, b = (source.metadata for source in self._sources)
        plain = all(each.foreign is None and not each.commit.codecs for each in (a, b))
        return plain and a.layout is b.layout

    async def values(self) -> list[ValueDifference]:
        """Compare values by their texts: equal texts are equal values, with their types."""
        one, two = [await _texts(source) for source in self._sources]
        return [
            ValueDifference(*key, one.get(key, ""), two.get(key, ""))
            for key in sorted(one.keys() | two.keys())
            if one.get(key) != two.get(key)
        ]

    async def objects(self) -> list[str]:
        """Compare opaque objects by the checksums of their files."""
        one, two = [await _digests(source) for source in self._sources]
        keys = sorted(one.keys() | two.keys())
        return [
            f"{KINDS[kind]} of rank {rank}" for kind, rank in keys if one.get((kind, rank)) != two.get((kind, rank))
        ]


def _counted(info: TensorInfo, counts: Counts) -> TensorDifference:
    words = info.type_words
    return TensorDifference(info.kind, info.name, words, words, counts.elements, counts.numel, counts.largest)


# -- receipts --------------------------------------------------------------------------------------


async def _receipts(source: Source, ranks: Sequence[int]) -> AsyncGenerator[Receipt, None]:
    """Yield the receipts of these ranks in order; few are in memory at once."""
    for first in range(0, len(ranks), RANKS_AT_ONCE):
        some = ranks[first : first + RANKS_AT_ONCE]
        with unwrap_stage_errors():
            found = await fetch_receipts(source.backend, source.metadata, some)
        for rank in some:
            yield found[rank]


async def _other_ranges(a: Source, b: Source) -> list[ByteRange]:
    """Return the byte ranges of data sections whose blocks have other checksums, for files with tensors."""
    layout = a.metadata.layout
    columns = (layout.file_rank.tolist(), layout.file_kind.tolist(), layout.file_nbytes.tolist())
    files: dict[int, list[tuple[int, int, int]]] = {}
    for row, (rank, kind, nbytes) in enumerate(zip(*columns, strict=True)):
        if KINDS[kind] not in OPAQUE_KINDS:
            files.setdefault(rank, []).append((row, kind, nbytes))
    ranges: list[ByteRange] = []
    ranks = sorted(files)
    async with aclosing(_receipts(a, ranks)) as one, aclosing(_receipts(b, ranks)) as two:
        async for receipt in one:
            other = await anext(two)
            for row, kind, nbytes in files[receipt.rank]:
                mine = file_of(a.metadata, receipt, kind, nbytes)
                theirs = file_of(b.metadata, other, kind, nbytes)
                ranges += [ByteRange(row, mine, theirs, *span) for span in _other_spans(mine[1], theirs[1])]
    return ranges


def _other_spans(mine: FileReceipt, theirs: FileReceipt) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the data section for each block with another checksum. Both files have equal blocks."""
    start = np.maximum(mine.blocks.raw_start - mine.data_start, 0)
    stop = mine.blocks.raw_start + mine.blocks.raw_length - mine.data_start
    for row, (one, two) in enumerate(zip(mine.blocks.checksum, theirs.blocks.checksum, strict=True)):
        if one != two and start[row] < stop[row]:
            yield int(start[row]), int(stop[row])


async def _texts(source: Source) -> dict[tuple[str, str], str]:
    """Return the values without tensors as JSON text, by kind and path."""
    layout = source.metadata.layout
    rows = {key: row for row, key in enumerate(layout.objects) if key[0] not in OPAQUE_KINDS}
    with unwrap_stage_errors():
        await source.read_receipts({int(layout.object_rank[row]) for row in rows.values()})
    return {key: source.value(row) or "" for key, row in rows.items()}


async def _digests(source: Source) -> dict[tuple[int, int], Sequence[bytes]]:
    """Return the checksums of the blocks of opaque objects and units, by kind and rank."""
    layout = source.metadata.layout
    pairs = set(zip(layout.extra_kind.tolist(), layout.extra_rank.tolist(), strict=True))
    for (kind, _), rank in zip(layout.objects, layout.object_rank.tolist(), strict=True):
        if kind in OPAQUE_KINDS:  # units of a data loader, which the ranks share
            pairs.add((KINDS.index(kind), rank))
    kinds: dict[int, list[int]] = {}
    for code, rank in pairs:
        kinds.setdefault(rank, []).append(code)
    digests: dict[tuple[int, int], Sequence[bytes]] = {}
    async with aclosing(_receipts(source, sorted(kinds))) as receipts:
        async for receipt in receipts:
            for code in kinds[receipt.rank]:
                digests[code, receipt.rank] = file_of(source.metadata, receipt, code)[1].blocks.checksum
    return digests
