"""Leaves of torch optimizers, named by the parameters they belong to.

Tensors of a parameter's state are ``state.<fqn>.<name>``, the fp32 master of a low precision parameter too
(``master_param``); every hyper-parameter of its group is ``param_groups.<fqn>.<key>``, so that a load may group the
parameters in another way than the save did. These names are the same for every framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from bcp.errors import StateError
from bcp.plan.read.renamed import MASTER
from bcp.state.dtensor import is_ragged, local_tensor
from bcp.state.inventory import Leaves
from bcp.state.names import Path, dotted
from bcp.state.nested import TREE, holds_tensors, is_turned, uprooted
from bcp.state.optimizer_parts import OUTER, is_zero, optimizers_in, parts_of
from bcp.state.placement import Leaf, Placement, ShardedLeaf
from bcp.state.tensor_specs import PLAIN

__all__ = [
    "COUNTS",
    "EMPTY",
    "MASTER",
    "NUMBER",
    "OPTIMIZER",
    "STEP",
    "Slot",
    "add_slots",
    "counts_in_group",
    "has_tree",
    "hyper_of",
    "is_mark",
    "optimizers_in",
    "slots_of",
]

OPTIMIZER = "optimizer"
"""The kind of everything here."""

STEP = "step"
"""Name of a parameter's step count among its states; a 0-d tensor for every optimizer."""

COUNTS = {f"{STEP}:int": 0, f"{STEP}:float": 0.0}
"""Names beside a step count that is stored as a tensor: the optimizer has a number of that kind."""

EMPTY = ":empty"
"""Name in the place of the states of a parameter that has a dict of them, with nothing in it."""

NUMBER = ":number="
"""Begins the name of a mark, before the number of a parameter: see :mod:`bcp.state.saved_order`."""

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
    keeps_kind: bool = False  # whether the kind of a step count that is a number is stored as well
    # keys of ``group`` that follow from the parallel layout: neither saved nor loaded
    layout_keys: Collection[str] = ()
    optimizer: type[Any] | None = None  # class of the optimizer that keeps the states, where it is known
    stand_in: torch.Tensor | None = None  # the tensor with the memory of a ``parameter`` that is on the meta device

    @property
    def model_for_states(self) -> torch.Tensor:
        """The tensor whose device, shape and placements new states get."""
        return self.parameter if self.stand_in is None else self.stand_in

    @property
    def values(self) -> dict[str, Any]:
        """The states of this parameter that exist, by name; those of ``parameter``, whose they all are.

        Raises StateError if the optimizer keeps something else of this parameter.
        """
        values: Any = {} if self.state is None else self.state.get(self.parameter, {})
        if type(values) is not dict and not isinstance(values, Mapping):
            raise StateError(f"the state of {self.fqn!r} is no dict; keep a dict of names for each parameter")
        return cast("dict[str, Any]", values)

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters of its group; a step count is none."""
        return hyper_of(self.group, *self.layout_keys, *((STEP,) if self.step_in_group else ()))

    @property
    def counter(self) -> dict[str, Any]:
        """The place of its step count."""
        return self.group if self.step_in_group else self.values

    @property
    def count(self) -> torch.Tensor | None:
        """Its step count as a new tensor, if the optimizer has a number: float32, or float64 if that is too short.

        None for a number with a kind to keep that no such tensor holds: ``True``, or an int of more than 53 bits.
        """
        steps = self.counter.get(STEP)
        if not isinstance(steps, (int, float)) or (self.keeps_kind and not _is_count(steps)):
            return None
        single = torch.tensor(float(steps), dtype=torch.float32)  # not in torch's default dtype, which may be bfloat16
        return single if single.item() == steps else torch.tensor(float(steps), dtype=torch.float64)

    def leaves(self, rank: int) -> Iterator[tuple[Path, Any]]:
        """Yield (path, leaf) of the states. A container without tensors is one leaf: nothing in it is placed.

        A container with tensors gives these, and a tree (:mod:`bcp.state.nested`) of the rest.

        Raises StateError, which names this ``rank``, if a state cannot be placed.
        """
        for name, value in self._named().items():
            if isinstance(value, torch.Tensor) and not has_tree(name, value):
                yield (name,), value if self.placement is None else self.placed(name, value, rank)
                continue
            if name == STEP and self.count is not None:
                continue
            if has_tree(name, value):
                yield from self._nested(name, value, rank)
            else:
                yield (name,), value

    def _nested(self, name: Any, value: Any, rank: int) -> Iterator[tuple[Path, Any]]:
        """Yield a state with tensors inside: its tensors by their paths, and the rest of it as one value."""
        where = f"the state {name!r} of {self.fqn!r}"
        tree, tensors = uprooted(value, str(name), where)
        for path, tensor in tensors.items():
            yield (path,), tensor if self.placement is None else self.placed(path, tensor, rank)
        yield (f"{name}{TREE}",), (name, tree)

    def _named(self) -> Mapping[Any, Any]:
        """Return the states by name. Raises StateError if the optimizer keeps something else of this parameter."""
        values: Mapping[Any, Any] = self.values
        if any(type(name) not in (str, int) for name in values):
            raise StateError(
                f"the state of {self.fqn!r} has keys that are no strings or ints; keep a dict of names for each "
                "parameter"
            )
        return values

    def placed(self, name: str, value: torch.Tensor, rank: int) -> Leaf:
        """Say where in the logical parameter a state lies: where the parameter does, if it has its local shape."""
        placement = self.placement
        if placement is None:
            return value
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


def is_mark(section: str, key: str) -> bool:
    """Whether a value in a checkpoint says how states are kept, by its section and key.

    A colon in front marks those of later versions, too: a state of such a name has a tree.
    """
    return section == "state" and (key in COUNTS or key.startswith(":") or key.endswith(TREE))


def _is_count(steps: float) -> bool:
    """Whether a tensor and one of ``COUNTS`` tell a number exactly."""
    return type(steps) in (int, float) and math.isfinite(steps) and float(steps) == steps


def hyper_of(group: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the hyper-parameters of a group, without ``others``.

    Raises StateError for a key that is no string, of which a checkpoint would make one.
    """
    if not {str}.issuperset(map(type, group)):
        other = next(key for key in group if type(key) is not str)
        raise StateError(
            f"a group of an optimizer has the key {other!r} of type {type(other).__name__}, of which a checkpoint "
            "would make a string; use a string"
        )
    return {key: value for key, value in group.items() if key not in _PER_PARAMETER and key not in others}


def has_tree(name: object, value: object) -> bool:
    """Whether a state needs a tree: it has tensors inside, or its name alone does not tell the key."""
    if type(name) is str and "." not in name and ":" not in name and name != MASTER:
        if isinstance(value, torch.Tensor):
            return is_turned(value)
        return isinstance(value, (Mapping, list, tuple)) and holds_tensors(value)
    return True


def slots_of(optimizers: Sequence[Any], names: Callable[[torch.Tensor], Sequence[str]]) -> Iterator[Slot]:
    """Yield every parameter of every group; ``names`` gives its FQN, and those that are tied to it.

    Wrappers and containers are read through, see :mod:`bcp.state.optimizer_parts`. ``ZeroRedundancyOptimizer`` keeps
    the states of this rank's parameters in an optimizer of its own, ``optim``. Raises StateError if a parameter is not
    in the model, or if the states of an optimizer cannot be read.
    """
    for optimizer in optimizers:
        depths: dict[int, int] = {}  # by parameter, how many parts inside of this one have it
        groups: set[int] = set()
        states: set[int] = set()
        for part in parts_of(optimizer):
            seen_groups, seen_states = set(groups), set(states)
            slots = list(_slots_of_part(part, names)) if _has_groups(part, names) else []
            for slot in slots:
                depth = depths.get(id(slot.parameter), 0)
                shared_state = id(slot.state) in seen_states
                if depth and shared_state and id(slot.group) in seen_groups:
                    continue
                depths[id(slot.parameter)] = depth + 1
                groups.add(id(slot.group))
                states.add(id(slot.state))
                yield slot if not depth else _outer(slot, depth, seen_groups, shared=shared_state)


def _outer(slot: Slot, depth: int, seen_groups: Collection[int], *, shared: bool) -> Slot:
    """Return the slot of a wrapper: without what it shares with the part inside."""
    group = {"params": [slot.parameter]} if id(slot.group) in seen_groups else slot.group
    suffix = OUTER * depth
    tied = [fqn + suffix for fqn in slot.tied]
    return replace(slot, fqn=slot.fqn + suffix, tied=tied, group=group, state=None if shared else slot.state)


def _has_groups(part: Any, names: Callable[[torch.Tensor], Sequence[str]]) -> bool:
    """Whether a part has parameters. Those of a container that keeps nothing itself need not be in the model."""
    if not isinstance(getattr(part, "param_groups", None), list) or not hasattr(part, "state"):
        return False
    if part.state or len(parts_of(part)) == 1:
        return True
    try:
        for group in part.param_groups:
            for parameter in group["params"]:
                names(parameter)
    except StateError:
        return False
    return True


def _slots_of_part(optimizer: Any, names: Callable[[torch.Tensor], Sequence[str]]) -> Iterator[Slot]:
    """Yield the parameters of one part."""
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise StateError(
            f"{type(optimizer).__name__}(overlap_with_ddp=True) keeps its states in a functional optimizer, which "
            "is not supported; make it with overlap_with_ddp=False"
        )
    keeper = optimizer.optim if is_zero(optimizer) else optimizer
    kept = {id(parameter) for group in keeper.param_groups for parameter in group["params"]}
    _check_keys(keeper, optimizer, kept)
    in_group = counts_in_group(keeper)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = keeper.state if id(parameter) in kept else None
            fqn, *tied = names(parameter)
            yield Slot(
                fqn,
                parameter,
                group,
                state,
                tied,
                step_in_group=in_group,
                keeps_kind=not in_group,
                optimizer=type(keeper),
            )


def _check_keys(keeper: Any, optimizer: Any, kept: Collection[int]) -> None:
    """Raise StateError for states of tensors that are in no group, and for ZeRO's states of no parameter."""
    for key in keeper.state:
        kind = type(optimizer).__name__
        if isinstance(key, torch.Tensor) and id(key) not in kept:
            raise StateError(
                f"the {kind} at states['optimizer'] has states of a tensor of shape {list(key.shape)} that is in none "
                "of its param_groups, so that it has no name; delete them, or add the tensor to a group"
            )
        if is_zero(optimizer) and not isinstance(key, torch.Tensor):
            raise StateError(
                f"the {kind} at states['optimizer'] has a state {key!r} of no parameter, which ZeRO does not save "
                "either; keep it in extra_states"
            )


def counts_in_group(optimizer: object) -> bool:
    """Whether an optimizer keeps its step count in its groups, as the fused ones of Apex and Transformer Engine do."""
    return any(base.__name__ in _STEPS_IN_GROUP for base in type(optimizer).__mro__)


def add_slots(leaves: Leaves, slots: Iterable[Slot]) -> None:
    """Take the states, masters and hyper-parameters that exist.

    Raises StateError if a parameter is in two optimizers, or a state cannot be placed.
    """
    groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
    counts: dict[str, list[str]] = {}
    leaves.add_all(OPTIMIZER, _states(slots, groups, counts, leaves.rank))
    for count, prefixes in counts.items():
        leaves.add_group(OPTIMIZER, prefixes, {count: True})
    for hyper, prefixes in groups.values():
        tensors = {key: value for key, value in hyper.items() if isinstance(value, torch.Tensor)}
        leaves.add_all(OPTIMIZER, ((f"{p}.{key}", value) for p in prefixes for key, value in tensors.items()))
        leaves.add_group(OPTIMIZER, prefixes, {key: value for key, value in hyper.items() if key not in tensors})


def _states(
    slots: Iterable[Slot],
    groups: dict[int, tuple[dict[str, Any], list[str]]],
    counts: dict[str, list[str]],
    rank: int,
) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of all states and masters; note the groups' hyper-parameters and kinds of step counts."""
    for slot in slots:
        if id(slot.group) not in groups:
            groups[id(slot.group)] = (slot.hyper, [])
        groups[id(slot.group)][1].append(f"param_groups.{slot.fqn}")
        prefix, values = f"state.{slot.fqn}.", slot.values
        if slot.keeps_kind and not values and slot.state is not None and slot.parameter in slot.state:
            counts.setdefault(EMPTY, []).append(prefix[:-1])
        simple = slot.placement is None and not slot.step_in_group
        if simple and PLAIN.issuperset(map(type, values.values())) and not any(map(has_tree, values, values.values())):
            for name, value in values.items():  # as a rule: what follows takes three times as long
                yield f"{prefix}{name}", value
        else:
            for path, value in slot.leaves(rank):
                yield prefix + dotted(path), value
            if (count := slot.count) is not None:
                yield prefix + STEP, count
                if slot.keeps_kind:
                    counts.setdefault(f"{STEP}:{type(slot.counter[STEP]).__name__}", []).append(prefix[:-1])
        if slot.master is not None and slot.master_saved:
            yield prefix + MASTER, slot.master
