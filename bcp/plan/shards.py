"""Columnar tables: the tensors and shards of one rank, and the segments of a layout.

Shapes are int64 matrices of a common width. A tensor of fewer dimensions is padded on the *right* with length 1 (offset
0, stride 0). That changes neither its volume nor its row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, count
from typing import Any

import numpy as np
import numpy.typing as npt

from bcp.plan.box import Box
from bcp.plan.columns import Ints, begins, concat, distinct_rows, matrix, mix, padded, runs

__all__ = [
    "BUFFER",
    "KINDS",
    "MAY_DIFFER",
    "ONE_WRITER",
    "OPAQUE_KINDS",
    "TENSOR_COLUMNS",
    "Segments",
    "ShardRow",
    "ShardTable",
    "TensorMeta",
    "TensorTable",
]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The segments of b boxes: k patterns, s segments in all patterns together.

    Tensor-parallel ranks cut their boxes alike, and so do pipeline stages of as many layers: a box is cut as its
    *pattern* says, in files counted from a first one of its own. 405B parameters on 8,960 ranks, in Megatron's buckets,
    are 10,618 boxes and 298,762 segments, but 296 patterns of 6,412.
    """

    file: Ints  # int64[b], row in the layout's file columns, from which the box's segments count
    pattern: Ints  # int64[b], how the box is cut
    begin: Ints  # int64[k + 1]; pattern i consists of the segments ``begin[i]`` to ``begin[i + 1]``
    line: Ints  # int64[s + 1], where each segment begins, in elements, with all patterns end to end; then their end
    step: Ints  # int64[s], its file, counted from the box's
    at: Ints  # int64[s], its first element, counted from the start of a plane of that file

    def __len__(self) -> int:
        return len(self.at)

    @classmethod
    def of(cls, number: Ints, length: Ints, file: Ints, at: Ints) -> Segments:
        """Build segments with one pattern for each box.

        ``number``, int64[b], has the number of segments of each box, at least one. The others are int64[n], one row a
        segment. The segments of a box tile it in row-major order.
        """
        begin = begins(number)
        first = file[begin[:-1]]
        return cls(first, np.arange(len(number)), begin, begins(length), file - np.repeat(first, number), at)

    @property
    def length(self) -> Ints:
        """int64[s]: elements of each segment."""
        return np.diff(self.line)

    @property
    def starts(self) -> Ints:
        """int64[b]: where each box's pattern begins on the line, in elements."""
        return self.line[self.begin[self.pattern]]

    def of_boxes(self, boxes: Ints) -> tuple[Ints, Ints]:
        """Return (box, segment) of all segments of these boxes, in order."""
        pattern = self.pattern[boxes]
        number = np.diff(self.begin)[pattern]
        return np.repeat(boxes, number), runs(self.begin[pattern], number)

    def folded(self) -> Segments:
        """Return the same segments with each distinct pattern once, in the order of the boxes."""
        number, length = np.diff(self.begin), self.length
        inside = np.arange(len(self)) - np.repeat(self.begin[:-1], number)
        columns = [length, self.step, self.at, inside]
        for seed in count():
            word = np.zeros(len(self), dtype=np.uint64)
            for column in columns:
                word = mix(word ^ column.astype(np.uint64), seed)
            total = np.add.reduceat(word, self.begin[:-1]) if len(number) else word
            key = np.column_stack([number, total.view(np.int64)])[self.pattern]
            first, code = distinct_rows(key)
            distinct = self.pattern[first]  # the pattern that stands for each distinct one
            same = runs(self.begin[distinct[code]], number[self.pattern])
            own = runs(self.begin[self.pattern], number[self.pattern])
            if all(np.array_equal(column[same], column[own]) for column in columns):
                break
        kept = runs(self.begin[distinct], number[distinct])
        begin, line = begins(number[distinct]), begins(length[kept])
        return Segments(self.file, code, begin, line, self.step[kept], self.at[kept])


KINDS = ("model", "optimizer", "dataloader", "extra_states")
"""The kinds of state, in the order of their codes."""

OPAQUE_KINDS = ("dataloader", "extra_states")
"""Kinds that no planner looks into: one packed object a rank."""

BUFFER, ONE_WRITER, MAY_DIFFER = 1, 2, 4
"""Marks of a tensor whose replicas are not simply divided among their ranks, as bits.

A buffer of a module has one writer while it is small. A tensor with one writer is never divided. The replicas of a
tensor that may differ are not compared. The writer is the lowest rank that holds the shard.
"""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The facts of a logical tensor that all ranks share (the paper's BasicMeta, and its identity).

    Attributes:
        kind: one of :data:`KINDS`.
        fqn: fully qualified name, unique within the kind.
        dtype: torch's name without the ``torch.``, as in ``"bfloat16"``.
        itemsize: bytes of one element.
        shape: global shape; ``()`` for a 0-d tensor.
        stride: strides of the global tensor in elements, as the framework reports them.
        device: device type, as in ``"cuda"``.
        requires_grad: whether autograd tracked it.
        tied_to: FQN (same kind) of the tensor whose memory this one shares, which is stored in its stead; or "".
    """

    kind: str
    fqn: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    device: str = "cpu"
    requires_grad: bool = False
    tied_to: str = ""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard as a planner states it: a flat interval of a box of a tensor.

    Attributes:
        tensor: the logical tensor that it is a shard of.
        box: the block of the global tensor (the paper's ShardMeta).
        start: first flat position inside the box that this rank holds; 0 for a regular shard.
        stop: one past the last; None means the box's end.
    """

    tensor: TensorMeta
    box: Box
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Logical tensors, one row each; n rows, common width D."""

    kind: Ints  # int64[n], code in :data:`KINDS`
    fqn: Sequence[str]  # n names
    dtype: Sequence[str]  # n dtype names
    itemsize: Ints  # int64[n], bytes
    ndim: Ints  # int64[n]
    shape: Ints  # int64[n, D], padded with 1
    stride: Ints  # int64[n, D], padded with 0
    device: Sequence[str]  # n device types
    requires_grad: Ints  # int64[n], 0 or 1
    tied_to: Sequence[str]  # n names, "" if the tensor stands for itself

    def __len__(self) -> int:
        return len(self.fqn)

    @classmethod
    def build(cls, metas: Sequence[TensorMeta]) -> TensorTable:
        """Make columns of records."""
        width = max((len(m.shape) for m in metas), default=0)
        return cls(
            kind=np.array([KINDS.index(m.kind) for m in metas], dtype=np.int64),
            fqn=[m.fqn for m in metas],
            dtype=[m.dtype for m in metas],
            itemsize=np.array([m.itemsize for m in metas], dtype=np.int64),
            ndim=np.array([len(m.shape) for m in metas], dtype=np.int64),
            shape=matrix([m.shape for m in metas], width, 1),
            stride=matrix([m.stride for m in metas], width, 0),
            device=[m.device for m in metas],
            requires_grad=np.array([m.requires_grad for m in metas], dtype=np.int64),
            tied_to=[m.tied_to for m in metas],
        )

    def dtypes_of(self, rows: Ints) -> list[str]:
        """Return the dtype of each of these rows, int64[k]; "" for row -1, which is none."""
        return list(map([*self.dtype, ""].__getitem__, rows.tolist()))

    def __getitem__(self, row: int) -> TensorMeta:
        ndim = int(self.ndim[row])
        return TensorMeta(
            kind=KINDS[self.kind[row]],
            fqn=self.fqn[row],
            dtype=self.dtype[row],
            itemsize=int(self.itemsize[row]),
            shape=tuple(self.shape[row, :ndim].tolist()),
            stride=tuple(self.stride[row, :ndim].tolist()),
            device=self.device[row],
            requires_grad=bool(self.requires_grad[row]),
            tied_to=self.tied_to[row],
        )

    def take(self, rows: Ints) -> TensorTable:
        """Return these rows, in this order."""
        indices = rows.tolist()
        taken: dict[str, Any] = {
            name: column[rows] if isinstance(column, np.ndarray) else list(map(column.__getitem__, indices))
            for name, column in self.columns().items()
        }
        return TensorTable(**taken)

    @classmethod
    def joined(cls, tables: Sequence[TensorTable]) -> TensorTable:
        """Put tables below each other, in their common width."""
        width = max((table.shape.shape[1] for table in tables), default=0)
        columns: dict[str, Any] = {
            name: _joined(name, [getattr(table, name) for table in tables], width) for name in TENSOR_COLUMNS
        }
        return cls(**columns)

    def columns(self) -> dict[str, Any]:
        """Return all columns by name, in the order of the fields."""
        return {name: getattr(self, name) for name in TENSOR_COLUMNS}

    @property
    def tied(self) -> npt.NDArray[np.bool_]:
        """bool[n]: whether each tensor is tied to another."""
        if not any(self.tied_to):  # as a rule
            return np.zeros(len(self), dtype=np.bool_)
        return np.array(list(map(bool, self.tied_to)), dtype=np.bool_)

    @property
    def numel(self) -> Ints:
        """int64[n]: elements of each global tensor."""
        return np.asarray(self.shape.prod(axis=1), dtype=np.int64)


TENSOR_COLUMNS = tuple(column.name for column in fields(TensorTable))
"""Names of the columns of a :class:`TensorTable`."""

_TEXTS = frozenset(column.name for column in fields(TensorTable) if column.type == "Sequence[str]")
_PADDING = {"shape": 1, "stride": 0}


def _joined(name: str, parts: Sequence[Any], width: int) -> Ints | list[str]:
    """Put the parts of one column below each other."""
    if name in _TEXTS:
        return list(chain.from_iterable(parts))
    return padded(parts, width, _PADDING[name]) if name in _PADDING else concat(parts)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ShardTable:
    """The shards of one rank: n shards of the tensors in ``tensors``. Nobody changes its columns.

    Attributes:
        tensors: the logical tensors, each once.
        tensor: int64[n], row in ``tensors``.
        offset: int64[n, D], first corner of each box.
        length: int64[n, D], extent of each box.
        start: int64[n], first flat position inside the box.
        stop: int64[n], one past the last.
        objects: (kind, path) of the leaves that are not tensors, sorted.
        extras: kinds with one opaque object of this rank (``dataloader``, ``extra_states``).
        units: units of sharded states that it has, by :func:`bcp.plan.units.encode_claims`.
        marks: int64, one for each of ``tensors``, of :data:`BUFFER`, :data:`ONE_WRITER` and :data:`MAY_DIFFER`; None
            if no tensor has any.
    """

    tensors: TensorTable
    tensor: Ints
    offset: Ints
    length: Ints
    start: Ints
    stop: Ints
    objects: Sequence[tuple[str, str]] = field(default=())
    extras: Sequence[str] = field(default=())
    units: str = ""
    marks: Ints | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def build(
        cls,
        rows: Sequence[ShardRow],
        objects: Sequence[tuple[str, str]] = (),
        extras: Sequence[str] = (),
        more: Sequence[TensorMeta] = (),
    ) -> ShardTable:
        """Make columns of records; ``more``: tensors without an element on this rank (tied, or an empty shard)."""
        index: dict[TensorMeta, int] = {}
        for meta in [*(row.tensor for row in rows), *more]:
            index.setdefault(meta, len(index))
        tensors = TensorTable.build(list(index))
        width = tensors.shape.shape[1]
        return cls(
            tensors=tensors,
            tensor=np.array([index[row.tensor] for row in rows], dtype=np.int64),
            offset=matrix([row.box.offsets for row in rows], width, 0),
            length=matrix([row.box.lengths for row in rows], width, 1),
            start=np.array([row.start for row in rows], dtype=np.int64),
            stop=np.array([row.box.numel if row.stop is None else row.stop for row in rows], dtype=np.int64),
            objects=sorted(objects),
            extras=sorted(extras),
        )

    def box(self, row: int) -> Box:
        """Return the box of one shard, in its tensor's own number of dimensions."""
        ndim = int(self.tensors.ndim[self.tensor[row]])
        return Box(tuple(self.offset[row, :ndim].tolist()), tuple(self.length[row, :ndim].tolist()))

    def meta(self, row: int) -> TensorMeta:
        """Return the tensor of one shard."""
        return self.tensors[int(self.tensor[row])]

    @property
    def nbytes(self) -> Ints:
        """int64[n]: bytes of each shard."""
        return np.asarray((self.stop - self.start) * self.tensors.itemsize[self.tensor], dtype=np.int64)
