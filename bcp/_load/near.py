"""Advice for names that a checkpoint lacks: a prefix that one side has, or names that are nearly the same."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from difflib import get_close_matches

__all__ = ["advice"]

EXAMINED = 3
"""Missing names that are looked at: each costs a walk over all names of the checkpoint."""

NEIGHBOURS = 100
"""Names that are compared letter by letter, which takes 50 us each."""

CLOSE = 0.7


def advice(missing: Sequence[str], saved: Collection[str]) -> str:
    """Say how names of the model that the checkpoint lacks might be meant; empty if there is no guess.

    Args:
        missing: FQNs that the target wants.
        saved: FQNs that the checkpoint has.

    """
    known = saved if isinstance(saved, (set, frozenset)) else set(saved)
    examined = missing[:EXAMINED]
    first = examined[0]
    for prefix in (first[: at + 1] for at, letter in enumerate(first) if letter == "."):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in known for name in examined):
            return f"the checkpoint has them without {prefix!r}: pass LoadOptions(rename=[('^', {prefix!r})])"
    longer = min((name for name in known if name.endswith("." + first)), key=lambda name: (len(name), name), default="")
    prefix = longer.removesuffix(first)
    if prefix and all(prefix + name in known for name in examined):
        pattern = "^" + re.escape(prefix)
        return f"the checkpoint has them with {prefix!r} in front: pass LoadOptions(rename=[({pattern!r}, '')])"
    ordered = sorted(known)
    pairs = [(name, near) for name in examined for near in _near(name, ordered)]
    return f"the checkpoint has {', '.join(f'{near!r} (for {name!r})' for name, near in pairs)}" if pairs else ""


def _near(name: str, ordered: Sequence[str]) -> list[str]:
    """Return the name of the checkpoint that is nearest, of those about where this one would stand."""
    at = bisect_left(ordered, name)
    ending = name.rpartition(".")[2]
    alike = [other for other in ordered if other.endswith(ending) and abs(len(other) - len(name)) <= len(ending)]
    return get_close_matches(
        name, {*ordered[max(at - NEIGHBOURS // 2, 0) : at + NEIGHBOURS // 2], *alike[:NEIGHBOURS]}, 1, CLOSE
    )
