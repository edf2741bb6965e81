"""One module as the target of a load: which entries are filled in place, and which the module takes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from bcp.protocols import ObjectKey, Refused
from bcp.state.dtensor import is_dtensor
from bcp.state.hooks import is_hooked, is_sharded_tensor
from bcp.state.inventory import Leaves
from bcp.state.load_path import Customs, customs_of, give, owned_tensors, storages, whole
from bcp.state.memory import memory, unsupported
from bcp.state.names import cleaner
from bcp.state.rehearsal import rehearsed

__all__ = ["ModuleTarget", "is_extra", "is_plain"]


def is_extra(raw: str) -> bool:
    """Whether an entry of a state dict is what ``get_extra_state()`` of a module returned."""
    return raw.endswith("_extra_state") and raw.rpartition(".")[2] == "_extra_state"


def is_plain(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a load fills every entry of a module's state dict in place, and calls no method of the module."""
    own = owned_tensors(module)
    in_place = own.keys() == state.keys() and all(map(is_, own.values(), map(state.__getitem__, own)))
    return in_place and not any(map(is_extra, own)) and not customs_of(module)


@dataclass(slots=True)
class ModuleTarget:
    """A module whose state dict is loaded, where :func:`is_plain` says no.

    Entries that are the module's own tensors are filled in place. Others go through ``load_state_dict`` of the module:
    those that ``state_dict()`` made, and those of modules with hooks or overrides that see entries before they are
    copied. Such a hook may change the live tensors first, so its entries are loaded into memory beside them.
    """

    leaves: Leaves
    kind: str
    module: nn.Module
    where: str  # for messages
    fqns: Mapping[str, str]  # the name in the checkpoint of each raw name
    state: Mapping[str, Any]  # the module's own state dict
    customs: Customs
    clean: Callable[[str], str]
    prefix: str  # of the names in the checkpoint
    beside: dict[str, torch.Tensor] = field(default_factory=dict)  # by raw name, memory that is not the module's
    arrived: set[str] = field(default_factory=set)  # clean names that need nobody to take them
    refused: set[str] = field(default_factory=set)  # clean names that the module is known to refuse
    handed: bool = False  # whether there are entries that only the module can take

    @classmethod
    def of(
        cls,
        leaves: Leaves,
        kind: str,
        module: nn.Module,
        where: str,
        fqns: Mapping[str, str],
        state: Mapping[str, Any],
        prefix: str = "",
    ) -> ModuleTarget:
        """Compare a module's state dict with its own tensors, and note in ``leaves`` the names that it refuses.

        Raises MismatchError if the module cannot take back its own state dict.
        """
        target = cls(leaves, kind, module, where, fqns, state, customs_of(module), cleaner(module), prefix)
        target._sort()
        return target

    def leaf(self, raw: str) -> Any:
        """Return the leaf that a load fills."""
        return self.beside.get(raw, self.state[raw])

    def finish(self, loaded: Mapping[ObjectKey, Any]) -> None:
        """Let the module take the entries that are not in place, and run its hooks."""
        if not (self.handed or self.customs):
            return
        given, left_out = {}, set()
        for raw in self.state:
            key = (self.kind, self.fqns[raw])
            if is_extra(raw) and key not in loaded:
                left_out.add(self.clean(raw))
            else:
                given[raw] = loaded[key] if key in loaded else self.leaf(raw)
        found = self._cleaned(give(self.module, whole(self.state, given), self.where))
        self._refuse({*found.missing} - left_out, found.unexpected)

    # -- what is done with each entry --------------------------------------------------------------------------

    def _sort(self) -> None:
        """Decide for every entry whether it is filled in place."""
        expected = {self.clean(raw): tensor for raw, tensor in owned_tensors(self.module).items()}
        names = {raw: self.fqns[raw].removeprefix(self.prefix) for raw in self.state}
        other = {
            raw: name for raw, name in names.items() if is_extra(raw) or not _same(expected.get(name), self.state[raw])
        }
        if not (other or self.customs) and len(expected) == len(names):
            return
        owned = {key for tensor in (*self.module.parameters(), *self.module.buffers()) for key in storages(tensor)}
        lent = {raw: name for raw, name in other.items() if name not in expected and self._lies_in(raw, owned)}
        made = {raw: name for raw, name in other.items() if raw not in lent}
        self.handed = bool(made)
        reached = {key for raw in lent for key in storages(self.state[raw])}
        set_by_method = {name for name, tensor in expected.items() if tensor is None}
        unexpected = {
            name
            for raw, name in made.items()
            if name not in (set_by_method if is_extra(raw) else expected) and not _states_itself(self.state[raw])
        }
        missing = expected.keys() - set(names.values())
        missing = {name for name in missing if expected[name] is None or not storages(expected[name]) <= reached}
        scope = tuple(map(self.clean, self.customs.before))
        scoped = {raw for raw, name in names.items() if name.startswith(scope) and _clonable(self.state[raw])}
        if self.customs and (unexpected or missing or scoped & lent.keys()):
            found = self._rehearsed()
            back = {raw for raw in scoped & lent.keys() if lent[raw] in found.unexpected}
            scoped -= back  # in place: the values arrive there, though the hooks do not take the names
            reached = {key for raw in lent.keys() - scoped for key in storages(self.state[raw])}
            self.arrived = {lent[raw] for raw in lent.keys() - scoped}
            self.arrived |= {name for name, own in expected.items() if own is not None and storages(own) <= reached}
            self._refuse(found.missing, found.unexpected)
        else:
            self.arrived = {*lent.values(), *(expected.keys() - names.values() - missing)}
            self._refuse(missing, unexpected)
        self._put_beside(raw for raw in names if raw in scoped or raw in made)

    def _lies_in(self, raw: str, owned: AbstractSet[object]) -> bool:
        """Whether an entry is memory of the module's own tensors, which a load fills."""
        value = self.state[raw]
        return isinstance(value, torch.Tensor) and not is_extra(raw) and storages(value) <= owned

    def _rehearsed(self) -> Refused:
        """Return the clean names that the module refuses of its own state dict; none if that cannot be tried."""
        state = {raw: value.detach() if _clonable(value) else value for raw, value in self.state.items()}
        return self._cleaned(rehearsed(self.module, whole(self.state, state), self.where) or Refused())

    def _cleaned(self, found: Refused) -> Refused:
        return Refused(tuple(map(self.clean, found.missing)), tuple(map(self.clean, found.unexpected)))

    def _put_beside(self, raws: Iterable[str]) -> None:
        """Give entries that the module takes by itself memory that is not the module's."""
        copies: dict[int, torch.Tensor] = {}
        for raw in raws:
            value = self.state[raw]
            if is_extra(raw) or not _clonable(value):  # what is no copy is filled where it lies
                continue
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone()
            self.beside[raw] = copies[id(value)]
            self.leaves.stand_in(self.kind, self.fqns[raw], value)

    def _refuse(self, missing: Iterable[str], unexpected: Iterable[str]) -> None:
        """Note names that the module refuses, except those that need nobody to take them."""
        known = self.refused | self.arrived
        new = [sorted({*names} - known) for names in (missing, unexpected)]
        self.refused.update(*new)
        self.leaves.refuse(*([f"{self.kind}: {self.prefix}{name}" for name in names] for names in new))


def _same(own: Any, value: Any) -> bool:
    """Whether an entry is the module's own tensor of that name; an extra state has None there."""
    if own is value and own is not None:
        return True
    return _clonable(own) and _clonable(value) and memory(own) == memory(value)


def _states_itself(value: Any) -> bool:
    """Whether a tensor is of a kind that is loaded where it lies, in which nothing else can take its place."""
    return isinstance(value, torch.Tensor) and not _clonable(value)


def _clonable(value: Any) -> bool:
    """Whether a value is a tensor of which a copy can stand for it."""
    if not isinstance(value, torch.Tensor) or is_sharded_tensor(value) or is_hooked(value):
        return False
    return is_dtensor(value) or not unsupported(value)
