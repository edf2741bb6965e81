"""Leaves of modules and of nested containers, and how loaded objects get back into them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from bcp.errors import StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import ObjectKey
from bcp.runtime.process import cached_property
from bcp.state.buffers import broadcast_buffers, buffer_marks
from bcp.state.dtensor import local_tensor
from bcp.state.hooks import ATTACH, is_sharded_tensor, shape_of
from bcp.state.inventory import Leaves, named_state_of
from bcp.state.load_path import inner_module
from bcp.state.memory import memory, unsupported
from bcp.state.meta_tensors import refuse_meta
from bcp.state.module_target import ModuleTarget, is_extra, is_plain
from bcp.state.names import Path, cleaned, cleaner, dotted, walk
from bcp.state.native_values import same_generator, set_generator
from bcp.state.placement import Leaf, ShardedLeaf
from bcp.state.tensor_specs import is_flat
from bcp.state.values import same_value

__all__ = [
    "Check",
    "Finish",
    "ParamNames",
    "TakeModule",
    "add_module",
    "add_state",
    "in_turn",
    "is_fsdp1",
    "is_fsdp1_type",
    "put",
]

Check = Callable[[Mapping[ObjectKey, Any]], None]
"""Raises where the loaded objects cannot be put into a target; touches nothing."""

Finish = Callable[[Mapping[ObjectKey, Any]], None]
"""Sets the loaded objects in a target, once its tensors are in place."""

TakeModule = Callable[[Leaves, str, nn.Module, str], Finish]
"""Takes the leaves of one module: (where to, kind, module, prefix of its names)."""


def add_state(leaves: Leaves, kind: str, state: object, take: TakeModule | None = None) -> Finish:
    """Take every leaf of a module, of a list of modules (pipeline chunks), or of nested containers of anything.

    Modules give their ``state_dict()``, persistent buffers included, or the leaves that ``take`` finds; they may also
    stand inside containers. A state that is one tensor has the kind as its FQN, as in ``{"model": tensor}``. Return the
    function that puts loaded objects back. Raises StateError if two leaves have one name, a key is no string or int, or
    something cannot be read this way.
    """
    where, take_module = f"states[{kind!r}]", take or add_module
    if isinstance(state, (list, tuple)) and state and all(isinstance(part, nn.Module) for part in state):
        return in_turn([take_module(leaves, kind, part, "") for part in state])
    if isinstance(state, torch.Tensor):
        leaves.add_all(kind, _with_memory(leaves, kind, [(kind, state)]))
        return in_turn([])
    if not isinstance(state, (nn.Module, Mapping, list, tuple)):
        raise StateError(
            f"{where} is a {type(state).__name__}; pass a module, a list of modules, a nested mapping or a tensor"
        )
    if is_flat(state):
        leaves.add_all(kind, _with_memory(leaves, kind, state.items()))
        return in_turn([])
    finishes: list[Finish] = []
    paths: dict[ObjectKey, Path] = {}

    def found() -> Iterator[tuple[str, Any]]:
        for path, leaf in walk(state, where):
            name = dotted(path)
            if isinstance(leaf, torch.Tensor):
                yield name, leaf
            elif isinstance(leaf, nn.Module):
                finishes.append(take_module(leaves, kind, leaf, f"{name}." if path else ""))
            elif isinstance(leaf, torch.optim.Optimizer):
                raise StateError(
                    f"{where} has an optimizer at {name!r}; pass it, or a list of them, as states['optimizer']"
                )
            else:
                paths[kind, name] = path
                yield name, leaf

    leaves.add_all(kind, _with_memory(leaves, kind, found()))
    return in_turn([*finishes, lambda objects: _put_all(state, paths, objects, where)])


def _with_memory(leaves: Leaves, kind: str, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of a state outside of modules. Raises StateError if a load has no memory to fill."""
    for name, leaf in named:
        if leaves.loading and isinstance(leaf, torch.Tensor):
            refuse_meta(kind, name, leaf, leaves.rank)
        yield name, leaf


class ParamNames:
    """Finds the FQNs of a parameter by identity, or by memory if only a plain state dict was passed."""

    def __init__(self, leaves: Leaves, state: object, saved: CheckpointNames | None = None) -> None:
        self._named: Mapping[str, Leaf] = {**leaves.tensors.get("model", {}), **leaves.originals}
        self._state, self._saved = state, saved
        self._by_id = self._indexed(self._named.items())
        for key, names in self._hidden.items() if saved is not None else ():
            known = self._by_id.get(key, [])
            if more := [fqn for fqn in names if fqn not in known]:
                self._by_id[key] = self.in_order([*known, *more])

    def in_order(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of one parameter, the best one first.

        A name with optimizer states in the checkpoint comes first, then one with hyper-parameters: libraries choose
        different names of a tied parameter. The next criteria are a name in the state dict of the target, and a name
        in the checkpoint's model.
        """
        return sorted(names, key=self._place) if len(names) > 1 else names

    def _place(self, fqn: str) -> tuple[bool, bool, bool, bool, str]:
        lacks = self._saved is None or ("model", fqn) not in self._saved.rows
        no_states, no_hyper = (not self._has_entries(f"{section}.{fqn}.") for section in ("state", "param_groups"))
        return no_states, no_hyper, fqn not in self._named, lacks, fqn

    def _has_entries(self, prefix: str) -> bool:
        names = self._optimizer_names
        place = bisect_left(names, prefix)
        return place < len(names) and names[place].startswith(prefix)

    def _indexed(self, named: Iterable[tuple[str, Leaf]]) -> dict[int, Sequence[str]]:
        """Return the names of each leaf by its ``id``."""
        names_by_id: dict[int, list[str]] = {}
        for fqn, leaf in named:
            names_by_id.setdefault(id(leaf), []).append(fqn)
        return {key: self.in_order(names) for key, names in names_by_id.items()}

    @cached_property
    def _optimizer_names(self) -> list[str]:
        """The sorted names of the checkpoint's optimizer entries; only ties ask for them."""
        return [] if self._saved is None else sorted(name for _, name in self._saved.names("optimizer"))

    @cached_property
    def _hidden(self) -> dict[int, Sequence[str]]:
        return self._indexed(_parameters(self._state))

    @cached_property
    def _by_memory(self) -> dict[object, Sequence[str]]:
        """The names by memory, which is slow to compare, and rarely needed."""
        names_by_memory: dict[object, list[str]] = {}
        for fqn, tensor in self._named.items():
            if _has_memory(tensor):
                names_by_memory.setdefault(memory(tensor), []).append(fqn)
        return {key: self.in_order(names) for key, names in names_by_memory.items()}

    def __call__(self, parameter: torch.Tensor) -> Sequence[str]:
        """Return the parameter's FQN, and the FQNs tied to it. Raises StateError if the model lacks the parameter."""
        names = self._by_id.get(id(parameter)) or self._hidden.get(id(parameter))
        if names is None and _has_memory(parameter):
            names = self._by_memory.get(memory(parameter))
        if names is None:
            raise StateError(
                f"states['optimizer'] has a parameter of shape {shape_of(parameter)} that is not in states['model'];"
                " pass the model that the optimizer was built for as well: parameters get their names from it"
            )
        return names


def put(container: Any, path: Path, value: object, where: str) -> Any:
    """Set a leaf at a path of nested containers, and return the outermost container.

    A tuple with a changed item is replaced by a new tuple. Raises StateError if a container on the path can neither be
    changed nor rebuilt.
    """
    if not path:
        return value
    key, rest = path[0], path[1:]
    old = container.get(key) if isinstance(container, Mapping) else container[key]
    new = put(old, rest, value, where)
    if new is old or (type(new) in (bool, int, float, str, bytes) and same_value(new, old)):
        return container
    if same_generator(old, new):
        set_generator(old, new)
        return container
    if isinstance(container, (MutableMapping, list)):
        container[key] = new
        return container
    if isinstance(container, tuple):
        items = [*container[:key], new, *container[key + 1 :]]
        return container._make(items) if hasattr(container, "_make") else type(container)(items)  # _make: namedtuple
    raise StateError(f"{where}: cannot set {key!r} in a {type(container).__name__}; use a dict")


def _at(container: Any, path: Path) -> Any:
    for key in path:
        container = container.get(key) if isinstance(container, Mapping) else container[key]
    return container


def _put_all(root: object, paths: Mapping[ObjectKey, Path], objects: Mapping[ObjectKey, Any], where: str) -> None:
    """Set all those objects that the target has a place for."""
    first: dict[tuple[int, object], ObjectKey] = {}
    for name, path in paths.items():
        if name in objects:
            known = first.setdefault((id(_at(root, path[:-1])), path[-1]), name)
            if known is not name and not same_value(objects[known], objects[name]):
                raise StateError(
                    f"{where}: {known[1]!r} and {name[1]!r} are one place in the target, and the checkpoint has two "
                    "values; give each a dict or list of its own"
                )
    for name, path in paths.items():
        if name in objects and put(root, path, objects[name], where) is not root:
            raise StateError(f"{where} is a {type(root).__name__} and cannot be changed in place; pass a dict or list")


def add_module(leaves: Leaves, kind: str, module: nn.Module, prefix: str) -> Finish:
    """Add the leaves of a module; see :class:`~bcp.state.module_target.ModuleTarget` for how they are loaded."""
    kinds = {type(part) for part in module.modules()}
    if any(map(is_fsdp1_type, kinds)):
        raise StateError("the model is wrapped in FSDP1, whose state_dict() communicates; pass framework='fsdp1'")
    if any(base.__name__ == "MegatronFSDP" for part in kinds for base in part.__mro__):
        raise StateError(
            f"the model is wrapped in MegatronFSDP, whose state_dict() communicates; pass its .module, and {ATTACH}"
        )
    if not callable(module.buffers):
        raise StateError(
            f"the model is wrapped in a {type(module).__name__} that is no module of torch's in full, as Megatron's "
            "is; pass framework='megatron'"
        )
    where = f"states[{kind!r}]" + (f", {prefix[:-1]!r}" if prefix else "")
    broadcast = broadcast_buffers(module, kinds)
    module = inner_module(module)
    state = named_state_of(module, where)
    names = cleaned(module, kinds, state)
    fqns = dict(zip(state, [prefix + name for name in names] if prefix else names, strict=True))
    leaves.mark(kind, buffer_marks(broadcast, zip(fqns.values(), state.values(), strict=True)))
    extras = set(filter(is_extra, state))
    for raw in extras:
        leaves.add_object(kind, fqns[raw], state[raw])
    entries = [raw for raw in state if raw not in extras] if extras else state
    leaf: Callable[[str], Any] = state.__getitem__
    finish: Finish = in_turn([])
    if leaves.loading and not is_plain(module, state):
        target = ModuleTarget.of(leaves, kind, module, where, fqns, state, prefix)
        leaf, finish = target.leaf, target.finish
    made = leaves.meta.take(kind, module, where, fqns, state) if leaves.meta is not None else {}
    for raw in made:
        leaves.stand_in(kind, fqns[raw], state[raw])
    values = (made[raw] if raw in made else leaf(raw) for raw in entries) if made else map(leaf, entries)
    leaves.add_all(kind, zip(map(fqns.__getitem__, entries), values, strict=True))
    return finish


def is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is FSDP1's wrapper."""
    return is_fsdp1_type(type(module))


def is_fsdp1_type(kind: type) -> bool:
    """Whether modules of that type are FSDP1's wrappers, not Megatron's of that name; FSDP1 need not be imported."""
    named = (base for base in kind.__mro__ if base.__name__ == "FullyShardedDataParallel")
    return any(not base.__module__.startswith("megatron.") for base in named)


def in_turn(finishes: Iterable[Finish]) -> Finish:
    """Make one function of several."""
    functions = list(finishes)

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        for function in functions:
            function(objects)

    return finish


def _parameters(state: object) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the named parameters of a module, of a list of modules, or of modules in nested containers."""
    chunks = isinstance(state, (list, tuple)) and all(isinstance(part, nn.Module) for part in state)
    for path, module in walk(state, "states['model']"):
        if isinstance(module, nn.Module):
            clean, prefix = cleaner(module), f"{dotted(path)}." if path and not chunks else ""
            for raw, parameter in module.named_parameters(remove_duplicate=False):
                yield prefix + clean(raw), parameter


def _has_memory(tensor: Leaf) -> bool:
    """Whether the tensor's memory tells it from others: an empty local shard may stand for any of several tensors."""
    if isinstance(tensor, ShardedLeaf):
        return False
    local = local_tensor(tensor)
    return not is_sharded_tensor(local) and not unsupported(local) and local.numel() > 0
