"""veScale's ``RaggedShard``: a tensor that is cut, as flat memory, into parts of stated proportions (paper sec. 4.4).

Known by attributes alone, so that veScale need not be installed: a DTensor one of whose placements has ``dims`` and
``local_units``. Its values lie as they would if that placement were none, in one block, of which this rank has the
flat interval that its units stand for. That is a :class:`~bcp.planners.placement.Placement` of one span.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate

from bcp.errors import StateError
from bcp.planners.dtensor import local_tensor, mesh_blocks
from bcp.planners.placement import Placement, Span

__all__ = ["ragged_placement"]


def ragged_placement(tensor: Any, name: str) -> Placement:
    """Return where the local tensor of a DTensor lies of which one placement is ragged.

    ``dims`` are the dimensions whose rows are the unit of the cut: ``(0, ..., k-1)``, or ``()`` for a tensor that is
    whole wherever units are not 0. They say nothing about order: memory is cut in row-major order.

    Raises:
        StateError: the placements cannot be read, or do not fit the tensor, the mesh or the local tensor.

    """
    at, ragged = next((at, p) for at, p in enumerate(tensor.placements) if hasattr(p, "local_units"))
    label = f"{name}: {type(ragged).__name__}(dims={tuple(ragged.dims)}, local_units={tuple(ragged.local_units)})"
    _check(tensor, at, ragged, label)
    local = local_tensor(tensor)
    others = [Replicate() if index == at else placement for index, placement in enumerate(tensor.placements)]
    if (traced := mesh_blocks(tensor, others, name)) is None:
        return Placement(tuple(tensor.shape), tuple(local.shape), ())
    blocks = [box for box, _ in traced[1] if box.numel]
    if len(blocks) > 1:
        raise StateError(f"{label} cuts {len(blocks)} blocks at once, which is not supported; redistribute it")
    coordinate = tensor.device_mesh.get_coordinate()[at]
    spans = tuple(Span(box, *_interval(ragged, coordinate, box.numel, label)) for box in blocks)
    placement = Placement(tuple(tensor.shape), tuple(local.shape), spans)
    if local.numel() != placement.numel or not local.is_contiguous():
        raise StateError(
            f"{label} gives this rank {placement.numel} elements of the {sum(box.numel for box in blocks)} that are "
            f"left of the shape {tuple(tensor.shape)}, but its local tensor has the shape {tuple(local.shape)} and "
            f"strides {local.stride()}; it must be contiguous and of that many elements"
        )
    return placement


def _check(tensor: Any, at: int, ragged: Any, label: str) -> None:
    """Raise StateError for a ragged placement that does not say which elements are here."""
    parts, units = tuple(tensor.device_mesh.shape)[at], tuple(ragged.local_units)
    if hasattr(ragged, "split_factor"):
        raise StateError(
            f"{label} has split_factor={ragged.split_factor}: strided ragged placements are not supported; "
            "redistribute it to RaggedShard or Shard first"
        )
    if tuple(ragged.dims) != tuple(range(len(ragged.dims))) or len(ragged.dims) > tensor.dim():
        raise StateError(f"{label}: dims of a tensor of shape {tuple(tensor.shape)} must be its first ones, in order")
    if len(units) != parts or min(units, default=0) < 0 or not sum(units):
        raise StateError(
            f"{label}: needs {parts} units that are not negative, as many as mesh dimension {at} has ranks"
        )


def _interval(ragged: Any, coordinate: int, numel: int, label: str) -> tuple[int, int]:
    """Return [start, stop) of the block's elements that are here."""
    units = tuple(ragged.local_units)
    if not ragged.dims:
        return (0, numel) if units[coordinate] else (0, 0)
    if numel % sum(units):
        raise StateError(f"{label}: {numel} elements cannot be cut into {sum(units)} equal units")
    unit, before = numel // sum(units), sum(units[:coordinate])
    return before * unit, (before + units[coordinate]) * unit
