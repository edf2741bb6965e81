"""What a checkpoint has, by name: what a planner asks about before it says what a target wants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, TensorMeta, TensorTable

__all__ = ["Saved"]


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
        names = zip((KINDS[code] for code in table.kind.tolist()), table.fqn, strict=True)
        objects = frozenset((kind, path) for kind, path in layout.objects)
        return cls({name: row for row, name in enumerate(names)}, objects, table)

    def meta(self, name: tuple[str, str]) -> TensorMeta:
        """Return the record of a tensor."""
        return self.tensors[self.rows[name]]

    def names(self, kind: str) -> Iterator[tuple[str, str]]:
        """Yield the names of all tensors and objects of one kind."""
        yield from (name for name in self.rows if name[0] == kind)
        yield from (name for name in self.objects if name[0] == kind)
