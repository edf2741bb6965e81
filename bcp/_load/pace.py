"""How fast each rank can send, as far as the division of the reading has to know it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from bcp.plan.load.fill import Floats

__all__ = ["MEASURED_BYTES", "packed_rate", "speeds"]

MEASURED_BYTES = 32 << 20
"""Shared bytes a rank from which on the ranks measure their ways: below, the load takes no longer than measuring."""

_RATE = struct.Struct("<d")
_FAST = 0.75  # quantile of the ranks whose rate counts as full speed
_SLOW = 0.4  # of that rate; faster ranks count as equals, since a measurement of some milliseconds varies
_LEAST = 1e-3


def packed_rate(rate: float) -> bytes:
    """Return what a rank tells of its bandwidth."""
    return _RATE.pack(rate)


def speeds(told: Sequence[bytes]) -> Floats | None:
    """Return the relative speed of each rank, 1 for most; None if no rank is slow.

    Args:
        told: :func:`packed_rate` of every rank.

    """
    rates = np.array([_RATE.unpack(each)[0] for each in told])
    if np.isinf(rates).any():  # all ranks share a host
        return None
    relative = rates / np.quantile(rates, _FAST, method="nearest")
    slow = relative < _SLOW
    return np.where(slow, np.maximum(relative, _LEAST), 1.0) if slow.any() else None
