"""Targets that share memory: their values are loaded beside it, and put there if all of them can be right.

Targets that are made of blocks of saved tensors, stated as parts of these; live memory is viewed, never copied.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from bcp._job import LoadJob
from bcp.errors import MismatchError
from bcp.plan.box import Box, flat_boxes
from bcp.plan.columns import Ints, concat, padded
from bcp.plan.layout import resolve_all
from bcp.plan.read.renamed import RenamedLayout, extended
from bcp.plan.read.renames import Moved
from bcp.plan.shards import ShardRow, ShardTable
from bcp.plan.strided import Strided
from bcp.protocols import LocalShards
from bcp.runtime.threads import in_thread
from bcp.stages.memcpy import addresses, block_of, stretch, written

__all__ = ["OverlappingTargets", "put_shared", "relocated", "without_overlaps"]


def relocated(shards: LocalShards, source: Ints, names: RenamedLayout) -> tuple[LocalShards, Ints]:
    """Cut the shards of assembled tensors at the borders of their blocks.

    ``source``, int64[n], has the row of each tensor in ``names.saved.tensors``, or -1. Returns the shards, and the row
    of each tensor in the checkpoint's layout, or -1: int64[m]. A tensor is appended for each pair of an assembled
    tensor and a saved tensor. It has the name of the assembled one and the shape of the saved one.
    """
    table, layout = shards.table, names.layout
    made = source >= len(layout.tensors)
    if not made.any():
        return shards, source
    rows, views = [], []
    kept = np.flatnonzero(~made[table.tensor])
    pairs: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(made[table.tensor]).tolist():
        tensor = int(table.tensor[row])
        cut, origins = names.joined[int(source[tensor]) - len(layout.tensors)]
        for target, memory in _blocks(table, row, shards.tensors[row]):
            for block, shared in cut.meetings(target):
                moved, origin = cut.moved[block], origins[cut.source[block]]
                pair = pairs.setdefault((tensor, origin), len(pairs))
                rows.append((pair, moved.back(shared)))
                views.append(_as_saved(block_of(memory, shared.within(target)), moved))
    metas = [
        replace(table.tensors[tensor], shape=layout.tensors[origin].shape, stride=(), tied_to="")
        for tensor, origin in pairs
    ]
    cuts = ShardTable.build([ShardRow(metas[pair], box) for pair, box in rows])
    width = max(table.offset.shape[1], cuts.offset.shape[1])
    behind = len(table.tensors) + np.array([pair for pair, _ in rows], np.int64)
    moved_table = replace(
        table,
        tensors=extended(table.tensors, metas),
        tensor=concat([table.tensor[kept], behind]),
        offset=padded([table.offset[kept], cuts.offset], width, 0),
        length=padded([table.length[kept], cuts.length], width, 1),
        start=concat([table.start[kept], cuts.start]),
        stop=concat([table.stop[kept], cuts.stop]),
    )
    memories = [*(shards.tensors[row] for row in kept.tolist()), *views]
    origins_of = np.array([origin for _, origin in pairs], np.int64)
    cut_up = replace(shards, table=moved_table, tensors=memories, address=None)
    return cut_up, concat([np.where(made, -1, source), origins_of])


def _blocks(table: ShardTable, row: int, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of the logical tensor that make up a shard, each with its memory in the box's shape."""
    box, start, stop = table.box(row), int(table.start[row]), int(table.stop[row])
    if start == 0 and stop == box.numel:
        yield box, tensor
        return
    for flat, inner in flat_boxes(box.lengths, start, stop):
        memory = tensor[flat - start : flat - start + inner.numel].view(inner.lengths)
        offsets = tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True))
        yield Box(offsets, inner.lengths), memory


def _as_saved(view: torch.Tensor, moved: Moved) -> torch.Tensor:
    """View a part of a block as it lies in the saved tensor."""
    while view.dim() > len(moved.saved.lengths):
        view = view[0]
    while view.dim() < len(moved.saved.lengths):
        view = view[None]
    return view.transpose(-1, -2) if moved.transposed else view


COMPARED_BYTES = 1 << 26
"""Bytes of two values that are compared at once."""

SHOWN = 10  # names in an error message

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OverlappingTargets:
    """Targets that share memory, each with at least one of the others."""

    names: Sequence[str]  # name of each target
    targets: Sequence[torch.Tensor]  # memory of each target
    # host memory of its own for each target, into which the checkpoint's value is loaded
    values: Sequence[torch.Tensor]

    def differing(self) -> list[str]:
        """Return names of targets that cannot all have their values; an empty list if they can."""
        views = list(map(_strided, self.targets))
        start, stop = min(view.start for view in views), max(view.stop for view in views)
        whole = next(
            (index for index, view in enumerate(views) if view.is_run and view.stop - view.start == stop - start), None
        )
        memory = np.zeros(stop - start, np.uint8) if whole is None else _bytes(self.values[whole]).reshape(-1)
        placed = [_view(memory, view, start) for view in views]
        if whole is None:
            for place, value in zip(placed, self.values, strict=True):
                place[...] = _bytes(value)
        wrong = [index for index, value in enumerate(self.values) if not _equal(placed[index], _bytes(value))]
        if not wrong:
            return []
        return list(self.names) if whole is None else [self.names[index] for index in sorted({whole, *wrong})]

    def put(self) -> None:
        """Copy the values into the targets."""
        written(self.targets)  # a snapshot of this memory learns it before the first byte changes
        for target, value in zip(self.targets, self.values, strict=True):
            target.detach().copy_(value)


def without_overlaps(
    shards: LocalShards, source: Ints, names: RenamedLayout
) -> tuple[LocalShards, tuple[OverlappingTargets, ...]]:
    """Return targets that share no memory, and the values to put into shared memory when all are loaded.

    Targets of one tensor may share memory: its planner has put the same value into several places. So may two that are
    the same elements in the same order, of a tensor that is stored once. ``source`` is as in :func:`relocated`, with
    -1 for tensors that are not loaded.
    """
    if any(shards.table.tensors.tied_to):
        shards = _with_tied(shards, source, _stored(source, names))
    table = shards.table
    address = addresses(shards.tensors, table) if shards.address is None else shards.address
    stretches = list(_meeting(shards, address, np.flatnonzero(source[table.tensor] >= 0)))
    if not stretches:  # as a rule
        return replace(shards, address=address), ()
    stored, tensors, shared = _stored(source, names), list(shards.tensors), []
    for rows in (rows for stretch_rows in stretches for rows in _sharing(shards, stretch_rows, stored)):
        targets = [tensors[row] for row in rows]
        values = [torch.empty(target.shape, dtype=target.dtype, device="cpu") for target in targets]
        shared.append(OverlappingTargets([_name(table, row) for row in rows], targets, values))
        for row, value in zip(rows, values, strict=True):
            tensors[row] = value
    return replace(shards, tensors=tensors, address=None if shared else address), tuple(shared)


async def put_shared(
    job: LoadJob, shared: Sequence[OverlappingTargets], is_replaced: Callable[[], Awaitable[bool]]
) -> bool:
    """Put values into memory that targets share; return whether that was in vain, for the checkpoint was replaced.

    Raises MismatchError if values disagree about some of this memory; nothing was written to it then.
    """
    try:
        await in_thread(_put_shared, job, shared)
    except MismatchError:
        if not await is_replaced():  # else another rank may have sent zeros
            raise
        return True
    return False


def _put_shared(job: LoadJob, shared: Sequence[OverlappingTargets]) -> None:
    with job.caller.streams_in_use(), torch.no_grad():
        _check_same(shared, job.rank)
        for targets in shared:
            targets.put()


def _check_same(shared: Sequence[OverlappingTargets], rank: int) -> None:
    """Look whether targets that share memory agree about its values."""
    wrong = list(filter(None, (targets.differing() for targets in shared)))
    if wrong:
        texts = [f"{' and '.join(names[:SHOWN])}{' and others' if len(names) > SHOWN else ''}" for names in wrong]
        more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        raise MismatchError(
            f"rank {rank}: targets that share memory have different values for it in the checkpoint: "
            f"{'; '.join(texts[:SHOWN])}{more}; give each target memory of its own (untie or .clone() it), or leave "
            "all but one out of the load with rename={'its name in the checkpoint': None}"
        )


def _with_tied(shards: LocalShards, source: Ints, stored: Ints) -> LocalShards:
    """Return the shards with further ones: of tied names that the checkpoint has a value of their own for."""
    table, kinds = shards.table, shards.table.tensors.kind.tolist()
    number = {name: tensor for tensor, name in enumerate(zip(kinds, table.tensors.fqn, strict=True))}
    more: list[tuple[int, int]] = []
    for tensor, tied_to in enumerate(table.tensors.tied_to):
        first = number.get((kinds[tensor], tied_to)) if tied_to else None  # none if no element of it is on this rank
        if first is not None and min(source[tensor], source[first]) >= 0 and stored[tensor] != stored[first]:
            more += ((row, tensor) for row in np.flatnonzero(table.tensor == first).tolist())
    rows = np.array([*range(len(table)), *(row for row, _ in more)], np.int64)
    further = replace(
        table,
        tensor=concat([table.tensor, np.array([tensor for _, tensor in more], np.int64)]),
        offset=table.offset[rows],
        length=table.length[rows],
        start=table.start[rows],
        stop=table.stop[rows],
    )
    address = None if shards.address is None else shards.address[rows]
    return replace(shards, table=further, tensors=[shards.tensors[row] for row in rows.tolist()], address=address)


def _meeting(shards: LocalShards, address: Ints, loaded: Ints) -> Iterator[list[int]]:
    """Yield groups of targets, by address, whose stretches of memory form one without a gap."""
    start, stop = address.copy(), address + shards.table.nbytes
    place, devices = np.zeros_like(address), {torch.device("cpu"): 0}
    for row in loaded[address[loaded] == 0].tolist():
        start[row], stop[row] = stretch(shards.tensors[row])
        place[row] = devices.setdefault(shards.tensors[row].device, len(devices))
    loaded = loaded[(stop > start)[loaded]]
    for number in devices.values():
        rows = loaded[place[loaded] == number]
        rows = rows[np.argsort(start[rows], kind="stable")]
        heads = np.flatnonzero(start[rows[1:]] >= np.maximum.accumulate(stop[rows])[:-1]) + 1
        bounds = concat([np.zeros(1, np.int64), heads, np.array([len(rows)])])
        for group in np.flatnonzero(np.diff(bounds) > 1).tolist():
            yield rows[bounds[group] : bounds[group + 1]].tolist()


def _sharing(shards: LocalShards, rows: Sequence[int], stored: Ints) -> Iterator[list[int]]:
    """Yield groups of targets, by address, each of which shares bytes with another one of its group."""
    table, groups = shards.table, {row: {row} for row in rows}
    active: list[tuple[int, Strided]] = []
    for row in rows:
        view = _strided(shards.tensors[row])
        active = [pair for pair in active if pair[1].stop > view.start]
        for other_row, other in active:
            if (
                groups[other_row] is groups[row]
                or table.tensor[other_row] == table.tensor[row]
                or not other.meets(view)
            ):
                continue
            if other.order == view.order and other.start == view.start and _same_value(table, stored, other_row, row):
                continue
            groups[other_row] |= groups[row]
            groups.update(dict.fromkeys(groups[other_row], groups[other_row]))
        active.append((row, view))
    yield from (sorted(group) for group in {id(group): group for group in groups.values()}.values() if len(group) > 1)


def _same_value(table: ShardTable, stored: Ints, first_row: int, second_row: int) -> bool:
    """Whether two targets get the same elements of the same stored tensor."""
    columns = (stored[table.tensor], table.start, table.stop, table.offset, table.length)
    return all(np.array_equal(column[first_row], column[second_row]) for column in columns)


def _stored(source: Ints, names: RenamedLayout) -> Ints:
    """int64[n]: a number for each tensor, equal for those whose values are stored once."""
    own = source < len(names.layout.tensors)
    return np.where(own, resolve_all(names.layout, np.where(own, source, -1)), source)


def _name(table: ShardTable, row: int) -> str:
    meta = table.meta(row)
    return f"{meta.kind} tensor {meta.fqn!r}"


def _strided(tensor: torch.Tensor) -> Strided:
    size = tensor.itemsize
    return Strided(tensor.data_ptr(), size, tuple(tensor.shape), tuple(step * size for step in tensor.stride()))


def _bytes(value: torch.Tensor) -> Bytes:
    return value.flatten().view(torch.uint8).numpy().reshape(*value.shape, value.itemsize)


def _view(memory: Bytes, view: Strided, start: int) -> Bytes:
    """View bytes of memory, which begins at an address, as a target does."""
    shape, strides = (*view.lengths, view.itemsize), (*view.strides, 1)
    return np.ndarray(shape, np.uint8, memory, view.start - start, strides)


def _equal(first: Bytes, second: Bytes) -> bool:
    """Compare bytes; a part of the rows at once, as the result takes as much memory as they do."""
    rows = max(1, COMPARED_BYTES * len(first) // first.nbytes)
    return all(
        np.array_equal(first[start : start + rows], second[start : start + rows])
        for start in range(0, len(first), rows)
    )
