"""What a checkpoint has, by name: what a planner asks about before it says what a target wants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from bcp.plan.columns import Ints, concat, padded
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, TensorMeta, TensorTable

__all__ = ["Saved", "extended"]


@dataclass(frozen=True, slots=True)
class Saved:
    """Names in a checkpoint, as the target calls them.

    Attributes:
        rows: (kind, FQN) of the tensors, to their row in ``tensors``.
        objects: (kind, path) of the other leaves.
        tensors: what is known of the tensors.
    """

    rows: Mapping[tuple[str, str], int]
    objects: Collection[tuple[str, str]]
    tensors: TensorTable

    @classmethod
    def of(cls, layout: Layout) -> Saved:
        """Index a layout, under the names that it has itself."""
        table = layout.tensors
        rows = dict(zip(_names(table), range(len(table)), strict=True))
        return cls(rows, frozenset(layout.objects), table)

    def meta(self, name: tuple[str, str]) -> TensorMeta:
        """Return the record of a tensor."""
        return self.tensors[self.rows[name]]

    def names(self, kind: str) -> Iterator[tuple[str, str]]:
        """Yield the names of all tensors and objects of one kind."""
        yield from (name for name in self.rows if name[0] == kind)
        yield from (name for name in self.objects if name[0] == kind)

    def find(self, wanted: TensorTable) -> Ints:
        """int64[n]: the row of every wanted tensor in ``tensors``, by kind and name; -1 where there is none."""
        return np.array(list(map(self.rows.get, _names(wanted), repeat(-1))), np.int64)


def _names(table: TensorTable) -> Iterator[tuple[str, str]]:
    """Yield (kind, FQN) of every tensor."""
    return zip(map(KINDS.__getitem__, table.kind.tolist()), table.fqn, strict=True)


def extended(table: TensorTable, metas: Sequence[TensorMeta]) -> TensorTable:
    """Return a table with further tensors behind its own."""
    more = TensorTable.build(metas)
    width = max(table.shape.shape[1], more.shape.shape[1])
    return TensorTable(
        kind=concat([table.kind, more.kind]),
        fqn=[*table.fqn, *more.fqn],
        dtype=[*table.dtype, *more.dtype],
        itemsize=concat([table.itemsize, more.itemsize]),
        ndim=concat([table.ndim, more.ndim]),
        shape=padded([table.shape, more.shape], width, 1),
        stride=padded([table.stride, more.stride], width, 0),
        device=[*table.device, *more.device],
        requires_grad=concat([table.requires_grad, more.requires_grad]),
        tied_to=[*table.tied_to, *more.tied_to],
    )
