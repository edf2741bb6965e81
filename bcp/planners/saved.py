"""What a checkpoint has, by name: the part of a layout that planners ask about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, TensorMeta, TensorTable
from bcp.protocols import ObjectKey

__all__ = ["SavedNames"]


@dataclass(frozen=True, slots=True)
class SavedNames:
    """Names in a checkpoint.

    Attributes:
        rows: (kind, FQN) of the tensors, to their row in ``tensors``.
        objects: (kind, path) of the other leaves.
        tensors: what is known of the tensors.
    """

    rows: dict[ObjectKey, int]
    objects: frozenset[ObjectKey]
    tensors: TensorTable

    @classmethod
    def of(cls, layout: Layout) -> SavedNames:
        """Index a layout."""
        table = layout.tensors
        names = zip((KINDS[code] for code in table.kind.tolist()), table.fqn, strict=True)
        objects = frozenset((kind, path) for kind, path in layout.objects)
        return cls({name: row for row, name in enumerate(names)}, objects, table)

    def meta(self, name: ObjectKey) -> TensorMeta:
        """Return the record of a tensor."""
        return self.tensors[self.rows[name]]

    def names(self, kind: str) -> Iterator[ObjectKey]:
        """Yield the names of all tensors and objects of one kind."""
        yield from (name for name in self.rows if name[0] == kind)
        yield from (name for name in self.objects if name[0] == kind)
