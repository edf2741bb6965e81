"""The planner for FSDP2 (``fully_shard``), tensor parallelism, HSDP, and whatever else holds DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.nn.parallel import DistributedDataParallel

from bcp.errors import StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.planners.torch_native import PlainPlanner
from bcp.protocols import States
from bcp.state.detection import InspectedStates
from bcp.state.dtensor import is_dtensor, is_ragged, torchs
from bcp.state.hooks import hooked_placement, ragged_placement, unstated
from bcp.state.inventory import Leaves, probe
from bcp.state.optimizers import Slot
from bcp.state.placement import Placement

__all__ = ["Fsdp2Planner", "VeScalePlanner", "holds_ddp", "holds_dtensors", "holds_ragged"]


class Fsdp2Planner(PlainPlanner):
    """Modules and optimizers are taken as for plain torch; every DTensor gives the blocks that its placements say.

    Nothing is gathered: the blocks are views of the sharded parameters and of their optimizer states. Replicas
    (HSDP, replicated TP parameters) are equal blocks on several ranks.
    """

    name = "fsdp2"

    def probe(self) -> str:
        """Return the running and the tested versions. Raises InputError if torch lacks a private attribute."""
        super().probe()
        needed = ["_spec", "_local_tensor", "device_mesh", "placements"]
        return probe({kind: needed} if (kind := torchs("DTensor")) else {}, self.name)

    def _slots(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Sequence[Slot] | None:
        """Find the slots; where a parameter says itself where it lies, its states lie there, too."""
        slots = super()._slots(leaves, states, saved)
        placed = ((slot, _stated(slot)) for slot in slots or ())
        placed_slots = [replace(slot, placement=placement) if placement else slot for slot, placement in placed]
        return None if slots is None else placed_slots


class VeScalePlanner(Fsdp2Planner):
    """The same for veScale, whose DTensors may be ragged shards: each is a flat interval of a block.

    veScale itself is not imported. Ragged DTensors are known by their attributes, in modules, optimizers and nested
    state dicts; optimizer states of a ragged parameter may also be plain tensors of its local shape.
    """

    name = "vescale"


def holds_dtensors(states: States) -> bool:
    """Whether there is a DTensor in the model, or in a plain optimizer state dict."""
    return any(map(is_dtensor, InspectedStates.of(states).special))


def holds_ragged(states: States) -> bool:
    """Whether there is a ragged shard in the model, or in a plain optimizer state dict."""
    return any(map(is_ragged, InspectedStates.of(states).special))


def holds_ddp(states: States) -> bool:
    """Whether a module of the model is, or contains, a ``DistributedDataParallel``."""
    return any(isinstance(part, DistributedDataParallel) for part in InspectedStates.of(states).modules)


def _stated(slot: Slot) -> Placement | None:
    """Return the placement that a parameter states in another way than by placements that its states have as well.

    Raises StateError if the parameter is Megatron-FSDP's, and does not say where it lies.
    """
    name = f"the parameter {slot.fqn!r}"
    if slot.placement is None and (reason := unstated(slot.parameter)):
        raise StateError(f"{name} of states['optimizer'] {reason}")
    if slot.placement or not is_dtensor(slot.parameter):
        return slot.placement
    return (
        ragged_placement(slot.parameter, name) if is_ragged(slot.parameter) else hooked_placement(slot.parameter, name)
    )
