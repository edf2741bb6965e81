"""Factored tables: the parts that many ranks share, apart from each rank's own intervals.

The ranks of one data-parallel group hold the same boxes of the same tensors, and differ in flat intervals at most
(ZeRO, FSDP1: the paper's irregular tensors, sec. 4.4). So a rank's table has three factors. The :class:`Catalogue`
names the tensors, and is equal in a pipeline stage. The :class:`Slots` are boxes, and are equal in a data-parallel
group. The rank's own flat intervals lie in some of the slots. Rank 0 needs each catalogue and each slots once
(:class:`AllTables`), and so plans for thousands of ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bcp._messages.planning import Claim
from bcp.plan.columns import Ints, begins, runs
from bcp.plan.shards import KINDS, ShardTable, TensorTable

__all__ = ["MOST_MEMBERS", "AllTables", "Catalogue", "FactoredTable", "Slots", "factor", "signature"]

MOST_MEMBERS = 16
"""The largest family, so that :func:`signature` fits into 48 bits."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tensors and other leaves that a rank knows of."""

    tensors: TensorTable  # n tensors, sorted by (kind, FQN)
    # int64[n], number of each tensor's family: states of one parameter with equal shards. They are planned and laid out
    # as one. Numbers count 0, 1, 2 ... in the order of their first members.
    family: Ints
    marks: Ints  # int64[n], bits of bcp.plan.shards.ONE_WRITER and its neighbours
    objects: Sequence[tuple[str, str]]  # (kind, path) of the leaves that are not tensors, sorted
    extras: Sequence[str]  # kinds with one opaque object of the rank


@dataclass(frozen=True, slots=True)
class Slots:
    """The boxes of a rank's shards: m boxes, D dimensions."""

    family: Ints  # int64[m], number in the catalogue; not decreasing
    offset: Ints  # int64[m, D], first corner of each box
    length: Ints  # int64[m, D], its extent
    regular: Ints  # int64[m], 1: the whole box is held; 0: every rank lists its intervals by itself, which may be none


@dataclass(frozen=True, slots=True)
class FactoredTable:
    """A rank's table, taken apart."""

    catalogue: Catalogue  # the tensors
    slots: Slots  # boxes of the tensors
    flat: Ints  # int64[k, 3], (slot, start, stop): this rank's intervals of slots that are not regular; none is empty
    row_begin: Ints  # int64[m + 1]; slot i stands for ``rows[row_begin[i]]`` to ``rows[row_begin[i + 1]]``
    rows: Ints  # rows of the table, in the order of the family's members
    units: str  # the table's claims of units, as text


def factor(table: ShardTable) -> FactoredTable:
    """Split a rank's table into catalogue, slots and flat intervals; only the order of its tensors is lost."""
    names = list(zip(table.tensors.kind.tolist(), table.tensors.fqn, strict=True))
    order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    owner = place[table.tensor]
    row = np.argsort(owner, kind="stable")
    row = row[~table.tensors.tied[table.tensor[row]]]  # nothing is stored for them
    begin = np.searchsorted(owner[row], np.arange(len(order) + 1))
    shards = np.column_stack([table.offset, table.length, table.start, table.stop])[row]
    tensors = table.tensors.take(order)
    family = _families(tensors, shards, begin)
    slot_family, row_begin, rows = _rows(family, row, begin)
    first = rows[row_begin[:-1]]
    marks = np.zeros_like(order) if table.marks is None else table.marks[order]
    start, stop = table.start[first], table.stop[first]
    regular = _regular(table, first)
    own = np.flatnonzero(~regular & (start != stop))
    return FactoredTable(
        catalogue=Catalogue(tensors, family, marks, table.objects, table.extras),
        slots=Slots(slot_family, table.offset[first], table.length[first], regular.astype(np.int64)),
        flat=np.column_stack([own, start[own], stop[own]]),
        row_begin=row_begin,
        rows=rows,
        units=table.units,
    )


def _regular(table: ShardTable, row: Ints) -> npt.NDArray[np.bool_]:
    """Mark the rows that are whole boxes, unless the rank holds anything of their kind in part.

    A small tensor of a ZeRO buffer is whole on one rank of its group by chance. As a regular one it would make the
    slots of that rank different from all others. Scalars cannot be cut: they count neither way.
    """
    kind, scalar = table.tensors.kind[table.tensor[row]], table.tensors.ndim[table.tensor[row]] == 0
    whole = (table.start[row] == 0) & (table.stop[row] == table.length[row].prod(axis=1)) & (table.stop[row] > 0)
    in_part = np.zeros(len(KINDS), dtype=bool)
    in_part[kind[~whole & ~scalar]] = True
    return np.asarray(whole & (scalar | ~in_part[kind]), dtype=np.bool_)


def _families(tensors: TensorTable, shards: Ints, begin: Ints) -> Ints:
    """Number the families: an optimizer's tensors whose names differ in the last part only, and whose shards are equal.

    The rows of tensor t are ``shards[begin[t]]`` to ``shards[begin[t + 1]]``.
    """
    family = np.empty(len(tensors), dtype=np.int64)
    numbers: dict[tuple[object, ...], int] = {}
    members: dict[int, int] = {}
    optimizer = KINDS.index("optimizer")
    kinds, bounds = tensors.kind.tolist(), begin.tolist()
    for row, (kind, fqn, tied_to) in enumerate(zip(kinds, tensors.fqn, tensors.tied_to, strict=True)):
        parameter, _, _ = fqn.rpartition(".")
        key: tuple[object, ...] = (kind, fqn, tied_to, row)
        if kind == optimizer and parameter and not tied_to:
            shape = (int(tensors.ndim[row]), tensors.shape[row].tobytes())
            key = (parameter, shape, shards[bounds[row] : bounds[row + 1]].tobytes())
        if members.get(numbers.get(key, -1), 0) == MOST_MEMBERS:
            key = (*key, row)
        family[row] = number = numbers.setdefault(key, len(numbers))
        members[number] = members.get(number, 0) + 1
    return family


def _rows(family: Ints, row: Ints, begin: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the family of each slot, and CSR-wise the rows of the table that each slot stands for."""
    member = np.argsort(family, kind="stable")
    member_begin = np.searchsorted(family[member], np.arange(int(family.max(initial=-1)) + 2))
    leader, size = member[member_begin[:-1]], np.diff(member_begin)
    count = np.diff(begin)[leader]
    slot_family = np.repeat(np.arange(len(leader)), count)
    number = runs(np.zeros_like(count), count)
    size = size[slot_family]
    row_begin = begins(size)
    tensor = member[runs(member_begin[slot_family], size)]
    return slot_family, row_begin, row[begin[tensor] + np.repeat(number, size)]


def signature(itemsize: Ints, family: Ints, number: Ints, families: int) -> Ints:
    """Return int64[families]: numbers that differ for families whose members differ in number or item sizes.

    The columns are int64[n], one row a member. Item sizes are powers of two; ``number`` counts the members of a family.
    """
    digit = np.log2(itemsize).astype(np.int64) + 1
    out = np.zeros(families, dtype=np.int64)
    np.add.at(out, family, digit << (3 * number))
    return out


@dataclass(frozen=True, slots=True)
class AllTables:
    """All ranks' tables, factored: c catalogues, K templates, N ranks, k flat intervals."""

    catalogues: Sequence[Catalogue]  # the tensors by name; in the order of the lowest rank that has each
    template_catalogue: Ints  # int64[K], the catalogue of each template
    template_slots: Sequence[Slots]  # the slots of each of K templates, in the order of the lowest rank that has each
    template: Ints  # int64[N], the template of each rank
    flat_rank: Ints  # int64[k], the rank of each interval; not decreasing
    flat_slot: Ints  # int64[k], slot of that rank's template
    flat_start: Ints  # int64[k], first flat element, counted in the slot's box
    flat_stop: Ints  # int64[k], one past the last
    # by rank, its claims of units of sharded states; ranks without any are left out
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
