"""Targets that share memory: values for the same memory are compared with each other, other overlaps are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bcp.errors import MismatchError, StateError
from bcp.plan.columns import Ints, concat
from bcp.plan.load.renamed import Renamed
from bcp.plan.lookup import resolve_all
from bcp.plan.shards import KINDS, ShardTable
from bcp.plan.strided import Strided
from bcp.protocols import LocalShards
from bcp.stages.memory import addresses, stretch

__all__ = ["Twin", "check_twins", "without_overlaps"]

COMPARED_BYTES = 1 << 26
"""Bytes of two values that are compared at once."""

SHOWN = 10  # pairs of names in an error message


@dataclass(frozen=True, slots=True)
class Twin:
    """A second value that the checkpoint has for the memory of a target.

    Attributes:
        loaded: name of the value that is loaded into the target.
        compared: name of the value that is compared with it.
        memory: memory of the target.
        second: host memory into which the second value is loaded.
    """

    loaded: str
    compared: str
    memory: torch.Tensor
    second: torch.Tensor


def without_overlaps(
    shards: LocalShards, source: Ints, names: Renamed, rank: int
) -> tuple[LocalShards, tuple[Twin, ...]]:
    """Return targets that share no memory: every second value of some memory gets host memory of its own.

    Args:
        shards: targets of this rank.
        source: int64[n], row in ``names.saved.tensors`` of each of their tensors; -1 for those that are not loaded.
        names: the checkpoint, by the target's names.
        rank: this rank, for messages.

    Raises:
        StateError: two targets share memory, and are not the same elements in the same order.

    """
    table = shards.table
    address = addresses(shards.tensors, table) if shards.address is None else shards.address
    shards = replace(shards, address=address)
    same = list(_same_memory(shards, address, np.flatnonzero(source[table.tensor] >= 0), rank))
    tied = list(_tied(table, source))
    if not (same or tied):  # as a rule
        return shards, ()
    stored = _stored(source, names)
    twins, tensors = [], list(shards.tensors)
    for first, row in same:
        if not _same_value(table, stored, first, row):
            twins.append(_twin(shards, first, int(table.tensor[row])))
            tensors[row] = twins[-1].second
    more = [(row, tensor) for row, tensor in tied if stored[table.tensor[row]] != stored[tensor]]
    twins += [_twin(shards, row, tensor) for row, tensor in more]
    if not twins:
        return shards, ()
    rows = np.array([*range(len(table)), *(row for row, _ in more)], np.int64)
    further = replace(
        table,
        tensor=concat([table.tensor, np.array([tensor for _, tensor in more], np.int64)]),
        offset=table.offset[rows],
        length=table.length[rows],
        start=table.start[rows],
        stop=table.stop[rows],
    )
    tensors += [twin.second for twin in twins[len(twins) - len(more) :]]
    return replace(shards, table=further, tensors=tensors, address=None), tuple(twins)


def check_twins(twins: Sequence[Twin], rank: int) -> None:
    """Compare the second values of targets with the loaded ones, bit by bit.

    Raises:
        MismatchError: two of them differ; names both.

    """
    pairs = {f"{twin.compared} and {twin.loaded}": None for twin in twins if not _equal(twin.memory, twin.second)}
    if pairs:
        more = f"; and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
        raise MismatchError(
            f"rank {rank}: {len(pairs)} pairs of names are one tensor in the target, and differ in the checkpoint: "
            f"{'; '.join(list(pairs)[:SHOWN])}{more}; untie them in the target, or leave one parameter of each pair "
            "out of the load with rename={'its name in the checkpoint': None}"
        )


def _same_memory(shards: LocalShards, address: Ints, loaded: Ints, rank: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of targets that are the same memory: the one that is loaded, and another one. Refuse other overlaps.

    Targets of one tensor are left out: its planner has put the same values into several places.
    """
    table, tensors = shards.table, shards.tensors
    for rows in _meeting(shards, address, loaded):
        active: list[tuple[int, Strided]] = []
        for row in rows:
            view = _strided(tensors[row])
            active = [each for each in active if each[1].stop > view.start]
            others = [each for each in active if table.tensor[each[0]] != table.tensor[row]]
            twin = next((at for at, other in others if _alike(other, view, tensors[at], tensors[row])), None)
            if twin is not None:
                yield twin, row
                continue
            for at, other in others:
                if other.meets(view):
                    raise StateError(
                        f"{_name(table, int(table.tensor[at]))} and {_name(table, int(table.tensor[row]))} on rank "
                        f"{rank} share memory, and are not the same elements in the same order: loading one would "
                        "overwrite a part of the other; load into memory of their own, made with .clone()"
                    )
            active.append((row, view))


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


def _strided(tensor: torch.Tensor) -> Strided:
    size = tensor.itemsize
    return Strided(tensor.data_ptr(), size, tuple(tensor.shape), tuple(step * size for step in tensor.stride()))


def _alike(one: Strided, other: Strided, tensor: torch.Tensor, its: torch.Tensor) -> bool:
    """Whether two views are the same elements in the same order."""
    return one.start == other.start and one.order == other.order and tensor.dtype is its.dtype


def _tied(table: ShardTable, source: Ints) -> Iterator[tuple[int, int]]:
    """Yield (row, tensor): a target, and a further name of its tensor for which the checkpoint has something too."""
    if not any(table.tensors.tied_to):
        return
    kinds = table.tensors.kind.tolist()
    number = {name: at for at, name in enumerate(zip(kinds, table.tensors.fqn, strict=True))}
    for at, tied_to in enumerate(table.tensors.tied_to):
        first = number.get((kinds[at], tied_to)) if tied_to else None  # none if no element of it is on this rank
        if first is not None and source[at] >= 0 and source[first] >= 0:
            yield from ((row, at) for row in np.flatnonzero(table.tensor == first).tolist())


def _stored(source: Ints, names: Renamed) -> Ints:
    """int64[n]: a number for each tensor that is equal for those whose values are stored once."""
    count = len(names.layout.tensors)
    return np.where(source < count, resolve_all(names.layout, np.where(source < count, source, -1)), source)


def _same_value(table: ShardTable, stored: Ints, one: int, other: int) -> bool:
    """Whether two targets get the same elements of the same stored tensor."""
    columns = (stored[table.tensor], table.start, table.stop, table.offset, table.length)
    return all(np.array_equal(column[one], column[other]) for column in columns)


def _twin(shards: LocalShards, row: int, tensor: int) -> Twin:
    """Give the value of a tensor that belongs into the memory of a target host memory of its own."""
    table, memory = shards.table, shards.tensors[row]
    second = torch.empty(memory.shape, dtype=memory.dtype, device="cpu")
    return Twin(_name(table, int(table.tensor[row])), _name(table, tensor), memory, second)


def _name(table: ShardTable, tensor: int) -> str:
    return f"{KINDS[int(table.tensors.kind[tensor])]} tensor {table.tensors.fqn[tensor]!r}"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (each.detach().to("cpu").contiguous().flatten().view(torch.uint8) for each in (one, other))
    return all(map(torch.equal, first.split(COMPARED_BYTES), second.split(COMPARED_BYTES)))
