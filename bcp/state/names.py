"""Names of leaves: prefixes of wrappers are removed, and nested containers are flattened into dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from bcp.errors import StateError

__all__ = ["Path", "cleaned", "cleaner", "dotted", "key_text", "split", "walk"]

Path = tuple[Any, ...]
"""Keys and indices that lead from a container to a leaf."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_SECTIONS = ("state", "param_groups")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)


def cleaner(module: nn.Module) -> Callable[[str], str]:
    """Return the function that maps the names a wrapped module uses to those of the module inside.

    ``torch.compile``, activation checkpointing and FSDP add a segment that nobody else uses. DDP adds ``module``,
    which users do use: it is dropped only where a DDP module really is the parent.
    """
    added = {
        tuple(filter(None, [*path.split("."), "module"]))
        for path, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, _PARALLEL)
    }

    def clean(name: str) -> str:
        if not added and not _may_be_wrapped(name):
            return name
        segments = name.split(".")
        return ".".join(
            segment
            for index, segment in enumerate(segments)
            if segment not in _WRAPPERS and not (segment == "module" and tuple(segments[: index + 1]) in added)
        )

    return clean


def cleaned(module: nn.Module, kinds: Collection[type], names: Iterable[str]) -> Sequence[str]:
    """Clean the names that a module uses; most need no change. ``kinds`` are the types of all the modules inside."""
    given = list(names)
    if any(issubclass(kind, _PARALLEL) for kind in kinds) or _may_be_wrapped("\n".join(given)):
        return list(map(cleaner(module), given))
    return given


def _may_be_wrapped(name: str) -> bool:
    return any(segment in name for segment in _WRAPPERS)


def dotted(path: Path) -> str:
    """Return a path as one name."""
    return key_text(path[0]) if len(path) == 1 else ".".join(map(key_text, path))


def key_text(key: object) -> str:
    """Return a key as text. Raises StateError for an integer of so many digits that Python does not write it."""
    try:
        return str(key)
    except ValueError as error:
        raise StateError(f"a key of a container has no name, because {error}; use a shorter key") from error


def walk(value: Any, where: str, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) for all leaves of nested mappings, lists and tuples; empty containers have none.

    ``where`` names the value in messages, as in ``states['model']``. ``path`` leads to it. Raises StateError if a key
    is neither a string nor an int, or a container contains itself.
    """
    if len(path) > 100:  # noqa: PLR2004 -- no real state is that deep, and Python's stack ends at about 1000
        raise StateError(f"{where} is nested more than 100 deep at {dotted(path[:6])!r}...; does it contain itself?")
    kind = _container(value.__class__)
    if kind is None:
        yield path, value
        return
    if kind is Mapping:
        _check_keys(value, where, path)
    children: Iterable[tuple[Any, Any]] = value.items() if kind is Mapping else enumerate(value)
    for key, child in children:
        if _container(child.__class__) is None:
            yield (*path, key), child
        else:
            yield from walk(child, where, (*path, key))


@cache
def _container(kind: type) -> type | None:
    """Return Mapping or list for the types that :func:`walk` goes into: isinstance() of a Mapping takes 0.5 us."""
    if issubclass(kind, Mapping):
        return Mapping
    return list if issubclass(kind, (list, tuple)) else None


def _check_keys(value: Any, where: str, path: Path) -> None:
    """Raise StateError for a key that cannot be a part of a name."""
    for key in value:
        if type(key) is not str and (isinstance(key, bool) or not isinstance(key, (str, int))):
            place = dotted(path) or "the top"
            raise StateError(
                f"{where} has the key {key!r} of type {type(key).__name__} at {place}; "
                "use strings or ints as keys, so that leaves have names"
            )


def split(name: str, fqns: Collection[str]) -> tuple[str, str, str] | None:
    """Return (section, fqn, key) of a name, with the longest of ``fqns`` that fits; None if no section or FQN fits."""
    section, _, rest = name.partition(".")
    cut = rest.rfind(".") if section in _SECTIONS else -1
    while cut > 0:
        if rest[:cut] in fqns:
            return section, rest[:cut], rest[cut + 1 :]
        cut = rest.rfind(".", 0, cut)
    return None
