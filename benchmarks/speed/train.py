"""A real training loop, small enough for steps of some milliseconds, to see what a save in the background costs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 -- everybody's name for it

from benchmarks.speed import disk
from benchmarks.speed.gpt import Gpt

__all__ = ["Background", "Trained", "Trainer"]

ALONE_SECONDS = 1.0
BATCH, CONTEXT, VOCAB = 4, 32, 256


@dataclass(frozen=True, slots=True)
class Background:
    """A save that goes on while training does.

    Attributes:
        wait: blocks until the library says that the checkpoint is written.
        update: what has to be entered to change parameters: waits, where the library asks for that.
    """

    wait: Callable[[], object]
    update: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True)
class Trained:
    """What a background save and training did to each other; all but ``steps`` in seconds.

    Attributes:
        blocking: until the call returned.
        stall: that, and what updates waited longer than usual before they could change what is saved.
        durable: from the call until every byte was synced.
        lost: training that did not happen meanwhile: the time less the steps done, at the usual length of a step.
        steps: training steps done meanwhile.
        worst: the longest of these steps.
        alone: the median of steps while nothing was saved.
        worst_alone: the longest of those; neighbours on the machine are to blame for it.
        training_cpu: CPU time of training itself, before and meanwhile.
    """

    blocking: float
    stall: float
    durable: float
    lost: float
    steps: int
    worst: float
    alone: float
    worst_alone: float
    training_cpu: float


class _Step(NamedTuple):
    """How long one step took, and of that the update of what is saved, with what it had to wait for; in seconds."""

    seconds: float
    update: float


class Trainer:
    """Trains a small GPT on one core, in the thread that calls."""

    def __init__(self, update_saved: Callable[[], object]) -> None:
        torch.manual_seed(0)
        self._model = Gpt(width=96, layers=2, vocab=VOCAB, heads=4)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._tokens = torch.randint(VOCAB, (BATCH, CONTEXT + 1))
        self._update_saved = update_saved

    def step(self, update: Callable[[], AbstractContextManager[object]] = nullcontext) -> _Step:
        """Do one step."""
        begin = time.perf_counter()
        logits = self._model(self._tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        asked = time.perf_counter()
        with update():
            self._update_saved()
            updated = time.perf_counter()
            self._optimizer.step()
        self._optimizer.zero_grad()
        return _Step(time.perf_counter() - begin, updated - asked)

    def alone(self, seconds: float = ALONE_SECONDS) -> list[_Step]:
        """Train while nothing is saved."""
        until = time.perf_counter() + seconds
        steps = [self.step()]
        while time.perf_counter() < until:
            steps.append(self.step())
        return steps

    def during(self, save: Callable[[], Background], path: Path) -> Trained:
        """Call ``save``, and train until what it wrote to ``path`` is durable."""
        cpu = time.thread_time()
        with _one_thread():
            alone = self.alone()
        usual, usual_update = (float(np.median(times)) for times in zip(*alone, strict=True))
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        background = save()
        blocking = time.perf_counter() - begin
        cpu += time.thread_time() - begin_cpu  # the call's own is no training
        with _one_thread():
            watch = _Watch(background, path)
            steps = [self.step(background.update)]
            while not watch.done.is_set():
                steps.append(self.step(background.update))
            until = time.perf_counter()
            cpu = time.thread_time() - cpu
        return Trained(
            blocking=blocking,
            stall=blocking + sum(max(step.update - usual_update, 0.0) for step in steps),
            durable=watch.ended() - begin,
            lost=until - begin - len(steps) * usual,
            steps=len(steps),
            worst=max(steps).seconds,
            alone=usual,
            worst_alone=max(alone).seconds,
            training_cpu=cpu,
        )


class _Watch:
    """A thread that waits for a background save, makes it durable, and takes the time."""

    def __init__(self, background: Background, path: Path) -> None:
        self.done = threading.Event()
        self._outcome: float | BaseException = 0.0
        self._thread = threading.Thread(target=self._run, args=(background, path))
        self._thread.start()

    def _run(self, background: Background, path: Path) -> None:
        try:
            background.wait()
            disk.make_durable(path)
            self._outcome = time.perf_counter()
        except BaseException as error:  # noqa: BLE001 -- raised by ended()
            self._outcome = error
        finally:
            self.done.set()

    def ended(self) -> float:
        """Return when the save was durable, or raise what went wrong."""
        self._thread.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that a core is left to the save, as training on a GPU would leave it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
