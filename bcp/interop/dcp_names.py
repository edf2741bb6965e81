"""Names of torch.distributed.checkpoint as names of bcp: ``model.X`` is the model's X where a dict was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from bcp.errors import CheckpointError

__all__ = ["Name", "by_parameter", "names_of"]

Name = tuple[str, str]
_WRAPPER = "app"
"""The key of model and optimizer in torch's own tutorial."""

_OPTIMIZERS = ("optim", "optimizer")
_SECTIONS = ("state", "param_groups")
_GROUP = re.compile(r"param_groups\.\d{1,9}\.params")


def names_of(keys: Iterable[str], paths: Mapping[str, tuple[Any, ...]], where: str) -> dict[str, Name]:
    """Return (kind, name) of each key.

    A state ``{"model": ..., "optim": ...}`` of ``get_state_dict`` has the kinds model and optimizer. Everything else
    belongs to the model, by its own name.

    Args:
        keys: of the library.
        paths: where each key was in the saved state, if the library says so.
        where: the checkpoint in messages.

    Raises:
        CheckpointError: two keys get one name.

    """
    keys = list(keys)
    guessed = {} if paths else _guessed(keys)
    named = {key: _name(key, paths.get(key) or guessed.get(key) or (key,)) for key in keys}
    owner: dict[Name, str] = {}
    for key, name in named.items():
        if owner.setdefault(name, key) != key:
            raise CheckpointError(
                f"{where} has {owner[name]!r} and {key!r}, and both are {name[0]}: {name[1]} here; rename a key, and "
                "save it anew"
            )
    return named


def _guessed(keys: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the paths of keys if all begin with the name of a part; else none."""
    cut = {key: tuple(key.split(".", 1)) for key in keys}
    return cut if all(path[0] in ("model", *_OPTIMIZERS) and len(path) > 1 for path in cut.values()) else {}


def _name(key: str, path: tuple[Any, ...]) -> Name:
    part = path[1:] if path[0] == _WRAPPER and len(path) > 2 else path  # noqa: PLR2004 -- a wrapper, a part, a name
    inside = ".".join(map(str, part[1:]))
    if part[0] == "model" and inside:
        return "model", inside
    if part[0] in _OPTIMIZERS and inside.partition(".")[0] in _SECTIONS:
        return "optimizer", inside
    return "model", key


def by_parameter(values: Mapping[Name, str]) -> dict[Name, str]:
    """Return the hyper-parameters of numbered groups by parameter.

    A state without flattened groups has ``param_groups.0.lr``, and the names in the group as ``param_groups.0.params``.
    """
    members = {
        path.removesuffix(".params"): json.loads(text)
        for (kind, path), text in values.items()
        if kind == "optimizer" and _GROUP.fullmatch(path)
    }
    found: dict[Name, str] = {}
    for (kind, path), text in values.items():
        group, _, key = path.rpartition(".")
        names = members.get(group) if kind == "optimizer" else None
        if not isinstance(names, list) or not names:
            found[kind, path] = text
        elif key != "params":
            found.update(((kind, f"param_groups.{name}.{key}"), text) for name in names)
    return found
