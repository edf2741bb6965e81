"""What all ranks hold together: their tensors merged by name, and their shards with the replicas folded (sec. 4.1).

Nothing here is done once per rank, only once per template and once per flat interval; a replica on
782 ranks costs as much as one on 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints, concat, distinct_rows, grouped, padded, runs
from bcp.plan.save.names import Merged
from bcp.plan.save.world import World

__all__ = ["Shards", "merge_shards"]


@dataclass(frozen=True, slots=True)
class Shards:
    """The distinct shards of all ranks, and who holds each.

    p pieces (distinct boxes) in the order (tensor, offset); s shards (distinct flat intervals of pieces) in the order
    (piece, start, stop); h statements of a shard by a template or by a rank, in the order (shard, source).

    Attributes:
        piece_tensor: int64[p], row in the merged tensor table, of a leader; not decreasing.
        offset: int64[p, D], first corner of each piece.
        length: int64[p, D], extent of each piece.
        piece: int64[s], the piece of each shard; not decreasing.
        start: int64[s], first flat position inside the piece.
        stop: int64[s], one past the last; always above ``start``.
        holder: int64[s], who holds it: a rank, or behind all ranks the number of a group in ``groups``.
        groups: the ranks of each group, ascending, at least two.
        source_begin: int64[s + 1]; the statements of shard i are ``source_begin[i]`` to ``source_begin[i + 1]``.
        source: int64[h], who states it: a template, or behind all templates a rank.
        slot: int64[h], the slot of that template.
        member: int64[h], which of the slot's family it is; -1 for all of them.
        template: int64[N], the template of each rank.
        templates: how many there are.
    """

    piece_tensor: Ints
    offset: Ints
    length: Ints
    piece: Ints
    start: Ints
    stop: Ints
    holder: Ints
    groups: Sequence[Ints]
    source_begin: Ints
    source: Ints
    slot: Ints
    member: Ints
    template: Ints
    templates: int

    def __len__(self) -> int:
        """Return the number of distinct shards."""
        return len(self.piece)

    @property
    def tensor(self) -> Ints:
        """int64[s]: the tensor of each shard, a leader."""
        return self.piece_tensor[self.piece]

    @property
    def line(self) -> Ints:
        """int64[s]: where each shard begins, in elements, where all pieces lie end to end."""
        numel = self.length.prod(axis=1)
        return np.asarray((np.cumsum(numel) - numel)[self.piece] + self.start, dtype=np.int64)

    def holders(self, shard: int) -> Ints:
        """Return the ranks that hold one shard, ascending."""
        world_size, holder = len(self.template), int(self.holder[shard])
        return self.groups[holder - world_size] if holder >= world_size else np.array([holder], dtype=np.int64)

    def stated(self, shard: Ints, rank: Ints) -> tuple[Ints, Ints]:
        """Return slot and member of each shard in the template of a rank that holds it."""
        at = self.source_begin[shard]
        several = np.flatnonzero(self.source_begin[shard + 1] - at > 1)
        if several.size:
            sources = self.templates + len(self.template)
            owner = np.repeat(np.arange(len(self)), np.diff(self.source_begin))
            key = owner * sources + self.source
            base, theirs = shard[several] * sources, self.template[rank[several]]
            found = np.searchsorted(key, base + theirs)
            alone = key[np.minimum(found, len(key) - 1)] != base + theirs
            found[alone] = np.searchsorted(key, (base + self.templates + rank[several])[alone])
            at[several] = found
        return self.slot[at], self.member[at]


def merge_shards(world: World, merged: Merged) -> Shards:
    """Fold identical shards (same tensor, box and flat interval) of all ranks into one shard with several holders.

    Shards without elements, and shards of tied tensors, are left out: nothing is stored for them. If a rank states
    the same shard twice, its first row counts.
    """
    boxes = _boxes(world, merged)
    at, start, stop, source = _statements(world, boxes)
    piece, pieces = _pieces(boxes, at, merged)
    numel = boxes.length[pieces].prod(axis=1)
    order = grouped(piece, len(pieces))
    line = ((np.cumsum(numel) - numel)[piece] + start)[order]
    # In a piece, ranks usually come in the order of their intervals: then this second, full sort costs one look.
    order = order[np.argsort(line, kind="stable")]
    at, piece, start, stop, source = at[order], piece[order], start[order], stop[order], source[order]
    fresh = _changes(piece, start, stop)
    once = fresh | _changes(source)
    first = np.flatnonzero(fresh)
    source_begin = np.append(np.flatnonzero(fresh[once]), np.count_nonzero(once))
    holder, groups = _holders(world, source_begin, source[once])
    return Shards(
        piece_tensor=boxes.tensor[pieces],
        offset=boxes.offset[pieces],
        length=boxes.length[pieces],
        piece=piece[first],
        start=start[first],
        stop=stop[first],
        holder=holder,
        groups=groups,
        source_begin=source_begin,
        source=source[once],
        slot=boxes.slot[at[once]],
        member=boxes.member[at[once]],
        template=world.template,
        templates=len(world.template_slots),
    )


@dataclass(frozen=True, slots=True)
class _Boxes:
    """All templates' slots, one below the other; b rows.

    A slot is one row, or one row for each member where its family is not one everywhere (``Merged.split``).
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


def _boxes(world: World, merged: Merged) -> _Boxes:
    """Write all slots in terms of the merged tensors."""
    slots, width = world.template_slots, merged.tensors.shape.shape[1]
    sizes = np.array([len(each.family) for each in slots], dtype=np.int64)
    template = np.repeat(np.arange(len(slots)), sizes)
    base = np.concatenate(([0], np.cumsum(sizes)))
    families = [each.family + merged.family_base[of] for each, of in zip(slots, world.template_catalogue, strict=True)]
    family = concat(families)
    rows = np.where(merged.split[family], merged.family_size[family], 1)
    begin = np.concatenate(([0], np.cumsum(rows)))
    of = np.repeat(np.arange(len(family)), rows)
    number = runs(np.zeros_like(rows), rows)
    family = family[of]
    return _Boxes(
        template=template[of],
        slot=(np.arange(len(template)) - base[template])[of],
        member=np.where(merged.split[family], number, -1),
        tensor=merged.members[merged.family_begin[family] + number],
        offset=padded([each.offset for each in slots], width, 0)[of],
        length=padded([each.length for each in slots], width, 1)[of],
        regular=concat([each.regular for each in slots])[of],
        begin=begin,
        base=base,
    )


def _statements(world: World, boxes: _Boxes) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (row in the boxes, start, stop, source) of everything that is held: templates first, ranks behind."""
    whole = np.flatnonzero(boxes.regular)
    numel = boxes.length[whole].prod(axis=1)
    own = boxes.base[world.template][world.flat_rank] + world.flat_slot
    columns = [world.flat_start, world.flat_stop, len(world.template_slots) + world.flat_rank]
    if len(boxes.begin) <= len(boxes.tensor):  # some slots have several rows
        rows = (boxes.begin[1:] - boxes.begin[:-1])[own]
        of = np.repeat(np.arange(len(own)), rows)
        own = runs(boxes.begin[own], rows)
        columns = [column[of] for column in columns]
    templates = [np.zeros(len(whole), dtype=np.int64), numel, boxes.template[whole]]
    start, stop, source = (np.concatenate(pair) for pair in zip(templates, columns, strict=True))
    return np.concatenate([whole, own]), start, stop, source


def _pieces(boxes: _Boxes, at: Ints, merged: Merged) -> tuple[Ints, Ints]:
    """Return the piece of every statement, and for every piece a row of the boxes; in the order (tensor, offset)."""
    used = np.zeros(len(boxes.tensor), dtype=bool)
    used[at] = True
    row = np.flatnonzero(used)
    # The flat position of the first corner orders boxes as their offsets do. Different boxes of one corner overlap: it
    # does not matter how they are ordered and whether replicas are told, since check_cover will refuse them.
    corner, numel = np.zeros(len(row), dtype=np.int64), merged.tensors.numel
    for offset, size in zip(boxes.offset[row].T, merged.tensors.shape[boxes.tensor[row]].T, strict=True):
        corner = corner * size + offset
    row = row[np.argsort((np.cumsum(numel) - numel)[boxes.tensor[row]] + corner, kind="stable")]
    fresh = _changes(boxes.tensor[row], *boxes.offset[row].T, *boxes.length[row].T)
    piece = np.empty(len(boxes.tensor), dtype=np.int64)
    piece[row] = np.cumsum(fresh) - 1
    return piece[at], row[fresh]


def _holders(world: World, begin: Ints, source: Ints) -> tuple[Ints, Sequence[Ints]]:
    """Return the holder of every shard, of which ``source[begin[i]:begin[i + 1]]`` state shard i, and the groups."""
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
        found = []
        for sources in lists[first]:
            ranks = sources - templates
            if ranks[0] < 0:
                parts = [of_template[each] for each in sources[ranks < 0].tolist()]
                ranks = np.unique(np.concatenate([*parts, ranks[len(parts) :]]))
            found.append(numbered(ranks))
        holder[rows] = np.array(found, dtype=np.int64)[code]
    return holder, groups


def _changes(*columns: Ints) -> npt.NDArray[np.bool_]:
    """Mark the rows that differ from the one before them; the first one does."""
    out = np.ones(len(columns[0]), dtype=bool)
    out[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return out
