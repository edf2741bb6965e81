"""Merge the tables of all ranks: tensors by name, and shards with their replicas folded (paper sec. 4.1).

:func:`merge_tensors` also finds the families that are one on all ranks. Nothing here is done once per rank, only once
per template and once per flat interval. So a replica on 782 ranks costs as much as one on 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from bcp.errors import StateError
from bcp.plan.columns import Ints, begins, concat, distinct_rows, grouped, padded, runs
from bcp.plan.shards import KINDS, TensorTable
from bcp.plan.write.world import AllTables, Catalogue

__all__ = ["DistinctShards", "MergedTensors", "merge_shards", "merge_tensors"]


@dataclass(frozen=True, slots=True)
class MergedTensors:
    """All tensors by name, n of them, and every catalogue's families in terms of them.

    Families are counted over all catalogues: those of catalogue c begin with ``family_base[c]``. The members of
    family f are ``members[family_begin[f]]`` and the next ones, ``family_size[f]`` in all.
    """

    tensors: TensorTable  # sorted by (code of the kind, FQN)
    leader: Ints  # int64[n], the tensor whose shards this one shares; itself, if it shares none
    number: Ints  # int64[n], which member of its leader's family it is, 0, 1, 2 ...
    weight: Ints  # int64[n], bytes of one element of all the tensors that this one leads
    marks: Ints  # int64[n], marks that any rank gives to any of the tensors that this one leads
    family_base: Ints  # int64[c + 1]
    family_begin: Ints  # int64[f]
    family_size: Ints  # int64[f]
    members: Ints  # rows in ``tensors``
    # bool[f], whether other ranks hold the members differently: then each of them leads itself
    split: npt.NDArray[np.bool_]


def merge_tensors(world: AllTables) -> MergedTensors:
    """Merge the ranks' tensors by (kind, FQN).

    If ranks differ in stride, device or requires_grad, the lowest rank's value is taken.

    Raises:
        StateError: ranks, or rows of one rank, disagree about a tensor's shape, dtype or tie. Or a tie leads nowhere,
            or to another tied tensor. Or elements have a size that is not a power of two.
    """
    parts = [catalogue.tensors for catalogue in world.catalogues]
    index, merged = _by_name(parts)
    stacked = TensorTable.joined(parts)
    first = np.full(sum(map(len, index)), len(merged), dtype=np.int64)
    np.minimum.at(first, merged, np.arange(len(merged), dtype=np.int64))
    ranks = np.repeat(world.lowest_ranks(), [len(part) for part in parts])
    _check_agreement(stacked, first[merged], ranks)
    tensors = stacked.take(first)
    _check_ties(tensors, index)
    _check_itemsizes(tensors)
    return _with_families(world.catalogues, tensors, merged)


def _by_name(parts: Sequence[TensorTable]) -> tuple[Sequence[dict[str, int]], Ints]:
    """Return, for each kind, the merged row of every name; and the merged row of every row of the parts.

    Rows of a part are sorted by kind.
    """
    index: list[dict[str, int]] = []
    rows: list[list[int]] = [[] for _ in parts]
    ends = [np.searchsorted(part.kind, np.arange(len(KINDS) + 1)).tolist() for part in parts]
    for kind in range(len(KINDS)):
        names = [part.fqn[end[kind] : end[kind + 1]] for part, end in zip(parts, ends, strict=True)]
        base = sum(map(len, index))
        index.append({fqn: row for row, fqn in enumerate(sorted(set().union(*names)), start=base)})
        for part_rows, part_names in zip(rows, names, strict=True):
            part_rows.extend(map(index[kind].__getitem__, part_names))
    return index, np.array(list(chain.from_iterable(rows)), dtype=np.int64)


def _with_families(catalogues: Sequence[Catalogue], tensors: TensorTable, merged: Ints) -> MergedTensors:
    """Find the families that are one in every catalogue."""
    base = begins(np.array([int(catalogue.family.max(initial=-1)) + 1 for catalogue in catalogues], dtype=np.int64))
    family = concat([catalogue.family + first for catalogue, first in zip(catalogues, base, strict=False)])
    order = np.argsort(family, kind="stable")
    begin = np.searchsorted(family[order], np.arange(base[-1] + 1))
    members, size, begin = merged[order], np.diff(begin), begin[:-1]
    lead = members[begin]
    split = _split(len(tensors), family[order], members, lead, size)
    leader, number = np.arange(len(tensors)), np.zeros(len(tensors), dtype=np.int64)
    whole = ~split[family[order]]
    leader[members[whole]] = lead[family[order][whole]]
    number[members[whole]] = (np.arange(len(order)) - begin[family[order]])[whole]
    weight = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(weight, leader, tensors.itemsize)
    marks = np.zeros(len(tensors), dtype=np.int64)
    np.bitwise_or.at(marks, leader[merged], concat([catalogue.marks for catalogue in catalogues]))
    return MergedTensors(tensors, leader, number, weight, marks, base, begin, size, members, split)


def _split(tensors: int, family: Ints, members: Ints, lead: Ints, size: Ints) -> npt.NDArray[np.bool_]:
    """Mark the families that have a member in another family elsewhere, and all families connected to these.

    ``family[i]`` has ``members[i]``; it is led by ``lead[family]`` and has ``size[family]`` members.
    """
    theirs, many = np.empty(tensors, dtype=np.int64), np.empty(tensors, dtype=np.int64)
    theirs[members], many[members] = lead[family], size[family]
    alone = np.zeros(tensors, dtype=bool)
    alone[members[(theirs[members] != lead[family]) | (many[members] != size[family])]] = True
    alone |= np.bincount(theirs, minlength=tensors)[theirs] != many
    split = np.zeros(len(lead), dtype=bool)
    while True:
        split[family[alone[members]]] = True
        before = int(alone.sum())
        alone[members[split[family]]] = True
        if int(alone.sum()) == before:
            return split


def _check_agreement(tensors: TensorTable, first: Ints, ranks: Ints) -> None:
    """Compare every row with the first of its name; ``ranks`` says whose row it is."""
    differs = (tensors.ndim != tensors.ndim[first]) | (tensors.shape != tensors.shape[first]).any(axis=1)
    differs |= tensors.itemsize != tensors.itemsize[first]
    for row in np.flatnonzero(first != np.arange(len(first))).tolist():
        for names in (tensors.dtype, tensors.tied_to):
            differs[row] |= names[row] != names[first[row]]
    if not differs.any():
        return
    other_row = int(differs.argmax())
    first_row = int(first[other_row])
    meta, first_meta = tensors[other_row], tensors[first_row]
    fields = [
        f"{name} {getattr(first_meta, name)!r} on rank {ranks[first_row]} and {getattr(meta, name)!r} on rank "
        f"{ranks[other_row]}"
        for name in ("shape", "dtype", "itemsize", "tied_to")
        if getattr(first_meta, name) != getattr(meta, name)
    ]
    raise StateError(
        f"{meta.kind} tensor {meta.fqn!r} is not the same tensor everywhere: {'; '.join(fields)}. One name means one "
        "global tensor: pass the same model on every rank, or give the tensors different names"
    )


def _check_ties(tensors: TensorTable, index: Sequence[dict[str, int]]) -> None:
    """Raise StateError if a tied tensor's target is unknown, or is tied itself."""
    for row in np.flatnonzero(tensors.tied).tolist():
        meta = tensors[row]
        target = index[int(tensors.kind[row])].get(meta.tied_to)
        if target is None:
            raise StateError(
                f"{meta.kind} tensor {meta.fqn!r} is tied to {meta.tied_to!r}, which no rank holds; save it as well"
            )
        if tensors.tied_to[target]:
            raise StateError(
                f"{meta.kind} tensor {meta.fqn!r} is tied to {meta.tied_to!r}, which is itself tied to "
                f"{tensors.tied_to[target]!r}; tie both to the tensor that is stored"
            )


def _check_itemsizes(tensors: TensorTable) -> None:
    """Raise StateError if elements could not be aligned in a file."""
    size = tensors.itemsize
    wrong = np.flatnonzero((size <= 0) | (size & (size - 1) != 0))
    if wrong.size:
        meta = tensors[int(wrong[0])]
        raise StateError(
            f"{meta.kind} tensor {meta.fqn!r} ({meta.dtype}) has elements of {meta.itemsize} bytes, which is not a "
            "power of two; save it as a view of another dtype"
        )


@dataclass(frozen=True, slots=True)
class DistinctShards:
    """The distinct shards of all ranks, and the ranks that hold each.

    The b boxes are distinct, in the order (tensor, offset). The s shards are the distinct flat intervals of boxes, in
    the order (box, start, stop). h statements, in the order (shard, source), say which template or rank has which
    shard.
    """

    box_tensor: Ints  # int64[b], row in the merged tensor table, of a leader; not decreasing
    offset: Ints  # int64[b, D], first corner of each box
    length: Ints  # int64[b, D], extent of each box
    box: Ints  # int64[s], the box of each shard; not decreasing
    start: Ints  # int64[s], first flat position inside the box
    stop: Ints  # int64[s], one past the last; always above ``start``
    holder: Ints  # int64[s], the rank that holds it; or, behind all ranks, the number of a group in ``groups``
    groups: Sequence[Ints]  # the ranks of each group, ascending, at least two
    source_begin: Ints  # int64[s + 1]; the statements of shard i are ``source_begin[i]`` to ``source_begin[i + 1]``
    source: Ints  # int64[h], the template that states it; or, behind all templates, a rank
    slot: Ints  # int64[h], the slot of that template
    member: Ints  # int64[h], which of the slot's family it is; -1 for all of them
    template: Ints  # int64[N], the template of each rank
    templates: int  # how many there are
    names: Sequence[int] | None = None  # numbers of the ranks, for messages; None: as they count

    def __len__(self) -> int:
        return len(self.box)

    @property
    def tensor(self) -> Ints:
        """The tensor of each shard, a leader: int64[s]."""
        return self.box_tensor[self.box]

    def holders(self, shard: int) -> Ints:
        """Return the ranks that hold one shard, ascending."""
        world_size, holder = len(self.template), int(self.holder[shard])
        return self.groups[holder - world_size] if holder >= world_size else np.array([holder], dtype=np.int64)

    def stated(self, shard: Ints, rank: Ints) -> tuple[Ints, Ints]:
        """Return slot and member of each shard in the template of a rank that holds it."""
        statement = self.source_begin[shard]
        several = np.flatnonzero(self.source_begin[shard + 1] - statement > 1)
        if several.size:
            sources = self.templates + len(self.template)
            owner = np.repeat(np.arange(len(self)), np.diff(self.source_begin))
            key = owner * sources + self.source
            base, theirs = shard[several] * sources, self.template[rank[several]]
            index = np.searchsorted(key, base + theirs)
            alone = key[np.minimum(index, len(key) - 1)] != base + theirs
            index[alone] = np.searchsorted(key, (base + self.templates + rank[several])[alone])
            statement[several] = index
        return self.slot[statement], self.member[statement]


def merge_shards(world: AllTables, merged: MergedTensors) -> DistinctShards:
    """Fold identical shards (same tensor, box and flat interval) of all ranks into one shard with several holders.

    Shards without elements, and shards of tied tensors, are left out: nothing is stored for them. If a rank states
    the same shard twice, its first row counts.
    """
    slots = _slot_rows(world, merged)
    slot_row, start, stop, source = _statements(world, slots)
    box, row = _distinct_boxes(slots, slot_row, merged)
    numel = slots.length[row].prod(axis=1)
    order = grouped(box, len(row))
    line = ((np.cumsum(numel) - numel)[box] + start)[order]
    # In a box, ranks usually come in the order of their intervals: then this second, full sort costs one look.
    order = order[np.argsort(line, kind="stable")]
    slot_row, box, start, stop, source = slot_row[order], box[order], start[order], stop[order], source[order]
    fresh = _changes(box, start, stop)
    once = fresh | _changes(source)
    first = np.flatnonzero(fresh)
    source_begin = np.append(np.flatnonzero(fresh[once]), np.count_nonzero(once))
    holder, groups = _holders(world, source_begin, source[once])
    return DistinctShards(
        box_tensor=slots.tensor[row],
        offset=slots.offset[row],
        length=slots.length[row],
        box=box[first],
        start=start[first],
        stop=stop[first],
        holder=holder,
        groups=groups,
        source_begin=source_begin,
        source=source[once],
        slot=slots.slot[slot_row[once]],
        member=slots.member[slot_row[once]],
        template=world.template,
        templates=len(world.template_slots),
    )


@dataclass(frozen=True, slots=True)
class _SlotRows:
    """All templates' slots, one below the other.

    A slot is one row, or one row for each member if its family is split (``MergedTensors.split``).
    Rows ``begin[i]`` to ``begin[i + 1]`` are slot i, counted over all templates; template k begins at slot ``base[k]``.
    """

    template: Ints
    slot: Ints
    member: Ints
    tensor: Ints
    offset: Ints
    length: Ints
    regular: Ints
    begin: Ints
    base: Ints


def _slot_rows(world: AllTables, merged: MergedTensors) -> _SlotRows:
    """Write all slots in terms of the merged tensors."""
    template_slots, width = world.template_slots, merged.tensors.shape.shape[1]
    sizes = np.array([len(slots.family) for slots in template_slots], dtype=np.int64)
    template, base = np.repeat(np.arange(len(template_slots)), sizes), begins(sizes)
    families = [
        slots.family + merged.family_base[catalogue]
        for slots, catalogue in zip(template_slots, world.template_catalogue, strict=True)
    ]
    family = concat(families)
    rows = np.where(merged.split[family], merged.family_size[family], 1)
    slot = np.repeat(np.arange(len(family)), rows)
    number = runs(np.zeros_like(rows), rows)
    family = family[slot]
    return _SlotRows(
        template=template[slot],
        slot=(np.arange(len(template)) - base[template])[slot],
        member=np.where(merged.split[family], number, -1),
        tensor=merged.members[merged.family_begin[family] + number],
        offset=padded([slots.offset for slots in template_slots], width, 0)[slot],
        length=padded([slots.length for slots in template_slots], width, 1)[slot],
        regular=concat([slots.regular for slots in template_slots])[slot],
        begin=begins(rows),
        base=base,
    )


def _statements(world: AllTables, slots: _SlotRows) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (row in the slots, start, stop, source) of every statement: templates first, ranks behind."""
    whole = np.flatnonzero(slots.regular)
    numel = slots.length[whole].prod(axis=1)
    own = slots.base[world.template][world.flat_rank] + world.flat_slot
    columns = [world.flat_start, world.flat_stop, len(world.template_slots) + world.flat_rank]
    if len(slots.begin) <= len(slots.tensor):  # some slots have several rows
        rows = (slots.begin[1:] - slots.begin[:-1])[own]
        interval = np.repeat(np.arange(len(own)), rows)
        own = runs(slots.begin[own], rows)
        columns = [column[interval] for column in columns]
    templates = [np.zeros(len(whole), dtype=np.int64), numel, slots.template[whole]]
    start, stop, source = (np.concatenate(pair) for pair in zip(templates, columns, strict=True))
    return np.concatenate([whole, own]), start, stop, source


def _distinct_boxes(slots: _SlotRows, slot_row: Ints, merged: MergedTensors) -> tuple[Ints, Ints]:
    """Return the box of every statement, and for every box a row of the slots; in the order (tensor, offset)."""
    used = np.zeros(len(slots.tensor), dtype=bool)
    used[slot_row] = True
    row = np.flatnonzero(used)
    # The flat position of the first corner orders boxes as their offsets do. Different boxes of one corner overlap: it
    # does not matter how they are ordered and whether replicas are told, since check_cover will refuse them.
    corner, numel = np.zeros(len(row), dtype=np.int64), merged.tensors.numel
    for offset, size in zip(slots.offset[row].T, merged.tensors.shape[slots.tensor[row]].T, strict=True):
        corner = corner * size + offset
    row = row[np.argsort((np.cumsum(numel) - numel)[slots.tensor[row]] + corner, kind="stable")]
    fresh = _changes(slots.tensor[row], *slots.offset[row].T, *slots.length[row].T)
    box = np.empty(len(slots.tensor), dtype=np.int64)
    box[row] = np.cumsum(fresh) - 1
    return box[slot_row], row[fresh]


def _holders(world: AllTables, begin: Ints, source: Ints) -> tuple[Ints, Sequence[Ints]]:
    """Return the holder of every shard, and the groups; ``source[begin[i]:begin[i + 1]]`` state shard i."""
    templates, size = len(world.template_slots), np.diff(begin)
    order = grouped(world.template, templates)
    of_template = np.split(order, np.cumsum(np.bincount(world.template, minlength=templates))[:-1])
    groups: list[Ints] = []

    def numbered(ranks: Ints) -> int:
        """Return the number of the rank, or of a new group."""
        if len(ranks) == 1:
            return int(ranks[0])
        groups.append(ranks)
        return world.world_size + len(groups) - 1

    holder = source[begin[:-1]] - templates  # right where it is one rank alone; templates count from the end
    alone = np.flatnonzero((size == 1) & (holder < 0))
    numbers = np.zeros(templates, dtype=np.int64)
    for template in np.unique(holder[alone] + templates).tolist():
        numbers[template] = numbered(of_template[template])
    holder[alone] = numbers[holder[alone] + templates]
    several = np.flatnonzero(size > 1)
    for many in np.unique(size[several]).tolist():
        rows = several[size[several] == many]
        lists = source[begin[rows, None] + np.arange(many)]
        first, code = distinct_rows(lists)
        distinct_holders = []
        for sources in lists[first]:
            ranks = sources - templates
            if ranks[0] < 0:
                parts = [of_template[template] for template in sources[ranks < 0].tolist()]
                ranks = np.unique(np.concatenate([*parts, ranks[len(parts) :]]))
            distinct_holders.append(numbered(ranks))
        holder[rows] = np.array(distinct_holders, dtype=np.int64)[code]
    return holder, groups


def _changes(*columns: Ints) -> npt.NDArray[np.bool_]:
    """Mark the rows that differ from the one before them; the first one does."""
    out = np.ones(len(columns[0]), dtype=bool)
    out[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return out
