"""The states of a run: the caller's, and random states as the last of them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from bcp._calls import check_kinds
from bcp._log import log
from bcp.errors import InputError
from bcp.planners.megatron import MegatronRng
from bcp.protocols import States
from bcp.state.random_states import AddedRngState, RngState

__all__ = ["RANDOM_STATES", "RunStates"]

RANDOM_STATES = "bcp_random_states"
"""Key of the random states among the extra states, if the caller passed none."""


class RunStates:
    """The caller's states with random states behind all other extra states.

    A state that draws random numbers when it is loaded does not disturb them there. The caller's mappings are read anew
    for each save, and get the loaded values of each load.

    Raises:
        InputError: the states, or the extra states, are no mapping, or have keys that no save knows.

    Example:
        >>> states = RunStates({"model": {}, "extra_states": {"epoch": 3}})
        >>> list(states.now()["extra_states"])
        ['epoch', 'bcp_random_states']

    """

    def __init__(self, states: States) -> None:
        """Check the states; they are read at each save and load."""
        check_kinds(states)
        self._states = states
        self._added = AddedRngState()
        self.now()

    def now(self) -> dict[str, Any]:
        """Return the states as they are now, for one save or load."""
        extra = self._states.get("extra_states", {})
        if not isinstance(extra, Mapping):
            raise InputError(
                f"states['extra_states'] is a {type(extra).__name__}; a run needs a dict, to add random states to it"
            )
        self._added.is_loaded = False
        random = {key: value for key, value in extra.items() if isinstance(value, RngState | MegatronRng)}
        others = {key: value for key, value in extra.items() if key not in random}
        rest = {kind: state for kind, state in self._states.items() if kind != "extra_states"}
        return {**rest, "extra_states": {**others, **(random or {RANDOM_STATES: self._added})}}

    def take(self, loaded: Mapping[str, Any], *, tells: bool) -> None:
        """Put the values of a load into the caller's extra states, as :func:`bcp.load` does.

        Values such as numbers are replaced, and keys of the checkpoint alone are added.

        Args:
            loaded: the states of the load.
            tells: warn of missing random states; all ranks miss the same.

        """
        values = loaded["extra_states"]
        extra = self._states.get("extra_states")
        if isinstance(extra, MutableMapping):
            for key, value in values.items():
                is_own = key == RANDOM_STATES and key not in extra
                if not is_own and (key not in extra or extra[key] is not value):
                    extra[key] = value
        if values.get(RANDOM_STATES) is self._added and not self._added.is_loaded:
            tell = log.warning if tells else log.info
            tell("the checkpoint has no random states: the job's own go on as they are")
