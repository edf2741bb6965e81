"""Divide the writing of a save: the writer and the place of every byte (paper sec. 3.3, 4.1). Pure.

Rank 0 calls :func:`divide_writes`. Each rank receives a :class:`RankShare`, and :func:`expand` turns it into
:class:`Writes` in terms of the rank's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints, begins, grouped, runs, within
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, Segments, ShardTable
from bcp.plan.units import claimed_paths, divide_units
from bcp.plan.write.cover import check_cover
from bcp.plan.write.merge import DistinctShards, MergedTensors, merge_shards, merge_tensors
from bcp.plan.write.replicas import ComparedReplicas, compared, with_one_writer
from bcp.plan.write.world import MOST_MEMBERS, AllTables, FactoredTable, signature

__all__ = [
    "BALANCES",
    "SHARE",
    "RankShare",
    "WriteDivision",
    "WriterIntervals",
    "Writes",
    "divide_writes",
    "expand",
    "holds",
    "split",
    "worst_fit",
]

SNAP_BYTES = 4 << 20
SNAP_SHARE = 2048
SNAP_FLOOR = 16 << 10
SNAP_FLOOR_SHARE = 256
"""A cut moves by at most 1 / 2048 of a rank's load, and 4 MiB: with two cuts, a load is 0.1 % off.

Or by 16 KiB where that is more, but by at most 1 / 256 of a load: of small models, rows matter more than balance.
"""
WHOLE_BYTES = 4 << 10
WHOLE_SHARE = 32
WHOLE_FLOOR = 256
"""Shards of up to 4 KiB, less where that is more than 1 / 32 of a load, but at least 256 bytes, are never cut."""


@dataclass(frozen=True, slots=True)
class WriterIntervals:
    """The writer of every element: c flat intervals that tile the shards, in the order (shard, start)."""

    shard: Ints  # int64[c], row in the :class:`~bcp.plan.write.merge.DistinctShards`; not decreasing
    start: Ints  # int64[c], first flat element, counted in the shard's box
    stop: Ints  # int64[c], one past the last
    rank: Ints  # int64[c], the rank that writes it, which holds the shard


def split(shards: DistinctShards, weight: Ints, world_size: int) -> WriterIntervals:
    """Cut replicated shards so that every rank writes equally much.

    A rank that holds a replica holds every row of it, so cutting is free. The shards of one group of ranks are laid end
    to end, and this line is cut into a share for each rank. The shares level the ranks' loads (water-fill), starting
    from the shards that only one rank holds. Groups of few ranks come first: they have least choice. Groups of equally
    many ranks, none of which is in two of them, are cut together.

    Cuts avoid splinters. A cut close to the end of a shard moves there, and small shards stay whole. Other cuts fall
    between whole rows, or between the largest contiguous blocks that are small enough. ``weight``, int64[s], has the
    bytes of one element of each shard, in all tensors that the shard stands for.
    """
    nbytes = (shards.stop - shards.start) * weight
    single = np.flatnonzero(shards.holder < world_size)
    load = _single_load(shards, single, nbytes, world_size)
    cuts = [_whole(shards, single, shards.holder[single])]
    mean = int(nbytes.sum()) // world_size
    shared = np.flatnonzero(shards.holder >= world_size)
    shared = shared[grouped(shards.holder[shared] - world_size, len(shards.groups))]
    count = np.bincount(shards.holder[shared] - world_size, minlength=len(shards.groups))
    begin = np.cumsum(count) - count
    total = np.add.reduceat(nbytes[shared], begin) if len(begin) else begin
    for batch in _batches(shards.groups, total):
        ranks = np.stack([shards.groups[group] for group in batch.tolist()])
        quota = _water_fill(load[ranks], total[batch])
        scale = np.maximum(mean, (load[ranks] + quota).max(axis=1))
        members = shared[runs(begin[batch], count[batch])]
        cut = _cut_lines(shards, members, count[batch], weight, ranks=ranks, quota=quota, scale=scale)
        np.add.at(load, cut.rank, (cut.stop - cut.start) * weight[cut.shard])
        cuts.append(cut)
    return _sorted(shards, cuts)


def worst_fit(shards: DistinctShards, weight: Ints, world_size: int) -> WriterIntervals:
    """Give whole shards, largest first, to the holder that writes least so far: the paper's algorithm (sec. 4.1).

    Shards that only one rank holds are counted before the first replica is given away. Balance is bounded by the
    largest shard: 56 shards of 525 MB cannot be spread evenly over 70 ranks. Arguments as in :func:`split`.
    """
    nbytes = (shards.stop - shards.start) * weight
    writer = shards.holder.copy()
    shared = np.flatnonzero(writer >= world_size)
    load = _single_load(shards, np.flatnonzero(writer < world_size), nbytes, world_size)
    for shard in shared[np.argsort(-nbytes[shared], kind="stable")].tolist():
        ranks = shards.holders(shard)
        writer[shard] = ranks[load[ranks].argmin()]
        load[writer[shard]] += nbytes[shard]
    return _whole(shards, np.arange(len(shards), dtype=np.int64), writer)


BALANCES: dict[str, Callable[[DistinctShards, Ints, int], WriterIntervals]] = {"split": split, "worst-fit": worst_fit}
"""The ways to balance, by the name that the user gives."""


def _single_load(shards: DistinctShards, single: Ints, nbytes: Ints, world_size: int) -> Ints:
    """Return int64[world_size]: the bytes that each rank writes because no other rank holds them."""
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, shards.holder[single], nbytes[single])
    return load


def _batches(groups: Sequence[Ints], total: Ints) -> Iterator[Ints]:
    """Yield the groups, those of few ranks first; together if they have equally many ranks and none in common."""
    sizes = np.array([len(ranks) for ranks in groups], dtype=np.int64)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        rows = rows[np.argsort(-total[rows], kind="stable")]
        ranks = np.stack([groups[group] for group in rows.tolist()])
        if np.bincount(ranks.ravel()).max() == 1:
            yield rows
            continue
        first, taken = 0, set(ranks[0].tolist())
        for index in range(1, len(rows)):
            if taken.isdisjoint(group_ranks := set(ranks[index].tolist())):
                taken |= group_ranks
            else:
                yield rows[first:index]
                first, taken = index, group_ranks
        yield rows[first:]


def _water_fill(load: Ints, nbytes: Ints) -> Ints:
    """Share ``nbytes[g]`` out so that the lowest of ``load[g]`` rise to one common level; exact in integers."""
    order = np.argsort(load, axis=1, kind="stable")
    level = np.take_along_axis(load, order, axis=1)
    before = np.cumsum(level, axis=1)
    count = np.arange(1, load.shape[1] + 1)
    filled = np.count_nonzero(level * count - before <= nbytes[:, None], axis=1)
    height, rest = np.divmod(nbytes + before[np.arange(len(load)), filled - 1], filled)
    share = np.where(count <= filled[:, None], height[:, None] - level, 0) + (count <= rest[:, None])
    quota = np.empty_like(load)
    np.put_along_axis(quota, order, share, axis=1)
    return quota


def _cut_lines(
    shards: DistinctShards, members: Ints, count: Ints, weight: Ints, *, ranks: Ints, quota: Ints, scale: Ints
) -> WriterIntervals:
    """Lay shards end to end, and cut each line of bytes into one interval for each rank.

    Args:
        shards: all shards.
        members: int64[m], those that lie on the lines, one line after the other.
        count: int64[g], how many lie on each line.
        weight: int64[s], bytes of one element of every shard.
        ranks: int64[g, k], who writes the stretches of each line, in this order.
        quota: int64[g, k], bytes of each stretch before cuts are moved to better places.
        scale: int64[g], bytes that a rank writes in all; the limits of small shards and moves depend on it.
    """
    size = weight[members]
    edge = begins((shards.stop - shards.start)[members] * size)
    ends = np.cumsum(count)
    base = edge[ends - count]
    wanted = (base[:, None] + np.cumsum(quota, axis=1)[:, :-1]).ravel()
    line = np.repeat(np.arange(len(count)), quota.shape[1] - 1)
    index = np.minimum(np.searchsorted(edge, wanted, side="right") - 1, ends[line] - 1)
    snap = np.maximum(np.minimum(SNAP_BYTES, scale // SNAP_SHARE), np.minimum(SNAP_FLOOR, scale // SNAP_FLOOR_SHARE))
    whole = np.minimum(WHOLE_BYTES, np.maximum(WHOLE_FLOOR, scale // WHOLE_SHARE))
    cut = edge[index] + _place(
        shards, members[index], size[index], wanted - edge[index], snap=snap[line], whole=whole[line]
    )
    begin = np.sort(np.concatenate([edge[:-1], cut[cut < edge[-1]]]), kind="stable")  # two runs, merged
    begin = begin[np.diff(begin, prepend=-1) > 0]
    end = np.append(begin[1:], edge[-1])
    owner = np.searchsorted(edge, begin, side="right") - 1
    line = np.searchsorted(ends, owner, side="right")
    stretch = np.searchsorted(cut, begin, side="right") - line * (quota.shape[1] - 1)
    first, size = shards.start[members[owner]], size[owner]
    return WriterIntervals(
        shard=members[owner],
        start=first + (begin - edge[owner]) // size,
        stop=first + (end - edge[owner]) // size,
        rank=ranks[line, stretch],
    )


def _place(shards: DistinctShards, shard: Ints, weight: Ints, inside: Ints, *, snap: Ints, whole: Ints) -> Ints:
    """Move cuts, each ``inside`` bytes behind the start of its shard, to better places; keeps their order.

    A cut moves by ``snap`` bytes at most; shards of up to ``whole`` bytes are not cut.
    """
    start, stop = shards.start[shard], shards.stop[shard]
    size = (stop - start) * weight
    grain = _grain(shards.length[shards.box[shard]], np.maximum(snap // weight, 1))
    position = (start * weight + inside + grain * weight // 2) // (grain * weight) * grain
    between = (np.clip(position, start, stop) - start) * weight
    near = (size <= whole) | (np.minimum(inside, size - inside) < snap)
    return np.where(near, np.where(2 * inside < size, 0, size), between)


def _grain(length: Ints, most: Ints) -> Ints:
    """Return the elements of the largest trailing block of each box (n rows, a row ... one element) within ``most``."""
    blocks = np.cumprod(length[:, ::-1], axis=1)
    return np.asarray(np.where(blocks <= most[:, None], blocks, 1).max(axis=1, initial=1), dtype=np.int64)


def _whole(shards: DistinctShards, rows: Ints, rank: Ints) -> WriterIntervals:
    return WriterIntervals(rows, shards.start[rows], shards.stop[rows], np.asarray(rank, dtype=np.int64))


def _sorted(shards: DistinctShards, cuts: Sequence[WriterIntervals]) -> WriterIntervals:
    """Put cuts below each other, in the order (shard, start)."""
    shard, start, stop, rank = (
        np.concatenate([getattr(cut, name) for cut in cuts]) for name in ("shard", "start", "stop", "rank")
    )
    numel = shards.length.prod(axis=1)
    order = np.argsort((np.cumsum(numel) - numel)[shards.box[shard]] + start, kind="stable")
    return WriterIntervals(shard[order], start[order], stop[order], rank[order])


@dataclass(frozen=True, slots=True)
class WriteDivision:
    """The work of a save, divided."""

    layout: Layout  # the place of every element
    rows: npt.NDArray[np.void]  # :data:`~bcp.plan.write.divide.SHARE` rows of all ranks, by rank
    begin: Ints  # int64[N + 1]; rank r has the rows ``rows[begin[r]]`` to ``rows[begin[r + 1]]``
    # by rank, the objects of its own table whose values it writes; ranks without any are left out
    owned: Mapping[int, Ints]
    # by rank, numbers of the paths that it writes, among the paths of its claims; ranks without any are left out
    units: Mapping[int, Ints]
    replicas: ComparedReplicas  # the shards that ranks compare before they write


def divide_writes(
    world: AllTables, *, balance: str = "split", block_bytes: int, names: Sequence[int] | None = None
) -> WriteDivision:
    """Fold replicas, check the cover, balance the writing, and lay out the files.

    The same world always gives the same division. Zero-element and tied tensors appear in the layout's tensors only.
    Options are as in :func:`bcp.plan.write.plan_save`; ``names`` as in :func:`bcp.plan.write.divide_save`.

    Raises:
        StateError: ranks disagree about a tensor, see :func:`~bcp.plan.write.merge.merge_tensors`, or about units, see
            :func:`~bcp.plan.units.divide_units`.
        CoverageError: shards do not tile their tensor, see :func:`~bcp.plan.write.cover.check_cover`.
    """
    units = divide_units(world.claims)
    merged = merge_tensors(world)
    shards = merge_shards(world, merged)
    check_cover(merged, shards, names)
    owners = _owners(world)
    replicas = compared(world, merged, shards, owners)
    shards = with_one_writer(merged, shards)
    cuts = BALANCES[balance](shards, merged.weight[shards.tensor], world.world_size)
    planes = _planes(merged)
    files = _files(merged, planes, shards, cuts, world.world_size)
    rows, begin = _rows(shards, cuts, files, world.world_size)
    objects = owners | {("dataloader", path): rank for path, rank in units.items()}
    layout = _layout(world, merged, shards, cuts, objects, planes=planes, files=files, block_bytes=block_bytes)
    return WriteDivision(layout, rows, begin, _owned(world, owners), _units(world, units), replicas)


@dataclass(frozen=True, slots=True)
class _Planes:
    """The planes of files. Families of one signature are a class; a file has a plane for each member of each class.

    ``of_class[t]`` is the class of leader t within its kind, and ``plane[t]`` the plane of tensor t. Plane p of kind k
    has elements of ``itemsize[k][p]`` bytes, of the class ``owner[k][p]``. Wide elements come first. Their sizes are
    powers of two, so every element is aligned to its size without padding, and none straddles a multiple of 4 KiB.
    """

    of_class: Ints
    plane: Ints
    itemsize: Sequence[Ints]
    owner: Sequence[Ints]


@dataclass(frozen=True, slots=True)
class _Files:
    """The files, and the place of each cut: ``file``, element ``at`` of a plane; ``order``: by rank, in file order."""

    file: Ints
    at: Ints
    order: Ints
    kind: Ints
    rank: Ints
    nbytes: Ints
    planes: Ints


def _plane_bases(elements: Ints, itemsize: Ints, owner: Ints) -> tuple[Ints, Ints]:
    """Return the first byte of each plane, int64[f, P], and the bytes of each file, int64[f].

    ``elements``, int64[f, C]: elements of a file in each plane of a class. ``owner``, int64[P]: the class of a plane.
    """
    nbytes = elements[:, owner] * itemsize
    ends = np.cumsum(nbytes, axis=1)
    return ends - nbytes, nbytes.sum(axis=1)


def _planes(merged: MergedTensors) -> _Planes:
    """Number classes and planes within each kind, by facts that every rank knows by itself."""
    tensors, leader = merged.tensors, merged.leader
    n = len(tensors)
    signatures = signature(tensors.itemsize, leader, merged.number, n)
    of_class, plane = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    itemsizes, owners = [], []
    for kind in range(len(KINDS)):
        rows = np.flatnonzero(tensors.kind == kind)
        code = np.unique(signatures[leader[rows]], return_inverse=True)[1]
        of_class[rows] = code
        key = (-tensors.itemsize[rows] * (int(code.max(initial=0)) + 1) + code) * MOST_MEMBERS + merged.number[rows]
        _, first, plane[rows] = np.unique(key, return_index=True, return_inverse=True)
        itemsizes.append(tensors.itemsize[rows[first]])
        owners.append(code[first])
    return _Planes(of_class, plane, itemsizes, owners)


def _files(
    merged: MergedTensors, planes: _Planes, shards: DistinctShards, cuts: WriterIntervals, world_size: int
) -> _Files:
    """Lay cuts into one file for each writing rank and kind; classes keep their order (tensor, box, start)."""
    tensor = shards.tensor[cuts.shard]
    classes = int(planes.of_class.max(initial=0)) + 1
    code = (cuts.rank * len(KINDS) + merged.tensors.kind[tensor]) * classes + planes.of_class[tensor]
    order = grouped(code, world_size * len(KINDS) * classes)
    length = (cuts.stop - cuts.start)[order]
    end = np.cumsum(length)
    sorted_code = code[order]
    first = np.flatnonzero(np.diff(sorted_code, prepend=-1))
    count = np.diff(np.append(first, len(code)))
    position = np.empty_like(code)
    position[order] = end - length - np.repeat((end - length)[first], count)
    owner = sorted_code[first] // classes
    fresh = np.diff(owner, prepend=-1) > 0
    key, row = owner[fresh], np.cumsum(fresh) - 1
    elements = np.zeros((len(key), classes), dtype=np.int64)
    elements[row, sorted_code[first] % classes] = np.add.reduceat(length, first) if len(first) else 0
    file = np.empty_like(code)
    file[order] = np.repeat(row, count)
    kind = key % len(KINDS)
    bases = np.zeros((len(key), max((len(sizes) for sizes in planes.itemsize), default=0)), dtype=np.int64)
    nbytes = np.zeros(len(key), dtype=np.int64)
    for code_of_kind, (itemsize, owner) in enumerate(zip(planes.itemsize, planes.owner, strict=True)):
        in_kind = kind == code_of_kind
        bases[in_kind, : len(itemsize)], nbytes[in_kind] = _plane_bases(elements[in_kind], itemsize, owner)
    by_kind = np.argsort(kind, kind="stable")  # files of a kind lie together, by rank
    number = np.empty_like(by_kind)
    number[by_kind] = np.arange(len(by_kind))
    rank = key // len(KINDS)
    return _Files(number[file], position, order, kind[by_kind], rank[by_kind], nbytes[by_kind], bases[by_kind])


def _rows(
    shards: DistinctShards, cuts: WriterIntervals, files: _Files, world_size: int
) -> tuple[npt.NDArray[np.void], Ints]:
    """Return the cuts of every rank, in terms of its own slots, and the first row of each rank."""
    slot, member = shards.stated(cuts.shard, cuts.rank)
    rows = np.empty(len(slot), dtype=SHARE)
    for name, column in (("slot", slot), ("member", member), ("start", cuts.start), ("stop", cuts.stop)):
        rows[name] = column[files.order]
    return rows, begins(np.bincount(cuts.rank, minlength=world_size))


def _owners(world: AllTables) -> dict[tuple[str, str], int]:
    """Assign every leaf that is no tensor to the lowest rank that has it."""
    owner: dict[tuple[str, str], int] = {}
    for catalogue, rank in zip(world.catalogues, world.lowest_ranks().tolist(), strict=True):
        for key in catalogue.objects:
            owner.setdefault(key, rank)
    return owner


def _owned(world: AllTables, owners: Mapping[tuple[str, str], int]) -> dict[int, Ints]:
    """Return, for every rank, the objects of its own table that it owns."""
    keys: dict[int, list[tuple[str, str]]] = {}
    for key, rank in sorted(owners.items()):
        keys.setdefault(rank, []).append(key)
    owned = {}
    for rank, own_keys in keys.items():
        catalogue = world.catalogues[int(world.template_catalogue[world.template[rank]])]
        place = {key: row for row, key in enumerate(catalogue.objects)}
        owned[rank] = np.array([place[key] for key in own_keys], dtype=np.int64)
    return owned


def _units(world: AllTables, owners: Mapping[str, int]) -> dict[int, Ints]:
    """Return, for every rank, the paths in its claims that it writes, as numbers."""
    chosen = {
        rank: np.flatnonzero([owners[path] == rank for claim in claims for path in claimed_paths(claim)])
        for rank, claims in world.claims.items()
    }
    return {rank: paths for rank, paths in chosen.items() if len(paths)}


def _layout(
    world: AllTables,
    merged: MergedTensors,
    shards: DistinctShards,
    cuts: WriterIntervals,
    objects: Mapping[tuple[str, str], int],
    *,
    planes: _Planes,
    files: _Files,
    block_bytes: int,
) -> Layout:
    """Build the layout; ``objects``: rank whose receipt has the value."""
    sorted_objects = sorted(objects.items())
    rank_catalogue = world.template_catalogue[world.template]
    extras = sorted(
        (KINDS.index(kind), rank)
        for number, catalogue in enumerate(world.catalogues)
        for kind in catalogue.extras
        for rank in np.flatnonzero(rank_catalogue == number).tolist()
    )
    number = np.bincount(shards.box[cuts.shard], minlength=len(shards.box_tensor))
    return Layout(
        world_size=world.world_size,
        block_bytes=block_bytes,
        tensors=merged.tensors,
        leader=merged.leader,
        plane=planes.plane,
        box_tensor=shards.box_tensor,
        offset=shards.offset,
        length=shards.length,
        segments=Segments.of(number, cuts.stop - cuts.start, files.file, files.at),
        file_kind=files.kind,
        file_rank=files.rank,
        file_nbytes=files.nbytes,
        file_planes=files.planes,
        objects=[key for key, _ in sorted_objects],
        object_rank=np.array([rank for _, rank in sorted_objects], dtype=np.int64),
        extra_kind=np.array([kind for kind, _ in extras], dtype=np.int64),
        extra_rank=np.array([rank for _, rank in extras], dtype=np.int64),
    )


SHARE = np.dtype([("slot", "<i4"), ("member", "<i4"), ("start", "<i8"), ("stop", "<i8")])
"""An interval of one of a rank's own slots, of one member of its family or (-1) of all of them."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Rank 0's answer to one rank."""

    owned: Ints  # int64[o], rows in its table's ``objects`` whose values it writes down
    units: Ints  # int64[u], numbers of the paths that it writes, counted through all its claims
    replicas: npt.NDArray[np.void]  # the shards that it compares, :data:`~bcp.plan.write.replicas.REPLICAS`
    compared: int  # bytes that it compares of each of them, at most
    rows: npt.NDArray[np.void]  # its intervals, :data:`SHARE`, in the order of its files


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of one rank: w flat intervals of its own shards, file after file (one a kind), in file order."""

    row: Ints  # int64[w], row in the rank's own :class:`~bcp.plan.shards.ShardTable`
    start: Ints  # int64[w], first flat element, counted in the row's box (not in the rank's interval of it)
    stop: Ints  # int64[w], one past the last
    # int64[w], byte in the data section of the rank's file of the row's kind. Intervals of a file are packed: each
    # begins where the one before it ends.
    offset: Ints

    def __len__(self) -> int:
        return len(self.row)


def holds(table: ShardTable, factored: FactoredTable, share: npt.NDArray[np.void]) -> bool:
    """Return whether all intervals of a share lie in shards of the rank. Arguments as in :func:`expand`."""
    slot, member = share["slot"].astype(np.int64), share["member"].astype(np.int64)
    if not within(slot, len(factored.row_begin) - 1):
        return False
    first = factored.row_begin[slot]
    if ((member < -1) | (member >= factored.row_begin[slot + 1] - first)).any():
        return False
    row, start, stop = factored.rows[first + np.maximum(member, 0)], share["start"], share["stop"]
    return bool(((table.start[row] <= start) & (start <= stop) & (stop <= table.stop[row])).all())


def expand(table: ShardTable, factored: FactoredTable, share: npt.NDArray[np.void]) -> Writes:
    """Return the writes of a rank, in terms of its own table.

    The order inside a file follows from the written tensors alone: planes of wide elements first, then by the family's
    signature and the member's number. In a plane the order is that of the share. :func:`divide_writes` lays out
    files by the same rule.
    """
    slot, member = share["slot"].astype(np.int64), share["member"].astype(np.int64)
    size = np.where(member < 0, factored.row_begin[slot + 1] - factored.row_begin[slot], 1)
    interval = np.repeat(np.arange(len(share)), size)
    number = runs(np.zeros_like(size), size)
    row = factored.rows[factored.row_begin[slot[interval]] + np.where(member[interval] < 0, number, member[interval])]
    itemsize = table.tensors.itemsize[table.tensor[row]]
    family = signature(itemsize, interval, number, len(share))[interval]
    kind = table.tensors.kind[table.tensor[row]]
    order = np.lexsort((interval, number, family, -itemsize, kind))
    row, interval = row[order], interval[order]
    start, stop = share["start"].astype(np.int64)[interval], share["stop"].astype(np.int64)[interval]
    nbytes, kind = (stop - start) * itemsize[order], kind[order]
    end = np.cumsum(nbytes)
    first = np.searchsorted(kind, kind)
    return Writes(row, start, stop, end - nbytes - (end - nbytes)[first])
