"""The tensors of all ranks, merged by name; and which of them are one family everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from bcp.errors import StateError
from bcp.plan.columns import Ints, concat, padded
from bcp.plan.save.template import Catalogue
from bcp.plan.save.world import World
from bcp.plan.shards import KINDS, TensorTable

__all__ = ["Merged", "merge_tensors"]


@dataclass(frozen=True, slots=True)
class Merged:
    """All tensors by name, n of them, and every catalogue's families in terms of them.

    Families are counted over all catalogues: those of catalogue c begin with ``family_base[c]``. The members of
    family f are ``members[family_begin[f]]`` and the next ones, ``family_size[f]`` in all.

    Attributes:
        tensors: sorted by (code of the kind, FQN).
        leader: int64[n], the tensor whose shards this one shares; itself, if it shares none.
        number: int64[n], which member of its leader's family it is, 0, 1, 2 ...
        weight: int64[n], bytes of one element of all the tensors that this one leads.
        family_base: int64[c + 1].
        family_begin: int64[f].
        family_size: int64[f].
        members: rows in ``tensors``.
        split: bool[f], whether other ranks hold the members differently: then each of them leads itself.
    """

    tensors: TensorTable
    leader: Ints
    number: Ints
    weight: Ints
    family_base: Ints
    family_begin: Ints
    family_size: Ints
    members: Ints
    split: npt.NDArray[np.bool_]


def merge_tensors(world: World) -> Merged:
    """Merge the ranks' tensors by (kind, FQN).

    Where ranks differ in stride, device or requires_grad, the lowest rank's value is taken.

    Raises:
        StateError: ranks (or rows of one rank) disagree about a tensor's shape, dtype or tie; a tie leads nowhere or
            to another tied tensor; or elements have a size that is not a power of two.

    """
    parts = [catalogue.tensors for catalogue in world.catalogues]
    index, merged = _by_name(parts)
    stacked = _concat_tensors(parts)
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
        for found, mine in zip(rows, names, strict=True):
            found.extend(map(index[kind].__getitem__, mine))
    return index, np.array(list(chain.from_iterable(rows)), dtype=np.int64)


def _with_families(catalogues: Sequence[Catalogue], tensors: TensorTable, merged: Ints) -> Merged:
    """Find the families that are one in every catalogue."""
    counts = [int(each.family.max(initial=-1)) + 1 for each in catalogues]
    base = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    family = concat([each.family + first for each, first in zip(catalogues, base, strict=False)])
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
    return Merged(tensors, leader, number, weight, base, begin, size, members, split)


def _split(tensors: int, family: Ints, members: Ints, lead: Ints, size: Ints) -> npt.NDArray[np.bool_]:
    """Mark the families of which some member is in another family elsewhere, and what hangs together with these.

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
    here = int(differs.argmax())
    there = int(first[here])
    mine, theirs = tensors[here], tensors[there]
    fields = [
        f"{name} {getattr(theirs, name)!r} on rank {ranks[there]} and {getattr(mine, name)!r} on rank {ranks[here]}"
        for name in ("shape", "dtype", "itemsize", "tied_to")
        if getattr(theirs, name) != getattr(mine, name)
    ]
    raise StateError(
        f"{mine.kind} tensor {mine.fqn!r} is not the same tensor everywhere: {'; '.join(fields)}. One name means one "
        "global tensor: pass the same model on every rank, or give the tensors different names"
    )


def _check_ties(tensors: TensorTable, index: Sequence[dict[str, int]]) -> None:
    """Raise where a tied tensor's target is unknown, or is tied itself."""
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
    """Raise where elements could not be aligned in a file."""
    size = tensors.itemsize
    wrong = np.flatnonzero((size <= 0) | (size & (size - 1) != 0))
    if wrong.size:
        meta = tensors[int(wrong[0])]
        raise StateError(
            f"{meta.kind} tensor {meta.fqn!r} ({meta.dtype}) has elements of {meta.itemsize} bytes, which is not a "
            "power of two; save it as a view of another dtype"
        )


def _concat_tensors(parts: Sequence[TensorTable]) -> TensorTable:
    """Put tensor tables below each other, in their common width."""
    width = max((part.shape.shape[1] for part in parts), default=0)
    return TensorTable(
        kind=concat([part.kind for part in parts]),
        fqn=list(chain.from_iterable(part.fqn for part in parts)),
        dtype=list(chain.from_iterable(part.dtype for part in parts)),
        itemsize=concat([part.itemsize for part in parts]),
        ndim=concat([part.ndim for part in parts]),
        shape=padded([part.shape for part in parts], width, 1),
        stride=padded([part.stride for part in parts], width, 0),
        device=list(chain.from_iterable(part.device for part in parts)),
        requires_grad=concat([part.requires_grad for part in parts]),
        tied_to=list(chain.from_iterable(part.tied_to for part in parts)),
    )
