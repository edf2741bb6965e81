"""Shard tables of ranks, made once for states that do not change, not at every save (paper sec. 4.1).

Every save finds all leaves anew, by calls of every ``state_dict()`` with its hooks. It asks every tensor for its
address and its spec. A table follows from the answers, and from nothing else: one that was made of equal answers is
right, whatever has happened since. The cache holds no tensor, no module and no value.

A table is made of the names and specs of a rank's leaves: spec by spec, not leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np

from bcp.plan.columns import Ints, matrix, runs
from bcp.plan.shards import KINDS, ShardTable, TensorTable
from bcp.protocols import ObjectKey
from bcp.runtime.process import process_lock
from bcp.state.memory import dtype_name
from bcp.state.tensor_specs import LEFT_OUT, TensorSpec

__all__ = ["ShardTableCache", "TableRows", "recall", "remember"]

_CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(slots=True)
class TableRows:
    """A table in the making."""

    kinds: list[int]  # code of the kind of each tensor
    fqns: list[str]
    forms: list[TensorSpec]
    tied_to: list[str]  # the FQN of the tensor that is stored in its stead, or ""
    owners: list[int]  # the tensor of each leaf that has shards
    stored: list[int]  # the number of each such leaf
    held: list[TensorSpec]  # the form of each such leaf

    @classmethod
    def of(
        cls,
        names: Sequence[tuple[str, str]],  # (kind, FQN) of each leaf
        forms: Sequence[TensorSpec],  # the form of each leaf, then of each copy
        firsts: Mapping[int, int],  # leaf to the leaf that stores the same memory, or to LEFT_OUT
        copies: Mapping[int, Sequence[int]],  # leaf to the numbers of its copies
    ) -> TableRows:
        """Take leaves. A tensor without an element on this rank is left out, unless it has no elements at all."""
        own: dict[int, Sequence[int]] = {
            n: [number for number in (n, *more) if forms[number].spans] for n, more in copies.items()
        }
        taken = [
            n
            for n, form in enumerate(forms[: len(names)])
            if (form.spans or own.get(n) or 0 in form.shape or n in firsts) and firsts.get(n) != LEFT_OUT
        ]
        shards = [
            (tensor, number)
            for tensor, n in enumerate(taken)
            if n not in firsts
            for number in own.get(n, (n,))
            if forms[number].spans
        ]
        return cls(
            kinds=[_CODES[names[n][0]] for n in taken],
            fqns=[names[n][1] for n in taken],
            forms=[forms[n] for n in taken],
            tied_to=[names[firsts[n]][1] if n in firsts else "" for n in taken],
            owners=[tensor for tensor, _ in shards],
            stored=[number for _, number in shards],
            held=[forms[number] for _, number in shards],
        )

    def add(self, kind: str, fqn: str, form: TensorSpec, tied_to: str) -> None:
        """Take a tensor without shards."""
        self.kinds.append(_CODES[kind])
        self.fqns.append(fqn)
        self.forms.append(form)
        self.tied_to.append(tied_to)

    def table(
        self, objects: Sequence[tuple[str, str]], marks: Mapping[tuple[str, str], int] = MappingProxyType({})
    ) -> ShardTable:
        """Make the table; ``objects`` are sorted, ``marks`` are those of tensors by name."""
        tensors, (distinct, number) = self._tensors(), _distinct(self.held)
        spans = [span for form in distinct for span in form.spans]
        span_counts = _column(len(form.spans) for form in distinct)
        width, count = tensors.shape.shape[1], span_counts[number]
        indices = runs((np.cumsum(span_counts) - span_counts)[number], count)
        return ShardTable(
            tensors=tensors,
            tensor=np.repeat(_column(self.owners), count),
            offset=matrix([span.box.offsets for span in spans], width, 0)[indices],
            length=matrix([span.box.lengths for span in spans], width, 1)[indices],
            start=_column(span.start for span in spans)[indices],
            stop=_column(span.stop for span in spans)[indices],
            objects=objects,
            marks=self._marks(marks) if marks else None,
        )

    def _marks(self, marks: Mapping[tuple[str, str], int]) -> Ints:
        names = zip(map(KINDS.__getitem__, self.kinds), self.fqns, strict=True)
        return _column(marks.get(name, 0) for name in names)

    def _tensors(self) -> TensorTable:
        """Make the part of the table that is about tensors."""
        distinct, number = _distinct(self.forms)
        width, numbers = max((len(form.shape) for form in distinct), default=0), number.tolist()
        dtypes, devices = [dtype_name(form.dtype) for form in distinct], [form.device for form in distinct]
        return TensorTable(
            kind=_column(self.kinds),
            fqn=self.fqns,
            dtype=list(map(dtypes.__getitem__, numbers)),
            itemsize=_column(form.dtype.itemsize for form in distinct)[number],
            ndim=_column(len(form.shape) for form in distinct)[number],
            shape=matrix([form.shape for form in distinct], width, 1)[number],
            stride=matrix([form.stride for form in distinct], width, 0)[number],
            device=list(map(devices.__getitem__, numbers)),
            requires_grad=_column(form.requires_grad for form in distinct)[number],
            tied_to=self.tied_to,
        )


def _distinct(forms: Sequence[TensorSpec]) -> tuple[list[TensorSpec], Ints]:
    """Return the different forms, and the number of each form among them."""
    different = {id(form): form for form in forms}
    numbers = {key: number for number, key in enumerate(different)}
    return list(different.values()), _column(numbers[id(form)] for form in forms)


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


MOST = 8
"""So many states are remembered: those of the roles of an RL job; others save one or two in turn."""

Seen = tuple[object, ...]
"""Everything that a table follows from: names, forms, ties."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardTableCache:
    """Results that follow from names, specs and ties."""

    seen: Seen  # the names, specs and ties
    table: ShardTable
    stored: Sequence[int]  # numbers of the leaves whose memory is the table's shards, in the order of its rows
    keys: Sequence[ObjectKey]  # keys of the objects, in the order in which their values are found
    plain: bool  # whether each of these leaves is one shard, and bytes of the CPU's memory in row-major order
    tracked: bool  # whether autograd tracks the memory of any of them


_stocks: list[ShardTableCache] = []
_lock = process_lock()


def recall(seen: Seen) -> ShardTableCache | None:
    """Return the results of equal names, specs and ties, or None."""
    with _lock:
        stocks = list(_stocks)
    known_stock = next((stock for stock in stocks if stock.seen == seen), None)
    if known_stock is not None:
        _put_first(known_stock)
    return known_stock


def remember(stock: ShardTableCache) -> None:
    """Remember results. Others will get the same table, so its numbers become read-only."""
    for part in (stock.table, stock.table.tensors):
        for column in (getattr(part, field.name) for field in fields(part)):
            if isinstance(column, np.ndarray):
                column.setflags(write=False)
    _put_first(stock)


def _put_first(stock: ShardTableCache) -> None:
    """Note that a stock was just needed; the one that was needed longest ago makes room."""
    with _lock:
        _stocks[:] = [stock, *(other for other in _stocks if other is not stock)][:MOST]
