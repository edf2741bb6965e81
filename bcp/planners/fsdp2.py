"""The planner for FSDP2 (``fully_shard``), tensor parallelism, HSDP, and whatever else holds DTensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bcp.planners.leaves import probe
from bcp.planners.names import walk
from bcp.planners.plain import PlainPlanner
from bcp.protocols import States

__all__ = ["Fsdp2Planner", "holds_ddp", "holds_dtensors"]


class Fsdp2Planner(PlainPlanner):
    """Modules and optimizers are taken as for plain torch; every DTensor gives the blocks that its placements say.

    Nothing is gathered: the blocks are views of the sharded parameters and of their optimizer states. Replicas
    (HSDP, replicated TP parameters) are equal blocks on several ranks.
    """

    name = "fsdp2"

    def probe(self) -> str:
        """Check torch's private attributes; return which versions run and were tested.

        Raises:
            InputError: this torch lacks one.

        """
        super().probe()
        return probe({DTensor: ["_spec", "_local_tensor", "device_mesh", "placements"]}, self.name)


def holds_dtensors(states: States) -> bool:
    """Whether there is a DTensor in the model, or in a plain optimizer state dict."""
    return any(
        isinstance(tensor, DTensor)
        for leaf in _leaves(states)
        for tensor in ((*leaf.parameters(), *leaf.buffers()) if isinstance(leaf, nn.Module) else (leaf,))
    )


def holds_ddp(states: States) -> bool:
    """Whether a module of the model is, or contains, a ``DistributedDataParallel``."""
    modules = (leaf for leaf in _leaves(states) if isinstance(leaf, nn.Module))
    return any(isinstance(part, DistributedDataParallel) for module in modules for part in module.modules())


def _leaves(states: States) -> Iterator[object]:
    """Yield the leaves of model and optimizer; a module is one leaf."""
    for kind in ("model", "optimizer"):
        yield from (leaf for _, leaf in walk(states.get(kind), f"states[{kind!r}]"))
