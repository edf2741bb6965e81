"""Leaves of torch optimizers, named by the parameters they belong to.

Tensors of a parameter's state are ``state.<fqn>.<name>``, the fp32 master of a low precision parameter too
(``master_param``); every hyper-parameter of its group is ``param_groups.<fqn>.<key>``, so that a load may group the
parameters in another way than the save did. These names are the same for every framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcp.errors import StateError
from bcp.plan.read.renamed import MASTER
from bcp.state.dtensor import is_ragged, local_tensor
from bcp.state.inventory import Leaves
from bcp.state.names import Path, dotted, walk
from bcp.state.placement import Leaf, Placement, ShardedLeaf
from bcp.state.tensor_specs import PLAIN

__all__ = ["MASTER", "OPTIMIZER", "STEP", "Slot", "add_slots", "counts_in_group", "optimizers_in", "slots_of"]

OPTIMIZER = "optimizer"
"""The kind of everything here."""

STEP = "step"
"""Name of a parameter's step count among its states; a 0-d tensor for every optimizer."""

_STEPS_IN_GROUP = frozenset({"FusedAdam"})
"""Optimizer classes (Apex, Transformer Engine) that count steps per group, as an int."""

_PER_PARAMETER = frozenset({"params", "param_names"})
"""Keys of a group with one item for each parameter; they are no hyper-parameters."""


@dataclass(slots=True, eq=False)  # to make a frozen one of ten fields takes 4 us instead of 0.8
class Slot:
    """One logical parameter in one optimizer; not to be changed."""

    fqn: str
    # the tensor that the optimizer steps, the key of its states: the parameter itself, or local memory that contains
    # it, as an FSDP1 flat parameter or a 1-D fp32 shard. Several slots may share such memory.
    parameter: torch.Tensor
    group: dict[str, Any]  # the group it is in, of which ``params`` and ``param_names`` are no hyper-parameters
    state: MutableMapping[torch.Tensor, dict[str, Any]] | None  # all parameters' states; None: another rank's (ZeRO-1)
    tied: Sequence[str] = ()  # its further names
    # place of ``parameter``, and of states of its shape, in the logical parameter; None if they are whole, or DTensors
    placement: Placement | None = None
    master: Leaf | None = None  # its fp32 master, where that is memory of its own
    master_saved: bool = True  # False where the model's tensor has the same values: then the master is not stored
    step_in_group: bool = False  # whether the optimizer counts steps per group instead of per parameter
    # keys of ``group`` that follow from the parallel layout: neither saved nor loaded
    layout_keys: Collection[str] = ()
    optimizer: type[Any] | None = None  # class of the optimizer that keeps the states, where it is known

    @property
    def values(self) -> dict[str, Any]:
        """The states of this parameter that exist, by name; those of ``parameter``, whose they all are."""
        return {} if self.state is None else self.state.get(self.parameter, {})

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters of its group; a step count is none."""
        none = {*_PER_PARAMETER, *self.layout_keys, *((STEP,) if self.step_in_group else ())}
        return {key: value for key, value in self.group.items() if key not in none}

    @property
    def counter(self) -> dict[str, Any]:
        """The place of its step count."""
        return self.group if self.step_in_group else self.values

    @property
    def count(self) -> torch.Tensor | None:
        """Its step count as a new tensor, if the optimizer has a number: float32, or float64 if that is too short."""
        steps = self.counter.get(STEP)
        if not isinstance(steps, (int, float)):
            return None
        single = torch.tensor(float(steps), dtype=torch.float32)  # not in torch's default dtype, which may be bfloat16
        return single if single.item() == steps else torch.tensor(float(steps), dtype=torch.float64)

    def leaves(self, rank: int) -> Iterator[tuple[Path, Any]]:
        """Yield (path, leaf) of the states. A container without tensors is one leaf: nothing in it is placed.

        Raises StateError, which names this ``rank``, if a state cannot be placed.
        """
        for name, value in self.values.items():
            if isinstance(value, torch.Tensor):
                yield (name,), value if self.placement is None else self._placed(name, value, self.placement, rank)
                continue
            if name == STEP and self.count is not None:
                continue
            parts = list(walk(value, f"the state of {self.fqn!r}", (name,)))
            if any(isinstance(leaf, torch.Tensor) for _, leaf in parts):
                yield from parts
            else:
                yield (name,), value

    def _placed(self, name: str, value: torch.Tensor, placement: Placement, rank: int) -> Leaf:
        """Say where in the logical parameter a state lies: where the parameter does, if it has its local shape."""
        if (not value.dim() and placement.local) or is_ragged(value):
            return value
        value = local_tensor(value)
        if tuple(value.shape) != placement.local:
            raise StateError(
                f"the state {name!r} of {self.fqn!r} has the shape {list(value.shape)}, its parameter "
                f"{list(placement.local)} on rank {rank}: which part of it is here cannot be told. States have to "
                "be of the parameter's shape, or 0-d"
            )
        return ShardedLeaf(value, placement)


def optimizers_in(value: object) -> list[torch.optim.Optimizer] | None:
    """Return the optimizers of ``value``, which is one, or a list or mapping of nothing else; None for others."""
    parts: list[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    parts = list(value) if isinstance(value, (list, tuple)) else parts
    return parts if parts and all(isinstance(part, torch.optim.Optimizer) for part in parts) else None


def slots_of(
    optimizers: Sequence[torch.optim.Optimizer], names: Callable[[torch.Tensor], Sequence[str]]
) -> Iterator[Slot]:
    """Yield every parameter of every group; ``names`` gives its FQN, and those that are tied to it.

    ``ZeroRedundancyOptimizer`` keeps the states of this rank's parameters in an optimizer of its own, ``optim``. Raises
    StateError if a parameter is not in the model, or if the states of an optimizer cannot be read.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise StateError(
                f"{type(optimizer).__name__}(overlap_with_ddp=True) keeps its states in a functional optimizer, which "
                "is not supported; make it with overlap_with_ddp=False"
            )
        inner = getattr(optimizer, "optim", None)
        keeper = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        kept = {id(parameter) for group in keeper.param_groups for parameter in group["params"]}
        in_group = counts_in_group(keeper)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = keeper.state if id(parameter) in kept else None
                fqn, *tied = names(parameter)
                yield Slot(fqn, parameter, group, state, tied, step_in_group=in_group, optimizer=type(keeper))


def counts_in_group(optimizer: object) -> bool:
    """Whether an optimizer keeps its step count in its groups, as the fused ones of Apex and Transformer Engine do."""
    return any(base.__name__ in _STEPS_IN_GROUP for base in type(optimizer).__mro__)


def add_slots(leaves: Leaves, slots: Iterable[Slot]) -> None:
    """Take the states, masters and hyper-parameters that exist.

    Raises StateError if a parameter is in two optimizers, or a state cannot be placed.
    """
    groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
    leaves.add_all(OPTIMIZER, _states(slots, groups, leaves.rank))
    for hyper, prefixes in groups.values():
        tensors = {key: value for key, value in hyper.items() if isinstance(value, torch.Tensor)}
        leaves.add_all(OPTIMIZER, ((f"{p}.{key}", value) for p in prefixes for key, value in tensors.items()))
        leaves.add_group(OPTIMIZER, prefixes, {key: value for key, value in hyper.items() if key not in tensors})


def _states(
    slots: Iterable[Slot], groups: dict[int, tuple[dict[str, Any], list[str]]], rank: int
) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of all states and masters; note the hyper-parameters of every group, and whose they are."""
    for slot in slots:
        if id(slot.group) not in groups:
            groups[id(slot.group)] = (slot.hyper, [])
        groups[id(slot.group)][1].append(f"param_groups.{slot.fqn}")
        prefix, values = f"state.{slot.fqn}.", slot.values
        if slot.placement is None and not slot.step_in_group and PLAIN.issuperset(map(type, values.values())):
            for name, value in values.items():  # as a rule: what follows takes three times as long
                yield f"{prefix}{name}", value
        else:
            for path, value in slot.leaves(rank):
                yield prefix + dotted(path), value
            if (count := slot.count) is not None:
                yield prefix + STEP, count
        if slot.master is not None and slot.master_saved:
            yield prefix + MASTER, slot.master
