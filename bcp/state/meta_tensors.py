"""Tensors of modules on the meta device: new memory for a load, and the moment in which it becomes theirs.

A parameter keeps its identity: the Python object stays, and ``torch.utils.swap_tensors`` gives it the new memory.
Optimizers, ties and other references go on working.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from bcp.errors import StateError
from bcp.protocols import ObjectKey
from bcp.runtime.accelerator import devices_in_use
from bcp.state.dtensor import is_dtensor, is_ragged, local_tensor, torchs
from bcp.state.hooks import is_hooked, is_sharded_tensor
from bcp.state.load_path import customs_of, storages
from bcp.state.memory import ON_META, is_wrapper, memory, unsupported

__all__ = ["MetaTensors", "refuse_meta"]

_REMEDY = "call to_empty(device=...) of the module before the load"

_CPU = torch.device("cpu")

_PLAIN = frozenset({torch.Tensor, nn.Parameter})

_SHOWN = 10  # names in a message


@dataclass(slots=True)
class _Replaced:
    """One tensor on the meta device."""

    tensor: torch.Tensor
    filled: torch.Tensor  # an equal tensor with new memory, not yet the module's
    names: set[ObjectKey]  # of all tensors of this memory


@dataclass(slots=True)
class MetaTensors:
    """The meta tensors of the modules of one load, and their new memory."""

    _replaced: dict[int, _Replaced] = field(default_factory=dict)  # by ``id`` of the meta tensor
    # new memory and its names, by the key of the old
    _memory: dict[object, tuple[torch.Tensor, set[ObjectKey]]] = field(default_factory=dict)
    _storages: dict[object, object] = field(default_factory=dict)  # that key, by each storage

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def take(
        self, kind: str, module: nn.Module, where: str, fqns: Mapping[str, str], state: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the new memory of a module's entries by their raw names; nothing of the module changes.

        Tensors are made on the CPU. In a module with DTensors all are made on the device of their mesh, DTensors with
        the shard of this rank only. Meta tensors of other kinds are left out, and refused where they are read.

        Raises StateError if an entry could not take its memory afterwards, or the state dict lacks a meta tensor.
        """
        found = {raw: value for raw, value in state.items() if _is_replaceable(value)}
        if not found:
            return {}
        _check_others(module, where, state)
        _check_hooks(module, where, found)
        device = next((_device(value, where, raw) for raw, value in state.items() if is_dtensor(value)), _CPU)
        return {raw: self._new(value, device, kind, fqns[raw]) for raw, value in found.items()}

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that has the new memory of a meta tensor; None for any other tensor."""
        known = self._replaced.get(id(tensor))
        return None if known is None else known.filled

    def hand_over(self, loaded: Collection[ObjectKey]) -> None:
        """Give the new memory to all tensors of which one name was loaded; the others stay on the meta device.

        Raises StateError before anything changes.
        """
        ready = [entry for entry in self._replaced.values() if not entry.names.isdisjoint(loaded)]
        for entry in ready:
            _check_swap(entry.tensor, min(entry.names))
        for entry in ready:
            torch.utils.swap_tensors(entry.tensor, entry.filled)

    def _new(self, tensor: torch.Tensor, device: torch.device, kind: str, fqn: str) -> torch.Tensor:
        """Return new memory for one entry: that of its ties, if it has any."""
        key = memory(tensor)
        _check_swap(tensor, (kind, fqn))
        for storage in storages(tensor):
            if self._storages.setdefault(storage, key) != key:
                raise StateError(
                    f"{kind} tensor {fqn!r} is on the meta device and shares a part of its memory with another tensor; "
                    f"{_REMEDY}"
                )
        if key not in self._memory:
            self._memory[key] = torch.empty_like(tensor.detach(), device=device), set()
        made, names = self._memory[key]
        names.add((kind, fqn))
        if id(tensor) not in self._replaced:
            self._replaced[id(tensor)] = _Replaced(tensor, _alike(tensor, made), names)
        return made


def refuse_meta(kind: str, name: str, tensor: torch.Tensor, rank: int) -> None:
    """Raise StateError for a tensor on the meta device that is not in a module."""
    if type(tensor) in _PLAIN and tensor.is_meta and unsupported(tensor) == ON_META:
        raise StateError(
            f"{kind} tensor {name!r} on rank {rank} {ON_META}, or pass the module that has it: a load gives memory to "
            "tensors of modules only"
        )


def _is_replaceable(value: object) -> bool:
    """Whether a value is a tensor on the meta device of a kind that a load can make."""
    if not _is_meta(value):
        return False
    local = local_tensor(value)
    if is_ragged(value) or is_hooked(local) or is_wrapper(type(local)) or unsupported(value) != ON_META:
        return False
    return local.layout is torch.strided and not (local.is_nested or local.is_quantized)


def _is_meta(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor on the meta device; other tensors than torch's own are asked with care."""
    if type(value) in _PLAIN:
        return bool(value.is_meta)
    if type(value) is torchs("DTensor"):
        return local_tensor(value).is_meta
    return isinstance(value, torch.Tensor) and not is_sharded_tensor(value) and unsupported(value) == ON_META


def _device(tensor: Any, where: str, raw: str) -> torch.device:
    """Return the device of this rank in the mesh of a DTensor: the caller's current one."""
    device = torch.device(tensor.device_mesh.device_type)
    if device != _CPU and not devices_in_use():  # then the current device of the caller was not asked either
        raise StateError(
            f"{where} has tensors on the meta device. The mesh of {raw!r} is on {device.type}, of which this process "
            "uses no device yet; make a tensor on the device of this rank before the load, as in "
            f"torch.empty(1, device='{device.type}:0')"
        )
    return device


def _alike(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the new memory with the class, the attributes and the ``requires_grad`` of another one."""
    if is_dtensor(tensor) and isinstance(tensor, nn.Parameter):
        alike: torch.Tensor = nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif is_dtensor(tensor) or type(tensor) is torch.Tensor:
        alike = made.detach().requires_grad_(tensor.requires_grad)
    else:
        alike = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)  # noqa: SLF001 -- torch's way
        for slot in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]  # noqa: SLF001 -- as swap_tensors
            if hasattr(tensor, slot):
                setattr(alike, slot, getattr(tensor, slot))
    alike.__dict__.update(tensor.__dict__)
    return alike


# -- what is refused -------------------------------------------------------------------------------


def _check_others(module: nn.Module, where: str, state: Mapping[str, Any]) -> None:
    """Raise StateError for meta tensors that are not in the state dict, as non-persistent buffers."""
    known = set(map(id, state.values()))
    lost = [name for name, tensor in _tensors(module) if id(tensor) not in known and _is_meta(tensor)]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise StateError(
            f"{where} has {len(lost)} tensors on the meta device that its state_dict() lacks, as non-persistent "
            f"buffers: {', '.join(map(repr, lost[:_SHOWN]))}{more}; no checkpoint has their values. Build them on a "
            f"real device, or {_REMEDY} and initialise them again"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_hooks(module: nn.Module, where: str, found: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError for load hooks that would see meta tensors before the copies."""
    for prefix, text in customs_of(module).before.items():
        raw = next((raw for raw in found if raw.startswith(prefix)), None)
        if raw is not None:
            raise StateError(f"{where}: {text} loads {raw!r}, which is on the meta device; {_REMEDY}")


def _check_swap(tensor: torch.Tensor, name: ObjectKey) -> None:
    """Raise StateError if a tensor cannot be given other memory."""
    reason = ""
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # noqa: SLF001 -- torch has no other way to ask
        reason = "has hooks of its gradient; register them after the load"
    elif weakref.getweakrefs(tensor):
        reason = f"has weak references to it, so that torch cannot give it memory; {_REMEDY}"
    elif not _is_held_once(tensor):
        reason = f"has views or a graph of autograd, so that torch cannot give it memory; {_REMEDY}"
    if reason:
        raise StateError(f"{name[0]} tensor {name[1]!r} is on the meta device and {reason}")


def _is_held_once(tensor: Any) -> bool:
    """Whether ``torch.utils.swap_tensors`` would accept what refers to a tensor: at most its gradient's node."""
    count = tensor._use_count()  # noqa: SLF001 -- what swap_tensors asks
    if count == 1:
        return True
    if count > 2 or not (tensor.is_leaf and tensor.requires_grad):  # noqa: PLR2004 -- the tensor and the node
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return bool(node is not None and tensor._use_count() == count)  # noqa: SLF001 -- a node made just now counts
