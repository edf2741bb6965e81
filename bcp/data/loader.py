"""The token loader: batches of packed windows, and a state that fits any number of readers and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd
from multiprocessing import get_all_start_methods
from typing import Any, NamedTuple

import torch

from bcp.data.closing import Closing
from bcp.data.recipe import Recipe, Source
from bcp.data.stream import Schedule, Streams, Windows, initial_state
from bcp.data.units import Unit, UnitState, from_plain, needed_count, needed_units, parse_units, reshard, to_plain
from bcp.data.workers import START_METHOD, Workers
from bcp.errors import InputError, MismatchError, StateError

__all__ = ["Batch", "SampleId", "TokenLoader"]

_INTERRUPTED = "reading a batch was interrupted; save the state, and load it to go on"
_MOST_PREFETCHED = 100  # as many messages lie in a socket, so that reader and worker never wait for each other's send


class SampleId(NamedTuple):
    """Names one reading of one sample, in a whole run.

    Attributes:
        source: name of the source.
        epoch: how many times the source was read before.
        index: index into the source's samples.
    """

    source: str
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One reader's windows of one step.

    A window is ``context`` consecutive tokens of one virtual shard: samples one after the other, cut at the window's
    end. The next window of the shard has the rest.

    Attributes:
        tokens: int64[batch / readers, context], on the CPU. 0 behind the end of the data.
        documents: int64[batch / readers, context]: number of the document within its window, from 0, for masks of
            attention and loss. -1 behind the end of the data.
        samples: for each window the ids of the samples that begin in it, in order.
        windows: number of each window, ascending, among those of all readers since the run began.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    samples: tuple[tuple[SampleId, ...], ...]
    windows: tuple[int, ...]


class TokenLoader(Closing):
    """Packs samples of weighted sources into windows, and resumes exactly on any number of readers and workers.

    An iterator over the :class:`Batch` of one reader. It reads everything through ``shards`` virtual shards, a number
    that is fixed for the life of a run. A virtual shard owns the samples at every ``shards``-th position of each
    source's shuffled epochs. It draws sources by weight, and joins their samples to a stream. Buffers belong to shards,
    and never to readers.

    Order: global window ``g`` comes from virtual shard ``g % shards``. Step ``t`` consumes the windows from ``t *
    batch`` until ``(t + 1) * batch``. Each step has the same windows for any number of readers and workers, if the
    readers divide the shards. If they do not, every shard is split into ``readers / gcd(shards, readers)`` parts by
    whole samples. Every sample is still fed once, in another order.

    The state (:class:`bcp.protocols.ShardedState`) is the consumed frontier: batches that the iterator has returned are
    consumed, and prefetched ones are not.

    Args:
        sources: sources of samples, in an order that is part of the run. With workers they have to be picklable.
        context: tokens of a window. For next-token targets pass the sequence length plus 1.
        batch: windows of all readers in a step. The readers divide it. It may change when a run resumes.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are.
        shards: how many virtual shards. Choose a number that all planned numbers of readers divide, for example 96.
        workers: reader processes; 0 reads in this process.
        prefetch: batches that the workers read ahead, at most 100.
        seed: chooses the order. It is part of the run.
        epochs: how often each sample is read; None for without end. With a number, a reader stops when its own shards
            have ended, and readers stop at different steps.
        start_method: how worker processes start, as for :mod:`multiprocessing`. None for forkserver, or spawn on
            systems without it; the main script then needs ``if __name__ == "__main__":``. ``"fork"`` takes sources that
            cannot be pickled, and may crash or hang in a process with threads, as of gRPC, CUDA or storage clients.

    Raises:
        InputError: arguments that contradict each other; the message names them.

    Example::

        books = Source("books", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
        loader = TokenLoader([books], context=4, batch=2, shards=2)
        batch = next(loader)
        loss = train(batch.tokens[:, :-1], batch.tokens[:, 1:])

    """

    reader: int
    readers: int
    _first: int  # windows consumed before the streams began
    _steps: int  # batches consumed since
    _states: dict[int, UnitState]  # of which the streams begin; empty once they have
    _engine: Streams | Workers | None
    _failure: Exception | None
    _ended: bool
    _closed: bool

    def __init__(
        self,
        sources: Sequence[Source],
        context: int,
        batch: int,
        *,
        reader: int = 0,
        readers: int = 1,
        shards: int = 64,
        workers: int = 0,
        prefetch: int = 2,
        seed: int = 0,
        epochs: int | None = None,
        start_method: str | None = None,
    ) -> None:
        counts = {"context": context, "batch": batch, "readers": readers, "shards": shards, "prefetch": prefetch}
        if start_method not in (None, *get_all_start_methods()):
            raise InputError(f"TokenLoader(start_method={start_method!r}): pass one of {get_all_start_methods()}")
        _check(sources, {**counts, "epochs": 1 if epochs is None else epochs}, reader, workers)
        self.reader, self.readers = reader, readers
        self._batch, self._workers, self._prefetch, self._start_method = (
            batch,
            workers,
            prefetch,
            start_method or START_METHOD,
        )
        parts = readers // gcd(shards, readers)
        self._recipe = Recipe(tuple(sources), context, shards, seed, epochs, parts)
        largest = max(len(source.samples) for source in sources)
        if epochs is None and largest < self._recipe.units:
            raise InputError(
                f"{shards} virtual shards in {parts} parts each need a source of {self._recipe.units} samples to be"
                f" endless, and the largest has {largest}; pass fewer shards, or readers that divide them"
            )
        self._units = [
            Unit(number % shards, number // shards, parts) for number in range(reader, self._recipe.units, readers)
        ]
        self._restart(0, {u.number(shards): initial_state(self._recipe, u.number(shards)) for u in self._units})

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, which is consumed with that.

        Raises:
            StopIteration: the epochs of this reader's shards have ended.
            InputError: the loader is closed, an earlier call was interrupted, or sources cannot be pickled for worker
                processes.
            StageError: a sample could not be read, or a worker process has died; the message names source, index and
                worker. Later calls raise it too. Unless a worker has died, the state can still be saved.

        """
        self._check_open()
        if self._ended:
            raise StopIteration
        if self._failure:
            raise self._failure
        engine = self._running()
        try:
            windows = engine.take()
        except BaseException as error:  # Ctrl-C too: some streams are one window further than others
            self._failure = error if isinstance(error, Exception) else InputError(_INTERRUPTED)
            raise
        if not windows.live:
            self._ended = True
            raise StopIteration
        engine.consume()
        self._steps += 1
        return self._to_batch(windows)

    @property
    def consumed(self) -> int:
        """Return how many windows all readers together have consumed since the run began."""
        return self._first + self._steps * self._batch

    def close(self) -> None:
        """End the worker processes. The loader has neither batches nor a state then, until it loads one. Idempotent."""
        if isinstance(self._engine, Workers):
            self._engine.close()
        self._engine, self._closed = None, True

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("the token loader is closed; make another one, or load a state into it")

    def _running(self) -> Streams | Workers:
        """Return the streams, which start with the first call."""
        if self._engine is None:
            schedule = Schedule(self.reader, self.readers, self._recipe.units, self._batch, self._first)
            if self._workers:
                self._engine = Workers(
                    self._recipe,
                    schedule,
                    self._states,
                    workers=min(self._workers, len(self._states)),
                    prefetch=self._prefetch,
                    start_method=self._start_method,
                )
            else:
                self._engine = Streams(self._recipe, schedule, self._states)
            self._states = {}
        return self._engine

    def _to_batch(self, windows: Windows) -> Batch:
        names = [source.name for source in self._recipe.sources]
        samples: list[list[SampleId]] = [[] for _ in windows.numbers]
        for row, source, epoch, index in windows.samples.tolist():
            samples[row].append(SampleId(names[source], epoch, index))
        return Batch(
            tokens=torch.from_numpy(windows.tokens),
            documents=torch.from_numpy(windows.documents),
            samples=tuple(tuple(window_samples) for window_samples in samples),
            windows=tuple(windows.numbers.tolist()),
        )

    # -- state --------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Return the values that a run keeps, equal on all readers: sources, context, shards, seed, epochs."""
        return self._recipe.shared_state()

    def unit_states(self) -> dict[str, Any]:
        """Return the state of each of this reader's units, by id.

        Ids are the number of the virtual shard, and the part if shards are split: ``"00003"``, ``"00003.0of2"``. A
        state is a dict of two integers and of int64 tensors. It has counters, the tokens that were read and are not
        consumed, and the samples of these tokens. The loader does not change a returned state.

        Raises:
            StageError: a worker process has died, and its state with it.
            InputError: the loader is closed.

        """
        self._check_open()
        states = self._states if self._engine is None else self._engine.states()
        return {
            str(unit): to_plain(replace(states[unit.number(self._recipe.shards)], at=self.consumed))
            for unit in self._units
        }

    def prepare(self, step: int) -> None:
        """Let the workers send their states now, so that :meth:`unit_states` need not wait for them.

        Call it in the step before a save. The prepared states serve until the loop has consumed ``prefetch`` more
        batches; a later :meth:`unit_states` asks the workers again. Returns at once.

        Args:
            step: number of the step that will be saved; all steps are prepared alike.

        """
        del step
        if isinstance(self._engine, Workers):
            self._engine.prepare()

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> list[str]:
        """Return which units of a checkpoint this reader loads. Pure: nothing changes.

        Args:
            shared: the checkpoint's :meth:`shared_state`.
            ids: the ids of all its units.

        Raises:
            MismatchError: the loader that was saved had other sources, another context, seed, number of shards or
                epochs.
            StateError: ids are missing, there twice, or of no token loader.

        """
        self._compare(shared)
        units = parse_units(ids, self._recipe.shards)
        parts = next(iter(units.values())).parts if units else 1
        expected = self._recipe.shards * parts
        if missing := expected - len(units):  # every id of `units` is one of those
            names = (str(Unit(shard, part, parts)) for shard in range(self._recipe.shards) for part in range(parts))
            first = list(islice((name for name in names if name not in units), 8))
            raise StateError(f"the checkpoint lacks {missing} of {expected} units of the dataloader: {first}")
        return self._wanted(parts)

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The tensors belong to the loader afterwards.

        Args:
            shared: the checkpoint's :meth:`shared_state`.
            units: the states of all :meth:`wanted_units`.

        Raises:
            MismatchError: as for :meth:`wanted_units`.
            StateError: a unit is missing, of another reader, or damaged, or units are of different steps. The loader is
                as before.

        """
        self._compare(shared)
        parsed = parse_units(units, self._recipe.shards)
        parts = next(iter(parsed.values())).parts if parsed else 1
        if (least := max(needed_count(unit, parts) for unit in self._units)) > len(parsed):
            raise StateError(
                f"reader {self.reader} of {self.readers} lacks units of the dataloader: it has {len(parsed)}, and "
                f"needs {least} or more, because the ids are of {parts} parts a virtual shard"
            )
        wanted = self._wanted(parts)
        if missing := [name for name in wanted if name not in units]:
            raise StateError(f"reader {self.reader} of {self.readers} lacks units of the dataloader: {missing[:8]}")
        if foreign := sorted(units.keys() - set(wanted)):
            raise StateError(f"reader {self.reader} of {self.readers} has units of other readers: {foreign[:8]}")
        saved = {unit: from_plain(name, units[name], self._recipe, unit) for name, unit in parsed.items()}
        first = self._position(saved)
        states = {
            unit.number(self._recipe.shards): reshard(
                unit, self._recipe, parts, [saved[old] for old in needed_units(unit, parts)]
            )
            for unit in self._units
        }
        self.close()
        self._restart(first, states)

    def _restart(self, first: int, states: dict[int, UnitState]) -> None:
        self._first, self._states, self._steps = first, states, 0
        self._engine = self._failure = None
        self._ended = self._closed = False

    def _wanted(self, parts: int) -> list[str]:
        return list(dict.fromkeys(str(old) for unit in self._units for old in needed_units(unit, parts)))

    def _position(self, saved: Mapping[Unit, UnitState]) -> int:
        """Return how many windows were consumed. Units that have ended were left behind by the others."""
        recipe = self._recipe
        ended = {
            unit: state.is_ended(replace(recipe, parts=unit.parts), unit.number(recipe.shards))
            for unit, state in saved.items()
        }
        positions = {state.at: unit for unit, state in saved.items() if not ended[unit]}
        if len(positions) > 1:
            listing = ", ".join(f"unit {str(unit)!r} at window {window}" for window, unit in sorted(positions.items()))
            raise StateError(f"units of the dataloader were saved at different steps: {listing}")
        return next(iter(positions), max(state.at for state in saved.values()))

    def _compare(self, shared: Any) -> None:
        """Raise if the checkpoint is of another run's loader."""
        own = self.shared_state()
        if not isinstance(shared, Mapping) or shared.keys() != own.keys():
            raise StateError(f"the checkpoint's dataloader is no token loader: its shared state is {shared!r:.200}")
        for name, value in own.items():
            saved = [list(row) for row in shared[name]] if name == "sources" else shared[name]
            if saved != value:
                raise MismatchError(
                    f"dataloader: {name} is {value!r:.400}, but {saved!r:.400} in the checkpoint; a run keeps it"
                )


def _check(sources: Sequence[Source], counts: Mapping[str, int], reader: int, workers: int) -> None:
    """Refuse arguments that contradict each other."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"TokenLoader({name}={count!r}): pass an integer of at least 1")
    if counts["prefetch"] > _MOST_PREFETCHED:
        raise InputError(f"TokenLoader(prefetch={counts['prefetch']}): pass at most {_MOST_PREFETCHED}")
    if not isinstance(workers, int) or workers < 0 or not 0 <= reader < counts["readers"]:
        raise InputError(
            f"TokenLoader(reader={reader}, readers={counts['readers']}, workers={workers}) is out of range"
        )
    if counts["batch"] % counts["readers"]:
        raise InputError(
            f"TokenLoader(batch={counts['batch']}): {counts['readers']} readers do not divide it; batch counts the"
            " windows of all readers"
        )
    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        raise InputError(f"TokenLoader(sources={names}): pass at least one source, each with a name of its own")
