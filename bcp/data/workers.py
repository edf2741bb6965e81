"""Reader worker processes, as their reader sees them."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import socket
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch

from bcp._messages.reading import (
    Batch,
    Consumed,
    ReaderJob,
    Start,
    States,
    StatesRequest,
    WorkerFailure,
    unexpected,
)
from bcp.data.recipe import Recipe, Source
from bcp.data.stream import Schedule, Windows
from bcp.data.units import UnitState
from bcp.data.worker import Job, Line, Received, pack_states, parcel, run, unpack_states
from bcp.errors import InputError, MessageError, StageError

__all__ = ["START_METHOD", "Workers"]

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
"""The default. A fork would copy locks that other threads of the training process hold, and crash now and then."""

_JOIN_TIMEOUT = 10.0  # a killed process that a file system holds in the kernel is left behind


class Workers:
    """The worker processes of one reader; behaves as its :class:`Streams`.

    Worker ``i`` has every ``workers``-th of the reader's units. A worker keeps all tokens until they are consumed, so
    that states are complete without the batches that lie in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        states: Mapping[int, UnitState],
        *,
        workers: int,
        prefetch: int,
        start_method: str,
    ) -> None:
        """Start the processes; each may read ``prefetch`` batches beyond the consumed frontier.

        Raises:
            InputError: the sources cannot be pickled, or a process cannot be started.

        """
        self._recipe, self._schedule, self._prefetch = recipe, schedule, prefetch
        self._consumed = 0
        self._request = 0
        self._requested = False
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._workers, os.getpid())
        context = multiprocessing.get_context(start_method)
        job, units = Job(recipe, schedule, prefetch), list(states)
        inherited = job if start_method == "fork" else None
        sent = nullcontext() if inherited else parcel({"job": _pickled(job)}, ReaderJob)
        try:
            with sent as message:
                for number in range(workers):
                    name = f"worker {number} of reader {schedule.reader}"
                    worker = _Worker(name, context, inherited)
                    self._workers.append(worker)
                    if message:
                        worker.line.send_parcel(message)
                    own = pack_states({unit: states[unit] for unit in units[number::workers]})
                    worker.line.send_arrays(own, Start)
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
            worker.line.send(Consumed())

    def prepare(self) -> None:
        """Let the workers send their states when they have read ahead, without waiting for it."""
        self._ask(self._consumed + self._prefetch)

    def states(self) -> dict[int, UnitState]:
        """Return the states of all units at the consumed frontier.

        Prepared states are brought to it, if they have the tokens of all batches that were consumed since.

        Raises:
            StageError: a worker has died.

        """
        states = self._answers() if self._requested else None
        while states is None:
            self._ask(0)
            states = self._answers()
        self._requested = False
        return states

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _ask(self, taken: int) -> None:
        """Ask for the states as soon as the workers have taken so many batches."""
        self._request += 1
        self._requested = True
        for worker in self._workers:
            worker.answer = None
            worker.line.send(StatesRequest(self._request, taken))

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

    def __init__(self, name: str, context: Any, job: Job | None) -> None:
        self.name = name
        self.batches: deque[Windows] = deque()
        self.answer: _Answer | None = None
        self.failure: StageError | MessageError | None = None
        self._heard = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line = Line(ours)
        self.process: BaseProcess = context.Process(target=run, args=(theirs, job), name=f"bcp {name}", daemon=True)
        try:
            self.process.start()
        except (OSError, EOFError) as error:
            ours.close()
            raise InputError(f"{name} could not be started: {type(error).__name__}: {error}") from error
        finally:
            theirs.close()

    def receive(self) -> None:
        """Wait for the next message, and keep its contents."""
        if isinstance(self.failure, MessageError):
            raise self.failure
        received = None
        if self.line.socket in wait([self.line.socket, self.process.sentinel]):
            try:
                received = self.line.receive()
                if received is not None:
                    self._take(received)
            except MessageError as error:
                error.add_note(f"It came from {self.name}.")
                self.failure = error
                raise
        if received is None:
            raise self._death()
        self._heard = True

    def _take(self, received: Received) -> None:
        """Keep the contents of a message."""
        match received.message:
            case Batch(live=live):
                self.batches.append(Windows(**received.arrays, live=live))
            case States(number=number, consumed=consumed):
                self.answer = _Answer(number, consumed, unpack_states(received.arrays))
            case WorkerFailure() as words:
                self.failure = StageError("read", f"{words.item} ({self.name})", RuntimeError(words.cause))
                self.failure.add_note(words.traceback)
            case other:
                raise unexpected(other)

    def _death(self) -> StageError:
        self.process.join()
        code = self.process.exitcode or 0
        outcome = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        remedy = "load the last checkpoint"
        if code > 0 and not self._heard:
            remedy = (
                "its output tells why. A process that starts imports the main script: the script's own work belongs"
                ' below `if __name__ == "__main__":`'
            )
        error = StageError("read", self.name, ChildProcessError(f"process {self.process.pid} {outcome}; {remedy}"))
        self.failure = error
        return error


class _Pickler(pickle.Pickler):
    """Pickles tensors by value. torch would pickle all of the storage that a tensor is a part of."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
            try:
                return torch.from_numpy, (value.numpy(),)
            except (TypeError, RuntimeError):  # numpy has no such tensors
                return NotImplemented
        return NotImplemented


def _pickled(job: Job) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a job as bytes.

    Raises:
        InputError: a source cannot be pickled; the message names it.

    """
    try:
        return _dumped(job)
    except Exception as error:
        raise InputError(
            f"{_unpicklable(job.recipe.sources)} cannot be pickled for worker processes: {type(error).__name__}:"
            f" {error}; define its class and functions at the top level of a module, or pass start_method='fork',"
            " of which docs/data.md warns"
        ) from error


def _dumped(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return np.frombuffer(file.getbuffer(), np.uint8)


def _unpicklable(sources: Sequence[Source]) -> str:
    for source in sources:
        try:
            _dumped(source)
        except Exception:  # noqa: BLE001 -- it is raised by the caller
            return f"source {source.name!r}"
    return "the sources"


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
    numbers = np.sort(np.concatenate([part.numbers for part in parts]))
    tokens = np.empty((len(numbers), parts[0].tokens.shape[1]), np.int64)
    documents = np.empty_like(tokens)
    samples = []
    for part in parts:
        rows = np.searchsorted(numbers, part.numbers)
        tokens[rows], documents[rows] = part.tokens, part.documents
        part.samples[:, 0] = rows[part.samples[:, 0]]
        samples.append(part.samples)
    together = np.concatenate(samples)
    return Windows(
        numbers=numbers,
        tokens=tokens,
        documents=documents,
        samples=together[np.argsort(together[:, 0], kind="stable")],
        live=any(part.live for part in parts),
    )
