"""Leaves that are not tensors, as JSON text: lossless with their types, readable, and safe to read."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bcp.errors import CheckpointError, StateError
from bcp.format.foreign_files import UNREAD
from bcp.protocols import ObjectKey
from bcp.state.packed import hex_number, hex_text, pack, unpack

__all__ = ["decode_value", "decode_values", "encode_value", "encode_values", "same_value", "shown"]

_DIGITS = 18
"""Integers up to that many digits are JSON numbers that every reader gets right."""

_MOST_SHOWN = 200


def encode_value(value: Any, *, where: str = "a value", allow_pickle: bool = False) -> str:
    """Return the value as JSON text; ``allow_pickle`` pickles objects of any class as well.

    None, bools, ints, finite floats, strings and lists of them are themselves. Any other type is an object with one
    key, its type: nan and infinities, huge ints, bytes, tuples, dicts, dtypes, devices, sizes. Other types are stored
    by :func:`~bcp.state.packed.pack`, in base64. Raises StateError, which names ``where``, if the value contains
    itself, or could not be serialized or read again. Integers of more than 65,536 hexadecimal digits raise it too.
    """
    try:
        return json.dumps(_encoded(value, where, allow_pickle), separators=(",", ":"))
    except RecursionError as error:
        raise StateError(f"{where} contains itself or is nested too deep; pass plain values") from error


def encode_values(
    values: Mapping[ObjectKey, Any], keys: Iterable[ObjectKey], *, allow_pickle: bool = False
) -> dict[ObjectKey, str]:
    """Return the values of these keys as :func:`encode_value` does; a value under many keys is encoded once.

    A group's learning rate stands under the names of all its parameters: 7 us each for 2,000 values of 11 kinds, else.
    """
    texts: dict[int, tuple[Any, str]] = {}  # with the value, so that its id stays its own
    encoded = {}
    for key in keys:
        value = values[key]
        known = texts.get(id(value))
        if known is None:
            known = texts[id(value)] = value, encode_value(value, where=" ".join(key), allow_pickle=allow_pickle)
        encoded[key] = known[1]
    return encoded


def decode_value(text: str, *, allow_pickle: bool, where: str) -> Any:
    """Return the value that :func:`encode_value` was given; ``where`` is its key, for messages.

    ``allow_pickle`` unpickles objects of any class, which may run code: only for checkpoints that you wrote. Raises
    CheckpointError if the text is damaged, or holds an object that only ``allow_pickle=True`` reads, or an integer of
    more digits than a save writes.
    """
    try:
        return _decoded(json.loads(text), allow_pickle, where)
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, struct.error) as error:
        raise CheckpointError(
            f"the value of {where} cannot be read: {type(error).__name__}: {error}; restore the receipt that holds it, "
            "or load another checkpoint"
        ) from error


def decode_values(texts: Iterable[tuple[ObjectKey, str, str]], *, allow_pickle: bool) -> dict[ObjectKey, Any]:
    """Return the values of (key, text, name in messages); equal texts of constants give one object."""
    constants: dict[str, Any] = {}
    values = {}
    for key, text, where in texts:
        if text in constants:
            values[key] = constants[text]
            continue
        values[key] = decode_value(text, allow_pickle=allow_pickle, where=where)
        if _is_constant(values[key]):
            constants[text] = values[key]
    return values


def same_value(value: object, other: object) -> bool:
    """Whether two values have the same type and bits: 0.0 is not -0.0, 1 is not True, a nan is itself."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = value.dtype == other.dtype and value.shape == other.shape
        return alike and torch.equal(_bytes_of(value), _bytes_of(other))
    kind = type(value)
    if kind is not type(other):
        return False
    if kind is float:
        return struct.pack("d", value) == struct.pack("d", other)
    if kind in (bool, int, str, bytes):
        return value == other
    return encode_value(value, allow_pickle=True) == encode_value(other, allow_pickle=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8)


def _is_constant(value: Any) -> bool:
    """Whether a value cannot be changed in place."""
    kind = type(value)
    return value is None or kind in _CONSTANTS or (kind is tuple and all(map(_is_constant, value)))


_CONSTANTS = frozenset({bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size})


def _encoded(value: Any, where: str, allow_pickle: bool) -> Any:  # noqa: FBT001, PLR0911 -- private; one line a type
    """Return JSON data for a value. Subclasses (an IntEnum, a namedtuple) are not their base: they are pickled."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 10**_DIGITS else {"int": hex_text(value, where)}
    if kind is float:
        return value if math.isfinite(value) else {"float": _float_text(value)}
    if kind in (list, tuple):
        items = [_encoded(child, f"{where}.{index}", allow_pickle) for index, child in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {
            "dict": [
                [_encoded(key, where, allow_pickle), _encoded(child, f"{where}.{key}", allow_pickle)]
                for key, child in value.items()
            ]
        }
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {"size": list(value)}
    return {"torch": base64.b64encode(pack(value, where, allow_pickle=allow_pickle)).decode()}


def _decoded(data: Any, allow_pickle: bool, where: str) -> Any:  # noqa: FBT001 -- private, two call sites
    """Return the value of JSON data."""
    if isinstance(data, list):
        return [_decoded(child, allow_pickle, where) for child in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == UNREAD:
        raise CheckpointError(f"the value of {where} cannot be read: {content}")
    if kind in ("tuple", "dict"):
        items = [_decoded(child, allow_pickle, where) for child in content]
        return tuple(items) if kind == "tuple" else dict(items)
    if kind == "torch":
        return unpack(
            base64.b64decode(content, validate=True), allow_pickle=allow_pickle, where=f"the value of {where}"
        )
    return _SCALARS[kind](content)


def shown(value: object) -> str:
    """Return a value for a message: at most 200 characters, and no error for integers that Python does not print."""
    try:
        text = repr(value)
    except ValueError:  # int's limit of 4300 digits
        return f"a {type(value).__name__} with an integer of very many digits"
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


_NAN = struct.pack(">d", math.nan)


def _float_text(value: float) -> str:
    """Return an infinity or a nan as text; of a nan with other bits than the usual one, its bits."""
    bits = struct.pack(">d", value)
    return str(value) if math.isinf(value) or bits == _NAN else f"nan:{bits.hex()}"


def _float(text: str) -> float:
    """Undo :func:`_float_text`."""
    kind, _, bits = text.partition(":")
    number: float = struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float(kind)
    return number


def _dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


_SCALARS: dict[str, Any] = {
    "int": hex_number,
    "float": _float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": _dtype,
    "device": torch.device,
    "size": torch.Size,
}
