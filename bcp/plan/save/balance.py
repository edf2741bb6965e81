"""Who writes which replica: every byte once, and every rank about as many (paper sec. 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.plan.columns import Ints, grouped, runs
from bcp.plan.save.merge import Shards

__all__ = ["BALANCES", "Cuts", "split", "worst_fit"]

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
class Cuts:
    """Who writes what: c flat intervals that tile the shards, in the order (shard, start).

    Attributes:
        shard: int64[c], row in the :class:`~bcp.plan.save.merge.Shards`; not decreasing.
        start: int64[c], first flat element, counted in the shard's piece.
        stop: int64[c], one past the last.
        rank: int64[c], the rank that writes it, which holds the shard.
    """

    shard: Ints
    start: Ints
    stop: Ints
    rank: Ints


def split(shards: Shards, weight: Ints, world_size: int) -> Cuts:
    """Cut replicated shards so that every rank writes equally much.

    A rank that holds a replica holds every row of it, so cutting is free. The shards that the same ranks hold are laid
    end to end, each rank is given its share of that line (water-fill over what it writes already, starting
    with what only it holds), and the line is cut at the shares. Groups of few ranks come first: they have least choice.
    Groups of equally many ranks, none of which is in two of them, are cut together.

    Cuts avoid splinters: one that is close to the end of a shard moves there, small shards stay whole, and other cuts
    fall between whole rows (or the largest contiguous blocks that are small enough).

    Args:
        shards: what can be written by whom.
        weight: int64[s], bytes of one element of each shard, in all tensors that it stands for.
        world_size: how many ranks there are.

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


def worst_fit(shards: Shards, weight: Ints, world_size: int) -> Cuts:
    """Give whole shards, largest first, to the holder that writes least so far: the paper's algorithm (sec. 4.1).

    What only one rank holds is counted before the first replica is given away. Balance is bounded by the largest
    shard: 56 shards of 525 MB cannot be spread evenly over 70 ranks. Arguments as in :func:`split`.
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


BALANCES: dict[str, Callable[[Shards, Ints, int], Cuts]] = {"split": split, "worst-fit": worst_fit}
"""The ways to balance, by the name that the user gives."""


def _single_load(shards: Shards, single: Ints, nbytes: Ints, world_size: int) -> Ints:
    """Return int64[world_size]: the bytes that each rank writes because nobody else holds them."""
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, shards.holder[single], nbytes[single])
    return load


def _batches(groups: Sequence[Ints], total: Ints) -> Iterator[Ints]:
    """Yield the groups, those of few ranks first; together where they have equally many ranks and none in common."""
    sizes = np.array([len(ranks) for ranks in groups], dtype=np.int64)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        rows = rows[np.argsort(-total[rows], kind="stable")]
        ranks = np.stack([groups[group] for group in rows.tolist()])
        if np.bincount(ranks.ravel()).max() == 1:
            yield rows
            continue
        first, taken = 0, set(ranks[0].tolist())
        for at in range(1, len(rows)):
            if taken.isdisjoint(mine := set(ranks[at].tolist())):
                taken |= mine
            else:
                yield rows[first:at]
                first, taken = at, mine
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
    shards: Shards, members: Ints, count: Ints, weight: Ints, *, ranks: Ints, quota: Ints, scale: Ints
) -> Cuts:
    """Lay shards end to end and cut each line of bytes into one stretch for each rank.

    Args:
        shards: all shards.
        members: int64[m], those that lie on the lines, one line after the other.
        count: int64[g], how many lie on each line.
        weight: int64[s], bytes of one element of every shard.
        ranks: int64[g, k], who writes the stretches of each line, in this order.
        quota: int64[g, k], bytes of each stretch before cuts are moved to better places.
        scale: int64[g], bytes that a rank writes in all: what is small is measured against it.

    """
    size = weight[members]
    edge = np.concatenate([[0], np.cumsum((shards.stop - shards.start)[members] * size)])
    ends = np.cumsum(count)
    base = edge[ends - count]
    wanted = (base[:, None] + np.cumsum(quota, axis=1)[:, :-1]).ravel()
    line = np.repeat(np.arange(len(count)), quota.shape[1] - 1)
    at = np.minimum(np.searchsorted(edge, wanted, side="right") - 1, ends[line] - 1)
    snap = np.maximum(np.minimum(SNAP_BYTES, scale // SNAP_SHARE), np.minimum(SNAP_FLOOR, scale // SNAP_FLOOR_SHARE))
    whole = np.minimum(WHOLE_BYTES, np.maximum(WHOLE_FLOOR, scale // WHOLE_SHARE))
    cut = edge[at] + _place(shards, members[at], size[at], wanted - edge[at], snap=snap[line], whole=whole[line])
    begin = np.sort(np.concatenate([edge[:-1], cut[cut < edge[-1]]]), kind="stable")  # two runs, merged
    begin = begin[np.diff(begin, prepend=-1) > 0]
    end = np.append(begin[1:], edge[-1])
    owner = np.searchsorted(edge, begin, side="right") - 1
    line = np.searchsorted(ends, owner, side="right")
    stretch = np.searchsorted(cut, begin, side="right") - line * (quota.shape[1] - 1)
    first, size = shards.start[members[owner]], size[owner]
    return Cuts(
        shard=members[owner],
        start=first + (begin - edge[owner]) // size,
        stop=first + (end - edge[owner]) // size,
        rank=ranks[line, stretch],
    )


def _place(shards: Shards, shard: Ints, weight: Ints, inside: Ints, *, snap: Ints, whole: Ints) -> Ints:
    """Move cuts, each ``inside`` bytes behind the start of its shard, to better places; keeps their order.

    A cut moves by ``snap`` bytes at most; shards of up to ``whole`` bytes are not cut.
    """
    start, stop = shards.start[shard], shards.stop[shard]
    size = (stop - start) * weight
    grain = _grain(shards.length[shards.piece[shard]], np.maximum(snap // weight, 1))
    position = (start * weight + inside + grain * weight // 2) // (grain * weight) * grain
    between = (np.clip(position, start, stop) - start) * weight
    near = (size <= whole) | (np.minimum(inside, size - inside) < snap)
    return np.where(near, np.where(2 * inside < size, 0, size), between)


def _grain(length: Ints, most: Ints) -> Ints:
    """Return the elements of the largest trailing block of each box (n rows, a row ... one element) within ``most``."""
    blocks = np.cumprod(length[:, ::-1], axis=1)
    return np.asarray(np.where(blocks <= most[:, None], blocks, 1).max(axis=1, initial=1), dtype=np.int64)


def _whole(shards: Shards, which: Ints, rank: Ints) -> Cuts:
    """Give each of these shards whole to a rank."""
    return Cuts(which, shards.start[which], shards.stop[which], np.asarray(rank, dtype=np.int64))


def _sorted(shards: Shards, cuts: Sequence[Cuts]) -> Cuts:
    """Put cuts below each other, in the order (shard, start)."""
    shard, start, stop, rank = (
        np.concatenate([getattr(cut, name) for cut in cuts]) for name in ("shard", "start", "stop", "rank")
    )
    numel = shards.length.prod(axis=1)
    order = np.argsort((np.cumsum(numel) - numel)[shards.piece[shard]] + start, kind="stable")
    return Cuts(shard[order], start[order], stop[order], rank[order])
