"""The states of a run: the caller's, and random states as the last of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bcp.errors import InputError
from bcp.planners.megatron import MegatronRng
from bcp.protocols import States
from bcp.state.random_states import RngState

__all__ = ["RANDOM_STATES", "with_random_states"]

RANDOM_STATES = "bcp_random_states"
"""Key of the random states among the extra states, if the caller passed none."""


def with_random_states(states: States) -> dict[str, Any]:
    """Return the states with random states behind all other extra states.

    A state that draws random numbers when it is loaded does not disturb them there.

    Raises:
        InputError: the extra states are no mapping.

    Example:
        >>> list(with_random_states({"model": {}, "extra_states": {"epoch": 3}})["extra_states"])
        ['epoch', 'bcp_random_states']

    """
    extra = states.get("extra_states", {})
    if not isinstance(extra, Mapping):
        raise InputError(
            f"states['extra_states'] is a {type(extra).__name__}; a run needs a dict, to add random states to it"
        )
    random = {key: value for key, value in extra.items() if isinstance(value, RngState | MegatronRng)}
    others = {key: value for key, value in extra.items() if key not in random}
    rest = {kind: state for kind, state in states.items() if kind != "extra_states"}
    return {**rest, "extra_states": {**others, **(random or {RANDOM_STATES: RngState()})}}
