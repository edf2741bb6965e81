"""Questions that every adapter asks before it saves or loads anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bcp.errors import InputError, MismatchError, StateError

__all__ = ["check_ids", "check_reader", "check_units", "compare", "fields_of", "methods_of"]


def check_reader(adapter: str, reader: int, readers: int) -> None:
    """Refuse a reader that is not among the readers."""
    if not 0 <= reader < readers:
        raise InputError(f"{adapter}(reader={reader}, readers={readers}): need 0 <= reader < readers")


def check_ids(ids: Sequence[str], expected: Iterable[str]) -> None:
    """Refuse ids of a checkpoint that are not exactly the expected ones."""
    wanted = set(expected)
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise StateError(f"units of the dataloader are in the checkpoint twice: {twice[:8]}")
    if wanted != set(ids):
        raise StateError(
            f"the checkpoint lacks units {sorted(wanted - set(ids))[:8]} of the dataloader, and has foreign ones"
            f" {sorted(set(ids) - wanted)[:8]}"
        )


def check_units(units: Mapping[str, Any], wanted: Iterable[str], reader: int, readers: int) -> None:
    """Refuse units that are not exactly those that a reader loads."""
    names = set(wanted)
    if names != units.keys():
        raise StateError(
            f"reader {reader} of {readers} lacks units {sorted(names - units.keys())[:8]} of the dataloader, and has"
            f" foreign ones {sorted(units.keys() - names)[:8]}"
        )


def compare(own: Mapping[str, Any], shared: Any, advice: Mapping[str, str] | None = None) -> None:
    """Refuse the shared state of another adapter, or of a run with other values.

    Args:
        own: the shared state of this reader.
        shared: the shared state of the checkpoint.
        advice: the remedy for each value that may differ, by its name.

    """
    if not isinstance(shared, Mapping) or shared.keys() != own.keys() or shared["adapter"] != own["adapter"]:
        raise StateError(f"the checkpoint has no state of {own['adapter']}: its shared state is {shared!r:.200}")
    for name, value in own.items():
        if shared[name] != value:
            remedy = (advice or {}).get(name, "a run keeps it")
            raise MismatchError(
                f"{own['adapter']}: {name} is {value!r:.200}, but {shared[name]!r:.200} in the checkpoint; {remedy}"
            )


def fields_of(name: str, state: Any, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return a unit's fields, after a look at their types."""
    if not isinstance(state, Mapping) or state.keys() != fields.keys():
        raise StateError(f"unit {name!r} is no state of this dataloader: it has to have the fields {sorted(fields)}")
    for field, kind in fields.items():
        if not isinstance(state[field], kind):
            raise StateError(f"unit {name!r} of the dataloader is damaged: {field} is {state[field]!r:.100}")
    return dict(state)


_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def methods_of(adapter: str, loader: Any) -> tuple[Any, Any]:
    """Return the two methods that read and write the state of a loader, under the name that it has for them."""
    for names in _METHODS:
        read, write = (getattr(loader, name, None) for name in names)
        if callable(read) and callable(write):
            return read, write
    raise InputError(
        f"{adapter}: {type(loader).__name__} has neither state_dict() and load_state_dict() nor get_state() and"
        " set_state(); pass the object that has the state"
    )
