"""Replicas: the shards whose values ranks compare before they write, and those that one rank writes whole.

Equal names mean equal tensors, so a replica may be cut, and each of its ranks writes a piece. If the values differ, the
pieces of several ranks would make a tensor that no rank has had. So ranks compare digests of samples. A digest for each
shard would be too much for rank 0, so each rank sends one sum over all its replicas. Of k holders of a shard, the
lowest rank counts its digest k - 1 times, and every other rank counts it -1 times. The total of all ranks is 0 if all
digests are equal, and a random number if any differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints, begins, runs, within
from bcp.plan.shards import BUFFER, MAY_DIFFER, ONE_WRITER
from bcp.plan.write.merge import DistinctShards, MergedTensors
from bcp.plan.write.world import AllTables, FactoredTable

__all__ = ["REPLICAS", "ComparedReplicas", "ComparedRows", "compared", "rows_of", "with_one_writer"]

SMALL_BUFFER_BYTES = 4 << 20
"""A buffer of a module that is larger is divided like a parameter: quantized weights may be buffers."""

SAMPLED_BYTES = 2 << 20
"""Bytes that one rank reads for its digests, shared evenly by its replicas.

Reading them takes 1 to 3 ms, and 12 ms for 20,000 replicas.
"""

FEWEST_BYTES, MOST_BYTES = 128, 64 << 10
"""Bytes that are read of one replica."""

REPLICAS = np.dtype([("first", "<i4"), ("stop", "<i4"), ("member", "<i4"), ("weight", "<i4")])
"""A run of slots of one rank that count ``weight`` times: one member of their families, or (-1) all of them.

With the member -2 it is a run of the rank's objects.
"""

_OBJECTS = -2


@dataclass(frozen=True, slots=True)
class ComparedReplicas:
    """The shards that each rank compares. A source is a template, or, behind all templates, a rank."""

    rows: npt.NDArray[np.void]  # :data:`REPLICAS`, by source
    begin: Ints  # int64[K + N + 1]; source i has the rows ``begin[i]`` to ``begin[i + 1]``
    template: Ints  # int64[N], the template of each rank
    nbytes: int  # bytes that are sampled of one shard, at most

    def by_rank(self) -> list[bytes]:
        """Return the rows of every rank: those of its template, and its own."""
        data, ends = self.rows.tobytes(), (self.begin * REPLICAS.itemsize).tolist()
        parts = [data[start:stop] for start, stop in pairwise(ends)]
        templates = len(parts) - len(self.template)
        return [parts[template] + own for template, own in zip(self.template.tolist(), parts[templates:], strict=True)]


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """The shards that one rank compares, in terms of its own table."""

    row: Ints  # int64[m], row in the rank's table
    weight: Ints  # int64[m], how often the digest of that row counts in the sum
    objects: Ints  # int64[k], rows in the table's objects
    object_weight: Ints  # int64[k], the same for these
    nbytes: int  # bytes that are sampled of each row, at most


def compared(
    world: AllTables, merged: MergedTensors, shards: DistinctShards, owners: Mapping[tuple[str, str], int]
) -> ComparedReplicas:
    """Choose the shards of several ranks, without those that may differ, and the values of an optimizer.

    ``owners`` has the rank that writes each value.
    """
    world_size, sources = len(shards.template), shards.templates + len(shards.template)
    lowest, count = _holders(shards, world_size)
    chosen = (count > 1) & (merged.marks[shards.tensor] & MAY_DIFFER == 0)
    shard = np.repeat(np.arange(len(shards)), np.diff(shards.source_begin))
    stated = np.flatnonzero(chosen[shard])
    first = np.flatnonzero(chosen)
    slot, member = shards.stated(first, lowest[first])
    columns = (
        np.concatenate([shards.source[stated], shards.templates + lowest[first]]),
        np.concatenate([np.full(len(stated), -1), count[first]]),
        np.concatenate([shards.member[stated], member]),
        np.concatenate([shards.slot[stated], slot]),
    )
    order = np.lexsort(columns[::-1])
    source, weight, member, slot = (column[order] for column in columns)
    fresh = np.ones(len(order), dtype=np.bool_)
    for column in (source, weight, member, slot - np.arange(len(order))):
        fresh[1:] &= column[1:] == column[:-1]
    fresh[1:] = ~fresh[1:]
    head = np.flatnonzero(fresh)
    stop = slot[np.append(head[1:], len(order)) - 1] + 1 if len(head) else head
    values = _compared_objects(world, owners)
    rows = np.empty(len(head) + len(values), dtype=REPLICAS)
    columns = (slot[head], stop, member[head], weight[head])
    for name, column, more in zip(REPLICAS.names or (), columns, values[:, 1:].T, strict=True):
        rows[name] = np.concatenate([column, more])
    owner = np.concatenate([source[head], values[:, 0]])
    rows, begin = rows[np.argsort(owner, kind="stable")], begins(np.bincount(owner, minlength=sources))
    tensors = np.where(shards.member[stated] < 0, np.bincount(merged.leader)[shards.tensor[shard[stated]]], 1)
    held = np.bincount(shards.source[stated], weights=tensors, minlength=sources)
    most = int((held[shards.template] + held[shards.templates :]).max(initial=1))
    nbytes = min(max(SAMPLED_BYTES // max(most, 1), FEWEST_BYTES), MOST_BYTES)
    return ComparedReplicas(rows, begin, shards.template, nbytes)


def _compared_objects(world: AllTables, owners: Mapping[tuple[str, str], int]) -> Ints:
    """Return int64[r, 5]: the source, and a row of :data:`REPLICAS`, of the runs of objects of several ranks."""
    if world.world_size == 1:
        return np.empty((0, 5), dtype=np.int64)
    ranks = np.bincount(world.template_catalogue[world.template], minlength=len(world.catalogues)).tolist()
    count = Counter[tuple[str, str]]()
    for catalogue, number in zip(world.catalogues, ranks, strict=True):
        count.update(dict.fromkeys((key for key in catalogue.objects if key[0] == "optimizer"), number))
    templates, rows = len(world.template_slots), []
    for number, (catalogue, lowest) in enumerate(zip(world.catalogues, world.lowest_ranks().tolist(), strict=True)):
        held = np.array([count[key] for key in catalogue.objects], dtype=np.int64)
        held[held == 1] = 0
        is_owner = np.array([owners[key] == lowest for key in catalogue.objects], dtype=np.bool_)
        here = np.flatnonzero(world.template_catalogue == number).tolist()
        rows += [(source, *run) for run in _runs(-(held > 0).astype(np.int64)) for source in here]
        rows += [(templates + lowest, *run) for run in _runs(held * is_owner)]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def _runs(weight: Ints) -> list[tuple[int, int, int, int]]:
    """Return the runs of equal weights that are not 0, as rows of :data:`REPLICAS`."""
    edges = np.flatnonzero(np.diff(weight, prepend=weight[:1] - 1)).tolist()
    bounds = pairwise([*edges, len(weight)])
    return [(first, stop, _OBJECTS, int(weight[first])) for first, stop in bounds if weight[first]]


def with_one_writer(merged: MergedTensors, shards: DistinctShards) -> DistinctShards:
    """Let the lowest rank alone hold the shards of marked tensors, so that it writes them whole."""
    world_size, marks = len(shards.template), merged.marks[shards.tensor]
    if not marks.any():
        return shards
    nbytes = (merged.tensors.numel * merged.tensors.itemsize)[shards.tensor]
    alone = (marks & ONE_WRITER > 0) | ((marks & BUFFER > 0) & (nbytes <= SMALL_BUFFER_BYTES))
    lowest, _ = _holders(shards, world_size)
    holder = np.where(alone, lowest, shards.holder)
    used, number = np.unique(holder[holder >= world_size], return_inverse=True)
    holder[holder >= world_size] = world_size + number
    return replace(shards, holder=holder, groups=[shards.groups[group] for group in (used - world_size).tolist()])


def _holders(shards: DistinctShards, world_size: int) -> tuple[Ints, Ints]:
    """Return the lowest rank that holds each shard, and the number of its ranks: int64[s] each."""
    lowest, count = shards.holder.copy(), np.ones(len(shards), dtype=np.int64)
    shared = np.flatnonzero(lowest >= world_size)
    group = lowest[shared] - world_size
    lowest[shared] = _column(shards.groups, 0)[group]
    count[shared] = np.array([len(ranks) for ranks in shards.groups], dtype=np.int64)[group]
    return lowest, count


def _column(groups: Sequence[Ints], place: int) -> Ints:
    return np.array([ranks[place] for ranks in groups], dtype=np.int64)


def rows_of(factored: FactoredTable, replicas: npt.NDArray[np.void], objects: int, nbytes: int) -> ComparedRows | None:
    """Return the rows that a rank compares; None if ``replicas`` name something that the rank does not have.

    ``objects`` is the number of objects of the rank.
    """
    are_objects = replicas["member"] == _OBJECTS
    values = _weights(replicas[are_objects], np.arange(objects + 1))
    tensors = _weights(replicas[~are_objects], factored.row_begin)
    if values is None or tensors is None:
        return None
    used, known = np.flatnonzero(tensors), np.flatnonzero(values)
    return ComparedRows(factored.rows[used], tensors[used], known, values[known], nbytes)


def _weights(replicas: npt.NDArray[np.void], row_begin: Ints) -> Ints | None:
    """Add up the weights of rows; slot i has the rows ``row_begin[i]`` to ``row_begin[i + 1]``."""
    first, stop, member, weight = (replicas[name].astype(np.int64) for name in REPLICAS.names or ())
    slots = len(row_begin) - 1
    if not within(first, slots) or ((stop <= first) | (stop > slots)).any():
        return None
    run = np.repeat(np.arange(len(replicas)), stop - first)
    slot = runs(first, stop - first)
    size = row_begin[slot + 1] - row_begin[slot]
    member, weight = member[run], weight[run]
    if ((member < _OBJECTS) | (member >= size)).any():
        return None
    count = np.where(member < 0, size, 1)
    total = np.zeros(int(row_begin[-1]), dtype=np.int64)
    np.add.at(total, runs(row_begin[slot] + np.maximum(member, 0), count), np.repeat(weight, count))
    return total
