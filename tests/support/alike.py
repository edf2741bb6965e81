"""Whether two values are the same in all that a checkpoint promises: types, bits, order of keys."""

from __future__ import annotations

import io
import random
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def exactly_alike(one: Any, other: Any) -> bool:  # noqa: PLR0911 -- one line a type
    """Equal with types, where nan is the same nan, 0.0 is not -0.0 and 1 is not True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _tensors(one, other)
    if isinstance(one, (np.ndarray, np.generic)):
        return _arrays(one, other)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return exactly_alike((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, Mapping):
        own = [
            (getattr(each, "default_factory", None), list(getattr(each, "__dict__", {}).items()))
            for each in (one, other)
        ]
        return own[0][0] is own[1][0] and exactly_alike([own[0][1], *one.items()], [own[1][1], *other.items()])
    if isinstance(one, (list, tuple, deque)):
        same_end = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return same_end and len(one) == len(other) and all(map(exactly_alike, one, other))
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell()) == (other.getvalue(), other.tell())
    if (state := state_of(one)) is not None:
        return exactly_alike(state, state_of(other))
    return bool(one == other)


def state_of(generator: Any) -> Any:
    """Return the state of a random generator, or None."""
    if isinstance(generator, np.random.Generator):
        return state_of(generator.bit_generator)
    if isinstance(generator, np.random.BitGenerator):
        return type(generator).__name__, generator.state, generator.seed_seq.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return str(generator.device), generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else None


def alike_in_any_order(one: Any, other: Any) -> bool:
    """Equal as :func:`exactly_alike` has it, but for the order of keys."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike_in_any_order(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike_in_any_order, one, other))
    return exactly_alike(one, other)


def _arrays(one: Any, other: Any) -> bool:
    same = one.dtype == other.dtype and one.dtype.type is other.dtype.type and one.dtype.str == other.dtype.str
    order = not isinstance(one, np.ndarray) or one.flags.fnc == other.flags.fnc or not one.flags.f_contiguous
    if one.dtype.names:  # between fields there may be bytes that mean nothing
        return same and order and all(_arrays(one[name], other[name]) for name in one.dtype.names)
    if one.dtype.char in "gG":  # as in the ten bytes of a long double, which takes sixteen
        return same and order and np.array_equal(one, other)
    return same and order and one.shape == other.shape and one.tobytes() == other.tobytes()


def _tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.is_nested:
        return len(one.unbind()) == len(other.unbind()) and all(map(_tensors, one.unbind(), other.unbind()))
    if one.layout is not torch.strided:
        return one.shape == other.shape and torch.equal(one.to_dense(), other.to_dense())
    if one.is_quantized:
        return bool(torch.equal(one, other))
    plain = (tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in (one, other))
    flat = [tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for tensor in plain]
    return one.shape == other.shape and torch.equal(*flat)
