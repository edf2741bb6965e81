"""Extra states and dataloader states: one compact byte object each (paper sec. 3.2).

``collect`` asks all owners for their states, ``restore`` gives these back. In between are bytes, see
:mod:`bcp.state.packed`. Owners are asked, and given their states, in the order of their keys: it is the same on all
ranks, so that they may communicate.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from bcp.errors import BcpError, StateError
from bcp.plan.strided import overlaps_itself
from bcp.protocols import Stateful
from bcp.state.dtensor import torchs
from bcp.state.hooks import is_sharded_tensor
from bcp.state.inventory import state_dict_of
from bcp.state.names import key_text
from bcp.state.native_values import is_generator, same_generator, set_generator
from bcp.state.packed import LOADERS, keeps_type
from bcp.state.random_states import RngState
from bcp.state.taken import Taken
from bcp.state.tensor_specs import PLAIN

__all__ = ["check_changeable", "collect", "restore"]

_NONE: Mapping[int, Any] = {}
_LEAVES = frozenset({bool, int, float, str, bytes, type(None), torch.Tensor})

_ORDERED = (dict, OrderedDict, defaultdict, Counter)
"""Mappings whose items can be put into another order."""


def collect(value: Any, where: str = "extra_states", known: Mapping[int, Any] = _NONE) -> Any:
    """Return a value with the states of all owners in it; nothing else is copied.

    Objects with ``state_dict`` and ``load_state_dict``, at any level of mappings, lists and tuples, give their states.
    Mappings that :mod:`~bcp.state.packed` does not store with their type become dicts. ``known`` has states that were
    read before, by the id of their owner. Raises StateError if a ``state_dict()`` raised, or a container contains
    itself.
    """
    try:
        return _collected(value, where, known)
    except RecursionError as error:
        raise StateError(f"{where} is nested too deep; does it contain itself? Pass plain values") from error


def _collected(value: Any, where: str, known: Mapping[int, Any]) -> Any:
    """Do it, level by level."""
    if type(value) in _LEAVES:  # to ask for the methods of a Stateful takes 2 us
        return value
    if isinstance(value, Stateful):
        state = known[id(value)] if id(value) in known else state_dict_of(value, where)
        return _collected(state, where, known)
    if isinstance(value, Mapping):
        children = {key: _collected(value[key], f"{where}.{key_text(key)}", known) for key in _in_order(value)}
        return _like(value, {key: children[key] for key in value})
    if type(value) in (list, tuple):
        return type(value)(_collected(child, f"{where}.{index}", known) for index, child in enumerate(value))
    return value


def _in_order(keys: Iterable[Any]) -> list[Any]:
    return sorted(keys, key=lambda key: (key_text(key), type(key).__name__))


def _like(value: Mapping[Any, Any], children: dict[Any, Any]) -> Any:
    """Return the collected items in a mapping of the type of ``value``, if that is stored with its type."""
    if type(value) is dict or not keeps_type(value):
        return children
    made: Any = copy(value)
    if not isinstance(value, defaultdict):
        vars(made).update(vars(value))
    for key, child in children.items():  # update() of a Counter would add
        made[key] = child
    return made


def restore(
    target: Any,
    loaded: Any,
    where: str = "extra_states",
    last: list[Callable[[], None]] | None = None,
    *,
    derive_for: int | None = None,
    taken: Taken | None = None,
) -> None:
    """Put a loaded value, a result of :func:`collect`, back into ``target``, in place.

    Mappings are updated key by key: keys that the checkpoint lacks stay, new ones are added, and all come in the order
    of the checkpoint. Lists take the loaded items. A :class:`~bcp.protocols.Stateful` takes its state, and so do random
    generators of one kind. A tensor takes the values of one with its shape and dtype. Other values are replaced in
    their container.

    A target at several places takes one value. Places with another value get the loaded one, and so do tensors in the
    memory of other targets. ``taken`` has these targets; without it, only those of this call count.

    ``last`` takes the functions that set random states, for the caller to call when all else is restored; without it
    they are called here. ``derive_for`` is this rank, if the value is another rank's: random states are derived from
    that one's. Raises StateError if ``target`` itself cannot be changed, or not into the loaded value, or if an owner
    of a state stands at places with different states.
    """
    check_changeable(target, where)
    later: list[Callable[[], None]] = [] if last is None else last
    if _Restoring(later, derive_for, taken or Taken()).restored(target, loaded, where) is not target:
        raise _unchangeable(target, where, f"a loaded {type(loaded).__name__}")
    for function in later if last is None else ():
        function()


def check_changeable(target: object, where: str) -> None:
    """Check, before a value is known, that :func:`restore` may put it into ``target``. Raises StateError otherwise."""
    if not isinstance(target, (Stateful, MutableMapping, list, torch.Tensor)) and not is_generator(target):
        raise _unchangeable(target, where, "what is loaded")


def _unchangeable(target: object, where: str, loaded: str) -> StateError:
    ways = LOADERS if isinstance(target, DataLoader) else "a dict, a list, or an object with load_state_dict"
    return StateError(f"{where} is a {type(target).__name__} and cannot take {loaded} in place; pass {ways}")


class _Restoring:
    """Puts loaded values into targets, random states last."""

    def __init__(self, last: list[Callable[[], None]], derive_for: int | None, taken: Taken) -> None:
        self._last = last
        self._derive_for = derive_for
        self._taken = taken

    def restored(self, target: Any, loaded: Any, where: str) -> Any:
        """Return ``target`` after it took the loaded value, or the value that is to stand in its place."""
        if isinstance(target, Stateful):
            self._stateful(target, loaded, where)
            return target
        if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
            return self._tensor(target, loaded, where)
        is_changeable = isinstance(target, (MutableMapping, list)) or is_generator(target)
        if is_changeable and self._taken.takes_another(target, loaded):
            return loaded
        if isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
            return self._mapping(target, loaded, where)
        if isinstance(target, (list, tuple)) and isinstance(loaded, (list, tuple)):
            return self._sequence(target, loaded, where)
        is_own = same_generator(target, loaded)
        if is_own:
            set_generator(target, loaded)
        return target if is_own else loaded

    def _stateful(self, target: Stateful, loaded: Any, where: str) -> None:
        """Give an owner its state, now or last of all."""
        give = partial(_give_state, target, loaded, where)
        if isinstance(target, RngState):
            derived = None if self._derive_for is None else partial(target.load_derived, loaded, self._derive_for)
            self._last.append(derived or give)
        elif self._taken.takes_another(target, loaded):
            raise StateError(
                f"{where} is a {type(target).__name__} that stands at another place of the target as well, and has "
                "another state there in the checkpoint; pass an object for each place"
            )
        else:
            give()

    def _mapping(self, target: MutableMapping[Any, Any], loaded: Mapping[Any, Any], where: str) -> Any:
        """Restore the items in the order of their keys, and put them in the order in which they were saved."""
        values = {}
        for key in _in_order(loaded):
            value = loaded[key]
            values[key] = self.restored(target[key], value, f"{where}.{key}") if key in target else value
        for key in loaded:
            try:
                target[key] = values[key]
            except BcpError:
                raise
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                raise StateError(
                    f"{where}.{key} cannot be set in a {type(target).__name__}: {message}; pass a dict"
                ) from error
        if type(target) in _ORDERED and [key for key in target if key in loaded] != list(loaded):
            for key in loaded:
                target[key] = target.pop(key)
        return target

    def _sequence(self, target: Any, loaded: Any, where: str) -> Any:
        """Restore item by item if both have equally many, so that a list of schedulers works; else take the items."""
        items = list(loaded)
        if len(target) == len(items):
            pairs = enumerate(zip(target, loaded, strict=True))
            items = [self.restored(old, new, f"{where}.{index}") for index, (old, new) in pairs]
        if isinstance(target, list):
            target[:] = items
            return target
        return tuple(items) if type(target) is tuple else loaded

    def _tensor(self, target: torch.Tensor, loaded: torch.Tensor, where: str) -> torch.Tensor:
        """Copy into a tensor of the same kind, so that others who hold it see the value; else return the loaded one.

        Raises StateError if the target is a DTensor or a ShardedTensor: the loaded tensor may be this rank's part of
        the target, or the whole.
        """
        if is_sharded_tensor(target) or isinstance(target, torchs("DTensor")):
            kind = type(target).__name__
            raise StateError(
                f"{where} is a {kind}; put it under states['model'], which reshards it, or pass its local tensor"
            )
        if not _is_writable(target) or not _is_writable(loaded):
            return loaded
        if target.shape != loaded.shape or target.dtype != loaded.dtype:
            return loaded
        return target if self._taken.fill(target, loaded) else loaded


def _give_state(target: Stateful, loaded: Any, where: str) -> None:
    """Give a state to its owner; a note says which one it was that raised."""
    try:
        target.load_state_dict(loaded)
    except Exception as error:
        error.add_note(f"bcp: raised while the {type(target).__name__} at {where} took its state")
        raise


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether ``copy_`` writes each element of a tensor once, and nothing else."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return not (tensor.is_meta or tensor.is_inference() or overlaps_itself(tensor.shape, tensor.stride()))
