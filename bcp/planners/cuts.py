"""Which indices of one tensor dimension a rank holds after the mesh dimensions that shard it have cut it.

torch has two readings of a ``_StridedShard``. ``distribute_tensor`` cuts in mesh order: a strided cut with factor f
makes f groups first, and takes a part of each. ``full_tensor`` (torch >= 2.10) takes the factor as a place in the order
of the cuts: after that many shards by mesh dimensions to its right. FSDP2 after TP cuts in this second order. Both
readings agree on dimensions that divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

__all__ = ["AmbiguousCutsError", "Cut", "Run", "chunk", "decoded", "runs_in_order", "runs_of"]

Run = tuple[int, int]
"""(first global index, how many); a local dimension is a list of runs, back to back."""


class Cut(NamedTuple):
    """How one mesh dimension cuts one tensor dimension.

    Attributes:
        parts: number of ranks of the mesh dimension.
        mine: coordinate of this rank on it.
        factor: split factor of a ``_StridedShard``; None for a ``Shard``.
    """

    parts: int
    mine: int
    factor: int | None = None


class AmbiguousCutsError(ValueError):
    """Several readings of the same cuts exist, and torch itself uses more than one."""


def runs_of(length: int, cuts: Sequence[Cut], order: Sequence[int] | None) -> list[Run]:
    """Return the indices of a dimension that are left after the cuts, which are in mesh order.

    Args:
        length: of the dimension.
        cuts: in mesh order.
        order: their :func:`decoded` places; None if those of any dimension of the tensor cannot be decoded, of which
            torch then decodes none.

    Raises:
        AmbiguousCutsError: torch distributes and gathers such a dimension in different ways, or cannot gather it.

    """
    if all(cut.factor is None for cut in cuts):
        return runs_in_order(length, cuts)
    if order is None:
        if _cut_after_strided(length, cuts):
            raise AmbiguousCutsError("a split factor is not the number of shards by mesh dimensions to its right")
        return runs_in_order(length, cuts)
    if not (_is_fsdp2(cuts) or length % math.prod(cut.parts for cut in cuts) == 0):
        _check_same(length, cuts, order)
    return runs_in_order(length, _plain(cuts, order))


def runs_in_order(length: int, cuts: Iterable[Cut]) -> list[Run]:
    """Return the indices that are left after the cuts were made one after the other, as ``distribute_tensor`` does.

    A cut with factor f makes f groups first, and takes a part of each.
    """
    runs = [(0, length)] if length else []
    for parts, mine, factor in cuts:
        groups = [runs] if factor is None else [chunk(runs, factor, group) for group in range(factor)]
        runs = _merged(run for group in groups for run in chunk(group, parts, mine))
    return runs


def chunk(runs: Sequence[Run], parts: int, mine: int) -> list[Run]:
    """Cut runs, back to back, as ``torch.chunk`` does: parts of the rounded-up size, the last ones may be empty."""
    size = -(-sum(count for _, count in runs) // parts)
    low, high = size * mine, size * (mine + 1)
    out, position = [], 0
    for first, count in runs:
        start, stop = max(low, position), min(high, position + count)
        if start < stop:
            out.append((first + start - position, stop - start))
        position += count
    return out


def decoded(cuts: Sequence[Cut]) -> list[int] | None:
    """Return the places of the cuts in the order in which they are made; None if a factor gives no place.

    A cut stands behind those cuts to its right whose sizes multiply to its factor: a ``Shard`` before all of them. This
    is ``DTensorSpec._maybe_convert_StridedShard_to_shard_order`` of torch 2.13.
    """
    order: list[int] = []
    for at in reversed(range(len(cuts))):
        before = [math.prod(cuts[other].parts for other in order[:place]) for place in range(len(order) + 1)]
        factor = cuts[at].factor or 1
        if factor not in before:
            return None
        order.insert(before.index(factor), at)
    return order


def _cut_after_strided(length: int, cuts: Sequence[Cut]) -> bool:
    """Return whether a strided cut has another cut to its right, of which torch's gather then miscounts the rows.

    One whose factor is at least the length leaves all rows to coordinate 0, and is no cut.
    """
    real = []
    for cut in cuts:
        if cut.parts > 1 and (cut.factor is None or length > cut.factor):
            real.append(cut)
            length = -(-length // cut.parts) if cut.factor is None else length
    return any(cut.factor is not None for cut in real[:-1])


def _is_fsdp2(cuts: Sequence[Cut]) -> bool:
    """Return whether FSDP2 makes these cuts: one strided cut, after all shards by mesh dimensions to its right."""
    strided = [at for at, cut in enumerate(cuts) if (cut.factor or 1) > 1]
    return len(strided) == 1 and cuts[strided[0]].factor == math.prod(cut.parts for cut in cuts[strided[0] + 1 :])


def _plain(cuts: Sequence[Cut], order: Iterable[int]) -> list[Cut]:
    """Return the cuts in another order, which says all that their factors said."""
    return [Cut(cuts[at].parts, cuts[at].mine) for at in order]


def _check_same(length: int, cuts: Sequence[Cut], order: Sequence[int]) -> None:
    """Raise AmbiguousCutsError if the two readings differ on any rank."""
    for coordinate in product(*(range(cut.parts) for cut in cuts)):
        there = [cut._replace(mine=mine) for cut, mine in zip(cuts, coordinate, strict=True)]
        if runs_in_order(length, there) != runs_in_order(length, _plain(there, order)):
            raise AmbiguousCutsError("the dimension does not divide evenly")


def _merged(runs: Iterator[Run]) -> list[Run]:
    """Join runs that touch."""
    out: list[Run] = []
    for first, count in runs:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + count)
        else:
            out.append((first, count))
    return out
