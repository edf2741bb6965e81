"""Who writes what, and where to: the coordinator's half of planning a save (paper sec. 3.3, 4.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bcp.plan.balance import BALANCES, Cuts
from bcp.plan.cover import check_cover
from bcp.plan.layout import Layout
from bcp.plan.merge import Shards, merge_shards, merge_tensors
from bcp.plan.shards import KINDS, Ints, ShardTable, TensorTable

__all__ = ["Division", "Writes", "divide"]


@dataclass(frozen=True, slots=True)
class Writes:
    """What one rank writes: w flat intervals of its own shards, file after file (one a kind), in file order.

    Attributes:
        row: int64[w], row in the rank's own :class:`~bcp.plan.shards.ShardTable`.
        start: int64[w], first flat element, counted in the row's box (not in what the rank holds of it).
        stop: int64[w], one past the last.
        offset: int64[w], byte in the data section of the rank's file of the row's kind. Intervals of a file are
            packed: each begins where the one before it ends.
    """

    row: Ints
    start: Ints
    stop: Ints
    offset: Ints

    def __len__(self) -> int:
        """Return the number of intervals."""
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Division:
    """The work of a save, divided.

    Attributes:
        layout: where every element will lie.
        writes: what each rank has to write for it, by rank.
    """

    layout: Layout
    writes: tuple[Writes, ...]


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the cuts lie: ``file`` and ``offset`` of each cut, ``order`` sorts the cuts by them; and the files."""

    file: Ints
    offset: Ints
    order: Ints
    kind: Ints
    rank: Ints
    nbytes: Ints


def divide(tables: Sequence[ShardTable], *, balance: str = "split", block_bytes: int) -> Division:
    """Fold replicas, check that nothing is missing, balance, and lay out the files.

    The same tables always give the same division. Zero-element and tied tensors appear in the layout's tensors only.

    Args:
        tables: what each rank holds, by rank.
        balance: ``"split"`` or ``"worst-fit"``, see :mod:`bcp.plan.balance`.
        block_bytes: size of the blocks that data files are checksummed and read in; noted in the layout.

    Raises:
        StateError: ranks disagree about a tensor, see :func:`~bcp.plan.merge.merge_tensors`.
        CoverageError: shards do not tile their tensor, see :func:`~bcp.plan.cover.check_cover`.

    """
    tensors, merged = merge_tensors(tables)
    shards = merge_shards(tables, merged)
    check_cover(tensors, shards)
    itemsize = tensors.itemsize[shards.tensor]
    cuts = BALANCES[balance](shards, itemsize, len(tables))
    nbytes = (cuts.stop - cuts.start) * itemsize[cuts.shard]
    files = _files(tensors.kind[shards.tensor[cuts.shard]], cuts.rank, itemsize[cuts.shard], nbytes, len(tables))
    layout = _layout(tables, tensors, shards, cuts, files=files, block_bytes=block_bytes)
    return Division(layout, _writes(shards, cuts, files, len(tables)))


def _files(kind: Ints, rank: Ints, itemsize: Ints, nbytes: Ints, world_size: int) -> _Files:
    """Lay cuts into one file for each kind and writing rank: packed, wide elements first.

    Descending item size (powers of two all) aligns every element to its size without padding, so that none
    straddles a multiple of 4 KiB. Otherwise a file keeps the order of the cuts: tensor, piece, start.
    """
    key, file = np.unique(kind * world_size + rank, return_inverse=True)
    order = np.lexsort((-itemsize, file))
    end = np.cumsum(nbytes[order])
    first = np.searchsorted(file[order], np.arange(len(key)))
    base = (end - nbytes[order])[first]
    offset = np.empty_like(nbytes)
    offset[order] = end - nbytes[order] - base[file[order]]
    size = np.zeros(len(key), dtype=np.int64)
    np.add.at(size, file, nbytes)
    return _Files(file.astype(np.int64), offset, order, key // world_size, key % world_size, size)


def _writes(shards: Shards, cuts: Cuts, files: _Files, world_size: int) -> tuple[Writes, ...]:
    """Tell every rank its cuts in terms of its own rows."""
    order = files.order[np.argsort(cuts.rank[files.order], kind="stable")]
    row = shards.row_of(cuts.shard, cuts.rank)
    columns = [column[order] for column in (row, cuts.start, cuts.stop, files.offset)]
    bounds = np.searchsorted(cuts.rank[order], np.arange(1, world_size))
    return tuple(Writes(*mine) for mine in zip(*(np.split(column, bounds) for column in columns), strict=True))


def _layout(
    tables: Sequence[ShardTable],
    tensors: TensorTable,
    shards: Shards,
    cuts: Cuts,
    *,
    files: _Files,
    block_bytes: int,
) -> Layout:
    """Write down where everything lies."""
    owner: dict[tuple[str, str], int] = {}
    for rank, table in enumerate(tables):
        for key in table.objects:
            owner.setdefault(key, rank)
    objects = sorted(owner)
    extras = sorted({(KINDS.index(kind), rank) for rank, table in enumerate(tables) for kind in table.extras})
    return Layout(
        world_size=len(tables),
        block_bytes=block_bytes,
        tensors=tensors,
        piece_tensor=shards.piece_tensor,
        offset=shards.offset,
        length=shards.length,
        segment_piece=shards.piece[cuts.shard],
        segment_start=cuts.start,
        segment_length=cuts.stop - cuts.start,
        segment_file=files.file,
        segment_offset=files.offset,
        file_kind=files.kind,
        file_rank=files.rank,
        file_nbytes=files.nbytes,
        objects=objects,
        object_rank=np.array([owner[key] for key in objects], dtype=np.int64),
        extra_kind=np.array([kind for kind, _ in extras], dtype=np.int64),
        extra_rank=np.array([rank for _, rank in extras], dtype=np.int64),
    )
