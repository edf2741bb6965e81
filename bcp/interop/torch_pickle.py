"""The pickle inside of a file of ``torch.save``: tensors become records of where they lie, and no class is imported."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.format.foreign_files import unread
from bcp.interop.catalogue import DTYPES
from bcp.interop.unpickle import Allowed, Call, unpickled
from bcp.plan.layout import LARGEST

__all__ = [
    "STORAGES",
    "TORCH_NAMES",
    "Device",
    "Dtype",
    "Stored",
    "Unread",
    "empty_dict",
    "leaves",
    "torch_value",
    "value_text",
]

MOST_LEVELS = 100
JSON_DIGITS = 10**18
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
"""Dtypes by the classes that name them in pickles. Other dtypes stand beside a storage of bytes."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of torch, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device of torch, as in ``"cuda:0"``."""

    name: str


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that bcp does not read; the reason is for the caller."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage: an entry of the zip."""

    key: str
    dtype: str  # empty for a storage of bytes: its tensors have the dtype


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the pickle: elements of a storage.

    Attributes:
        key: name of the storage.
        dtype: dtype of the elements.
        offset: first element in the storage.
        shape: its shape.
        stride: its strides in elements.
    """

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * DTYPES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie side by side, row by row."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Stored:
    """Stand for ``torch._utils._rebuild_tensor_v2``."""
    return _stored(storage, offset, size, stride, storage.dtype)


def _typed_tensor(*arguments: Any) -> Stored:
    """Stand for ``torch._utils._rebuild_tensor_v3``, of dtypes without a storage of their own."""
    storage, offset, size, stride, _grad, _hooks, dtype, *_ = arguments
    return _stored(storage, offset, size, stride, dtype.name)


def _stored(storage: Any, offset: Any, size: Any, stride: Any, dtype: str) -> Stored:
    if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0 or dtype not in DTYPES:
        raise ValueError("a tensor of no storage or dtype")
    shape, strides = _sizes(size), _sizes(stride)
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {list(shape)} and strides {list(strides)}")
    return Stored(storage.key, dtype, offset, shape, strides)


def _sizes(sizes: Any) -> tuple[int, ...]:
    """Return a shape or strides, or raise ValueError."""
    if not isinstance(sizes, tuple) or not all(type(size) is int and 0 <= size < LARGEST for size in sizes):
        raise ValueError("a tensor of no possible shape or strides")
    return sizes


def _persistent(pid: Any) -> _Storage:
    """Return the storage of a persistent id: ``("storage", type, key, location, elements)``."""
    kind, dtype, key, _, _ = pid
    if kind != "storage" or not isinstance(dtype, Dtype) or not isinstance(key, str):
        raise ValueError(f"it has the persistent id {pid!r:.80}")
    return _Storage(key, dtype.name)


def empty_dict() -> dict[Any, Any]:
    """Stand for ``collections.OrderedDict``; items follow the call."""
    return {}


def _no_bytes() -> bytes:
    """Stand for ``bytes``. Protocol 2 calls it for empty bytes; a number as argument would ask for memory."""
    return b""


def _bytes(text: str, encoding: str) -> bytes:
    """Stand for ``_codecs.encode``: protocol 2 writes bytes by it."""
    return text.encode(encoding if encoding in ("latin1", "ascii") else "utf-8")


_dtypes = {("torch", name): Dtype(name) for name in DTYPES}
_of_bytes = {(module, "UntypedStorage"): Dtype("") for module in ("torch", "torch.storage")}
_builtins = {
    (module, name): Call(function)
    for module in ("builtins", "__builtin__")
    for name, function in (("bytes", _no_bytes), ("complex", complex))
}
TORCH_NAMES: Allowed = {
    **_dtypes,
    **_of_bytes,
    **_builtins,
    **{("torch", name): Dtype(dtype) for name, dtype in STORAGES.items()},
    ("torch._utils", "_rebuild_tensor"): Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Call(_typed_tensor),
    ("torch._utils", "_rebuild_parameter"): Call(lambda data, *_: data),
    ("torch", "Size"): Call(tuple),
    ("torch", "device"): Call(lambda kind, index=None: Device(kind if index is None else f"{kind}:{index}")),
    ("collections", "OrderedDict"): Call(empty_dict),
    ("_codecs", "encode"): Call(_bytes),
}
"""All names in pickles of ``torch.save`` for tensors and plain values."""


def torch_value(data: bytes, where: str, allowed: Allowed = TORCH_NAMES) -> Any:
    """Return the value of such a pickle, with :class:`Stored` for tensors.

    Args:
        data: the pickle.
        where: its name in messages.
        allowed: all possible names; those of a library beside torch's.

    Raises:
        CheckpointError: it has objects of other classes, or sparse or quantized tensors, or subclasses of tensors.
        CorruptError: it is damaged.

    """
    return unpickled(data, allowed, where, _persistent)


def leaves(value: Any, where: str, most: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, leaf) of nested dicts, lists and tuples.

    Args:
        value: the value of a pickle.
        where: its name in messages.
        most: how many leaves there may be: a pickle of a few bytes may refer to one list very often.

    Raises:
        CheckpointError: a key is neither a string nor an int.
        CorruptError: there are more leaves, or the value contains itself.

    """
    left = [most]

    def walk(inner: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        left[0] -= 1
        if len(path) > MOST_LEVELS or left[0] < 0:
            raise CorruptError(f"{where} contains itself, or is larger than its pickle can be; get the file again")
        children: Iterable[tuple[Any, Any]]
        if isinstance(inner, Mapping):
            children = inner.items()
        elif isinstance(inner, list | tuple):
            children = enumerate(inner)
        else:
            yield path, inner
            return
        for key, child in children:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"{where} has the key {key!r:.80} of type {type(key).__name__}, and names are made of strings and "
                    "ints; save it anew with such keys"
                )
            yield from walk(child, (*path, key))

    return walk(value, ())


def value_text(value: Any, most: int, where: str) -> str:
    """Return a value without tensors as JSON text, as :func:`bcp.state.values.decode_value` reads it.

    A value of another type, or of more than ``most`` parts, becomes the text of
    :func:`~bcp.format.foreign_files.unread`. Its reason begins with ``where``.
    """
    if isinstance(value, Unread):
        return unread(value.reason)
    try:
        return json.dumps(_json(value, 0, [most]), separators=(",", ":"))
    except ValueError as error:
        return unread(f"{where}: {error}")


def _json(value: Any, level: int, left: list[int]) -> Any:  # noqa: PLR0911 -- one line a type
    """Return a value as JSON data."""
    kind = type(value)
    left[0] -= 1
    if level > MOST_LEVELS or left[0] < 0:
        raise ValueError("it contains itself, or is larger than its pickle can be")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < JSON_DIGITS else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind in (list, tuple):
        items = [_json(child, level + 1, left) for child in value]
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[_json(key, level + 1, left), _json(child, level + 1, left)] for key, child in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (Dtype, Device):
        return {kind.__name__.lower(): value.name}
    raise ValueError(f"it is a {kind.__name__}")
