"""How long the GPU tests may take."""

from __future__ import annotations

SECONDS = 480
"""Of all GPU tests together."""

MOST = 60
"""Seconds of one test; pytest-timeout ends it then."""


def limit(spent: float) -> float:
    """Return the seconds that the next test may take: what is left, if that is little."""
    return max(min(MOST, SECONDS - spent), 0.1)
