"""Nested values with tensors inside: a tree without the tensors, and the tensors by name.

The tree is a value like any other. A load makes the tensors by their names before it knows the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bcp.errors import CheckpointError, StateError

__all__ = ["STORAGES", "TREE", "holds_tensors", "is_key", "is_turned", "leaves_of", "planted", "uprooted"]

TREE = ":tree"
"""Ending of the name of a tree; the tensors of ``a:tree`` are ``a`` itself, or ``a.<path>``."""

STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_OF_MEMORY = (torch.Tensor, *STORAGES)

_MARK = "bcp:tensor"
_MOST_LEVELS = 100


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor or a storage, or a container with one in it."""
    if isinstance(value, _OF_MEMORY):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_tensors, value))


def uprooted(value: Any, name: str, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the tree of a value named ``name``, and the tensors by name; ``where`` is for messages.

    Raises StateError if a key on the way to a tensor is neither a string nor an int.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _uprooted(value, name, where, tensors, 0), tensors


def _uprooted(value: Any, name: str, where: str, tensors: dict[str, torch.Tensor], level: int) -> Any:
    if level > _MOST_LEVELS:
        raise StateError(f"{where} is nested more than {_MOST_LEVELS} deep; does it contain itself?")
    if isinstance(value, torch.Tensor):
        if name in tensors:
            raise StateError(f"{where} has two tensors named {name!r}; rename a key")
        tensors[name] = value
        return (_MARK, name, value.stride()) if is_turned(value) else (_MARK, name)
    if isinstance(value, STORAGES):
        raise StateError(f"{where} is a {type(value).__name__}, which has no shape; pass a tensor of it")
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if not holds_tensors(value):
        return value
    if isinstance(value, Mapping):
        _check_keys(value, where)
        made = {key: _uprooted(child, f"{name}.{key}", where, tensors, level + 1) for key, child in value.items()}
        return OrderedDict(made) if type(value) is OrderedDict else made
    items = [_uprooted(child, f"{name}.{number}", where, tensors, level + 1) for number, child in enumerate(value)]
    if isinstance(value, tuple) and type(value) is not tuple:
        raise StateError(f"{where} has tensors in a {type(value).__name__}; use a tuple, a list or a dict")
    return items if isinstance(value, list) else tuple(items)


def is_key(key: object) -> bool:
    """Whether a key of a dict is a constant that another process finds again."""
    if type(key) is tuple:
        return all(map(is_key, key))
    return key is None or type(key) in (str, int, float, bool, bytes)


def _check_keys(value: Mapping[Any, Any], where: str) -> None:
    for key in value:
        if not is_key(key):
            raise StateError(
                f"{where} has a {type(key).__name__} as a key, which no other process finds again; use strings, "
                "numbers, or tuples of them as keys"
            )


def planted(tree: Any, tensors: Callable[[str], torch.Tensor | None]) -> Any:
    """Return the value of a tree; ``tensors`` gives them by name. Raises CheckpointError where one is missing."""
    if type(tree) is tuple and len(tree) > 1 and tree[0] == _MARK:
        tensor = tensors(tree[1])
        if tensor is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {tree[1]!r}; load another checkpoint")
        return tensor if tree[2:] in ((), (tensor.stride(),)) else _turned(tensor, tree[2])
    if isinstance(tree, Mapping):
        children = [(key, planted(child, tensors)) for key, child in tree.items()]
        if all(child is tree[key] for key, child in children):
            return tree
        return OrderedDict(children) if type(tree) is OrderedDict else dict(children)
    if type(tree) in (list, tuple):
        return type(tree)(planted(child, tensors) for child in tree)
    return tree


def is_turned(value: torch.Tensor) -> bool:
    """Whether a whole tensor has other strides than a new one, as eigenvectors do: products differ in last bits."""
    return type(value) is torch.Tensor and value.layout is torch.strided and value.dim() > 1 and _is_dense(value)


def _is_dense(value: torch.Tensor) -> bool:
    return not value.is_contiguous() and torch.empty_like(value, device="meta").stride() == value.stride()


def _turned(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of these strides, if memory without gaps has them."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    if not is_turned(made):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def leaves_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from leaves_of(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from leaves_of(child)
