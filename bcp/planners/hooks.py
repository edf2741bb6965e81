"""Tensors that say themselves which blocks they hold, by the methods that torch's own checkpoint planners ask.

``LocalShardsWrapper`` has both methods. Megatron-FSDP puts the first one on the local tensor of a DTensor, on the
tensor and not on its class, and does without the second.

Before Megatron-FSDP has done so, its parameters are DTensors whose placements do not say which rows are here, or plain
local tensors. These are known by attributes, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.planners.dtensor import is_dtensor, is_reordered, local_tensor
from bcp.planners.placement import Placement, Span

__all__ = ["ATTACH", "HOOKS", "MEGATRON_FSDP", "hooked_blocks", "hooked_placement", "is_hooked", "unstated"]

HOOKS = ("__create_chunk_list__", "__get_tensor_shard__")
"""Which blocks there are; and where each of them is. Without the second, the tensor is its only block."""

MEGATRON_FSDP = frozenset(
    {"_mfsdp_parameter_group", "__fsdp_param__", "megatron_fsdp_dist_index", "_megatron_fsdp_model"}
)
"""Attributes that Megatron-FSDP sets on its parameters: the first one in version 2, the others in version 1."""

ATTACH = (
    "attach that to the parameters first, by Megatron-FSDP's preprocess_state_dict_for_uneven_dtensor(named) or, in "
    "version 2, attach_uneven_dtensor_metadata(model, named, {'state': {}}), where named = "
    "dict(model.named_parameters()); or pass the state dicts that its own checkpoint functions prepare"
)
"""The remedy for Megatron-FSDP's parameters."""


def is_hooked(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is no DTensor says itself which blocks it holds."""
    return hasattr(tensor, HOOKS[0]) and not is_dtensor(tensor)


def unstated(tensor: torch.Tensor) -> str:
    """Say why the blocks of a Megatron-FSDP tensor cannot be known, and what to do; "" if they can, and for others.

    Its meshes may have a ``_shard_order``, in which ranks with the right local size hold other rows than the placements
    say. Replicas have no blocks to be stated.
    """
    marked = not MEGATRON_FSDP.isdisjoint(tensor.__dict__) or (is_dtensor(tensor) and is_reordered(tensor.device_mesh))
    if not marked or is_hooked(local_tensor(tensor)):
        return ""
    if is_dtensor(tensor) and all(type(placement).__name__ == "Replicate" for placement in tensor.placements):
        return ""
    return f"is sharded by Megatron-FSDP, and does not say which of its rows are here; {ATTACH}"


def hooked_blocks(tensor: Any, name: str, shape: tuple[int, ...]) -> list[tuple[Box, torch.Tensor]]:
    """Return the non-empty blocks of a tensor that says itself which they are, each with its view as it is.

    Args:
        tensor: the tensor, which may be the local one of a DTensor.
        name: what it is called in messages.
        shape: the shape of the logical tensor.

    Raises:
        StateError: a block lies outside of the tensor, its view has another size, or one of the methods raised.

    """
    try:
        stated = list(_stated(tensor, name))
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"{name}: {type(tensor).__name__} raised {type(error).__name__}: {error} when asked for its blocks; repair "
            f"{' and '.join(HOOKS)}, or pass the plain tensors inside it"
        ) from error
    for box, view in stated:
        _check_block(tensor, box, view, name, shape)
    return [(box, view) for box, view in stated if box.numel]


def _check_block(tensor: Any, box: Box, view: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise StateError for a block that is not one of the logical tensor, or whose view is not of its size."""
    lengths = tuple(view.shape) if isinstance(view, torch.Tensor) else None
    if lengths != box.lengths and (box.numel or not hasattr(tensor, HOOKS[1])):
        gives = type(view).__name__ if lengths is None else lengths
        raise StateError(f"{name}: {type(tensor).__name__} states a block {box} but gives {gives}")
    if box.numel and (len(box.lengths) != len(shape) or Box.whole(shape).intersect(box) != box):
        raise StateError(f"{name}: {type(tensor).__name__} states a block {box} outside of the shape {shape}")


def hooked_placement(tensor: torch.Tensor, name: str) -> Placement | None:
    """Return where the local tensor of a DTensor lies that says so itself; None for any other tensor.

    Optimizer states that are made like such a parameter are DTensors too, but do not say it: they lie where it does.

    Raises:
        StateError: as :func:`hooked_blocks`.

    """
    local = local_tensor(tensor)
    if not is_hooked(local) or hasattr(local, HOOKS[1]):
        return None
    spans = tuple(Span.whole(box) for box, _ in hooked_blocks(local, name, tuple(tensor.shape)))
    return Placement(tuple(tensor.shape), tuple(local.shape), spans)


def _stated(tensor: Any, name: str) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield every block that a tensor states, with its view."""
    parts = tensor.__create_chunk_list__()
    if not hasattr(tensor, HOOKS[1]):
        if len(parts) > 1 or (not parts and tensor.numel()):
            raise StateError(
                f"{name}: {type(tensor).__name__} of shape {tuple(tensor.shape)} states {len(parts)} blocks, and has "
                f"no {HOOKS[1]} that says where they are; it must be one block, or have that method"
            )
        yield from ((Box(tuple(part.offsets), tuple(part.sizes)), tensor) for part in parts)
        return
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 -- slow to import, rarely needed

    for index, part in enumerate(parts):
        view = tensor.__get_tensor_shard__(MetadataIndex(name, part.offsets, index))
        yield Box(tuple(part.offsets), tuple(part.sizes)), view
