"""Values of numpy, and random generators, taken apart into plain values and put together again.

:mod:`bcp.state.packed` stores them this way: the reader needs no class but those in the table below, and no trust.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch

from bcp.errors import CheckpointError

__all__ = ["is_generator", "same_generator", "set_generator", "take_apart", "together"]

Parts = tuple[str, Any]
"""(name of a form, content). The content may hold values that have to be taken apart in turn."""

_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
_MOST_POOL, _MOST_ENTROPY_BITS = 1024, 1 << 18
"""Bounds of a seed sequence, which takes time with the square of both to make: 2 ms with the largest pool."""

_USERS = 2
"""``dtype.isbuiltin`` of the dtypes of other libraries."""

_GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random, *_BIT_GENERATORS.values())


def take_apart(value: Any) -> Parts | None:
    """Return the form of a value, or None if its exact type has none.

    ``together(*take_apart(value))`` is equal to ``value``, bit by bit, and has its type, dtype, shape and byte order.
    """
    kind = type(value)
    if kind in _APART:
        return _APART[kind](value)
    if kind is np.ndarray or (isinstance(value, np.generic) and kind is value.dtype.type):
        return _array_apart(value)
    if isinstance(value, np.dtype):
        described = _described(value)
        return None if described is None else ("dtype", described)
    return None


def together(name: str, content: Any) -> Any:
    """Return the value of a form. Raises CheckpointError if no form has this name."""
    if name not in _TOGETHER:
        raise CheckpointError(f"a value has the form {name!r}, which this bcp does not know; upgrade bcp")
    return _TOGETHER[name](content)


# -- random generators -------------------------------------------------------------------------------


def is_generator(value: object) -> bool:
    """Whether a value is a random generator whose state can be read and set."""
    return type(value) in _GENERATORS


def same_generator(target: object, loaded: object) -> bool:
    """Whether both are random generators of one kind, so that ``target`` can take the state of ``loaded`` in place."""
    if type(target) is not type(loaded) or not is_generator(target):
        return False
    if isinstance(target, torch.Generator) and isinstance(loaded, torch.Generator):
        return target.device.type == loaded.device.type
    return type(_bits_of(target)) is type(_bits_of(loaded))


def set_generator(target: Any, loaded: Any) -> None:
    """Set the state of a generator to that of another one, for which :func:`same_generator` holds."""
    if isinstance(target, torch.Generator):
        target.set_state(loaded.get_state())
    elif isinstance(target, random.Random):
        target.setstate(loaded.getstate())
    elif isinstance(target, np.random.RandomState):
        target.set_state(loaded.get_state(legacy=False))
    else:
        _bits_of(target).__setstate__(_bits_of(loaded).__reduce__()[2])  # with the seed sequence of spawn()


def _bits_of(generator: Any) -> Any:
    """Return the bit generator inside a generator of numpy; other generators are their own."""
    if isinstance(generator, np.random.RandomState):
        return generator._bit_generator  # noqa: SLF001 -- numpy shows it in no other way
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _bits_apart(bits: Any) -> Any:
    """Return (class, state, seed sequence) of a bit generator of numpy; None for one of another library."""
    seeds = bits.seed_seq
    if type(bits) not in _BIT_GENERATORS.values() or type(seeds) not in (np.random.SeedSequence, type(None)):
        return None
    if seeds is not None and not _is_bounded(seeds.state):
        return None
    return type(bits).__name__, bits.state, None if seeds is None else seeds.state


def _is_bounded(seeds: Any) -> bool:
    return bool(seeds["pool_size"] <= _MOST_POOL and _entropy_of(seeds) <= _MOST_ENTROPY_BITS)


def _entropy_of(seeds: Any) -> float:
    return _entropy_bits(seeds["entropy"]) + _entropy_bits(seeds.get("spawn_key", ()))


def _entropy_bits(value: Any) -> float:
    """Return how many bits numbers, text or arrays have at most; infinity for other values."""
    if isinstance(value, (list, tuple)):
        return sum(map(_entropy_bits, value))
    if isinstance(value, int):
        return value.bit_length()
    if isinstance(value, (str, range)):
        return len(value) * np.int64().nbytes * 8
    return 0 if value is None else 8 * getattr(value, "nbytes", math.inf)


def _bits_together(content: Any) -> Any:
    """Undo :func:`_bits_apart`."""
    name, state, seeds = content
    if seeds is not None and not _is_bounded(seeds):
        raise CheckpointError(
            f"a random generator has a seed sequence of {seeds['pool_size']} words and {_entropy_of(seeds)} "
            f"bits of entropy; at most {_MOST_POOL} words and {_MOST_ENTROPY_BITS} bits are read"
        )
    bits = _BIT_GENERATORS[name](0 if seeds is None else np.random.SeedSequence(**seeds))
    bits.state = state
    return bits


def _of_bits(name: str, bits: Any) -> Parts | None:
    content = _bits_apart(bits)
    return None if content is None else (name, content)


def _random_state_apart(value: Any) -> Parts | None:
    """Take a legacy generator apart; beyond its bit generator it may hold the second of two Gaussian numbers."""
    known = type(_bits_of(value)) in _BIT_GENERATORS.values()
    return ("RandomState", value.get_state(legacy=False)) if known else None


def _with_state(made: Any, state: Any) -> Any:
    made.set_state(state)
    return made


def _python_generator(state: Any) -> random.Random:
    made = random.Random(0)  # noqa: S311 -- the caller's own generator
    made.setstate(state)
    return made


# -- numpy -------------------------------------------------------------------------------------------


def _array_apart(value: Any) -> Parts | None:
    """Take an array or a scalar apart into dtype, shape, order and bytes."""
    if isinstance(value, (np.str_, np.bytes_)):  # an array would drop the zeros at their end
        return type(value).__name__, bytes(value) if isinstance(value, bytes) else str.__str__(value)  # so does str()
    described = _described(value.dtype)
    if described is None:
        return None
    if isinstance(value, np.generic):
        return "scalar", (described, (), "C", torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()))
    order: Any = "F" if value.flags.fnc else "C"
    flat = np.asarray(value, order=order).reshape(-1, order=order).view(np.uint8)
    return "ndarray", (described, value.shape, order, torch.from_numpy(flat.copy()))


def _array_together(content: Any) -> Any:
    """Undo :func:`_array_apart` for an array."""
    described, shape, order, data = content
    return data.numpy().view(_dtype(described)).reshape(shape, order=order)


def _described(dtype: Any) -> Any:
    """Return the argument from which :func:`_dtype` makes this dtype; None for objects and foreign dtypes."""
    described = None if dtype.hasobject or not dtype.itemsize else _words(dtype)
    return described if described is not None and _alike(dtype, _dtype(described)) else None


def _words(dtype: Any) -> Any:
    """Return a dtype as text, (base, shape) or, if it has fields, lists of names, dtypes, offsets and titles."""
    if dtype.subdtype:
        base, shape = dtype.subdtype
        return None if (words := _words(base)) is None else (words, shape)
    if dtype.names is None:
        known = dtype.kind in "biufcmMSUV" and dtype.isbuiltin != _USERS
        plain = dtype.kind not in "iufc" or np.dtype(dtype.str).type is dtype.type
        return (dtype.str if plain else dtype.str[0] + dtype.char) if known else None  # longlong is not int64
    fields = [dtype.fields[name] for name in dtype.names]
    words = [_words(field[0]) for field in fields]
    offsets, titles = [field[1] for field in fields], [field[2] if field[2:] else None for field in fields]
    return None if None in words else [list(dtype.names), words, offsets, titles, dtype.itemsize, dtype.isalignedstruct]


def _dtype(described: Any) -> Any:
    """Return the dtype of a description. Raises CheckpointError if it has objects: pointers would come from a file."""
    if isinstance(described, list):
        names, words, offsets, titles, itemsize, aligned = described
        fields: Any = {"names": names, "formats": [*map(_dtype, words)], "offsets": offsets, "itemsize": itemsize}
        if any(title is not None for title in titles):
            fields["titles"] = titles
        return np.dtype(fields, align=aligned)
    if isinstance(described, tuple):
        return np.dtype((_dtype(described[0]), described[1]))
    dtype: Any = np.dtype(described)
    if dtype.hasobject:
        raise CheckpointError(f"a value is an array of {described!r}, which holds objects; restore the file")
    return dtype


def _alike(dtype: Any, other: Any) -> bool:
    """Return whether two dtypes also agree in scalar type, alignment and metadata, which ``==`` ignores."""
    if (
        dtype != other
        or dtype.type is not other.type
        or dtype.isalignedstruct != other.isalignedstruct
        or dtype.metadata
    ):
        return False
    if dtype.subdtype:
        return _alike(dtype.subdtype[0], other.subdtype[0])
    return all(_alike(dtype.fields[name][0], other.fields[name][0]) for name in dtype.names or ())


# -- the table ---------------------------------------------------------------------------------------

_APART: dict[type, Callable[[Any], Parts | None]] = {
    range: lambda value: ("range", (value.start, value.stop, value.step)),
    slice: lambda value: ("slice", (value.start, value.stop, value.step)),
    set: lambda value: ("set", list(value)),
    frozenset: lambda value: ("frozenset", list(value)),
    deque: lambda value: ("deque", (list(value), value.maxlen)),
    BytesIO: lambda value: ("BytesIO", (value.getvalue(), value.tell())),
    np.random.Generator: lambda value: _of_bits("Generator", value.bit_generator),
    np.random.RandomState: _random_state_apart,
    torch.Generator: lambda value: ("torch.Generator", (str(value.device), value.get_state())),
    random.Random: lambda value: ("Random", value.getstate()),
    **dict.fromkeys(_BIT_GENERATORS.values(), lambda value: _of_bits("BitGenerator", value)),
}
"""By exact type: subclasses have attributes and methods of their own."""

_TOGETHER: dict[str, Callable[[Any], Any]] = {
    "range": lambda content: range(*content),
    "slice": lambda content: slice(*content),
    "set": set,
    "frozenset": frozenset,
    "deque": lambda content: deque(*content),
    "BytesIO": lambda content: _stream(*content),
    "Generator": lambda content: np.random.Generator(_bits_together(content)),
    "BitGenerator": _bits_together,
    "RandomState": lambda state: _with_state(np.random.RandomState(_BIT_GENERATORS[state["bit_generator"]](0)), state),
    "torch.Generator": lambda content: _with_state(torch.Generator(content[0]), content[1]),
    "Random": _python_generator,
    "ndarray": _array_together,
    "scalar": lambda content: _array_together(content)[()],
    "str_": np.str_,
    "bytes_": np.bytes_,
    "dtype": _dtype,
}


def _stream(data: bytes, position: int) -> BytesIO:
    stream = BytesIO(data)
    stream.seek(position)
    return stream
