"""Who writes which replica: every byte once, and every rank about as many (paper sec. 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.plan.merge import Shards
from bcp.plan.shards import Ints

__all__ = ["BALANCES", "Cuts", "split", "worst_fit"]

SNAP_BYTES = 4 << 20
SNAP_SHARE = 256
"""A cut moves by at most 4 MiB, and by at most 1 / 256 of a rank's load: with two cuts, a load is 0.8 % off."""
WHOLE_BYTES = 4 << 10
WHOLE_SHARE = 32
WHOLE_FLOOR = 256
"""Shards of up to 4 KiB, less where that is more than 1 / 32 of a load, but at least 256 bytes, are never cut."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Who writes what: c flat intervals that tile the shards, in the order (shard, start).

    Attributes:
        shard: int64[c], row in the :class:`~bcp.plan.merge.Shards`; not decreasing.
        start: int64[c], first flat element, counted in the shard's piece.
        stop: int64[c], one past the last.
        rank: int64[c], the rank that writes it, which holds the shard.
    """

    shard: Ints
    start: Ints
    stop: Ints
    rank: Ints


def split(shards: Shards, itemsize: Ints, world_size: int) -> Cuts:
    """Cut replicated shards so that every rank writes equally much.

    A rank that holds a replica holds every row of it, so cutting is free. The shards that the same ranks hold are laid
    end to end, each rank is given its share of that line (water-fill over what it writes already, starting
    with what only it holds), and the line is cut at the shares. Sets of few ranks come first: they have least choice.

    Cuts avoid splinters: one that is close to the end of a shard moves there, small shards stay whole, and other cuts
    fall between whole rows (or the largest contiguous blocks that are small enough).

    Args:
        shards: what can be written by whom.
        itemsize: int64[s], bytes of one element of each shard.
        world_size: how many ranks there are.

    """
    nbytes = (shards.stop - shards.start) * itemsize
    single, sets = _holder_sets(shards)
    load = _single_load(shards, single, nbytes, world_size)
    cuts = [_whole(shards, single, shards.holder_rank[shards.holder_begin[single]])]
    mean = int(nbytes.sum()) // world_size
    for ranks, members in sorted(sets, key=lambda s: (len(s[0]), -int(nbytes[s[1]].sum()), int(s[1][0]))):
        quota = _water_fill(load[ranks], int(nbytes[members].sum()))
        scale = max(mean, int((load[ranks] + quota).max()))
        cut = _cut_line(shards, members, itemsize[members], ranks=ranks, quota=quota, scale=scale)
        np.add.at(load, cut.rank, (cut.stop - cut.start) * itemsize[cut.shard])
        cuts.append(cut)
    return _sorted(cuts)


def worst_fit(shards: Shards, itemsize: Ints, world_size: int) -> Cuts:
    """Give whole shards, largest first, to the holder that writes least so far: the paper's algorithm (sec. 4.1).

    What only one rank holds is counted before the first replica is given away. Balance is bounded by the largest
    shard: 56 shards of 525 MB cannot be spread evenly over 70 ranks. Arguments as in :func:`split`.
    """
    nbytes = (shards.stop - shards.start) * itemsize
    single, sets = _holder_sets(shards)
    load = _single_load(shards, single, nbytes, world_size)
    writer = shards.holder_rank[shards.holder_begin[:-1]].copy()
    owners = {int(member): ranks for ranks, members in sets for member in members}
    for shard in sorted(owners, key=lambda shard: (-int(nbytes[shard]), shard)):
        ranks = owners[shard]
        writer[shard] = ranks[load[ranks].argmin()]
        load[writer[shard]] += nbytes[shard]
    return _whole(shards, np.arange(len(shards), dtype=np.int64), writer)


BALANCES: dict[str, Callable[[Shards, Ints, int], Cuts]] = {"split": split, "worst-fit": worst_fit}
"""The ways to balance, by the name that the user gives."""


def _holder_sets(shards: Shards) -> tuple[Ints, Sequence[tuple[Ints, Ints]]]:
    """Return the shards that one rank alone holds, and for every other set of ranks (ascending) the shards it holds."""
    copies = np.diff(shards.holder_begin)
    members: dict[bytes, list[int]] = {}
    for shard in np.flatnonzero(copies > 1).tolist():
        members.setdefault(shards.holders(shard).tobytes(), []).append(shard)
    sets = [(np.frombuffer(key, dtype=np.int64), np.array(rows, dtype=np.int64)) for key, rows in members.items()]
    return np.flatnonzero(copies == 1), sets


def _single_load(shards: Shards, single: Ints, nbytes: Ints, world_size: int) -> Ints:
    """Return int64[world_size]: the bytes that each rank writes because nobody else holds them."""
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, shards.holder_rank[shards.holder_begin[single]], nbytes[single])
    return load


def _water_fill(load: Ints, nbytes: int) -> Ints:
    """Share ``nbytes`` out so that the lowest loads rise to one common level; exact in integers."""
    order = np.argsort(load, kind="stable")
    level = load[order]
    before = np.cumsum(level)
    filled = int(np.count_nonzero(level * np.arange(1, len(level) + 1) - before <= nbytes))
    height, rest = divmod(nbytes + int(before[filled - 1]), filled)
    quota = np.zeros(len(load), dtype=np.int64)
    quota[order[:filled]] = height - level[:filled]
    quota[order[:rest]] += 1
    return quota


def _cut_line(shards: Shards, members: Ints, itemsize: Ints, *, ranks: Ints, quota: Ints, scale: int) -> Cuts:
    """Lay shards end to end and cut the line of bytes into one stretch for each rank.

    Args:
        shards: all shards.
        members: int64[m], those that lie on the line, in this order.
        itemsize: int64[m], bytes of one element of each.
        ranks: int64[k], who writes the stretches, in this order.
        quota: int64[k], bytes of each stretch before cuts are moved to better places.
        scale: bytes that a rank writes in all: what is small is measured against it.

    """
    edge = np.concatenate([[0], np.cumsum((shards.stop - shards.start)[members] * itemsize)])
    wanted = np.cumsum(quota)[:-1]
    at = np.minimum(np.searchsorted(edge, wanted, side="right") - 1, len(members) - 1)
    cut = edge[at] + _place(shards, members[at], itemsize[at], wanted - edge[at], scale)
    begin = np.unique(np.concatenate([edge[:-1], cut[cut < edge[-1]]]))
    end = np.append(begin[1:], edge[-1])
    owner = np.searchsorted(edge, begin, side="right") - 1
    first, size = shards.start[members[owner]], itemsize[owner]
    return Cuts(
        shard=members[owner],
        start=first + (begin - edge[owner]) // size,
        stop=first + (end - edge[owner]) // size,
        rank=ranks[np.searchsorted(cut, begin, side="right")],
    )


def _place(shards: Shards, shard: Ints, itemsize: Ints, inside: Ints, scale: int) -> Ints:
    """Move cuts, each ``inside`` bytes behind the start of its shard, to better places; keeps their order."""
    start, stop = shards.start[shard], shards.stop[shard]
    size = (stop - start) * itemsize
    snap = min(SNAP_BYTES, scale // SNAP_SHARE)
    whole = min(WHOLE_BYTES, max(WHOLE_FLOOR, scale // WHOLE_SHARE))
    grain = _grain(shards.length[shards.piece[shard]], np.maximum(snap // itemsize, 1))
    position = (start * itemsize + inside + grain * itemsize // 2) // (grain * itemsize) * grain
    between = (np.clip(position, start, stop) - start) * itemsize
    near = (size <= whole) | (np.minimum(inside, size - inside) < snap)
    return np.where(near, np.where(2 * inside < size, 0, size), between)


def _grain(length: Ints, most: Ints) -> Ints:
    """Return the elements of the largest trailing block of each box (n rows, a row ... one element) within ``most``."""
    blocks = np.cumprod(length[:, ::-1], axis=1)
    return np.asarray(np.where(blocks <= most[:, None], blocks, 1).max(axis=1, initial=1), dtype=np.int64)


def _whole(shards: Shards, which: Ints, rank: Ints) -> Cuts:
    """Give each of these shards whole to a rank."""
    return Cuts(which, shards.start[which], shards.stop[which], np.asarray(rank, dtype=np.int64))


def _sorted(cuts: Sequence[Cuts]) -> Cuts:
    """Put cuts below each other, in the order (shard, start)."""
    shard, start, stop, rank = (
        np.concatenate([getattr(cut, name) for cut in cuts]) for name in ("shard", "start", "stop", "rank")
    )
    order = np.lexsort((start, shard))
    return Cuts(shard[order], start[order], stop[order], rank[order])
