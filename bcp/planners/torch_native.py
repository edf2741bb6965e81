"""The planner for torch's own modules, nested state dicts and optimizers, also under DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import LoadTargets, LocalShards, ObjectKey, States
from bcp.state.empty_groups import add_empty_groups, empty_group_targets
from bcp.state.inventory import Leaves, probe
from bcp.state.meta_tensors import MetaTensors
from bcp.state.modules import Check, Finish, ParamNames, add_state, in_turn
from bcp.state.optimizer_entries import add_entries, entry_targets
from bcp.state.optimizer_restore import slot_targets
from bcp.state.optimizers import OPTIMIZER, Slot, add_slots, optimizers_in, slots_of
from bcp.state.packed_optimizers import is_packed, packed_slots, refuse_packed_inside, was_saved_by_number
from bcp.state.saved_order import in_saved_order

__all__ = ["DdpPlanner", "PlainPlanner"]


class PlainPlanner:
    """Every tensor is whole, or says itself (DTensor) which part of it is here.

    ``states["model"]`` is a module, wrapped or not, a list of modules (virtual pipeline chunks), or nested mappings
    and lists. ``states["optimizer"]`` is a torch optimizer, a list or mapping of them, or nested mappings.

    Tensors of several names that are the same memory (tied) are stored once. Tied and untied states load into each
    other; where a tied target meets several saved values, those of the first name in sorted order win.

    The planners of other frameworks are subclasses: they state how a model's leaves and an optimizer's
    slots are found (``_add_model``, ``_slots``), and the work that follows a load (``_settle``).
    """

    name = "plain"
    fills_meta = True  # whether a load gives memory to modules on the meta device

    def probe(self) -> str:
        """Return the running and the tested versions. Raises InputError if torch lacks a private attribute."""
        return probe({torch.Tensor: ["_version"], torch.UntypedStorage: ["_cdata"]}, self.name)

    def local_shards(self, states: States) -> LocalShards:
        """Return the shards of this rank; see :meth:`bcp.protocols.Planner.local_shards`."""
        leaves = Leaves()
        self._add_model(leaves, states)
        slots = self._slots(leaves, states)
        if slots is None:
            _add_plain(leaves, OPTIMIZER, states)
        else:
            add_slots(leaves, slots)
            add_entries(leaves, self._torch_optimizers(states), slots)
            add_empty_groups(leaves, self._groups_in(states))
        return leaves.to_save()

    def load_targets(self, states: States, saved: CheckpointNames) -> LoadTargets:
        """Return the targets of this rank; see :meth:`bcp.protocols.Planner.load_targets`."""
        meta = MetaTensors()
        leaves = Leaves(loading=True, meta=meta if self.fills_meta else None)
        become_real: Finish = lambda _: meta.hand_over(saved.rows)  # noqa: E731 -- placed among functions of its kind
        finish_model = self._add_model(leaves, states, saved)
        check: Check = _nothing
        slots = self._slots(leaves, states, saved)
        if slots is None:
            finish_optimizer = in_turn([become_real, _add_plain(leaves, OPTIMIZER, states)])
        else:
            slots = [replace(slot, stand_in=meta.stand_in(slot.parameter)) for slot in slots] if meta else slots
            slots = in_saved_order(slots, saved)
            check, finish_slots = slot_targets(leaves, slots, saved)
            finish_groups = empty_group_targets(leaves, self._groups_in(states), saved)
            finish_entries = entry_targets(leaves, self._torch_optimizers(states), slots, saved)
            finish_optimizer = in_turn([finish_slots, become_real, finish_groups, finish_entries])

        def finish(objects: Mapping[ObjectKey, Any]) -> None:
            finish_optimizer(objects)  # first: it may find tensors that do not agree, and then nothing was set
            finish_model(objects)
            self._settle(states, objects)

        return LoadTargets(leaves.to_load(saved.rows), check, finish, leaves.refusals, leaves.foreign)

    def _add_model(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Finish:  # noqa: ARG002 -- hook
        return _add_plain(leaves, "model", states)

    def _slots(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Sequence[Slot] | None:
        """Find the slots of the optimizers, or None where they are a plain nested state; the model was taken before."""
        optimizers = optimizers_in(states.get(OPTIMIZER))
        if is_packed(states.get(OPTIMIZER)) and not (saved and was_saved_by_number(saved)):
            return packed_slots(leaves, states.get("model"), states[OPTIMIZER], saved)
        if not optimizers and saved is None:
            refuse_packed_inside(states.get(OPTIMIZER))
        return list(slots_of(optimizers, ParamNames(leaves, states.get("model"), saved))) if optimizers else None

    def _torch_optimizers(self, states: States) -> object:
        """Return the torch optimizers whose own ``state_dict()`` is compared with the slots; () for none."""
        return () if is_packed(states[OPTIMIZER]) else states[OPTIMIZER]

    def _groups_in(self, states: States) -> object:
        """Return the torch optimizers, or a list of their state dict."""
        state = states.get(OPTIMIZER)
        return [state] if is_packed(state) else self._torch_optimizers(states)

    def _settle(self, states: States, objects: Mapping[ObjectKey, Any]) -> None:
        """Do the local work that follows a load, when all tensors and objects are in place."""


class DdpPlanner(PlainPlanner):
    """The same under ``DistributedDataParallel``: all ranks hold the same whole tensors and share the writing."""

    name = "ddp"


def _add_plain(leaves: Leaves, kind: str, states: States) -> Finish:
    """Take the leaves of one kind, if there are any."""
    state = states.get(kind)
    return _nothing if state is None else add_state(leaves, kind, state)


def _nothing(_: Mapping[ObjectKey, Any]) -> None:
    """Find nothing wrong, set nothing."""
