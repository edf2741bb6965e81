"""Numbers of ranks and of hosts in messages: int32, little-endian."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints

__all__ = ["packed", "unpacked"]


def packed(numbers: npt.ArrayLike) -> bytes:
    """Encode numbers, 4 bytes each."""
    return np.asarray(numbers, "<i4").tobytes()


def unpacked(data: bytes) -> Ints:
    """Undo :func:`packed`; int64[n]."""
    return np.frombuffer(data, "<i4").astype(np.int64)
