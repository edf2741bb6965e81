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
            text = json.dumps(entry, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = ""
        size += len(text)
        if not text or size > MOST_FACTS:
            lost.append(str(key))
        else:
            facts[str(key)] = json.loads(text)
    if lost:
        more = [f"and {len(lost) - MOST_LEFT_OUT} more"] if len(lost) > MOST_LEFT_OUT else []
        facts["left_out"] = [name[:200] for name in lost[:MOST_LEFT_OUT]] + more
    return {library: facts}
