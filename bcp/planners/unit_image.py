"""One unit of a sharded state as memory to write, without a copy; and as it was again, in the memory that was read.

The *image* of a unit: its large tensors, those with larger elements first, so that each is aligned; a list of them as
JSON; all else as an archive of :func:`~bcp.planners.packed.pack`; zeros; and the three numbers of ``_END``. An image
has a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from bcp.errors import CheckpointError
from bcp.planners.packed import pack, unpack

__all__ = ["Image", "image_of", "unit_in"]

ALIGNMENT = 64
_END = struct.Struct("<3Q")
"""Where the list of tensors begins, its bytes, and those of the archive behind it."""

_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Image:
    """A unit to write.

    Attributes:
        tensors: contiguous, of the CPU, in the order of the image; their memory is the unit's own.
        tail: the bytes behind them.
    """

    tensors: Sequence[torch.Tensor]
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return sum(tensor.nbytes for tensor in self.tensors) + len(self.tail)

    def digest(self) -> str:
        """Return 32 hex digits (xxh3-128) that tell images apart."""
        state = xxhash.xxh3_128(self.tail)
        for tensor in self.tensors:
            state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return state.hexdigest()


def image_of(state: Any, where: str, *, trust: bool) -> Image:
    """Make the image of a unit's state, whose tensors nobody may change until they are written.

    Args:
        state: nested Python values and tensors.
        where: its name, for messages.
        trust: as for :func:`~bcp.planners.packed.pack`.

    Raises:
        StateError: something in it cannot be serialized, or not be read again; the message names it.

    """
    outside: list[torch.Tensor] = []
    packed = pack(state, where, trust=trust, outside=outside)
    order = sorted(range(len(outside)), key=lambda number: -outside[number].itemsize)
    tensors = [outside[number] for number in order]
    rows = [[number, _name(outside[number].dtype), list(outside[number].shape)] for number in order]
    head = json.dumps(rows, separators=(",", ":")).encode()
    start = sum(tensor.nbytes for tensor in tensors)
    padding = bytes(-(start + len(head) + len(packed) + _END.size) % ALIGNMENT)
    return Image(tensors, head + packed + padding + _END.pack(start, len(head), len(packed)))


def unit_in(image: torch.Tensor, *, trust: bool, where: str) -> Any:
    """Return the state of a unit; its large tensors are in the memory of the image.

    Args:
        image: uint8, aligned to 64 bytes, of :func:`image_of`.
        trust: as for :func:`~bcp.planners.packed.unpack`.
        where: its name, for messages.

    Raises:
        CheckpointError: the image is damaged, or holds objects that only ``trust=True`` reads.

    """
    data = image.numpy().data
    try:
        start, head, packed = _END.unpack_from(data, len(data) - _END.size)
        tensors = _tensors(image[:start], json.loads(bytes(data[start : start + head])))
    except (struct.error, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}; load another checkpoint") from error
    return unpack(data[start + head : start + head + packed], trust=trust, where=where, outside=tensors)


def _tensors(memory: torch.Tensor, rows: Sequence[tuple[int, str, list[int]]]) -> list[torch.Tensor]:
    """Cut memory into the tensors that lie in it, by number; ValueError unless they fill it."""
    tensors: dict[int, torch.Tensor] = {}
    at = 0
    for number, name, shape in rows:
        dtype = _DTYPES[name]
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=1) < 1 or nbytes > len(memory) - at:
            raise ValueError(f"a tensor of shape {shape} and dtype {name} does not fit into {len(memory)} bytes")
        tensors[number] = memory[at : at + nbytes].view(dtype).reshape(shape)
        at += nbytes
    if at != len(memory) or sorted(tensors) != list(range(len(rows))):
        raise ValueError(f"{len(rows)} tensors do not fill {len(memory)} bytes")
    return [tensors[number] for number in range(len(rows))]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
