"""Names of leaves: what wrappers add to them is taken away, and nested containers are flattened into dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from bcp.errors import StateError

__all__ = ["Path", "cleaner", "dotted", "split", "walk"]

Path = tuple[Any, ...]
"""Keys and indices that lead from a container to a leaf."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
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
        segments = name.split(".")
        return ".".join(
            segment
            for index, segment in enumerate(segments)
            if segment not in _WRAPPERS and not (segment == "module" and tuple(segments[: index + 1]) in added)
        )

    return clean


def dotted(path: Path) -> str:
    """Return a path as one name."""
    return ".".join(str(key) for key in path)


def walk(value: object, where: str, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) for all leaves of nested mappings, lists and tuples; empty containers have none.

    Args:
        value: the outermost container.
        where: what it is called in messages, as in ``states['model']``.
        path: leads to ``value``.

    Raises:
        StateError: a key is neither a string nor an int, or a container contains itself.

    """
    if len(path) > 100:  # noqa: PLR2004 -- no real state is that deep, and Python's stack ends at about 1000
        raise StateError(f"{where} is nested more than 100 deep at {dotted(path[:6])!r}...; does it contain itself?")
    if isinstance(value, Mapping):
        for key, child in value.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                at = dotted(path) or "the top"
                raise StateError(
                    f"{where} has the key {key!r} of type {type(key).__name__} at {at}; "
                    "use strings or ints as keys, so that leaves have names"
                )
            yield from walk(child, where, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from walk(child, where, (*path, index))
    else:
        yield path, value


def split(name: str, section: str, fqns: Mapping[str, object]) -> tuple[str, str] | None:
    """Take ``<section>.<fqn>.<key>`` apart, where ``fqn`` is one of ``fqns``; the longest that fits.

    Returns:
        (fqn, key), or None where the name is of another section or parameter.

    """
    head, _, rest = name.partition(".")
    if head != section:
        return None
    cut = rest.rfind(".")
    while cut > 0:
        if rest[:cut] in fqns:
            return rest[:cut], rest[cut + 1 :]
        cut = rest.rfind(".", 0, cut)
    return None
