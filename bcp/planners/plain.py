"""The planner for what torch itself has: modules, nested state dicts, torch optimizers; also under DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bcp.plan.layout import Layout
from bcp.planners.leaves import Leaves, probe
from bcp.planners.model import Check, Finish, ParamNames, add_state
from bcp.planners.optimizer import OPTIMIZER, add_optimizers, optimizers_in
from bcp.planners.optimizer_load import optimizer_targets
from bcp.planners.saved import SavedNames
from bcp.protocols import LoadTargets, LocalShards, ObjectKey, States

__all__ = ["DdpPlanner", "PlainPlanner"]


class PlainPlanner:
    """Every tensor is whole, or says itself (DTensor) which part of it is here.

    ``states["model"]`` is a module, wrapped or not, a list of modules (virtual pipeline chunks), or nested mappings
    and lists. ``states["optimizer"]`` is a torch optimizer, a list or mapping of them, or nested mappings.

    Tensors of several names that are the same memory (tied) are stored once. Tied and untied states load into each
    other; where a tied target meets several saved values, those of the first name in sorted order win.
    """

    name = "plain"

    def probe(self) -> str:
        """Check torch's private attributes; return which versions run and were tested.

        Raises:
            InputError: this torch lacks one.

        """
        return probe({torch.Tensor: ["_version"], torch.UntypedStorage: ["_cdata"]}, self.name)

    def local_shards(self, states: States) -> LocalShards:
        """Say what this rank holds; see :meth:`bcp.protocols.Planner.local_shards`."""
        leaves = Leaves()
        _add_plain(leaves, "model", states)
        if optimizers := optimizers_in(states.get(OPTIMIZER)):
            add_optimizers(leaves, optimizers, ParamNames(leaves, states.get("model")))
        else:
            _add_plain(leaves, OPTIMIZER, states)
        return leaves.to_save()

    def load_targets(self, states: States, saved: Layout) -> LoadTargets:
        """Say where this rank wants what to be put; see :meth:`bcp.protocols.Planner.load_targets`."""
        leaves, names = Leaves(), SavedNames.of(saved)
        finish_model = _add_plain(leaves, "model", states)
        check: Check = _nothing
        if optimizers := optimizers_in(states.get(OPTIMIZER)):
            params = ParamNames(leaves, states.get("model"), names.rows)
            check, finish_optimizer = optimizer_targets(leaves, optimizers, params, names)
        else:
            finish_optimizer = _add_plain(leaves, OPTIMIZER, states)

        def finish(objects: Mapping[ObjectKey, Any]) -> None:
            finish_optimizer(objects)  # first: it may find tensors that do not agree, and then nothing was set
            finish_model(objects)

        return LoadTargets(leaves.to_load(names.rows), check, finish)


class DdpPlanner(PlainPlanner):
    """The same under ``DistributedDataParallel``: all ranks hold the same whole tensors and share the writing."""

    name = "ddp"


def _add_plain(leaves: Leaves, kind: str, states: States) -> Finish:
    """Take the leaves of one kind, if there are any."""
    state = states.get(kind)
    return _nothing if state is None else add_state(leaves, kind, state)


def _nothing(_: Mapping[ObjectKey, Any]) -> None:
    """Find nothing wrong, set nothing."""
