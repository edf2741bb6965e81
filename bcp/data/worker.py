"""The work of a reader worker process: it reads ahead, and keeps every token until it is consumed.

A worker computes nothing with torch, whose threads do not survive a fork.

Messages between a reader and its worker processes.

A message is words as JSON, and arrays. Both lie in an anonymous file in memory if there are arrays, and its descriptor
goes through a socket. A gigabyte of state therefore never fills the socket, nobody waits for the other end to receive
it, and the receiver maps it without a copy.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from bcp.data.recipe import Recipe, Tokens
from bcp.data.stream import Schedule, Streams
from bcp.data.units import UnitState
from bcp.errors import StageError

__all__ = ["Job", "Line", "pack_states", "parcel", "run", "unpack_states"]

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


class Job(NamedTuple):
    """The part of the work that all workers of a reader have in common.

    Attributes:
        recipe: sources and order.
        schedule: the reader's windows.
        prefetch: batches to read beyond the consumed frontier.
    """

    recipe: Recipe
    schedule: Schedule
    prefetch: int


def run(theirs: socket.socket, job: Job | None) -> None:
    """Serve a reader until it ends this process, or dies.

    The first message has the states of the units. Without a job in the arguments, a message before it has one, pickled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the reader's to act on
    for notice in (signal.SIGTERM, signal.SIGUSR1):  # torchrun and SLURM signal the group; the last steps need batches
        signal.signal(notice, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    threading.Thread(target=_watch_parent, daemon=True).start()
    line = Line(theirs)
    if job is None and (message := line.receive()):
        try:
            job = pickle.loads(message.arrays["job"].data)  # noqa: S301 -- the socket pair's other end is the parent's
        except Exception as error:  # noqa: BLE001 -- the reader raises it
            _report(line, "the sources, which could not be unpickled", error)
            return
    if job and (message := line.receive()):
        _serve(line, Streams(job.recipe, job.schedule, unpack_states(message.arrays)), job.prefetch)


def _watch_parent() -> None:
    """End this process when its parent has died. Others may hold the socket's other end, so its end tells nothing."""
    parent, family = os.getppid(), multiprocessing.parent_process()
    sentinels = [family.sentinel] if family else []
    while os.getppid() == parent and not wait(sentinels, timeout=1.0):
        pass
    os._exit(1)


def _serve(line: Line, streams: Streams, prefetch: int) -> None:
    request: dict[str, Any] | None = None
    failed = False
    while True:
        if request and (failed or streams.taken >= request["taken"]):
            states = pack_states(streams.states())
            line.send_arrays("states", states, number=request["number"], consumed=streams.consumed)
            del states
            request = None
        elif failed or streams.taken >= streams.consumed + prefetch or line.has_message():
            message = line.receive()
            if message is None:
                return
            if message.words["kind"] == "consumed":
                streams.consume()
            else:
                request = message.words
        else:
            failed = not _take(line, streams)


def _take(line: Line, streams: Streams) -> bool:
    """Send the next batch, or why there is none."""
    try:
        windows = streams.take()
        arrays = {name: getattr(windows, name) for name in ("numbers", "tokens", "documents", "samples")}
        line.send_arrays("batch", arrays, live=windows.live)
    except Exception as error:  # noqa: BLE001 -- the reader raises it
        cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
        _report(line, error.item if isinstance(error, StageError) else "a batch", cause)
        return False
    return True


def _report(line: Line, item: str, cause: BaseException) -> None:
    """Send an error, which the reader raises; clipped, because a character takes up to 12 bytes of the packet."""
    line.send(
        "failure",
        item=item[:500],
        cause=f"{type(cause).__name__}: {cause}"[:1000],
        traceback="".join(traceback.format_exception(cause))[-8000:],
    )
