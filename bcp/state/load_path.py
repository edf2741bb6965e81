"""The way a module takes a state dict back by itself: its overrides and hooks of ``load_state_dict``.

A load fills the memory of plain modules in place and calls none of their methods. Modules with overrides or hooks get
the whole state dict, as from ``load_state_dict`` without bcp.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from bcp.errors import BcpError, MismatchError
from bcp.protocols import Refused
from bcp.state.dtensor import local_tensor
from bcp.state.hooks import is_sharded_tensor, local_shards

__all__ = [
    "POST_HOOKS",
    "PRE_HOOKS",
    "Customs",
    "customs_of",
    "give",
    "inner_module",
    "owned_tensors",
    "place_of",
    "save_customs_of",
    "storages",
    "whole",
]

PRE_HOOKS, POST_HOOKS = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"

_NEUTRAL = ("torch.nn.modules.", "torch.nn.utils.", "torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
"""Modules of torch whose hooks and overrides change nothing where the names are those of this version of torch.

They rename what older versions saved, strip prefixes of wrappers, or let FSDP2 look at its parameters again.
"""

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
}
"""Wrappers with no state of their own, and the name of the module inside."""

_SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


@dataclass(frozen=True, slots=True)
class Customs:
    """Places of a module tree with code of their own on the way of a state dict into the module."""

    # by raw prefix of a module, as text for messages
    before: Mapping[str, str] = field(default_factory=dict)  # hooks and overrides that see entries before the copies
    after: Mapping[str, str] = field(default_factory=dict)  # hooks that run after the copies

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    @property
    def all(self) -> dict[str, str]:
        """One of them for each prefix."""
        return {**self.after, **self.before}


def inner_module(module: nn.Module) -> nn.Module:
    """Return the module inside of DDP's and ``torch.compile``'s wrappers.

    torch calls ``load_state_dict`` of the outermost module only, so an override of the inner one would not run.
    """
    kind: Any = type(module)
    while name := _WRAPPERS.get(_full_name(kind)):
        if any(getattr(module, hooks, ()) for hooks in (PRE_HOOKS, POST_HOOKS, *_SAVE_HOOKS)):
            break
        module = getattr(module, name)
        kind = type(module)
    return module


@cache
def _full_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def customs_of(module: nn.Module, known: tuple[str, ...] = ()) -> Customs:
    """Find the hooks and overrides of a module tree that a load has to run, except those known to change nothing.

    ``known``: prefixes of further Python modules whose hooks and overrides are known to change nothing.
    """
    neutral = (*_NEUTRAL, *known)
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    if _is_custom(_method(module, "load_state_dict"), neutral):
        before[""] = f"load_state_dict() of {type(module).__name__}"
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if "_load_from_state_dict" in part.__dict__ or _overrides(part.__class__, neutral):
            before.setdefault(prefix, f"_load_from_state_dict() of {_called(part, path)}")
        if _has_custom(getattr(part, PRE_HOOKS, None), neutral):
            before.setdefault(prefix, f"the pre-hook of load_state_dict of {_called(part, path)}")
        if _has_custom(getattr(part, POST_HOOKS, None), neutral):
            after[prefix] = f"the post-hook of load_state_dict of {_called(part, path)}"
    return Customs(before, after)


def save_customs_of(module: nn.Module) -> dict[str, str]:
    """Find what ``state_dict()`` of a module tree runs beside torch's own code, as text by raw prefix."""
    found: dict[str, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if _is_custom(_method(part, "state_dict"), _NEUTRAL):
            found[prefix] = f"state_dict() of {_called(part, path)}"
        elif any(_has_custom(getattr(part, hooks, None), _NEUTRAL) for hooks in _SAVE_HOOKS):
            found[prefix] = f"the hook of state_dict of {_called(part, path)}"
    return found


def _called(part: nn.Module, path: str) -> str:
    return f"{type(part).__name__}{f' {path!r}' if path else ''}"


def _method(module: Any, name: str) -> Any:
    return getattr(module, "__dict__", {}).get(name) or getattr(type(module), name)


@cache
def _overrides(kind: Any, neutral: tuple[str, ...]) -> bool:
    return _is_custom(kind._load_from_state_dict, neutral)  # noqa: SLF001 -- torch's name for what a module may override


def _has_custom(hooks: Mapping[int, Any] | None, neutral: tuple[str, ...]) -> bool:
    return bool(hooks) and any(_is_custom(hook, neutral) for hook in (hooks or {}).values())


def _is_custom(function: Any, neutral: tuple[str, ...]) -> bool:
    """Whether a hook or method is neither torch's own nor one of those that change nothing."""
    return not str(getattr(function, "__module__", None)).startswith(neutral)


# -- names and memory ------------------------------------------------------------------------------


def owned_tensors(module: nn.Module) -> dict[str, Any]:
    """Return the tensors that ``load_state_dict`` expects by their raw names; an extra state has None there.

    Modules that are in several places are there under all their names.
    """
    owned: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix, passing = f"{path}." if path else "", part._non_persistent_buffers_set  # noqa: SLF001 -- torch asks it, too
        for held in (part._parameters, part._buffers):  # noqa: SLF001 -- as above
            for name, tensor in held.items():
                if tensor is not None and name not in passing:
                    owned[prefix + name] = tensor
        if type(part).set_extra_state is not nn.Module.set_extra_state:
            owned[f"{prefix}_extra_state"] = None
    return owned


def storages(tensor: torch.Tensor) -> set[object]:
    """Return keys of the memory that a tensor looks at, of which it may use only a part."""
    if is_sharded_tensor(tensor):
        return {key for shard in local_shards(tensor) for key in storages(shard)}
    local = local_tensor(tensor)
    try:
        return {local.untyped_storage()._cdata}  # noqa: SLF001 -- data_ptr() is 0 for every empty storage
    except (RuntimeError, ValueError):  # sparse, opaque, uninitialized ones have none; they are refused with a reason
        return {id(local)}


# -- the call --------------------------------------------------------------------------------------


def give(module: Any, state: Mapping[str, Any], where: str) -> Refused:
    """Let a module, or another owner of a state, take a whole state dict, and return the names that it refused.

    Raises MismatchError if its method raised; the message names the module inside.
    """
    seen: list[Any] = []
    overridden = _method(module, "load_state_dict") is not nn.Module.load_state_dict
    # an override may return nothing, or load parts
    watched = module.modules() if overridden and isinstance(module, nn.Module) else ()
    handles = [part.register_load_state_dict_post_hook(lambda _, keys: seen.append(keys)) for part in watched]
    try:
        result = module.load_state_dict(state, **_not_strict(module.load_state_dict))
    except BcpError:
        raise
    except Exception as error:
        raise MismatchError(
            f"{where}: load_state_dict() of {type(module).__name__}{place_of(error)} raised {type(error).__name__}: "
            f"{error}; repair it, or load into the dict that its state_dict() returns"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    notes = [*seen, *([result] if hasattr(result, "missing_keys") and hasattr(result, "unexpected_keys") else [])]
    return Refused(
        tuple(dict.fromkeys(name for keys in notes for name in keys.missing_keys)),
        tuple(dict.fromkeys(name for keys in notes for name in keys.unexpected_keys)),
    )


def _not_strict(method: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments by which a method returns refused names instead of raising; an override may lack them."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}
    takes = "strict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"strict": False} if takes else {}


def place_of(error: BaseException) -> str:
    """Return the module at whose load an error was raised, as text: torch passes its prefix to every hook."""
    place, trace = "", error.__traceback__
    while trace is not None:
        prefix = trace.tb_frame.f_locals.get("prefix")
        place = prefix[:-1] if isinstance(prefix, str) and prefix.endswith(".") else place
        trace = trace.tb_next
    return f", at {place!r} inside it," if place else ""


def whole(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict with other values, and with the versions of classes that ``state`` has."""
    given = OrderedDict(values)
    if (versions := getattr(state, "_metadata", None)) is not None:
        given._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001 -- as torch keeps them
    return given
