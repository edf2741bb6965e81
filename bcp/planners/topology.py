"""The place of this rank in the parallel topology: names of dimensions and this rank's coordinates."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import nn

from bcp.planners.dtensor import is_dtensor
from bcp.protocols import States

__all__ = ["coordinates"]

LOOKED_AT = 64
"""Tensors that are asked for their mesh: all of a model have the same ones, as a rule."""

MEGATRON = "megatron.core.parallel_state"
_MEGATRON = {
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}


def coordinates(states: States) -> dict[str, int]:
    """Return this rank's coordinates, as in ``{"pp": 0, "dp": 3, "tp": 1}``; empty if nothing tells them.

    They are Megatron's if its groups are initialized; else those in the largest device mesh of the states' DTensors.
    """
    return _of_megatron() or _of_mesh(states)


def _of_megatron() -> dict[str, int]:
    """Return the coordinates in Megatron's groups; without context and expert parallelism if there is none."""
    groups: Any = sys.modules.get(MEGATRON)
    if groups is None or not groups.model_parallel_is_initialized():
        return {}
    sizes = {name: getattr(groups, f"get_{words}_world_size")() for name, words in _MEGATRON.items()}
    return {
        name: int(getattr(groups, f"get_{words}_rank")())
        for name, words in _MEGATRON.items()
        if sizes[name] > 1 or name in ("pp", "dp", "tp")
    }


def _of_mesh(states: States) -> dict[str, int]:
    """Return the coordinates in the device mesh with the most dimensions, and of these in the largest one."""
    tensors = (each for each in islice(_leaves(states), LOOKED_AT) if is_dtensor(each))
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors}.values()
    mesh = max(meshes, key=lambda each: (each.ndim, each.size()), default=None)
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None:
        return {}
    names = mesh.mesh_dim_names or tuple(f"dim_{number}" for number in range(mesh.ndim))
    return dict(zip(names, map(int, place), strict=True))


def _leaves(value: object) -> Iterator[object]:
    """Yield what is in modules, mappings and lists, one after the other."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _leaves(child)
    else:
        yield value
