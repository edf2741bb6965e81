"""The planner for Megatron-core: any tensor, pipeline, expert and data parallel layout, with no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from bcp.errors import InputError, StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.planners.megatron.model import MODEL, LogicalShards, add_model, unwrapped
from bcp.planners.megatron.slots import (
    FORMAT,
    fresh_in,
    optimizers_of,
    refuse_sharded_optimizers,
    scalers_of,
    slots_of,
)
from bcp.planners.torch_native import PlainPlanner
from bcp.protocols import ObjectKey, States
from bcp.runtime.imports import imported
from bcp.state.detection import InspectedStates
from bcp.state.inventory import Leaves
from bcp.state.modules import Finish
from bcp.state.names import walk
from bcp.state.optimizers import OPTIMIZER, Slot

__all__ = ["MegatronPlanner", "holds_megatron"]

_TESTED = "0.15.3, 0.16.1 and 0.19.2"

_NEEDED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "megatron.core.dist_checkpointing.mapping": {
        "ShardedTensor": ("from_rank_offsets", "prepend_axis_num", "allow_shape_mismatch", "replica_id"),
        "ShardedTensorFactory": ("build",),
        "ShardedObject": ("unique_key",),
        "LocalNonpersistentObject": (),
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "DistributedOptimizer": ("_copy_main_params_to_model_params", "_build_gbuf_range_map")
    },
    "megatron.core.optimizer.optimizer": {
        "ChainedOptimizer": (),
        "FP32Optimizer": (),
        "Float16OptimizerWithFloat16Params": ("_copy_main_params_to_model_params",),
    },
}
"""By module and class: what has to be there for the rest to be where it is read."""


class MegatronPlanner(PlainPlanner):
    """``states["model"]`` is a model chunk or a list of them, in Megatron's wrappers or not, or sharded state dicts.

    Names are Megatron's keys with numbered layers and experts, so that tensor, pipeline, virtual pipeline, expert and
    data parallel sizes may all change. Whatever else has a ``sharded_state_dict`` may stand beside the chunks, as
    :class:`~bcp.planners.megatron.MegatronRng` does.

    ``states["optimizer"]`` is the result of ``get_megatron_optimizer``. States and fp32 masters of the distributed
    optimizer are read from its flat shards and loaded into them; before the first step they are made, and no step is
    taken. Loss scalers are part of it. Without ``states["model"]``, a load copies the masters that it filled into this
    rank's part of the weights, as a step would; ``start_param_sync(force_sync=True)`` of the chunks, which
    communicates, then brings them to the other ranks. A load without ``states["optimizer"]`` leaves the masters
    alone: call ``reload_model_params()`` of the optimizer.

    With ``overlap_param_gather``, weights are taken from the shards that were stepped, as the others are gathered only
    by the next forward pass; that needs ``states["optimizer"]``.

    The vocabulary may be padded to another length in the checkpoint: rows that both have are loaded, other rows stay.
    """

    name = "megatron"
    fills_meta = False

    def __init__(self) -> None:
        self._shards = LogicalShards()

    def __repr__(self) -> str:
        return f"MegatronPlanner({len(self._shards.by_id)} local tensors)"

    def probe(self) -> str:
        """Return the running and the tested versions. Raises InputError if Megatron or an attribute is missing."""
        super().probe()
        tested = _versions()
        for path, classes in _NEEDED.items():
            module = _imported(path, tested)
            for name, attributes in classes.items():
                owner = getattr(module, name, None)
                fields = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
                if owner is None or (missing := [attribute for attribute in attributes if attribute not in fields]):
                    lacks = f"{path} has no {name}" if owner is None else f"{name} has no {', '.join(missing)}"
                    raise InputError(f"{tested}, in which {lacks}; pin megatron-core or upgrade bcp")
        return tested

    def _add_model(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Finish:
        """Take the weights; where there is only an optimizer, read its model for the names alone."""
        refuse_sharded_optimizers(states)
        optimizers = _optimizers(states)
        self._shards = LogicalShards(saved, fresh_in(optimizers) if saved is None else {})
        if states.get(MODEL) is None:
            add_model(Leaves(), self._shards, _chunks_of(optimizers))
            return lambda _: None
        if saved is None and states.get(OPTIMIZER) is None:
            _check_gathered(states[MODEL])
        return add_model(leaves, self._shards, states[MODEL])

    def _slots(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Sequence[Slot] | None:
        """Find the slots of the optimizers, and take their loss scalers; one that was not saved stays as it is."""
        if states.get(OPTIMIZER) is None:
            return None
        optimizers = _optimizers(states)
        for name, scaler in scalers_of(optimizers).items():
            if saved is None or (OPTIMIZER, name) in saved.objects:
                leaves.add_object(OPTIMIZER, name, _plain(scaler.state_dict()))
        return list(slots_of(optimizers, self._shards))

    def _torch_optimizers(self, states: States) -> object:  # noqa: ARG002 -- hook
        """Return none: Megatron's optimizers are not asked for their state dict."""
        return ()

    def _settle(self, states: States, objects: Mapping[ObjectKey, Any]) -> None:
        """Set the loss scalers; where only the optimizer was loaded, copy its masters into the weights."""
        optimizers = _optimizers(states)
        for name, scaler in scalers_of(optimizers).items():
            if (OPTIMIZER, name) in objects:
                _set_scaler(scaler, objects[OPTIMIZER, name])
        if states.get(MODEL) is None:
            with torch.no_grad():
                for optimizer in optimizers:
                    getattr(optimizer, "_copy_main_params_to_model_params", lambda: None)()


def holds_megatron(states: States) -> bool:
    """Whether a leaf of the model, or an optimizer, is of a class of Megatron's, other than a Megatron-FSDP wrapper.

    A sharded state dict of Megatron's distributed optimizer counts, too.
    """
    try:
        placed = [pair for pairs in InspectedStates.of(states).placed.values() for pair in pairs]
    except StateError:
        refuse_sharded_optimizers(states)  # which have tuples as keys, in one of Megatron's formats
        raise
    if any(FORMAT in path for path, _ in placed):
        return True
    leaves = (leaf for _, leaf in placed)
    bases = (base for leaf in leaves for base in type(unwrapped(leaf)).__mro__)
    return any(base.__module__.startswith("megatron.") and ".megatron_fsdp." not in base.__module__ for base in bases)


def _versions() -> str:
    """Say which versions were tested and which one runs, or raise InputError where none does."""
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        version = getattr(_imported("megatron.core", ""), "__version__", "from source")
    return f"planner 'megatron' was tested with megatron-core {_TESTED}; this is megatron-core {version}"


def _imported(path: str, tested: str) -> Any:
    """Import a module of Megatron's."""
    try:
        return imported(path)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        if tested:
            raise InputError(f"{tested}, which has no module {path}; pin megatron-core or upgrade bcp") from error
        raise InputError("framework='megatron' needs Megatron-core; install megatron-core") from error


def _optimizers(states: States) -> list[Any]:
    return [] if states.get(OPTIMIZER) is None else optimizers_of(states[OPTIMIZER], _versions)


def _chunks_of(optimizers: Sequence[Any]) -> list[Any]:
    """Return the model chunks that the optimizers know. Raises StateError if they know none."""
    chunks = {id(chunk): chunk for optimizer in optimizers for chunk in getattr(optimizer, "model_chunks", ())}
    if optimizers and not chunks:
        raise StateError("states['optimizer'] does not know its model; pass it as states['model'] as well")
    return list(chunks.values())


def _check_gathered(model: object) -> None:
    """Refuse to save weights alone that the next forward pass would gather first."""
    for _, chunk in walk(model, f"states[{MODEL!r}]"):
        if getattr(chunk, "use_forward_hook", False) and getattr(chunk, "remove_forward_pre_hook_handles", ()):
            raise StateError(
                "with overlap_param_gather, the weights of this step are spread over the data-parallel ranks until the "
                "next forward pass; pass states['optimizer'] as well, or call disable_forward_pre_hook() of the "
                "chunks first, which gathers them"
            )


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _set_scaler(scaler: Any, values: Mapping[str, Any]) -> None:
    """Set a loss scaler in place; its own ``load_state_dict`` needs CUDA."""
    live = scaler.state_dict()
    for key, value in values.items():
        if isinstance(live.get(key), torch.Tensor):
            live[key].fill_(value)
        elif hasattr(scaler, f"_{key}"):
            setattr(scaler, f"_{key}", value)
