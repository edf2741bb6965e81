"""The layout of an edited checkpoint: other names over the same files, without what was dropped, and with new files.

No element moves. Tensors get other names, so their order changes, and families get other leaders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bcp.plan.columns import Ints, concat, padded
from bcp.plan.layout import Layout, named_files, resolve_all, rows_of
from bcp.plan.shards import KINDS, Segments, TensorTable

__all__ = ["Kept", "dropped_files", "edited", "tied_rows"]


@dataclass(frozen=True, slots=True)
class Kept:
    """What an edit keeps of a checkpoint.

    Attributes:
        tensors: new names by row of the layout's tensors.
        objects: new paths by row of the layout's objects.
        extras: kinds whose opaque objects stay.
    """

    tensors: Mapping[int, str]
    objects: Mapping[int, str]
    extras: Collection[str]


def tied_rows(layout: Layout) -> dict[int, list[int]]:
    """Return the rows that share elements with a stored tensor, itself first, by its row; only where there are ties."""
    rows: dict[int, list[int]] = {}
    for row in np.flatnonzero(layout.tensors.tied).tolist():
        stored = int(resolve_all(layout, _ints([row]))[0])
        rows.setdefault(stored, [stored]).append(row)
    return rows


def edited(old: Layout, kept: Kept, new: Layout | None, values: Collection[tuple[str, str]]) -> Layout:
    """Return the layout of an edited checkpoint.

    Args:
        old: the layout of the checkpoint.
        kept: what stays of it.
        new: the layout of further tensors, which one writer has written: the one behind all others. None for none.
        values: (kind, path) of the values in the receipt of that writer. Others stay in the receipts that have them.

    """
    writer = old.world_size
    names = dict(kept.tensors)
    rows = resolve_all(old, np.arange(len(old.tensors)))
    layout = old
    if new is not None:
        more, count = resolve_all(new, np.arange(len(new.tensors))), len(old.tensors)
        rows = concat([rows, more + count])
        names |= dict(enumerate(new.tensors.fqn, count))
        layout = _beside(old, new, writer)
    has_writer = new is not None or bool(values)
    objects = {(old.objects[row][0], path): int(old.object_rank[row]) for row, path in kept.objects.items()}
    objects |= dict.fromkeys(values, writer)
    stays = np.isin(old.extra_kind, [KINDS.index(kind) for kind in kept.extras])
    return replace(
        _chosen(layout, names, rows),
        world_size=writer + has_writer,
        objects=sorted(objects),
        object_rank=_ints([objects[name] for name in sorted(objects)]),
        extra_kind=old.extra_kind[stays],
        extra_rank=old.extra_rank[stays],
    )


def dropped_files(old: Layout, new: Layout) -> set[tuple[int, int]]:
    """Return (rank, code of the kind) of the data files that only the old one of two layouts names."""
    return named_files(old) - named_files(new)


def _beside(old: Layout, new: Layout, writer: int) -> Layout:
    """Put the tensors, boxes and files of two layouts below each other; nothing is sorted then."""
    count, files, planes = len(old.tensors), len(old.file_rank), old.file_planes.shape[1]
    tensors = TensorTable.joined([old.tensors, new.tensors])
    width = tensors.shape.shape[1]
    a, b = old.segments, new.segments
    segments = Segments(
        file=concat([a.file, b.file + files]),
        pattern=concat([a.pattern, b.pattern + len(a.begin) - 1]),
        begin=concat([a.begin, b.begin[1:] + a.begin[-1]]),
        line=concat([a.line, b.line[1:] + a.line[-1]]),
        step=concat([a.step, b.step]),
        at=concat([a.at, b.at]),
    )
    file_planes = np.zeros((files + len(new.file_rank), planes + new.file_planes.shape[1]), np.int64)
    file_planes[:files, :planes], file_planes[files:, planes:] = old.file_planes, new.file_planes
    return replace(
        old,
        world_size=writer + 1,
        tensors=tensors,
        leader=concat([old.leader, new.leader + count]),
        plane=concat([old.plane, new.plane + planes]),
        box_tensor=concat([old.box_tensor, new.box_tensor + count]),
        offset=padded([old.offset, new.offset], width, 0),
        length=padded([old.length, new.length], width, 1),
        segments=segments,
        file_kind=concat([old.file_kind, new.file_kind]),
        file_rank=concat([old.file_rank, np.full_like(new.file_rank, writer)]),
        file_nbytes=concat([old.file_nbytes, new.file_nbytes]),
        file_planes=file_planes,
    )


def _chosen(layout: Layout, names: Mapping[int, str], data: Ints) -> Layout:
    """Return the layout of some tensors under new names, and of the files that they need.

    Args:
        layout: the tensors, not sorted.
        names: of each tensor that is chosen, by its row.
        data: int64[n], the row of the tensor whose elements each one has.

    """
    tensors = layout.tensors
    rows = sorted(names, key=lambda row: (int(tensors.kind[row]), names[row]))
    owner: dict[int, int] = {}  # by row of a stored tensor: the tensor that is stored from now on
    for row in sorted(rows, key=lambda row: (row != data[row], row)):
        owner.setdefault(int(data[row]), row)
    ties = [names[first] if (first := owner[int(data[row])]) != row else "" for row in rows]
    table = replace(tensors.take(_ints(rows)), fqn=[names[row] for row in rows], tied_to=ties)
    leader, leads = np.arange(len(rows)), dict[int, int]()  # leads: by old leader, its new row
    plane, planes = np.zeros(len(rows), np.int64), dict[tuple[int, int, int], int]()
    for place, row in enumerate(rows):
        stored = int(data[row])
        if ties[place] or not tensors.numel[row]:
            continue
        leader[place] = leads.setdefault(int(layout.leader[stored]), place)
        first = int(data[rows[leader[place]]])
        key = (int(tensors.kind[row]), int(layout.plane[first]), int(layout.plane[stored]))
        plane[place] = planes.setdefault(key, sum(kind == key[0] for kind, _, _ in planes))
    spans = [rows_of(layout.box_tensor, old) for old in leads]
    boxes = concat([np.arange(first, stop) for first, stop in spans])
    owners = np.repeat(_ints(list(leads.values())), _ints([stop - first for first, stop in spans]))
    box, segment = layout.segments.of_boxes(boxes)
    file = layout.segments.file[box] + layout.segments.step[segment]
    used = np.unique(file)
    used = used[np.lexsort((layout.file_rank[used], layout.file_kind[used]))]
    where = np.full(len(layout.file_rank), -1)
    where[used] = np.arange(len(used))
    number = np.diff(layout.segments.begin)[layout.segments.pattern[boxes]]
    elements, at = layout.segments.length[segment], layout.segments.at[segment]
    return replace(
        layout,
        tensors=table,
        leader=leader,
        plane=plane,
        box_tensor=owners,
        offset=layout.offset[boxes],
        length=layout.length[boxes],
        segments=Segments.of(number, elements, where[file], at),
        file_kind=layout.file_kind[used],
        file_rank=layout.file_rank[used],
        file_nbytes=layout.file_nbytes[used],
        file_planes=_planes(layout, used, planes),
    )


def _planes(layout: Layout, files: Ints, planes: Mapping[tuple[int, int, int], int]) -> Ints:
    """Return the first byte of each plane, by its new number within its kind, in each of these files."""
    found = np.zeros((len(files), max(planes.values(), default=-1) + 1), np.int64)
    for (kind, _, old), number in planes.items():
        own = layout.file_kind[files] == kind
        found[own, number] = layout.file_planes[files[own], old]
    return found


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)
