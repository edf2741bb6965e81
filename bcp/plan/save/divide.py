"""Rank 0's half of planning a save: the writer and the place of every byte (paper sec. 3.3, 4.1). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints, grouped
from bcp.plan.layout import Layout
from bcp.plan.save.balance import BALANCES, Cuts
from bcp.plan.save.cover import check_cover
from bcp.plan.save.merge import Shards, merge_shards
from bcp.plan.save.names import Merged, merge_tensors
from bcp.plan.save.template import MOST_MEMBERS, signature
from bcp.plan.save.world import World
from bcp.plan.save.writes import SHARE
from bcp.plan.segments import Segments
from bcp.plan.shards import KINDS
from bcp.plan.units import divide_units

__all__ = ["Division", "divide"]


@dataclass(frozen=True, slots=True)
class Division:
    """The work of a save, divided.

    Attributes:
        layout: where every element will lie.
        rows: :data:`~bcp.plan.save.writes.SHARE` rows of all ranks, by rank.
        begin: int64[N + 1]; those of rank r are ``rows[begin[r]]`` to ``rows[begin[r + 1]]``.
        owned: rank -> the objects of its own table whose values it writes down; ranks that own none are left out.
        units: rank -> which of the paths that its claims name it writes; ranks that write none are left out.
    """

    layout: Layout
    rows: npt.NDArray[np.void]
    begin: Ints
    owned: Mapping[int, Ints]
    units: Mapping[int, Ints]


def divide(world: World, *, balance: str = "split", block_bytes: int) -> Division:
    """Fold replicas, check that nothing is missing, balance, and lay out the files.

    The same world always gives the same division. Zero-element and tied tensors appear in the layout's tensors only.

    Args:
        world: the tables of all ranks.
        balance: ``"split"`` or ``"worst-fit"``, see :mod:`bcp.plan.save.balance`.
        block_bytes: size of the blocks that data files are checksummed and read in; noted in the layout.

    Raises:
        StateError: ranks disagree about a tensor, see :func:`~bcp.plan.save.names.merge_tensors`, or about units, see
            :func:`~bcp.plan.units.divide_units`.
        CoverageError: shards do not tile their tensor, see :func:`~bcp.plan.save.cover.check_cover`.

    """
    units = divide_units(world.claims)
    merged = merge_tensors(world)
    shards = merge_shards(world, merged)
    check_cover(merged, shards)
    cuts = BALANCES[balance](shards, merged.weight[shards.tensor], world.world_size)
    planes = _planes(merged)
    files = _files(merged, planes, shards, cuts, world.world_size)
    rows, begin = _rows(shards, cuts, files, world.world_size)
    owners = _owners(world)
    objects = owners | {("dataloader", path): rank for path, rank in units.items()}
    layout = _layout(world, merged, shards, cuts, objects, planes=planes, files=files, block_bytes=block_bytes)
    return Division(layout, rows, begin, _owned(world, owners), _units(world, units))


@dataclass(frozen=True, slots=True)
class _Planes:
    """How files are divided. Families of one signature are a class; a file has a plane for each member of each class.

    ``of_class[t]`` is the class of leader t within its kind, ``plane[t]`` the plane of tensor t; plane p of kind k has
    elements of ``itemsize[k][p]`` bytes, of the class ``owner[k][p]``. Wide elements come first: their sizes are
    powers of two, so every element is aligned to its size without padding, and none straddles a multiple of 4 KiB.
    """

    of_class: Ints
    plane: Ints
    itemsize: Sequence[Ints]
    owner: Sequence[Ints]


@dataclass(frozen=True, slots=True)
class _Files:
    """The files, and where the cuts lie: ``file``, element ``at`` of a plane; ``order``: by rank, in file order."""

    file: Ints
    at: Ints
    order: Ints
    kind: Ints
    rank: Ints
    nbytes: Ints
    planes: Ints


def _plane_bases(elements: Ints, itemsize: Ints, owner: Ints) -> tuple[Ints, Ints]:
    """Return the first byte of each plane, int64[f, P], and the bytes of each file, int64[f].

    Args:
        elements: int64[f, C], how many elements of each class a file has (in each of the class's planes).
        itemsize: int64[P], of each plane.
        owner: int64[P], its class.

    """
    nbytes = elements[:, owner] * itemsize
    ends = np.cumsum(nbytes, axis=1)
    return ends - nbytes, nbytes.sum(axis=1)


def _planes(merged: Merged) -> _Planes:
    """Number classes and planes within each kind, by facts that every rank can find out by itself."""
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


def _files(merged: Merged, planes: _Planes, shards: Shards, cuts: Cuts, world_size: int) -> _Files:
    """Lay cuts into one file for each writing rank and kind; classes keep their order (tensor, piece, start)."""
    tensor = shards.tensor[cuts.shard]
    classes = int(planes.of_class.max(initial=0)) + 1
    code = (cuts.rank * len(KINDS) + merged.tensors.kind[tensor]) * classes + planes.of_class[tensor]
    order = grouped(code, world_size * len(KINDS) * classes)
    length = (cuts.stop - cuts.start)[order]
    end = np.cumsum(length)
    sorted_code = code[order]
    first = np.flatnonzero(np.diff(sorted_code, prepend=-1))
    count = np.diff(np.append(first, len(code)))
    at = np.empty_like(code)
    at[order] = end - length - np.repeat((end - length)[first], count)
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
        mine = kind == code_of_kind
        bases[mine, : len(itemsize)], nbytes[mine] = _plane_bases(elements[mine], itemsize, owner)
    by_kind = np.argsort(kind, kind="stable")  # files of a kind lie together, by rank
    number = np.empty_like(by_kind)
    number[by_kind] = np.arange(len(by_kind))
    rank = key // len(KINDS)
    return _Files(number[file], at, order, kind[by_kind], rank[by_kind], nbytes[by_kind], bases[by_kind])


def _rows(shards: Shards, cuts: Cuts, files: _Files, world_size: int) -> tuple[npt.NDArray[np.void], Ints]:
    """Tell every rank its cuts in terms of its own slots."""
    slot, member = shards.stated(cuts.shard, cuts.rank)
    rows = np.empty(len(slot), dtype=SHARE)
    for name, column in (("slot", slot), ("member", member), ("start", cuts.start), ("stop", cuts.stop)):
        rows[name] = column[files.order]
    return rows, np.concatenate(([0], np.cumsum(np.bincount(cuts.rank, minlength=world_size))))


def _owners(world: World) -> dict[tuple[str, str], int]:
    """Give every leaf that is no tensor to the lowest rank that has it."""
    owner: dict[tuple[str, str], int] = {}
    for catalogue, rank in zip(world.catalogues, world.lowest_ranks().tolist(), strict=True):
        for key in catalogue.objects:
            owner.setdefault(key, rank)
    return owner


def _owned(world: World, owners: Mapping[tuple[str, str], int]) -> dict[int, Ints]:
    """Tell every rank which objects of its own table it owns."""
    keys: dict[int, list[tuple[str, str]]] = {}
    for key, rank in sorted(owners.items()):
        keys.setdefault(rank, []).append(key)
    owned = {}
    for rank, mine in keys.items():
        catalogue = world.catalogues[int(world.template_catalogue[world.template[rank]])]
        place = {key: row for row, key in enumerate(catalogue.objects)}
        owned[rank] = np.array([place[key] for key in mine], dtype=np.int64)
    return owned


def _units(world: World, owners: Mapping[str, int]) -> dict[int, Ints]:
    """Tell every rank which of the paths that its claims name it writes."""
    chosen = {
        rank: np.flatnonzero([owners[path] == rank for claim in claims for path in claim.paths()])
        for rank, claims in world.claims.items()
    }
    return {rank: paths for rank, paths in chosen.items() if len(paths)}


def _layout(
    world: World,
    merged: Merged,
    shards: Shards,
    cuts: Cuts,
    objects: Mapping[tuple[str, str], int],
    *,
    planes: _Planes,
    files: _Files,
    block_bytes: int,
) -> Layout:
    """Write down where everything lies; ``objects``: rank whose receipt has the value."""
    sorted_objects = sorted(objects.items())
    found = world.template_catalogue[world.template]
    extras = sorted(
        (KINDS.index(kind), rank)
        for number, catalogue in enumerate(world.catalogues)
        for kind in catalogue.extras
        for rank in np.flatnonzero(found == number).tolist()
    )
    number = np.bincount(shards.piece[cuts.shard], minlength=len(shards.piece_tensor))
    return Layout(
        world_size=world.world_size,
        block_bytes=block_bytes,
        tensors=merged.tensors,
        leader=merged.leader,
        plane=planes.plane,
        piece_tensor=shards.piece_tensor,
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
