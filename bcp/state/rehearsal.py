"""A load is tried on a copy of a module, so that the names it refuses are known before a byte is read."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcp.protocols import Refused
from bcp.state.load_path import POST_HOOKS, PRE_HOOKS, give, storages
from bcp.state.tensor_specs import PLAIN

__all__ = ["rehearsed"]


def rehearsed(module: nn.Module, state: Mapping[str, Any], where: str) -> Refused | None:
    """Let a copy of a module take a state dict with the module's own values, and return the names that it refused.

    The copy has modules and attributes of its own, and the tensors of the original, which are not written to. Returns
    None if no copy can be made. Raises MismatchError as :func:`give` does.
    """
    try:
        double = _Doubles().of(module)
    except Exception:  # noqa: BLE001 -- a class may refuse anything; the names are compared after the load then
        return None
    memory = {key for tensor in (*module.parameters(), *module.buffers()) for key in storages(tensor)}
    with torch.no_grad(), _Unwritten(memory):
        return give(double, state, where)


@dataclass(slots=True)
class _Doubles:
    """Copies of modules that share their tensors' memory."""

    modules: dict[int, nn.Module] = field(default_factory=dict)  # by ``id`` of the original
    tensors: dict[int, Any] = field(default_factory=dict)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module and of all that is inside."""
        if id(module) in self.modules:
            return self.modules[id(module)]
        double: Any = object.__new__(type(module))
        self.modules[id(module)] = double
        for name, value in module.__dict__.items():
            double.__dict__[name] = copy(value) if isinstance(value, (dict, list, set)) else value
        held = double.__dict__
        for tensors in (held["_parameters"], held["_buffers"]):
            for name, tensor in tensors.items():
                tensors[name] = self._tensor(tensor)
        for name, child in held["_modules"].items():
            held["_modules"][name] = None if child is None else self.of(child)
        for attribute in (PRE_HOOKS, POST_HOOKS):
            hooks = held.get(attribute, {})
            for key, hook in hooks.items():
                hooks[key] = self._hook(hook, double)
        return self.modules[id(module)]

    def _tensor(self, tensor: Any) -> Any:
        if type(tensor) not in PLAIN:
            return tensor
        if id(tensor) not in self.tensors:
            double = tensor.detach()
            if isinstance(tensor, nn.Parameter):
                double = nn.Parameter(double, tensor.requires_grad)
                double.__dict__.update(tensor.__dict__)
            self.tensors[id(tensor)] = double
        return self.tensors[id(tensor)]

    def _hook(self, hook: Any, double: nn.Module) -> Any:
        """Bind a hook to the copy where it is bound to a module."""
        if getattr(hook, "with_module", False):
            return type(hook)(self._hook(hook.hook, double), double)
        if hasattr(hook, "with_module"):
            return type(hook)(self._hook(hook.hook, double))
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, nn.Module) and isinstance(hook, types.MethodType):
            return types.MethodType(hook.__func__, self.modules.get(id(owner), double))
        return hook


class _Unwritten(TorchDispatchMode):
    """Leaves out every operation that would write into some memory."""

    def __init__(self, memory: Collection[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, schema = kwargs or {}, func._schema  # noqa: SLF001 -- torch's only name for it
        written = [
            value
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in _tensors(args[number] if number < len(args) else given.get(argument.name))
        ]
        if any(not storages(value).isdisjoint(self._memory) for value in written):
            return written[0] if len(schema.returns) == 1 and len(written) == 1 else tuple(written)
        return func(*args, **given)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return (tensor for tensor in values if isinstance(tensor, torch.Tensor))
