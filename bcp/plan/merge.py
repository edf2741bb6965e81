"""What all ranks hold together: their tables merged by name, and their shards with the replicas folded (sec. 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
import pyarrow as pa

from bcp.errors import StateError
from bcp.plan.shards import KINDS, Ints, ShardTable, TensorTable, mix

__all__ = ["Shards", "distinct_rows", "merge_shards", "merge_tensors"]


@dataclass(frozen=True, slots=True)
class Shards:
    """The distinct shards of all ranks, and who holds each.

    p pieces (distinct boxes) in the order (tensor, offset, length); s shards (distinct flat intervals of pieces) in
    the order (piece, start, stop); h holdings in the order (shard, rank).

    Attributes:
        piece_tensor: int64[p], row in the merged tensor table; not decreasing.
        offset: int64[p, D], first corner of each piece.
        length: int64[p, D], extent of each piece.
        piece: int64[s], the piece of each shard; not decreasing.
        start: int64[s], first flat position inside the piece.
        stop: int64[s], one past the last; always above ``start``.
        holder_begin: int64[s + 1]; the holdings of shard i are ``holder_begin[i]`` to ``holder_begin[i + 1]``.
        holder_rank: int64[h], the rank.
        holder_row: int64[h], the row in that rank's own table.
    """

    piece_tensor: Ints
    offset: Ints
    length: Ints
    piece: Ints
    start: Ints
    stop: Ints
    holder_begin: Ints
    holder_rank: Ints
    holder_row: Ints

    def __len__(self) -> int:
        """Return the number of distinct shards."""
        return len(self.piece)

    @property
    def tensor(self) -> Ints:
        """int64[s]: the tensor of each shard."""
        return self.piece_tensor[self.piece]

    def holders(self, shard: int) -> Ints:
        """Return the ranks that hold one shard, ascending."""
        return self.holder_rank[self.holder_begin[shard] : self.holder_begin[shard + 1]]

    def row_of(self, shard: Ints, rank: Ints) -> Ints:
        """Return the row of each shard in the table of a rank that holds it."""
        world_size = int(self.holder_rank.max(initial=0)) + 1
        owner = np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.holder_begin))
        at = np.searchsorted(owner * world_size + self.holder_rank, shard * world_size + rank)
        return np.asarray(self.holder_row[at], dtype=np.int64)


def merge_tensors(tables: Sequence[ShardTable]) -> tuple[TensorTable, Ints]:
    """Merge the ranks' tensors by (kind, FQN).

    Where ranks differ in stride, device or requires_grad, the lowest rank's value is taken.

    Returns:
        The merged tensors, sorted by (code of the kind, FQN), and for every row of all the ranks' tensor tables, one
        rank after the other, its row in the merged table.

    Raises:
        StateError: ranks (or rows of one rank) disagree about a tensor's shape, dtype or tie; a tie leads nowhere or
            to another tied tensor; or elements have a size that is not a power of two.

    """
    parts = [table.tensors for table in tables]
    index: dict[tuple[int, str], int] = {}
    found = [
        index.setdefault(key, len(index)) for part in parts for key in zip(part.kind.tolist(), part.fqn, strict=True)
    ]
    keys = sorted(index)
    place = np.empty(len(keys), dtype=np.int64)
    place[[index[key] for key in keys]] = np.arange(len(keys))
    merged = place[np.array(found, dtype=np.int64)]
    stacked = _concat_tensors(parts)
    first = _first_rows(merged, len(keys))
    _check_agreement(stacked, first[merged], np.cumsum([len(part) for part in parts]))
    tensors = _take(stacked, first)
    _check_ties(tensors, index)
    _check_itemsizes(tensors)
    return tensors, merged


def merge_shards(tables: Sequence[ShardTable], merged: Ints) -> Shards:
    """Fold identical shards (same tensor, box and flat interval) of all ranks into one shard with several holders.

    Shards without elements, and shards of tied tensors, are left out: nothing is stored for them. If a rank states
    the same shard twice, its first row counts.

    Args:
        tables: what each rank holds.
        merged: second result of :func:`merge_tensors`.

    """
    width = max((table.tensors.shape.shape[1] for table in tables), default=0)
    tensor_begin = np.cumsum([0, *(len(table.tensors) for table in tables)])
    rank = np.repeat(np.arange(len(tables), dtype=np.int64), [len(table) for table in tables])
    row = _concat([np.arange(len(table), dtype=np.int64) for table in tables])
    local = _concat([table.tensor for table in tables]) + tensor_begin[rank]
    start, stop = _concat([table.start for table in tables]), _concat([table.stop for table in tables])
    tied = np.array([bool(name) for table in tables for name in table.tensors.tied_to], dtype=bool)
    kept = np.flatnonzero((start != stop) & ~tied[local])
    box = np.column_stack(
        [
            merged[local],
            _concat_padded([table.offset for table in tables], width, 0),
            _concat_padded([table.length for table in tables], width, 1),
            start,
            stop,
        ]
    )[kept]
    return _fold(box, rank[kept], row[kept], width)


def distinct_rows(rows: Ints) -> tuple[Ints, Ints]:
    """Find equal rows of a matrix.

    Hashes every row and looks the hashes up: 5 to 7 times faster than sorting them, and exact, because every row is
    compared with the first one of its hash; a collision only costs another round.

    Returns:
        The first row of each value, in order of appearance, and for every row the number of its value.

    """
    for seed in count():
        hashes = np.zeros(len(rows), dtype=np.uint64)
        for column in rows.T:
            hashes = mix(hashes ^ column.astype(np.uint64), seed)
        codes = np.asarray(pa.array(hashes).dictionary_encode().indices, dtype=np.int64)
        first = _first_rows(codes, int(codes.max(initial=-1)) + 1)
        if np.array_equal(rows, rows[first[codes]]):
            return first, codes
    raise AssertionError  # pragma: no cover -- count() does not end


def _fold(rows: Ints, rank: Ints, row: Ints, width: int) -> Shards:
    """Make :class:`Shards` of rows (tensor, offset, length, start, stop) and who holds them."""
    first, code = distinct_rows(rows)
    shards = rows[first]
    order = np.lexsort(shards.T[::-1])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    shards, code = shards[order], place[code]
    boxes = shards[:, : 1 + 2 * width]
    fresh = np.ones(len(shards), dtype=bool)
    fresh[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
    pieces = boxes[fresh]
    holding = np.lexsort((row, rank, code))
    code, rank, row = code[holding], rank[holding], row[holding]
    once = np.ones(len(code), dtype=bool)
    once[1:] = (code[1:] != code[:-1]) | (rank[1:] != rank[:-1])
    return Shards(
        piece_tensor=pieces[:, 0].copy(),
        offset=pieces[:, 1 : 1 + width].copy(),
        length=pieces[:, 1 + width :].copy(),
        piece=np.cumsum(fresh, dtype=np.int64) - 1,
        start=shards[:, -2].copy(),
        stop=shards[:, -1].copy(),
        holder_begin=np.searchsorted(code[once], np.arange(len(shards) + 1)).astype(np.int64),
        holder_rank=rank[once],
        holder_row=row[once],
    )


def _check_agreement(tensors: TensorTable, first: Ints, ends: Ints) -> None:
    """Compare every row with the first of its name; ``ends`` says where each rank's rows end."""
    differs = (tensors.ndim != tensors.ndim[first]) | (tensors.shape != tensors.shape[first]).any(axis=1)
    differs |= tensors.itemsize != tensors.itemsize[first]
    for names in (tensors.dtype, tensors.tied_to):
        codes: dict[str, int] = {}
        code = np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int64)
        differs |= code != code[first]
    if not differs.any():
        return
    here = int(differs.argmax())
    there = int(first[here])
    rank, other = (int(np.searchsorted(ends, at, side="right")) for at in (here, there))
    mine, theirs = tensors[here], tensors[there]
    fields = [
        f"{name} {getattr(theirs, name)!r} on rank {other} and {getattr(mine, name)!r} on rank {rank}"
        for name in ("shape", "dtype", "itemsize", "tied_to")
        if getattr(theirs, name) != getattr(mine, name)
    ]
    raise StateError(
        f"{mine.kind} tensor {mine.fqn!r} is not the same tensor everywhere: {'; '.join(fields)}. One name means one "
        "global tensor: pass the same model on every rank, or give the tensors different names"
    )


def _check_ties(tensors: TensorTable, index: dict[tuple[int, str], int]) -> None:
    """Raise where a tied tensor's target is unknown, or is tied itself."""
    ties = {(kind, fqn): to for kind, fqn, to in zip(tensors.kind.tolist(), tensors.fqn, tensors.tied_to, strict=True)}
    for (kind, fqn), target in ties.items():
        if target and (kind, target) not in index:
            raise StateError(
                f"{KINDS[kind]} tensor {fqn!r} is tied to {target!r}, which no rank holds; save it as well"
            )
        if target and ties[kind, target]:
            raise StateError(
                f"{KINDS[kind]} tensor {fqn!r} is tied to {target!r}, which is itself tied to {ties[kind, target]!r}; "
                "tie both to the tensor that is stored"
            )


def _check_itemsizes(tensors: TensorTable) -> None:
    """Raise where elements could not be aligned in a file."""
    size = tensors.itemsize
    wrong = np.flatnonzero((size <= 0) | (size & (size - 1) != 0))
    if wrong.size:
        meta = tensors[int(wrong[0])]
        raise StateError(
            f"{meta.kind} tensor {meta.fqn!r} ({meta.dtype}) has elements of {meta.itemsize} bytes, which is not a "
            "power of two; save it as a view of another dtype"
        )


def _concat_tensors(parts: Sequence[TensorTable]) -> TensorTable:
    """Put tensor tables below each other, in their common width."""
    width = max((part.shape.shape[1] for part in parts), default=0)
    return TensorTable(
        kind=_concat([part.kind for part in parts]),
        fqn=list(chain.from_iterable(part.fqn for part in parts)),
        dtype=list(chain.from_iterable(part.dtype for part in parts)),
        itemsize=_concat([part.itemsize for part in parts]),
        ndim=_concat([part.ndim for part in parts]),
        shape=_concat_padded([part.shape for part in parts], width, 1),
        stride=_concat_padded([part.stride for part in parts], width, 0),
        device=list(chain.from_iterable(part.device for part in parts)),
        requires_grad=_concat([part.requires_grad for part in parts]),
        tied_to=list(chain.from_iterable(part.tied_to for part in parts)),
    )


def _take(tensors: TensorTable, rows: Ints) -> TensorTable:
    """Return these rows, in this order."""
    at = rows.tolist()
    return TensorTable(
        kind=tensors.kind[rows],
        fqn=[tensors.fqn[row] for row in at],
        dtype=[tensors.dtype[row] for row in at],
        itemsize=tensors.itemsize[rows],
        ndim=tensors.ndim[rows],
        shape=tensors.shape[rows],
        stride=tensors.stride[rows],
        device=[tensors.device[row] for row in at],
        requires_grad=tensors.requires_grad[rows],
        tied_to=[tensors.tied_to[row] for row in at],
    )


def _first_rows(codes: Ints, size: int) -> Ints:
    """Return where each of the codes 0 .. size - 1 appears first."""
    first = np.full(size, len(codes), dtype=np.int64)
    np.minimum.at(first, codes, np.arange(len(codes), dtype=np.int64))
    return first


def _concat(columns: Sequence[Ints]) -> Ints:
    """Concatenate int64 columns; none at all make an empty one."""
    return np.concatenate([np.empty(0, dtype=np.int64), *columns])


def _concat_padded(matrices: Sequence[Ints], width: int, fill: int) -> Ints:
    """Put int64 matrices below each other, each padded on the right."""
    padded = [
        m if m.shape[1] == width else np.pad(m, ((0, 0), (0, width - m.shape[1])), constant_values=fill)
        for m in matrices
    ]
    return np.concatenate([np.empty((0, width), dtype=np.int64), *padded])
