"""Streams of tokens, cut into windows: the work of a reader or of one of its worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from bcp.data.recipe import Recipe, Tokens
from bcp.data.units import UnitState
from bcp.errors import StageError

__all__ = ["Schedule", "Stream", "Streams", "Windows", "initial_state"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which global windows a reader consumes: window ``g`` is of unit ``g % units``, and of reader ``g % readers``.

    The readers divide the units, so that a reader needs the units ``u`` with ``u % readers == reader`` and no others.
    They divide the batch too, so that each has equally many windows of every batch. The windows of a batch are the same
    for any number of readers.

    Attributes:
        reader: number of the reader.
        readers: how many readers there are.
        units: how many units there are.
        batch: windows of all readers in a step.
        start: number of the first window.
    """

    reader: int
    readers: int
    units: int
    batch: int
    start: int

    def windows(self, step: int) -> range:
        """Return the numbers of the reader's windows of a step, counted from 0 at ``start``."""
        first = self.start + step * self.batch
        return range(first + (self.reader - first) % self.readers, first + self.batch, self.readers)

    def count(self, unit: int, begin: int, end: int) -> int:
        """Return how many windows of a unit the steps from ``begin`` until ``end`` have."""
        first, stop = (self.start + step * self.batch for step in (begin, end))
        return len(range(first + (unit - first) % self.units, stop, self.units))


class Span(NamedTuple):
    """Consecutive tokens of one sample.

    Attributes:
        sample: source, epoch, index.
        begins: the sample begins here.
        tokens: int64[n], n may be 0.
    """

    sample: tuple[int, int, int]
    begins: bool
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of one worker in one batch.

    Attributes:
        numbers: int64[n], ascending: the numbers of the windows.
        tokens: int64[n, context]; 0 behind the end of a stream.
        documents: int64[n, context]: number of the document within the window, from 0; -1 behind the end of a stream.
        samples: int64[k, 4]: row of the window, source, epoch and index of each sample that begins in one.
        live: the streams had not ended before this batch.
    """

    numbers: Tokens
    tokens: Tokens
    documents: Tokens
    samples: Tokens
    live: bool


def initial_state(recipe: Recipe, unit: int) -> UnitState:
    """Return the state of a unit that nothing was read of."""
    return UnitState(
        cursors=np.array([[0, unit]] * len(recipe.sources), np.int64),
        draws=0,
        samples=np.empty((0, 5), np.int64),
        tokens=np.empty(0, np.int64),
        backlog=np.empty((0, 3), np.int64),
    )


class Stream:
    """The stream of one unit: samples are drawn, joined and cut into windows.

    Windows that were cut are held until they are consumed, so that the state is always that of the consumed frontier.
    """

    def __init__(self, recipe: Recipe, unit: int, state: UnitState) -> None:
        self._recipe, self._unit = recipe, unit
        self._cursors, self._draws = state.cursors.copy(), state.draws
        self._backlog = deque((row[0], row[1], row[2]) for row in state.backlog.tolist())
        pieces = np.split(state.tokens, np.cumsum(state.samples[:, 4])[:-1]) if len(state.samples) else []
        self._fresh = deque(
            Span((row[0], row[1], row[2]), not row[3], piece)
            for row, piece in zip(state.samples.tolist(), pieces, strict=True)
        )
        self._fresh_tokens = len(state.tokens)
        self._held: deque[list[Span]] = deque()

    @property
    def live(self) -> bool:
        """Tell whether another window would have a sample."""
        return bool(self._fresh or self._backlog or self._recipe.open_sources(self._unit, self._cursors))

    def cut(self) -> list[Span]:
        """Return the next window, which is held until :meth:`consume`. The last ones of a stream are short or empty.

        Raises:
            StageError: a sample could not be read. The state is as before.

        """
        context = self._recipe.context
        while self._fresh_tokens < context and (span := self._read()):
            self._fresh.append(span)
            self._fresh_tokens += len(span.tokens)
        window: list[Span] = []
        missing = context
        while missing and self._fresh:
            span = self._fresh.popleft()
            if len(span.tokens) > missing:
                self._fresh.appendleft(Span(span.sample, begins=False, tokens=span.tokens[missing:]))
                span = span._replace(tokens=span.tokens[:missing])
            window.append(span)
            missing -= len(span.tokens)
        self._fresh_tokens -= context - missing
        self._held.append(window)
        return window

    def consume(self) -> None:
        """Forget the oldest window that is held."""
        self._held.popleft()

    def state(self) -> UnitState:
        """Return the state at the consumed frontier; a copy."""
        spans = [*chain.from_iterable(self._held), *self._fresh]
        rows: list[list[int]] = []
        for span in spans:
            if span.begins or not rows or tuple(rows[-1][:3]) != span.sample:
                rows.append([*span.sample, not span.begins, 0])
            rows[-1][4] += len(span.tokens)
        return UnitState(
            cursors=self._cursors.copy(),
            draws=self._draws,
            samples=np.array(rows, np.int64).reshape(-1, 5),
            tokens=np.concatenate([span.tokens for span in spans]) if spans else np.empty(0, np.int64),
            backlog=np.array(self._backlog, np.int64).reshape(-1, 3),
        )

    def _read(self) -> Span | None:
        """Read the next sample of the backlog or of a drawn source. The counters move after it was read."""
        if self._backlog:
            span = self._span(*self._backlog[0])
            self._backlog.popleft()
            return span
        among = self._recipe.open_sources(self._unit, self._cursors)
        if not among:
            return None
        source = self._recipe.draw(self._unit, self._draws, among)
        epoch, position = (int(value) for value in self._cursors[source])
        if position >= len(self._recipe.sources[source].samples):
            epoch, position = epoch + 1, self._unit
        span = self._span(source, epoch, self._recipe.index(source, epoch, position))
        self._cursors[source] = epoch, position + self._recipe.units
        self._draws += 1
        return span

    def _span(self, source: int, epoch: int, index: int) -> Span:
        try:
            tokens = self._recipe.sources[source].read(index)
        except Exception as error:
            name = self._recipe.sources[source].name
            raise StageError("read", f"sample {index} of source {name!r} in epoch {epoch}", error) from error
        return Span((source, epoch, index), begins=True, tokens=tokens)


class Streams:
    """The streams of one worker; takes its windows of each batch of the schedule, ahead of their consumption."""

    def __init__(self, recipe: Recipe, schedule: Schedule, states: Mapping[int, UnitState]) -> None:
        self._context, self._schedule = recipe.context, schedule
        self._streams = {unit: Stream(recipe, unit, state) for unit, state in states.items()}
        self.taken = 0
        self.consumed = 0

    def take(self) -> Windows:
        """Return the windows of the next batch."""
        live = any(stream.live for stream in self._streams.values())
        numbers = self._numbers(self.taken)
        windows = [self._streams[number % self._schedule.units].cut() for number in numbers]
        self.taken += 1
        tokens = np.zeros((len(numbers), self._context), np.int64)
        documents = np.full_like(tokens, -1)
        samples: list[tuple[int, ...]] = []
        for row, spans in enumerate(windows):
            samples += [(row, *span.sample) for span in spans if span.begins]
            _fill(tokens[row], documents[row], spans)
        return Windows(
            np.array(numbers, np.int64), tokens, documents, np.array(samples, np.int64).reshape(-1, 4), live=live
        )

    def consume(self) -> None:
        """Move the consumed frontier behind the oldest batch that was taken."""
        for number in self._numbers(self.consumed):
            self._streams[number % self._schedule.units].consume()
        self.consumed += 1

    def states(self) -> dict[int, UnitState]:
        """Return the states of all units at the consumed frontier."""
        return {unit: stream.state() for unit, stream in self._streams.items()}

    def _numbers(self, step: int) -> list[int]:
        return [n for n in self._schedule.windows(step) if n % self._schedule.units in self._streams]


def _fill(tokens: Tokens, documents: Tokens, spans: Sequence[Span]) -> None:
    """Write the spans of a window, each of another sample. A span is a document; that of an empty sample is none."""
    end = 0
    for document, span in enumerate(span for span in spans if len(span.tokens)):
        begin, end = end, end + len(span.tokens)
        tokens[begin:end] = span.tokens
        documents[begin:end] = document
