"""The tables of all ranks, each distinct part once: rank 0 plans with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bcp.plan.columns import Ints
from bcp.plan.save.template import Catalogue, Slots
from bcp.plan.units import Claim

__all__ = ["World"]


@dataclass(frozen=True, slots=True)
class World:
    """All ranks' tables, factored: c catalogues, K templates, N ranks, k flat intervals.

    Attributes:
        catalogues: the tensors by name; in the order of the lowest rank that has each.
        template_catalogue: int64[K], the catalogue of each template.
        template_slots: K times the slots; templates are in the order of the lowest rank that has each.
        template: int64[N], the template of each rank.
        flat_rank: int64[k], whose interval it is; not decreasing.
        flat_slot: int64[k], slot of that rank's template.
        flat_start: int64[k], first flat element, counted in the slot's box.
        flat_stop: int64[k], one past the last.
        claims: units of sharded states, of every rank that has any.
    """

    catalogues: Sequence[Catalogue]
    template_catalogue: Ints
    template_slots: Sequence[Slots]
    template: Ints
    flat_rank: Ints
    flat_slot: Ints
    flat_start: Ints
    flat_stop: Ints
    claims: Mapping[int, Sequence[Claim]] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.template)

    def lowest_ranks(self) -> Ints:
        """Return int64[c]: the lowest rank that has each catalogue."""
        lowest = np.full(len(self.catalogues), self.world_size, dtype=np.int64)
        np.minimum.at(lowest, self.template_catalogue[self.template], np.arange(self.world_size))
        return lowest
