"""Entries of an optimizer's ``state_dict()`` that belong to no parameter, or that only its own methods understand.

The tensors and hyper-parameters of :class:`~bcp.state.optimizers.Slot` are left out: each is found again in the state
dict by identity. All that remains is stored, as ``own.<optimizer>.<path>``. A load puts it into the state dict that the
optimizer gives after its states have arrived, and hands the whole to ``load_state_dict``, so that its hooks run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bcp.errors import BcpError, StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import ObjectKey
from bcp.state.dtensor import is_dtensor
from bcp.state.inventory import Leaves, state_dict_of
from bcp.state.modules import Finish, in_turn
from bcp.state.names import Path, dotted
from bcp.state.nested import TREE, is_key, leaves_of, planted, uprooted
from bcp.state.optimizer_parts import is_zero, parts_of
from bcp.state.optimizers import OPTIMIZER, Slot
from bcp.state.tensor_specs import PLAIN
from bcp.state.values import same_value

__all__ = ["OWN", "add_entries", "entry_targets", "numbered"]

OWN = "own."
"""Begins the names of such entries."""


_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

_Names = Callable[[torch.Tensor], str]


def numbered(value: object) -> list[tuple[str, Any]]:
    """Return the optimizers of a state, each with the key by which its entries are named."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    return [(str(number), part) for number, part in enumerate(value if isinstance(value, (list, tuple)) else [value])]


def add_entries(leaves: Leaves, state: object, slots: Sequence[Slot]) -> None:
    """Take the entries of optimizers that only their own ``state_dict()`` has.

    Raises StateError, which names the entry, if it cannot be stored.
    """
    for key, optimizer in numbered(state):
        if _is_ordinary(optimizer):
            continue
        for path, value in _StateDict(optimizer, slots).rest():
            where = f"the entry {dotted(_shown(path))!r} of {type(optimizer).__name__}.state_dict()"
            name = f"{OWN}{key}.{dotted(_shown(path))}"
            tree, tensors = uprooted(value, name, where)
            for tensor_name, tensor in tensors.items():
                _check_whole(tensor, slots, where)
                leaves.add(OPTIMIZER, tensor_name, tensor)
            stored = [("param", step.fqn) if isinstance(step, _Parameter) else ("key", step) for step in path]
            leaves.add_object(OPTIMIZER, name + TREE, (stored, tree))


def entry_targets(leaves: Leaves, state: object, slots: Sequence[Slot], saved: CheckpointNames) -> Finish:
    """Want the entries that the checkpoint has of the optimizers; return the function that hands them over.

    That function raises StateError, from the optimizer's error, if it does not take its state.
    """
    finishes = []
    for key, optimizer in numbered(state):
        if is_zero(optimizer):
            continue
        prefix = f"{OWN}{key}."
        tensors: dict[str, torch.Tensor] = {}
        names: list[str] = []
        if not (_is_torchs(optimizer) and _is_ordinary(optimizer)):  # else such entries are another class's
            names = [name for kind, name in saved.objects if kind == OPTIMIZER and name.startswith(prefix)]
            found = [name for kind, name in saved.rows if kind == OPTIMIZER and name.startswith(prefix)]
            tensors = {name: _made(saved, name, slots) for name in found}
            leaves.add_all(OPTIMIZER, tensors.items())
        for name in [*names, *_lacking(optimizer, prefix, slots, names)]:
            leaves.add_object(OPTIMIZER, name, None)
        finishes.append(_hand_over(optimizer, slots, sorted(names), tensors))
    return in_turn(finishes)


def _lacking(optimizer: Any, prefix: str, slots: Sequence[Slot], names: Sequence[str]) -> list[str]:
    """Return the names of entries that the optimizer has of its own and the checkpoint lacks.

    Entries of one parameter are left out: a fresh optimizer and one that has stepped differ in them. A container counts
    as saved if a part of it is there, or the container around it.
    """
    if _is_ordinary(optimizer):
        return []
    saved = [f"{name.removesuffix(TREE)}." for name in names]
    lacking = []
    for path, value in _StateDict(optimizer, slots).rest():
        is_empty = value is None or (isinstance(value, (Mapping, list, tuple)) and not value)
        if is_empty or any(isinstance(step, _Parameter) for step in path):
            continue
        own = f"{prefix}{dotted(_shown(path))}."
        if not any(own.startswith(name) or name.startswith(own) for name in saved):
            lacking.append(own[:-1] + TREE)
    return lacking


def _hand_over(
    optimizer: Any, slots: Sequence[Slot], names: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> Finish:
    """Return the function that gives an optimizer its whole state dict, by its own method."""

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        entries = [objects[OPTIMIZER, name] for name in names if (OPTIMIZER, name) in objects]
        if not entries and _is_ordinary(optimizer):
            _set_state(optimizer)
            return
        held = _StateDict(optimizer, slots)
        state = held.state
        for path, tree in entries:
            state = _with(state, held.here(path), planted(tree, tensors.get))
        try:
            optimizer.load_state_dict(state)
        except Exception as error:
            raise _not_taken(optimizer, "load_state_dict()", error) from error

    return finish


def _set_state(optimizer: Any) -> None:
    """Let an optimizer of another class than torch's adapt what was loaded, as ``load_state_dict`` does at its end."""
    own = type(optimizer).__setstate__ is not torch.optim.Optimizer.__setstate__
    if not own or (_is_torchs(optimizer) and not _has_numbers(optimizer)):
        return
    try:
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    except Exception as error:
        raise _not_taken(optimizer, "__setstate__()", error) from error


def _has_numbers(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(values.get("step"), (int, float)) for values in optimizer.state.values())


def _not_taken(optimizer: object, method: str, error: Exception) -> BcpError:
    kind = type(optimizer).__name__
    return StateError(
        f"{method} of the {kind} at states['optimizer'] raised {type(error).__name__}: {error}. Its tensors were "
        "already loaded. Load into an optimizer that was made as the saved one was"
    )


def _is_torchs(optimizer: object) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_ordinary(optimizer: Any) -> bool:
    """Whether the state dict of an optimizer follows from states and groups of its parameters alone."""
    if is_zero(optimizer):
        return True
    kind, base = type(optimizer), torch.optim.Optimizer
    if not isinstance(optimizer, base):
        return False
    if kind.state_dict is base.state_dict and not hasattr(optimizer, _HOOKS[0]):
        return True  # made without torch's __init__: it has no state dict
    if len(parts_of(optimizer)) > 1:
        return False
    methods = ("state_dict", "load_state_dict")
    if any(getattr(kind, name) is not getattr(base, name) or name in optimizer.__dict__ for name in methods):
        return False
    return not any(optimizer.__dict__.get(name) for name in _HOOKS) and all(
        isinstance(key, torch.Tensor) for key in optimizer.state
    )


def _check_whole(tensor: torch.Tensor, slots: Sequence[Slot], where: str) -> None:
    """Raise StateError for a plain tensor beside sharded parameters: it may be a shard of something."""
    if type(tensor) not in PLAIN or tensor.dim() == 0 or not torch.distributed.is_available():
        return
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    if any(slot.placement is not None or is_dtensor(slot.parameter) for slot in slots):
        raise StateError(
            f"{where} is a plain tensor of shape {list(tensor.shape)} beside sharded parameters: it cannot be told "
            "whether it is whole. Keep it in the optimizer's state of a parameter, as a DTensor, or in extra_states"
        )


def _made(saved: CheckpointNames, name: str, slots: Sequence[Slot]) -> torch.Tensor:
    """Make the tensor of an entry: like a sharded parameter of its shape, or whole on the CPU."""
    meta = saved.meta((OPTIMIZER, name))
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{name!r} was saved as {meta.dtype!r}, which torch {torch.__version__} does not know")
    shape = tuple(meta.shape)
    for slot in slots:
        if is_dtensor(slot.parameter) and tuple(slot.parameter.shape) == shape:
            return torch.zeros_like(slot.model_for_states.detach(), dtype=dtype)
    devices = {slot.model_for_states.device for slot in slots} if shape else set()
    return torch.zeros(shape, dtype=dtype, device=devices.pop() if len(devices) == 1 else "cpu")


@dataclass(frozen=True, slots=True)
class _Parameter:
    """The step of a path to the states of a parameter: its number differs between state dicts."""

    fqn: str


class _StateDict:
    """The state dict of one optimizer, and what of it the slots have."""

    def __init__(self, optimizer: Any, slots: Sequence[Slot]) -> None:
        self._fqns = {id(slot.parameter): slot.fqn for slot in reversed(slots)}
        parts = parts_of(optimizer)
        with _recorded(parts) as raw:
            self.state = state_dict_of(optimizer, "states['optimizer']")
        self._raw = raw  # keeps the ids below alive
        self._states: dict[int, Any] = {id(part.state): part for part in parts if _has_state(part)}
        self._states |= {id(given["state"]): part for part, given in raw if "state" in given}
        self._groups = {id(given["param_groups"]): part for part, given in raw if "param_groups" in given}
        self._known: set[int] = set()
        for part in parts:
            for group in getattr(part, "param_groups", ()):
                self._known |= {id(group), *(id(value) for value in group.values() if isinstance(value, torch.Tensor))}
            self._known.add(id(getattr(part, "param_groups", None)))
            for key, values in part.state.items() if _has_state(part) else ():
                if isinstance(key, torch.Tensor):
                    self._known |= {id(values), *map(id, leaves_of(values))}
        self._order = {id(part): _order(part) for part in parts}
        self._parts = parts

    def rest(self) -> list[tuple[Path, Any]]:
        """Return the largest subtrees without anything that slots have, each with its path."""
        if not isinstance(self.state, Mapping):
            raise StateError(
                f"state_dict() of the {type(self._parts[-1]).__name__} at states['optimizer'] returned a "
                f"{type(self.state).__name__}; return a dict, or pass the optimizers inside of it"
            )
        known, entries = self._rest(self.state, ())
        return entries if known else [((key,), value) for key, value in self.state.items()]

    def _rest(self, value: Any, path: Path) -> tuple[bool, list[tuple[Path, Any]]]:
        """Return whether slots have a part of a value, and the subtrees of which they have nothing."""
        if id(value) in self._known:
            return True, []
        if id(value) in self._states:
            return True, self._rest_of_states(self._states[id(value)], value, path)
        if id(value) in self._groups:
            return True, self._rest_of_groups(self._groups[id(value)].param_groups, value, path)
        if isinstance(value, Mapping) and (part := self._alike(value)) is not None:
            entries = self._rest_of_states(part, value["state"], (*path, "state"))
            entries += self._rest_of_groups(part.param_groups, value["param_groups"], (*path, "param_groups"))
            others = [(key, child) for key, child in value.items() if key not in ("state", "param_groups")]
            return True, entries + [entry for key, child in others for entry in self._rest(child, (*path, key))[1]]
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, (Mapping, list, tuple)):
            children = value.items() if isinstance(value, Mapping) else enumerate(value)
        results = [((*path, key), child, *self._rest(child, (*path, key))) for key, child in children]
        if not any(known for _, _, known, _ in results):
            return False, [(path, value)]
        return True, [entry for _, _, _, entries in results for entry in entries]

    def _alike(self, value: Mapping[Any, Any]) -> Any:
        """Return the part of which a state dict is a copy, by the sizes of its groups; None for none."""
        if not {"state", "param_groups"} <= value.keys():
            return None
        groups = value["param_groups"]
        if id(value["state"]) in self._states or not isinstance(value["state"], Mapping):
            return None
        if not isinstance(groups, list) or not all(
            isinstance(group, Mapping) and "params" in group for group in groups
        ):
            return None
        sizes = [len(group["params"]) for group in groups]
        for part in self._parts:
            if _has_state(part) and [len(group["params"]) for group in part.param_groups] == sizes:
                return part
        return None

    def _rest_of_states(self, part: Any, states: Mapping[Any, Any], path: Path) -> list[tuple[Path, Any]]:
        """Return the entries of a section ``state`` that slots do not have."""
        entries: list[tuple[Path, Any]] = []
        for key, values in states.items():
            if id(values) in self._known:
                continue
            parameter = key if isinstance(key, torch.Tensor) else self._order[id(part)].get(key)
            if parameter is None:
                entries += self._rest(values, (*path, key))[1]
                continue
            live, here = part.state.get(parameter, {}), (*path, _Parameter(self._fqns.get(id(parameter), "")))
            for name, value in values.items() if isinstance(values, Mapping) else ():
                if not (name in live and _same(value, live[name])):
                    entries += self._rest(value, (*here, name))[1]
        return entries

    def _rest_of_groups(self, live: Sequence[Any], groups: Sequence[Any], path: Path) -> list[tuple[Path, Any]]:
        """Return the entries of a section ``param_groups`` that slots do not have."""
        entries: list[tuple[Path, Any]] = []
        for number, group in enumerate(groups):
            own = live[number] if number < len(live) else {}
            for key, value in group.items():
                if key in ("params", "param_names") or (key in own and _same(value, own[key])):
                    continue
                entries += self._rest(value, (*path, number, key))[1]
        return entries

    def here(self, path: Sequence[Any]) -> Path:
        """Return a path of a checkpoint in this state dict: parameters have other numbers here."""
        numbers = {
            self._fqns.get(id(parameter)): number
            for order in self._order.values()
            for number, parameter in order.items()
        }
        return tuple(numbers.get(step, step) if kind == "param" else step for kind, step in path)


def _has_state(part: Any) -> bool:
    return isinstance(getattr(part, "state", None), Mapping) and isinstance(getattr(part, "param_groups", None), list)


def _order(part: Any) -> dict[int, torch.Tensor]:
    """Return the parameters of a part by the numbers that torch gives them in a state dict."""
    numbers: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    start = 0
    for group in getattr(part, "param_groups", None) or ():
        for number, parameter in enumerate(group["params"], start):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                numbers[number] = parameter
        start += len(group["params"])
    return numbers


def _same(value: Any, live: Any) -> bool:
    if value is live:
        return True
    if isinstance(value, torch.Tensor) or isinstance(live, torch.Tensor):
        plain = type(value) in PLAIN and type(live) in PLAIN and value.device == live.device
        return plain and same_value(value, live)
    try:
        return same_value(value, live)
    except BcpError:
        return False


@contextmanager
def _recorded(parts: Collection[Any]) -> Iterator[list[tuple[Any, Mapping[str, Any]]]]:
    """Note the state dict that torch makes of each part, before hooks and overrides change it."""
    raw: list[tuple[Any, Mapping[str, Any]]] = []
    with ExitStack() as hooks:
        for part in parts:
            if _HOOKS[1] in getattr(part, "__dict__", {}):
                handle = part.register_state_dict_post_hook(
                    lambda part, state: raw.append((part, dict(state))), prepend=True
                )
                hooks.callback(handle.remove)
        yield raw


def _with(container: Any, path: Path, value: Any) -> Any:
    """Return a container with another value at a path; the containers on the way are copied."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(container, (list, tuple)):
        if not isinstance(key, int) or key >= len(container):
            raise StateError(
                f"the checkpoint has an entry {key!r} of a list in the optimizer's state_dict(), which has "
                f"{len(container)} items here; make the optimizer as the saved one was made"
            )
        items = list(container)
        items[key] = _with(items[key], rest, value)
        return items if isinstance(container, list) else tuple(items)
    copied = dict(container) if isinstance(container, Mapping) else {}
    copied[key] = _with(copied.get(key, {}), rest, value)
    return copied


def _shown(path: Path) -> Path:
    """Return a path for names and messages. Raises StateError for a key that no other process knows."""
    for step in path:
        if not isinstance(step, _Parameter) and not is_key(step):
            raise StateError(
                f"state_dict() of an optimizer has a {type(step).__name__} as a key, which no other process finds "
                "again; use strings, numbers, or tuples of them as keys"
            )
    return tuple(step.fqn if isinstance(step, _Parameter) else step for step in path)
