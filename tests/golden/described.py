"""Values that are not tensors as JSON, to the last bit, without bcp: equal texts mean equal values.

JSON's own values stand for themselves, but for floats. Every other value is an object with one key, its type.
"""

from __future__ import annotations

import io
import json
import random
import struct
from base64 import b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["described", "text_of"]


def described(value: Any) -> Any:
    """Return a value as JSON data.

    Raises:
        TypeError: a golden checkpoint has no values of this type.

    """
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < 1 << 53 else {"int": hex(value)}
    if type(value) is list:
        return [described(each) for each in value]
    for kind, describe in _KINDS.items():
        if type(value) is kind or (kind in _WITH_SUBCLASSES and isinstance(value, kind)):
            return {kind.__name__: describe(value)}
    raise TypeError(f"{type(value)} has no description")


def text_of(description: Any) -> str:
    """Return a description as text, in which 1, 1.0 and True differ."""
    return json.dumps(description, ensure_ascii=True)


def _bits(data: bytes | bytearray) -> str:
    return b64encode(data).decode()


def _pairs(value: Any) -> list[Any]:
    return [[described(key), described(each)] for key, each in value.items()]


def _sorted(value: Any) -> list[Any]:
    return sorted((described(each) for each in value), key=text_of)


def _each(value: Any) -> list[Any]:
    return [described(each) for each in value]


def _bounds(value: Any) -> list[Any]:
    return [described(each) for each in (value.start, value.stop, value.step)]


def _tensor(value: torch.Tensor) -> list[Any]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [str(value.dtype), list(value.shape), _bits(data)]


def _array(value: Any) -> list[Any]:
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return [_dtype(value.dtype), list(value.shape), order, _bits(value.tobytes(order))]


def _dtype(value: np.dtype[Any]) -> Any:
    return value.str if value.names is None else [[name, _dtype(value[name])] for name in value.names]


def _generator(value: Any) -> Any:
    bits = value if isinstance(value, np.random.BitGenerator) else value.bit_generator
    return [type(bits).__name__, described(bits.state)]


_KINDS: dict[type, Callable[[Any], Any]] = {
    float: lambda value: struct.pack(">d", value).hex(),
    complex: lambda value: [struct.pack(">d", value.real).hex(), struct.pack(">d", value.imag).hex()],
    bytes: _bits,
    bytearray: _bits,
    torch.Size: list,
    tuple: _each,
    dict: _pairs,
    OrderedDict: _pairs,
    Counter: _pairs,
    defaultdict: lambda value: [getattr(value.default_factory, "__name__", None), _pairs(value)],
    set: _sorted,
    frozenset: _sorted,
    deque: lambda value: [_each(value), value.maxlen],
    range: _bounds,
    slice: _bounds,
    io.BytesIO: lambda value: [_bits(value.getvalue()), value.tell()],
    torch.dtype: str,
    torch.device: str,
    torch.Tensor: _tensor,
    torch.Generator: lambda value: [str(value.device), _tensor(value.get_state())],
    np.dtype: _dtype,
    np.ndarray: _array,
    np.generic: lambda value: [_dtype(value.dtype), _bits(value.tobytes())],
    np.random.Generator: _generator,
    np.random.BitGenerator: _generator,
    np.random.RandomState: lambda value: described(value.get_state(legacy=False)),
    random.Random: lambda value: described(value.getstate()),
}
_WITH_SUBCLASSES = {np.dtype, np.generic, np.random.BitGenerator}
