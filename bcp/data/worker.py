"""The work of a reader worker process: it reads ahead, and keeps every token until it is consumed.

A worker computes nothing with torch, whose threads do not survive a fork.

Messages between a reader and its worker processes.

A message is a struct, and arrays. Both lie in an anonymous file in memory if there are arrays, and its descriptor goes
through a socket. So a gigabyte of state never fills the socket, and nobody waits for the other end to receive it. The
receiver maps it without a copy.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from bcp._messages.base import refused
from bcp._messages.reading import (
    ArrayPlace,
    Batch,
    Consumed,
    Enclosure,
    Places,
    ReaderJob,
    Start,
    States,
    StatesRequest,
    WorkerFailure,
    WorkerMessage,
    decode_worker_message,
    unexpected,
)
from bcp.data.recipe import Recipe, Tokens
from bcp.data.stream import Schedule, Streams
from bcp.data.units import UnitState
from bcp.errors import MessageError, StageError

__all__ = ["Job", "Line", "pack_states", "parcel", "run", "unpack_states"]

_PACKET = 131_072
"""Most bytes of a packet. A message without arrays has to fit in."""
_ALIGNMENT = 64
_STATE = ("cursors", "samples", "tokens", "backlog")


class Received(NamedTuple):
    """A received message. The arrays are writable and the receiver's own.

    Attributes:
        message: the struct.
        arrays: arrays by name.
    """

    message: WorkerMessage
    arrays: dict[str, np.ndarray[Any, Any]]


class Parcel(NamedTuple):
    """A message with arrays that is ready to be sent, to any number of receivers.

    Attributes:
        descriptor: an anonymous file: the arrays first, the struct at the end.
        packet: an encoded :class:`~bcp._messages.reading.Enclosure`.
    """

    descriptor: int
    packet: bytes


@contextmanager
def parcel(arrays: Mapping[str, np.ndarray[Any, Any]], build: Callable[[Places], WorkerMessage]) -> Iterator[Parcel]:
    """Write a message to an anonymous file, which is closed at the end; ``build`` makes it of the arrays' places."""
    descriptor = os.memfd_create("bcp-data")
    try:
        end = 0
        places: Places = {}
        for name, array in arrays.items():
            places[name] = ArrayPlace(end, array.shape, array.dtype.str)
            end += _write(descriptor, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, end)
            end += -end % _ALIGNMENT
        size = _write(descriptor, memoryview(build(places).encode()), end)
        yield Parcel(descriptor, Enclosure(end, size).encode())
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

    def send(self, message: WorkerMessage) -> None:
        """Send a message. To an end that is closed it is lost: the next :meth:`receive` tells of it."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(message.encode())

    def send_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]], build: Callable[[Places], WorkerMessage]) -> None:
        """Send a message with arrays, made as by :func:`parcel`. To an end that is closed it is lost."""
        with parcel(arrays, build) as message:
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

    def receive(self) -> Received | None:
        """Wait for a message. Returns None if the other end is closed.

        Raises:
            MessageError: it cannot be decoded.

        """
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self.socket, _PACKET, 1)
        except ConnectionResetError:  # it comes once if the other end was closed with messages unread, before its last
            packet, descriptors, flags, _ = socket.recv_fds(self.socket, _PACKET, 1)
        if flags & socket.MSG_CTRUNC:
            raise OSError("a descriptor of a reader worker's message is lost: this process has too many open files")
        if not packet:
            return None
        if not descriptors:
            message = decode_worker_message(packet)
            if hasattr(message, "arrays"):
                raise refused("of a reader worker", packet, "it names arrays, and came without them")
            return Received(message, {})
        try:
            enclosure = Enclosure.decode(packet)
            memory = _mapped(descriptors[0], enclosure)
        finally:
            os.close(descriptors[0])
        message = decode_worker_message(memory[enclosure.end :].tobytes())
        places: Places = getattr(message, "arrays", {})
        return Received(message, {name: _array(memory[: enclosure.end], place) for name, place in places.items()})


def pack_states(states: Mapping[int, UnitState]) -> dict[str, Tokens]:
    """Return the states of units as arrays to send."""
    arrays = {f"{unit} {name}": getattr(state, name) for unit, state in states.items() for name in _STATE}
    return {"units": np.array([[unit, state.draws] for unit, state in states.items()], np.int64), **arrays}


def unpack_states(arrays: Mapping[str, Tokens]) -> dict[int, UnitState]:
    """Return the states of units that :func:`pack_states` packed; they share the arrays' memory.

    Raises:
        MessageError: arrays of a unit are missing.

    """
    try:
        return {
            unit: UnitState(draws=draws, **cast("dict[str, Any]", {name: arrays[f"{unit} {name}"] for name in _STATE}))
            for unit, draws in arrays["units"].reshape(-1, 2).tolist()
        }
    except (KeyError, ValueError) as error:
        raise MessageError(
            f"{len(arrays)} arrays of a reader worker are no states of units: {error!r}; "
            "run the same version of bcp in all processes"
        ) from error


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written


def _mapped(descriptor: int, enclosure: Enclosure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map an anonymous file, but not by the module mmap, which keeps a descriptor for as long as there is an array."""
    nbytes, expected = os.fstat(descriptor).st_size, enclosure.end + enclosure.nbytes
    if nbytes != expected:  # torch would make a shorter file longer
        raise refused("with arrays", nbytes, f"{expected} bytes were announced")
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    return cast("np.ndarray[Any, np.dtype[np.uint8]]", memory.numpy())


def _array(memory: np.ndarray[Any, np.dtype[np.uint8]], place: ArrayPlace) -> np.ndarray[Any, Any]:
    if place.offset + place.nbytes > len(memory):
        raise refused("with arrays", memory.data, f"an array of {place.nbytes} bytes begins at byte {place.offset}")
    return memory[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)


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
    if job is None and (received := _received(line, ReaderJob)):
        try:
            job = pickle.loads(received.arrays["job"].data)  # noqa: S301 -- the socket pair's other end is the parent's
        except Exception as error:  # noqa: BLE001 -- the reader raises it
            _report(line, "the sources, which could not be unpickled", error)
            return
    if job and (received := _received(line, Start)):
        _serve(line, Streams(job.recipe, job.schedule, unpack_states(received.arrays)), job.prefetch)


def _received(line: Line, kind: type[WorkerMessage]) -> Received | None:
    """Wait for a message of that class. Returns None if the other end is closed."""
    received = line.receive()
    if received is not None and not isinstance(received.message, kind):
        raise unexpected(received.message)
    return received


def _watch_parent() -> None:
    """End this process when its parent has died. Others may hold the socket's other end, so its end tells nothing."""
    parent, family = os.getppid(), multiprocessing.parent_process()
    sentinels = [family.sentinel] if family else []
    while os.getppid() == parent and not wait(sentinels, timeout=1.0):
        pass
    os._exit(1)


def _serve(line: Line, streams: Streams, prefetch: int) -> None:
    request: StatesRequest | None = None
    failed = False
    while True:
        if request and (failed or streams.taken >= request.taken):
            states = pack_states(streams.states())
            line.send_arrays(states, partial(States, number=request.number, consumed=streams.consumed))
            del states
            request = None
        elif failed or streams.taken >= streams.consumed + prefetch or line.has_message():
            received = line.receive()
            if received is None:
                return
            match received.message:
                case Consumed():
                    streams.consume()
                case StatesRequest() as request:
                    pass
                case other:
                    raise unexpected(other)
        else:
            failed = not _take(line, streams)


def _take(line: Line, streams: Streams) -> bool:
    """Send the next batch, or why there is none."""
    try:
        windows = streams.take()
        arrays = {name: getattr(windows, name) for name in ("numbers", "tokens", "documents", "samples")}
        line.send_arrays(arrays, partial(Batch, live=windows.live))
    except Exception as error:  # noqa: BLE001 -- the reader raises it
        cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
        _report(line, error.item if isinstance(error, StageError) else "a batch", cause)
        return False
    return True


def _report(line: Line, item: str, cause: BaseException) -> None:
    """Send an error, which the reader raises; clipped, because a character takes up to 6 bytes of the packet."""
    line.send(
        WorkerFailure(
            item=item[:500],
            cause=f"{type(cause).__name__}: {cause}"[:1000],
            traceback="".join(traceback.format_exception(cause))[-8000:],
        )
    )
