"""Which blocks of the global tensor a DTensor holds here, traced from its placements without communication.

torch's own ``compute_local_shape_and_global_offset`` describes every local tensor as one block, which is wrong for
some layouts (an uneven FSDP2-after-TP parameter, a lone ``_StridedShard``); here the runs of indices are traced
dimension by dimension, and a local tensor is a *list* of blocks (paper sec. 3.2, 4.4).

Which indices of one tensor dimension a rank holds after the mesh dimensions that shard it have cut it.

torch has two readings of a ``_StridedShard``. ``distribute_tensor`` cuts in mesh order: a strided cut with factor f
makes f groups first, and takes a part of each. ``full_tensor`` (torch >= 2.10) takes the factor as a place in the order
of the cuts: after that many shards by mesh dimensions to its right. FSDP2 after TP cuts in this second order. Both
readings agree on dimensions that divide evenly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from bcp.errors import StateError
from bcp.plan.box import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "DimensionCut",
    "Meshes",
    "Run",
    "chunk",
    "decoded",
    "dtensor_blocks",
    "is_dtensor",
    "is_ragged",
    "is_reordered",
    "layout_of",
    "local_tensor",
    "mesh_blocks",
    "placement_key",
    "runs_of",
    "stated_orders",
    "torchs",
]

Run = tuple[int, int]
"""(first global index, how many); a local dimension is a list of runs, back to back."""


class DimensionCut(NamedTuple):
    """How one mesh dimension cuts one tensor dimension."""

    parts: int  # number of ranks of the mesh dimension
    coordinate: int  # of this rank on it
    factor: int | None = None  # split factor of a ``_StridedShard``; None for a ``Shard``


class AmbiguousCutsError(ValueError):
    """Several readings of the same cuts exist, and torch itself uses more than one."""


def runs_of(length: int, cuts: Sequence[DimensionCut], order: Sequence[int] | None) -> list[Run]:
    """Return the indices of a dimension that are left after the cuts, which are in mesh order.

    ``order`` has their :func:`decoded` places. It is None if torch cannot decode those of any dimension of the tensor:
    it then decodes none. Raises AmbiguousCutsError if torch distributes and gathers such a dimension in different
    ways, or cannot gather it.
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


def runs_in_order(length: int, cuts: Iterable[DimensionCut]) -> list[Run]:
    """Return the indices that are left after the cuts were made one after the other, as ``distribute_tensor`` does.

    A cut with factor f makes f groups first, and takes a part of each.
    """
    runs = [(0, length)] if length else []
    for parts, coordinate, factor in cuts:
        groups = [runs] if factor is None else [chunk(runs, factor, group) for group in range(factor)]
        runs = _merged(run for group in groups for run in chunk(group, parts, coordinate))
    return runs


def chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Cut runs, back to back, as ``torch.chunk`` does: parts of the rounded-up size, the last ones may be empty."""
    size = -(-sum(count for _, count in runs) // parts)
    low, high = size * index, size * (index + 1)
    out, position = [], 0
    for first, count in runs:
        start, stop = max(low, position), min(high, position + count)
        if start < stop:
            out.append((first + start - position, stop - start))
        position += count
    return out


def decoded(cuts: Sequence[DimensionCut]) -> list[int] | None:
    """Return the places of the cuts in the order in which they are made; None if a factor gives no place.

    A cut stands behind those cuts to its right whose sizes multiply to its factor: a ``Shard`` before all of them. This
    is ``DTensorSpec._maybe_convert_StridedShard_to_shard_order`` of torch 2.13.
    """
    order: list[int] = []
    for index in reversed(range(len(cuts))):
        before = [math.prod(cuts[other].parts for other in order[:place]) for place in range(len(order) + 1)]
        factor = cuts[index].factor or 1
        if factor not in before:
            return None
        order.insert(before.index(factor), index)
    return order


def _cut_after_strided(length: int, cuts: Sequence[DimensionCut]) -> bool:
    """Return whether a strided cut has another cut to its right, of which torch's gather then miscounts the rows.

    One whose factor is at least the length leaves all rows to coordinate 0, and is no cut.
    """
    real = []
    for cut in cuts:
        if cut.parts > 1 and (cut.factor is None or length > cut.factor):
            real.append(cut)
            length = -(-length // cut.parts) if cut.factor is None else length
    return any(cut.factor is not None for cut in real[:-1])


def _is_fsdp2(cuts: Sequence[DimensionCut]) -> bool:
    """Return whether FSDP2 makes these cuts: one strided cut, after all shards by mesh dimensions to its right."""
    strided = [index for index, cut in enumerate(cuts) if (cut.factor or 1) > 1]
    return len(strided) == 1 and cuts[strided[0]].factor == math.prod(cut.parts for cut in cuts[strided[0] + 1 :])


def _plain(cuts: Sequence[DimensionCut], order: Iterable[int]) -> list[DimensionCut]:
    return [DimensionCut(cuts[index].parts, cuts[index].coordinate) for index in order]


def _check_same(length: int, cuts: Sequence[DimensionCut], order: Sequence[int]) -> None:
    """Raise AmbiguousCutsError if the two readings differ on any rank."""
    for coordinate in product(*(range(cut.parts) for cut in cuts)):
        rank_cuts = [cut._replace(coordinate=index) for cut, index in zip(cuts, coordinate, strict=True)]
        if runs_in_order(length, rank_cuts) != runs_in_order(length, _plain(rank_cuts, order)):
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


_TENSOR = "torch.distributed.tensor"
_PLACEMENTS = f"{_TENSOR}.placement_types"

_NAMES = frozenset({"Replicate", "Shard", "_StridedShard"})
"""Class names by which placements that are not torch's own are known; veScale has had such."""

Split = tuple[int, int | None]
"""(tensor dimension, split factor) of a mesh dimension that shards; None for a ``Shard``, which has no factor."""

_IN_ORDER = "use_strided_shard_as_shard_order"
"""An attribute of torch's specs: False if strided shards are cuts in mesh order, whatever their factors."""

Order = tuple[int, tuple[int, ...]]
"""(tensor dimension, mesh dimensions in the order in which they cut it)."""

Meshes = dict[int, tuple[object, ...]]
"""Shape of a mesh and this rank's place in it, by its ``id``, which is its own while its tensors are there."""

Traced = tuple[tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]
"""(shape of the local tensor, its blocks of the global one with the local index where each starts)."""


def torchs(name: str, module: str = _TENSOR) -> Any:
    """Return a class of torch's DTensors, or () if nobody has imported it: nothing is an instance of it then.

    bcp does not import it. The import takes seconds: it brings sympy.

    Example::

        isinstance(value, torchs("DTensor"))

    """
    return getattr(sys.modules.get(module), name, ())


def _placement_kinds() -> tuple[Any, ...]:
    """Return torch's own placements that bcp knows. torch may no longer have ``_StridedShard``."""
    return tuple(torchs(name, _PLACEMENTS) for name in sorted(_NAMES))


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is torch's DTensor, or looks like one: veScale's has not always been derived from it."""
    return isinstance(tensor, torchs("DTensor")) or (hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements"))


def is_ragged(tensor: object) -> bool:
    """Whether a placement of a DTensor is veScale's ``RaggedShard``.

    Only an attribute is asked for: that class does not initialise torch's C++ base, so that ``==``, ``hash`` and
    ``is_shard()`` of such a placement may end the process; ``is_replicate()`` does, on torch 2.13.
    """
    return is_dtensor(tensor) and any(hasattr(placement, "local_units") for placement in tensor.placements)


def is_reordered(mesh: object) -> bool:
    """Return whether a mesh says, as Megatron-FSDP's may, that its dimensions cut tensors in an order of their own."""
    return hasattr(mesh, "_shard_order")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory behind a DTensor itself, or any other tensor: no copy, no view, no collective."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # noqa: SLF001 -- to_local() records autograd or returns a view
    return local


def dtensor_blocks(tensor: DTensor, name: str) -> list[tuple[Box, torch.Tensor]]:
    """Return the non-empty blocks that this rank holds, each with its view of the local tensor.

    Replicas give equal blocks on several ranks. A rank outside of the mesh holds nothing. Raises StateError if a
    placement is a pending reduction or unknown, or if placements and local shape disagree. The same goes for placements
    of which torch itself has more than one reading.
    """
    if (traced := mesh_blocks(tensor, tensor.placements, name, stated_orders(tensor))) is None:
        return []
    local, (expected, blocks) = local_tensor(tensor), traced
    if not (local.numel() or math.prod(expected)):  # torch gives such a tensor the shape (2, 0) or (0, 0)
        return []
    if tuple(local.shape) != expected:
        raise StateError(
            f"{name}: placements {tensor.placements} of global shape {tuple(tensor.shape)} give this rank "
            f"{expected}, but its local tensor is {tuple(local.shape)}; build it with distribute_tensor, or pass "
            "shape and stride to DTensor.from_local"
        )
    return [(box, _view(local, start, box.lengths)) for box, start in blocks]


def placement_key(placement: Any) -> object:
    """Return a key that tells a placement from others; a ragged one is asked for attributes only."""
    ragged = hasattr(placement, "local_units")
    return (tuple(placement.dims), tuple(placement.local_units)) if ragged else str(placement)


def layout_of(tensor: Any, meshes: Meshes) -> object:
    """Return a key for the blocks of a DTensor on this rank; None if they need a closer look.

    Placements are not compared themselves: torch has said that ``_StridedShard(0)`` equals ``Shard(0)``, which cuts
    otherwise (2.6), and veScale's may crash.
    """
    spec, cuts, kinds = tensor._spec, [], _placement_kinds()  # noqa: SLF001 -- probe() checks it
    for placement in spec.placements:
        if type(placement) not in kinds:
            return None
        cuts.append((getattr(placement, "dim", None), getattr(placement, "split_factor", None)))
    mesh = spec.mesh
    place = meshes.get(id(mesh))
    if place is None:
        coordinate = mesh.get_coordinate()
        place = meshes[id(mesh)] = (tuple(mesh.shape), None if coordinate is None else tuple(coordinate))
    if is_reordered(mesh):
        return None
    return tuple(cuts), getattr(spec, "shard_order", None), getattr(spec, _IN_ORDER, None), place


def mesh_blocks(tensor: Any, placements: Sequence[Any], name: str, orders: Sequence[Order] = ()) -> Traced | None:
    """Trace which blocks this rank would hold of a DTensor if its placements were these; None stands for a replica.

    Return the shape that the local tensor would have, and the blocks with the local index where each starts; None on a
    rank outside of the mesh. Raises StateError if a placement is a pending reduction or unknown, or does not fit tensor
    and mesh. The same goes for placements of which torch itself has more than one reading.
    """
    shape, mesh = tuple(tensor.shape), tuple(tensor.device_mesh.shape)
    if len(placements) != len(mesh):
        raise StateError(
            f"{name} has {len(placements)} placements on a mesh of shape {mesh}; give it one for each mesh dimension"
        )
    splits = tuple(_split(placement, shape, name) for placement in placements)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if not math.prod(shape):
        return (0,) * len(shape), ()
    try:
        return _traced(shape, splits, mesh, tuple(coordinate), tuple(orders))
    except AmbiguousCutsError as error:
        raise StateError(
            f"{name} has the placements {tuple(placements)} on a mesh of shape {mesh}, and torch's own "
            f"distribute_tensor and full_tensor disagree on which rows of its global shape {shape} are where: {error}; "
            "redistribute it to Shard or Replicate, and check the values: torch may permute them on the way"
        ) from None


@lru_cache(maxsize=4096)
def _traced(
    shape: tuple[int, ...],  # shape of the global tensor
    splits: tuple[Split | None, ...],  # split of each mesh dimension; None if it replicates
    parts: tuple[int, ...],  # the number of parts of each mesh dimension
    coordinate: tuple[int, ...],  # this rank's place in the mesh
    orders: tuple[Order, ...],  # orders of cuts, as far as the tensor states them
) -> Traced:
    """Return the local shape, and the blocks with the local index where each starts.

    A model has thousands of tensors and a few layouts: remembering them takes a third off the planning.
    """
    cuts: list[dict[int, DimensionCut]] = [{} for _ in shape]
    for mesh_dim, split in enumerate(splits):
        if split:
            cuts[split[0]][mesh_dim] = DimensionCut(parts[mesh_dim], coordinate[mesh_dim], split[1])
    places = [decoded(list(dim_cuts.values())) for dim_cuts in cuts]
    runs = []
    for dim, length in enumerate(shape):
        stated = [cuts[dim][mesh_dim] for mesh_dim in _order(orders, dim, list(cuts[dim]))]
        order = None if None in places else places[dim]
        runs.append(runs_in_order(length, stated) if stated else runs_of(length, list(cuts[dim].values()), order))
    return tuple(sum(count for _, count in dim) for dim in runs), tuple(_boxes(runs))


def _split(placement: Any, shape: Sequence[int], name: str) -> Split | None:
    """Return (tensor dimension, split factor) of a placement, None for one that splits nothing."""
    if placement is None:
        return None
    if hasattr(placement, "local_units"):  # first: any other question to veScale's RaggedShard may crash
        raise StateError(f"{name} has more than one ragged placement, which is not supported; redistribute it")
    kind = type(placement).__name__
    replicate, shard, strided = (torchs(known, _PLACEMENTS) for known in ("Replicate", "Shard", "_StridedShard"))
    if not isinstance(placement, (replicate, shard, strided)) and kind not in _NAMES:
        raise StateError(
            f"{name} has the placement {placement!r}: its values are not there before a reduction, or lie in an order "
            "that is not known; redistribute it to Shard or Replicate first"
        )
    if isinstance(placement, replicate) or kind == "Replicate":
        return None
    if not -len(shape) <= placement.dim < len(shape):
        raise StateError(
            f"{name} has the placement {placement!r}, but its global shape is {tuple(shape)}; "
            "place it on a dimension that it has"
        )
    has_factor = isinstance(placement, strided) or kind == "_StridedShard"
    return placement.dim % len(shape), int(placement.split_factor) if has_factor else None


def stated_orders(tensor: DTensor) -> tuple[Order, ...]:
    """Return (tensor dimension, mesh dimensions in the order in which they cut it), if the tensor states it.

    torch >= 2.10 may state it. With strided shards it counts only where torch says that their factors are no order,
    as it does of views (2.13); otherwise the factors themselves are the order.
    """
    spec = getattr(tensor, "_spec", None)  # not public yet
    strided = any(hasattr(placement, "split_factor") for placement in tensor.placements)
    if strided and getattr(spec, _IN_ORDER, True) is not False:
        return ()
    entries = getattr(spec, "shard_order", None) or ()
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in entries)


def _order(orders: Sequence[Order], dim: int, mesh_dims: list[int]) -> Sequence[int]:
    """Return the mesh dimensions in the order in which they cut a dimension; () if the tensor does not state it."""
    stated = [mesh for tensor_dim, mesh in orders if tensor_dim == dim]
    return stated[0] if stated and sorted(stated[0]) == mesh_dims else ()


def _boxes(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield every combination of runs as a box, with the local index where it starts."""
    placed = []
    for dim in runs:
        starts = [sum(count for _, count in dim[:index]) for index in range(len(dim))]
        placed.append([(first, count, start) for (first, count), start in zip(dim, starts, strict=True)])
    for corner in product(*placed):
        yield Box(tuple(c[0] for c in corner), tuple(c[1] for c in corner)), tuple(c[2] for c in corner)


def _view(local: torch.Tensor, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return that block of the local tensor, as a view."""
    view = local.detach()
    if tuple(view.shape) == tuple(lengths):
        return view
    for dim, (first, count) in enumerate(zip(start, lengths, strict=True)):
        view = view.narrow(dim, first, count)
    return view
