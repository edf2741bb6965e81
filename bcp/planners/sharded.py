"""Sharded states among the dataloader's: found, asked for their units, and told apart from opaque objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bcp.errors import BcpError, InputError, StateError
from bcp.plan.save.units import Claim, unit_path
from bcp.plan.shards import OPAQUE_KINDS
from bcp.planners.unit_image import Image, image_of
from bcp.protocols import ShardedState, Stateful, States

__all__ = ["Units", "collect_units", "opaque_states", "sharded_states"]

DATALOADER = "dataloader"


@dataclass(frozen=True, slots=True)
class Units:
    """What the sharded states of this rank consist of.

    Attributes:
        claims: what the rank says of each.
        images: of every path in the claims (see :meth:`~bcp.plan.save.units.Claim.paths`).
    """

    claims: Sequence[Claim]
    images: Mapping[str, Image]


def sharded_states(states: States) -> dict[str, ShardedState]:
    """Find the sharded states: ``states["dataloader"]`` itself, or values of its mappings, by their keys.

    Returns:
        Name to state; a name consists of keys joined by ``/``, and is empty for ``states["dataloader"]`` itself.

    Raises:
        InputError: two of them would have one name.

    """
    found: dict[str, ShardedState] = {}
    _find(states.get(DATALOADER), "", found)
    return found


def _find(value: Any, name: str, found: dict[str, ShardedState]) -> None:
    if isinstance(value, ShardedState):
        if name in found:
            raise InputError(f"two dataloader states would be named {name!r}; rename one of the keys")
        found[name] = value
    elif _is_container(value):
        for key, child in value.items():
            _find(child, f"{name}/{key}" if name else str(key), found)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, Stateful)


def opaque_states(states: States) -> dict[str, Any]:
    """Return what is stored as one opaque object a rank, by kind: extra states, and a dataloader without its units.

    A dataloader of which nothing is left has none.
    """
    opaque = {kind: states[kind] for kind in OPAQUE_KINDS if kind in states}
    if sharded_states(states):
        rest = _rest(opaque.pop(DATALOADER))
        if rest:
            opaque[DATALOADER] = rest
    return opaque


def _rest(value: Any) -> Any:
    """Return a mapping without the sharded states in it, and without mappings that held nothing else."""
    if isinstance(value, ShardedState):
        return None
    if not _is_container(value):
        return value
    kept = {key: (child, _rest(child)) for key, child in value.items()}
    return {key: rest for key, (child, rest) in kept.items() if not _is_gone(child, rest)}


def _is_gone(child: Any, rest: Any) -> bool:
    return isinstance(child, ShardedState) or (_is_container(child) and len(child) > 0 and not rest)


def collect_units(states: States, *, trust: bool) -> Units:
    """Ask the sharded states for their units.

    Raises:
        InputError: an id is no text, or is empty, or has a slash.
        StateError: a state raised, or something in a unit cannot be serialized.

    """
    claims, images = [], {}
    for name, state in sorted(sharded_states(states).items()):
        where = f"dataloader {name!r}" if name else "dataloader"
        shared, units = _asked(state, where)
        for unit in units:
            if not isinstance(unit, str) or not unit or "/" in unit:
                raise InputError(f"{where}: {unit!r} is no id of a unit; ids are texts without a slash")
        claim = Claim(name, int(state.reader), int(state.readers), tuple(units))
        claims.append(claim)
        images[unit_path(name)] = image_of(shared, f"{where}: its shared state", trust=trust)
        for unit, value in units.items():
            images[unit_path(name, unit)] = image_of(value, f"{where}, unit {unit!r}", trust=trust)
    return Units(claims, images)


def _asked(state: ShardedState, where: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the shared part and the units of a state."""
    try:
        return state.shared_state(), state.unit_states()
    except BcpError as error:
        error.add_note(f"bcp: raised while the {type(state).__name__} at {where} was asked for its state")
        raise
    except Exception as error:
        raise StateError(
            f"the {type(state).__name__} at {where} was asked for its state and raised {type(error).__name__}: "
            f"{error}; repair it, or leave it out of the states"
        ) from error
