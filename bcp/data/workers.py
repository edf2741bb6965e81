"""Reader worker processes: they read ahead, and keep every token until it is consumed.

A reader and a worker share one socket. A message is a line of JSON; arrays lie in an anonymous file in memory whose
descriptor goes with the message. A batch or a gigabyte of state therefore never fills the socket, no worker waits for
the training loop to receive it, and the training process maps it without a copy.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import select
import signal
import socket
import struct
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from bcp.data.recipe import Recipe, Tokens
from bcp.data.stream import Schedule, Streams, Windows
from bcp.data.units import UnitState
from bcp.errors import InputError, StageError

__all__ = ["Workers"]

_PACKET = 65536
_ALIGNMENT = 64
_JOIN_TIMEOUT = 10.0  # a killed process that a file system holds in the kernel is left behind


class Workers:
    """The worker processes of one reader; behaves as its :class:`Streams`.

    Worker ``i`` has every ``workers``-th of the reader's units. What a worker does not hold, a state does not need: the
    states are complete without the batches that lie in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        states: Mapping[int, UnitState],
        *,
        workers: int,
        prefetch: int,
        start_method: str | None,
    ) -> None:
        """Start the processes; each may read ``prefetch`` batches beyond the consumed frontier.

        Raises:
            InputError: the sources cannot be sent to a new process.

        """
        self._recipe, self._schedule, self._prefetch = recipe, schedule, prefetch
        self._consumed = 0
        self._request = 0
        self._requested = False
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._workers, os.getpid())
        context = multiprocessing.get_context(start_method)
        units = list(states)
        try:
            for number in range(workers):
                name = f"worker {number} of reader {schedule.reader}"
                worker = _Worker(name, context, (recipe, schedule, prefetch))
                self._workers.append(worker)
                worker.line.send("start", arrays=_pack({unit: states[unit] for unit in units[number::workers]}))
        except BaseException:
            self.close()
            raise

    def take(self) -> Windows:
        """Return the windows of the next batch.

        Raises:
            StageError: a worker could not read a sample, or has died. Later calls raise it too.

        """
        for worker in self._workers:
            while not worker.batches:
                if worker.failure:
                    raise worker.failure
                worker.receive()
        return _joined([worker.batches.popleft() for worker in self._workers])

    def consume(self) -> None:
        """Move the consumed frontier behind the oldest batch that was taken."""
        self._consumed += 1
        for worker in self._workers:
            worker.line.send("consumed")

    def prepare(self) -> None:
        """Let the workers send their states when they have read ahead, without waiting for it."""
        self._ask(self._consumed + self._prefetch)

    def states(self) -> dict[int, UnitState]:
        """Return the states of all units at the consumed frontier.

        Prepared states are brought to it, if they have the tokens of all batches that were consumed since.

        Raises:
            StageError: a worker has died.

        """
        found = self._answers() if self._requested else None
        while found is None:
            self._ask(0)
            found = self._answers()
        self._requested = False
        return found

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _ask(self, taken: int) -> None:
        """Ask for the states as soon as the workers have taken so many batches."""
        self._request += 1
        self._requested = True
        for worker in self._workers:
            worker.answer = None
            worker.line.send("states", number=self._request, taken=taken)

    def _answers(self) -> dict[int, UnitState] | None:
        states: dict[int, UnitState] = {}
        for worker in self._workers:
            while worker.answer is None or worker.answer.number != self._request:
                worker.receive()
            for unit, state in worker.answer.states.items():
                windows = self._schedule.count(unit, worker.answer.consumed, self._consumed)
                later = state.after(windows, self._recipe, unit)
                if later is None:
                    return None
                states[unit] = later
        for worker in self._workers:
            worker.answer = None  # its memory belongs to the caller
        return states


class _Answer(NamedTuple):
    """States at a consumed frontier, in answer to a request."""

    number: int
    consumed: int
    states: dict[int, UnitState]


class _Worker:
    """One worker process, as the reader sees it."""

    def __init__(self, name: str, context: Any, work: tuple[Recipe, Schedule, int]) -> None:
        self.name = name
        self.batches: deque[Windows] = deque()
        self.answer: _Answer | None = None
        self.failure: StageError | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line = _Line(ours)
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, *work), name=f"bcp {name}", daemon=True)
        try:
            self.process.start()
        except (TypeError, AttributeError, ValueError, OSError) as error:  # pickle raises all but the last
            ours.close()
            raise InputError(f"{name} could not be started: {error}; sources have to be picklable") from error
        finally:
            theirs.close()

    def receive(self) -> None:
        """Wait for the next message, and keep its contents."""
        message = None
        if self.line.socket in wait([self.line.socket, self.process.sentinel]):
            message = self.line.receive()
        if message is None:
            raise self._death()
        words, arrays = message
        if words["kind"] == "batch":
            self.batches.append(Windows(**arrays, live=words["live"]))
        elif words["kind"] == "states":
            self.answer = _Answer(words["number"], words["consumed"], _unpack(arrays))
        else:
            self.failure = StageError("read", f"{words['item']} ({self.name})", RuntimeError(words["cause"]))
            self.failure.add_note(words["traceback"])

    def _death(self) -> StageError:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause = ChildProcessError(f"process {self.process.pid} {how}; load the last checkpoint")
        self.failure = StageError("read", self.name, cause)
        return self.failure


def _end(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the training process
        return
    for worker in workers:
        worker.process.kill()  # the state of a worker is the reader's to ask for
    for worker in workers:
        worker.process.join(_JOIN_TIMEOUT)
        worker.line.socket.close()


def _joined(parts: list[Windows]) -> Windows:
    """Return the windows of all workers, in the order of their numbers."""
    if len(parts) == 1:
        return parts[0]
    numbers = np.concatenate([part.numbers for part in parts])
    order = np.argsort(numbers)
    rows = np.argsort(order)  # new row of each old one
    offsets = np.cumsum([0, *(len(part.numbers) for part in parts)])
    samples = np.concatenate([part.samples for part in parts])
    old = samples[:, 0] + np.repeat(offsets[:-1], [len(part.samples) for part in parts])
    samples[:, 0] = rows[old]
    return Windows(
        numbers=numbers[order],
        tokens=np.concatenate([part.tokens for part in parts])[order],
        documents=np.concatenate([part.documents for part in parts])[order],
        samples=samples[np.argsort(samples[:, 0], kind="stable")],
        live=any(part.live for part in parts),
    )


# -- in the worker ----------------------------------------------------------------------------


def _work(theirs: socket.socket, recipe: Recipe, schedule: Schedule, prefetch: int) -> None:
    """Run a worker until the reader ends it, or dies.

    It computes nothing with torch, whose threads do not survive a fork.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the reader's to act on
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and a handler of the training loop is not for this process
    signal.set_wakeup_fd(-1)
    threading.Thread(target=_watch_parent, daemon=True).start()
    line = _Line(theirs)
    message = line.receive()
    if message is not None:
        _serve(line, Streams(recipe, schedule, _unpack(message[1])), prefetch)


def _watch_parent() -> None:
    """End this process when its parent has died. Others may hold the socket's other end, so its end tells nothing."""
    parent, family = os.getppid(), multiprocessing.parent_process()
    sentinels = [family.sentinel] if family else []
    while os.getppid() == parent and not wait(sentinels, timeout=1.0):
        pass
    os._exit(1)


def _serve(line: _Line, streams: Streams, prefetch: int) -> None:
    request: dict[str, Any] | None = None
    failed = False
    while True:
        if request and (failed or streams.taken >= request["taken"]):
            states = _pack(streams.states())
            line.send("states", number=request["number"], consumed=streams.consumed, arrays=states)
            request = None
        elif failed or streams.taken >= streams.consumed + prefetch or line.has_message():
            message = line.receive()
            if message is None:
                return
            if message[0]["kind"] == "consumed":
                streams.consume()
            else:
                request = message[0]
        else:
            failed = not _take(line, streams)


def _take(line: _Line, streams: Streams) -> bool:
    """Send the next batch, or why there is none."""
    try:
        windows = streams.take()
    except Exception as error:  # noqa: BLE001 -- the reader raises it
        cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
        line.send(
            "failure",
            item=error.item if isinstance(error, StageError) else "a batch",
            cause=f"{type(cause).__name__}: {cause}"[:2000],
            traceback="".join(traceback.format_exception(cause))[-20000:],
        )
        return False
    arrays = {name: getattr(windows, name) for name in ("numbers", "tokens", "documents", "samples")}
    line.send("batch", live=windows.live, arrays=arrays)
    return True


# -- messages ---------------------------------------------------------------------------------


_STATE = ("cursors", "samples", "tokens", "backlog")


def _pack(states: Mapping[int, UnitState]) -> dict[str, Tokens]:
    arrays = {f"{unit} {name}": getattr(state, name) for unit, state in states.items() for name in _STATE}
    return {"units": np.array([[unit, state.draws] for unit, state in states.items()], np.int64), **arrays}


def _unpack(arrays: Mapping[str, Tokens]) -> dict[int, UnitState]:
    return {
        unit: UnitState(draws=draws, **cast("dict[str, Any]", {name: arrays[f"{unit} {name}"] for name in _STATE}))
        for unit, draws in arrays["units"].reshape(-1, 2).tolist()
    }


class _Line:
    """One end of a socket that carries messages: words as JSON, and int64 arrays."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def has_message(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, kind: str, *, arrays: Mapping[str, Tokens] | None = None, **words: Any) -> None:
        """Send a message. To an end that is closed it is lost: the receiver's death is noticed by the next receive."""
        try:
            if arrays is None:
                self.socket.send(json.dumps({"kind": kind, **words}).encode())
            else:
                self._send_arrays({"kind": kind, **words}, arrays)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _send_arrays(self, words: dict[str, Any], arrays: Mapping[str, Tokens]) -> None:
        """Send the words and the arrays in an anonymous file: the arrays first, the words at the end."""
        descriptor = os.memfd_create("bcp-data")
        try:
            end = 0
            places = {}
            for name, array in arrays.items():
                places[name] = end, array.shape
                end += _write(descriptor, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, end)
                end += -end % _ALIGNMENT
            size = _write(descriptor, memoryview(json.dumps({**words, "arrays": places}).encode()), end)
            socket.send_fds(self.socket, [struct.pack("<QQ", end, size)], [descriptor])
        finally:
            os.close(descriptor)

    def receive(self) -> tuple[dict[str, Any], dict[str, Tokens]] | None:
        """Wait for a message. Returns None if the other end is closed. The arrays are writable and the caller's own."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self.socket, _PACKET, 1)
        except ConnectionResetError:
            return None
        if flags & socket.MSG_CTRUNC:
            raise OSError("a descriptor of a reader worker's message is lost: this process has too many open files")
        if not packet:
            return None
        if not descriptors:
            return json.loads(packet), {}
        end, size = struct.unpack("<QQ", packet)
        try:  # not by the module mmap, which keeps a descriptor for as long as there is an array
            file = f"/proc/self/fd/{descriptors[0]}"
            memory = torch.from_file(file, shared=True, size=end + size, dtype=torch.uint8).numpy()
        finally:
            os.close(descriptors[0])
        words = json.loads(memory[end:].tobytes())
        arrays = {name: _array(memory, offset, shape) for name, (offset, shape) in words.pop("arrays").items()}
        return words, arrays


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written


def _array(memory: np.ndarray[Any, np.dtype[np.uint8]], offset: int, shape: list[int]) -> Tokens:
    return memory[offset : offset + 8 * math.prod(shape)].view(np.int64).reshape(shape)
