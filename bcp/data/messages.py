"""Messages between a reader and its worker processes.

A message is words as JSON, and arrays. Both lie in an anonymous file in memory if there are arrays, and its descriptor
goes through a socket. A gigabyte of state therefore never fills the socket, nobody waits for the other end to receive
it, and the receiver maps it without a copy.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from bcp.data.recipe import Tokens
from bcp.data.units import UnitState

__all__ = ["Line", "Message", "Parcel", "pack_states", "parcel", "unpack_states"]

_PACKET = 131_072
"""Most bytes of a packet. Words without arrays have to fit in."""
_ALIGNMENT = 64
_STATE = ("cursors", "samples", "tokens", "backlog")


class Message(NamedTuple):
    """A received message. The arrays are writable and the receiver's own.

    Attributes:
        words: small values by name; ``kind`` tells the purpose.
        arrays: arrays by name.
    """

    words: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]


class Parcel(NamedTuple):
    """A message with arrays that is ready to be sent, to any number of receivers.

    Attributes:
        descriptor: an anonymous file: the arrays first, the words at the end.
        packet: position and size of the words.
    """

    descriptor: int
    packet: bytes


@contextmanager
def parcel(arrays: Mapping[str, np.ndarray[Any, Any]], **words: Any) -> Iterator[Parcel]:
    """Write a message to an anonymous file, which is closed at the end."""
    descriptor = os.memfd_create("bcp-data")
    try:
        end = 0
        places = {}
        for name, array in arrays.items():
            places[name] = end, array.shape, array.dtype.str
            end += _write(descriptor, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, end)
            end += -end % _ALIGNMENT
        size = _write(descriptor, memoryview(json.dumps({**words, "arrays": places}).encode()), end)
        yield Parcel(descriptor, struct.pack("<QQ", end, size))
    finally:
        os.close(descriptor)


class Line:
    """One end of a socket that carries messages."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a socket of type SOCK_SEQPACKET."""
        self.socket = end

    def has_message(self) -> bool:
        """Tell whether :meth:`receive` would return at once."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, kind: str, **words: Any) -> None:
        """Send words. To an end that is closed they are lost: the next :meth:`receive` tells of it."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(json.dumps({"kind": kind, **words}).encode())

    def send_arrays(self, kind: str, arrays: Mapping[str, np.ndarray[Any, Any]], **words: Any) -> None:
        """Send words and arrays. To an end that is closed they are lost."""
        with parcel(arrays, kind=kind, **words) as message:
            self.send_parcel(message)

    def send_parcel(self, message: Parcel) -> None:
        """Send a message that was written before. To an end that is closed it is lost."""
        try:
            socket.send_fds(self.socket, [message.packet], [message.descriptor])
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            raise OSError(
                error.errno,
                "all reader workers of this user have too many batches on their way; raise the limit of open files"
                " (ulimit -n), or lower prefetch or workers",
            ) from error

    def receive(self) -> Message | None:
        """Wait for a message. Returns None if the other end is closed."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self.socket, _PACKET, 1)
        except ConnectionResetError:
            return None
        if flags & socket.MSG_CTRUNC:
            raise OSError("a descriptor of a reader worker's message is lost: this process has too many open files")
        if not packet:
            return None
        if not descriptors:
            return Message(json.loads(packet), {})
        end, size = struct.unpack("<QQ", packet)
        try:  # not by the module mmap, which keeps a descriptor for as long as there is an array
            file = f"/proc/self/fd/{descriptors[0]}"
            memory = torch.from_file(file, shared=True, size=end + size, dtype=torch.uint8).numpy()
        finally:
            os.close(descriptors[0])
        words = json.loads(memory[end:].tobytes())
        return Message(words, {name: _array(memory, *place) for name, place in words.pop("arrays").items()})


def pack_states(states: Mapping[int, UnitState]) -> dict[str, Tokens]:
    """Return the states of units as arrays to send."""
    arrays = {f"{unit} {name}": getattr(state, name) for unit, state in states.items() for name in _STATE}
    return {"units": np.array([[unit, state.draws] for unit, state in states.items()], np.int64), **arrays}


def unpack_states(arrays: Mapping[str, Tokens]) -> dict[int, UnitState]:
    """Return the states of units that :func:`pack_states` packed; they share the arrays' memory."""
    return {
        unit: UnitState(draws=draws, **cast("dict[str, Any]", {name: arrays[f"{unit} {name}"] for name in _STATE}))
        for unit, draws in arrays["units"].reshape(-1, 2).tolist()
    }


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written


def _array(
    memory: np.ndarray[Any, np.dtype[np.uint8]], offset: int, shape: list[int], dtype: str
) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    return memory[offset : offset + nbytes].view(kind).reshape(shape)
