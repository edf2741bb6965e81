"""The data of the page in one compressed text, which cannot end the element around it.

Layout before compression: the length of the JSON text as four bytes (little-endian), the JSON text in ASCII, zeros up
to a multiple of 8, then the columns one after the other, each aligned to 8 bytes. A column in the JSON text is
``{"$": [type, offset, count]}``. gzip and base64 make it a text of letters, digits, ``+``, ``/`` and ``=``.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bcp.telemetry.page.columns import Numbers

__all__ = ["packed", "squeezed"]

_ALIGN = 8


def packed(data: Mapping[str, Any]) -> str:
    """Return data as a text; its leaves are columns of numpy, and whatever JSON has.

    Numbers of JSON that are not finite become null. A column may have int8 to int32, uint8 to uint32, float32 or
    float64.
    """
    columns = bytearray()
    text = json.dumps(_plain(data, columns), separators=(",", ":"), allow_nan=False).encode("ascii")
    head = len(text).to_bytes(4, "little") + text
    return squeezed(head + bytes(-len(head) % _ALIGN) + columns)


def squeezed(data: bytes) -> str:
    """Return bytes as the base64 text of their gzip."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def _plain(value: Any, columns: bytearray) -> Any:
    if isinstance(value, np.ndarray):
        return {"$": _added(value, columns)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part, columns) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part, columns) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _added(column: Numbers, columns: bytearray) -> tuple[str, int, int]:
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    offset = len(columns)
    columns += little.tobytes()
    columns += bytes(-len(columns) % _ALIGN)
    return column.dtype.name, offset, len(column)
