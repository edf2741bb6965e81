"""New states of optimizers, made of zeros: tensors, and trees of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from bcp.errors import CheckpointError, CorruptError
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import TensorMeta
from bcp.protocols import ObjectKey
from bcp.state.inventory import Leaves
from bcp.state.nested import TREE, planted, uprooted
from bcp.state.optimizers import OPTIMIZER, STEP, Slot

__all__ = ["Trees", "fresh", "in_tree", "owner_of", "saved_dtype", "scalar_device", "zeros"]


def owner_of(slot: Slot) -> tuple[int, int]:
    """Return what tells the states of a slot from those of others; several slots may share them."""
    return id(slot.state), id(slot.parameter)


def scalar_device(slot: Slot, key: str) -> torch.device:
    """Return where a 0-d state belongs: by the parameter, but ``step`` on the CPU unless kernels read it."""
    in_kernel = slot.group.get("capturable") or slot.group.get("fused")
    return slot.model_for_states.device if in_kernel or key != STEP else torch.device("cpu")


def zeros(slot: Slot, key: str, meta: TensorMeta) -> torch.Tensor:
    """Make one state tensor as the optimizer would have made it, in the saved dtype."""
    parameter, dtype = slot.model_for_states.detach(), saved_dtype(meta)
    if not meta.shape and (key == STEP or parameter.dim()):
        return torch.zeros((), dtype=dtype, device=scalar_device(slot, key))
    if slot.placement or meta.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    return fresh(meta, parameter.device)


def fresh(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Make a tensor of zeros in the shape that the checkpoint claims."""
    try:
        return torch.zeros(meta.shape, dtype=saved_dtype(meta), device=device)
    except RuntimeError as error:
        raise CorruptError(
            f"{meta.fqn!r} has shape {list(meta.shape)} in the checkpoint, for which there is no memory: {error}; "
            "load another checkpoint"
        ) from error


def saved_dtype(meta: TensorMeta) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{meta.fqn!r} was saved as {meta.dtype!r}, which torch {torch.__version__} does not know; load it with "
            "the torch that saved it"
        )
    return dtype


def in_tree(key: str, trees: Collection[str]) -> bool:
    """Whether a state belongs to one of these trees."""
    return any(key == tree or key.startswith(f"{tree}.") for tree in trees)


class Trees:
    """States with tensors inside: the tensors are loaded, then put into the tree that was saved."""

    def __init__(self) -> None:
        self._slots: list[tuple[Slot, str]] = []
        self._tensors: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # by owner, by key

    def want(
        self, leaves: Leaves, slot: Slot, trees: Collection[str], keys: Collection[str], saved: CheckpointNames
    ) -> None:
        """Want the trees of a slot, and the tensors in them by ``keys``; live tensors that fit are filled."""
        if slot.state is None or not trees:
            return
        live: dict[str, torch.Tensor] = {}
        for name, value in slot.values.items():
            live |= uprooted(value, str(name), f"the state of {slot.fqn!r}")[1] if str(name) in trees else {}
        for key in keys:
            full = (OPTIMIZER, f"state.{slot.fqn}.{key}")
            if full in saved.rows:
                made = self._tensors.setdefault(owner_of(slot), {})
                if key not in made:
                    made[key] = _fitting(live.get(key), zeros(slot, key, saved.meta(full)))
                tensor = made[key]
                leaves.add(*full, tensor if slot.placement is None else slot.placed(key, tensor, leaves.rank))
            else:
                leaves.add_object(*full, None)
        for tree in trees:
            leaves.add_object(OPTIMIZER, f"state.{slot.fqn}.{tree}{TREE}", None)
            self._slots.append((slot, tree))

    def set_in(self, objects: Mapping[ObjectKey, Any]) -> None:
        """Put the trees with their tensors into the states."""
        for slot, tree in self._slots:
            if slot.state is None or (OPTIMIZER, f"state.{slot.fqn}.{tree}{TREE}") not in objects:
                continue
            name, value = objects[OPTIMIZER, f"state.{slot.fqn}.{tree}{TREE}"]
            tensors = self._tensors.get(owner_of(slot), {})
            slot.state.setdefault(slot.parameter, {})[name] = planted(value, tensors.get)


def _fitting(live: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    """Return the live tensor if it has the shape and dtype of the saved one."""
    if live is None or live.shape != made.shape or live.dtype != made.dtype or type(live) is not type(made):
        return made
    return live
