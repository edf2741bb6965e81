"""From numpy arrays and lists to Arrow arrays and back, by their buffers and without pandas.

``pyarrow.array``, ``pyarrow.scalar`` and ``to_numpy`` import pandas wherever it is installed. In the first save that
import takes 0.2 s. A process that is forked meanwhile inherits the module's import lock, which nobody releases there.
Its own first save waits for that lock for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["arrow_array", "numbers_of"]


def arrow_array(values: Any, kind: pa.DataType) -> pa.Array:
    """Return an array without missing values, the same as ``pyarrow.array(values, kind)``.

    ``kind`` is an integer or float type, ``string()``, ``list_(string())`` or ``binary(length)``; ``values`` are
    numbers, strings, lists of strings, or bytes. Numpy arrays are cast unchecked; those of bytes have dtype ``V``.

    Raises:
        OverflowError: a Python number does not fit into ``kind``.
        TypeError: an element is no string or no number.
        ValueError: an element is not as long as ``kind`` says, or all together take more than one array holds: 2 GiB.
    """
    if pa.types.is_string(kind):
        return _texts(values)
    if pa.types.is_list(kind):
        items = _texts([text for texts in values for text in texts])
        return pa.ListArray.from_arrays(_numbers(_offsets(np.fromiter(map(len, values), np.int64, len(values)))), items)
    if pa.types.is_fixed_size_binary(kind):
        is_numpy = isinstance(values, np.ndarray)
        lengths = {values.itemsize} if is_numpy else set(map(len, values))
        if not lengths <= {kind.byte_width}:
            raise ValueError(f"values of {sorted(lengths)} bytes are no column of {kind.byte_width} bytes each")
        data = values.tobytes() if is_numpy else b"".join(values)
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])
    return _numbers(np.asarray(values, kind.to_pandas_dtype()))


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return the n integers or floats of an array without missing values, as a read-only view of its memory."""
    kind = np.dtype(array.type.to_pandas_dtype())
    memory = array.buffers()[1] if len(array) else b""
    numbers = np.frombuffer(memory, kind, len(array), array.offset * kind.itemsize if len(array) else 0)
    numbers.flags.writeable = False
    return numbers


def _numbers(numbers: npt.NDArray[Any]) -> pa.Array:
    data = np.ascontiguousarray(numbers)
    return pa.Array.from_buffers(pa.from_numpy_dtype(data.dtype), len(data), [None, pa.py_buffer(data)])


def _texts(texts: Sequence[str]) -> pa.Array:
    joined = "".join(texts)
    data = joined.encode()
    # a character is a byte in nearly all lists; else each text is encoded by itself
    lengths = map(len, texts) if len(data) == len(joined) else (len(text.encode()) for text in texts)
    offsets = _offsets(np.fromiter(lengths, np.int64, len(texts)))
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(data))


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return where each of a sequence of values begins, and where the last one ends."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{len(lengths)} values take {ends[-1]} bytes together, more than one array holds")
    return ends.astype(np.int32)
