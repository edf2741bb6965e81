"""Hyper-parameters by parameter, of state dicts that have them by group: ``bcp.load`` looks for them there."""

from __future__ import annotations

from collections.abc import Mapping

from bcp.dcp.names import GROUPS
from bcp.errors import CheckpointError
from bcp.protocols import ObjectKey
from bcp.state.values import decode_value

__all__ = ["by_parameter", "is_of_group"]

_LISTS = frozenset({"params", "param_names"})
"""Entries of a group with one item for each parameter; they are no hyper-parameters."""

_BEGINS = f"{GROUPS}param_groups."


def is_of_group(key: ObjectKey) -> bool:
    """Whether a value belongs to a group with a number."""
    return key[0] == "optimizer" and key[1].startswith(_BEGINS)


def by_parameter(values: Mapping[ObjectKey, str]) -> dict[ObjectKey, str]:
    """Return the hyper-parameters of groups under the names of their parameters, as text.

    Args:
        values: of all groups, as text: ``dcp.param_groups.0.lr``, and the names of the parameters in
            ``dcp.param_groups.0.params``. A group whose parameters have no names is left out.

    Example:
        >>> group = {"params": '["w","b"]', "lr": "0.1"}
        >>> by_parameter({("optimizer", f"dcp.param_groups.0.{key}"): text for key, text in group.items()})
        {('optimizer', 'param_groups.w.lr'): '0.1', ('optimizer', 'param_groups.b.lr'): '0.1'}
    """
    groups: dict[str, dict[str, str]] = {}
    for (kind, name), text in sorted(values.items()):
        number, _, entry = name.removeprefix(_BEGINS).partition(".")
        if is_of_group((kind, name)) and entry:
            groups.setdefault(number, {})[entry] = text
    return {
        ("optimizer", f"param_groups.{fqn}.{entry}"): text
        for entries in groups.values()
        for fqn in _parameters(entries.get("params", "[]"))
        for entry, text in entries.items()
        if entry not in _LISTS
    }


def _parameters(text: str) -> list[str]:
    """Return the names of a group's parameters; nothing for numbers, which ``Optimizer.state_dict()`` has."""
    try:
        names = decode_value(text, allow_pickle=False, where="param_groups")
    except CheckpointError:  # pickled objects
        return []
    return names if isinstance(names, list) and all(type(name) is str for name in names) else []
