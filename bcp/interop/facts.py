"""Facts of a foreign checkpoint that are no states: counters, arguments and schedules, as user metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["facts_of"]

MOST_FACTS = 32 << 10
"""Characters of all facts; user metadata may have 64 KiB."""

MOST_LEFT_OUT = 100


def facts_of(
    library: str, value: Mapping[Any, Any], states: Collection[str], left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the entries of a dict that are no states, as JSON data under the name of the library.

    Entries that JSON cannot hold, or that are too long, are listed under ``left_out``.

    Args:
        library: name of the library.
        value: the dict.
        states: keys that are states.
        left_out: names that were left out before.

    """
    facts: dict[str, Any] = {}
    lost, size = list(left_out), 0
    for key, entry in value.items():
        if key in states or entry is None:
            continue
        try:
            plain = _plain(entry, [MOST_FACTS])
            text = json.dumps(plain, allow_nan=False)
        except (ValueError, RecursionError):
            lost.append(str(key))
            continue
        size += len(text)
        if size > MOST_FACTS:
            lost.append(str(key))
        else:
            facts[str(key)] = plain
    if lost:
        more = [f"and {len(lost) - MOST_LEFT_OUT} more"] if len(lost) > MOST_LEFT_OUT else []
        facts["left_out"] = [name[:200] for name in lost[:MOST_LEFT_OUT]] + more
    return {library: facts}


def _plain(value: Any, left: list[int]) -> Any:
    """Return a value as JSON data. A pickle of a few bytes may refer to one list or string very often.

    Raises ValueError if it is of another type, or has more than ``left`` parts and characters.
    """
    left[0] -= 1 + (len(value) if isinstance(value, str) else 0)
    if left[0] < 0:
        raise ValueError("it is too long")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [_plain(child, left) for child in value]
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {_plain(str(key), left): _plain(child, left) for key, child in value.items()}
    raise ValueError("it is no JSON data")
