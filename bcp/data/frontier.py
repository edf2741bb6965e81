"""Prompts for loops that complete them out of order: none is lost at a restart, and no trained one comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch

from bcp.errors import InputError, MismatchError, StageError, StateError
from bcp.runtime.process import process_lock

__all__ = ["Frontier"]


@dataclass(slots=True)
class _Shard:
    """Ordinals of one virtual shard: all below ``lowest`` are acknowledged, and those in ``acked`` above it."""

    lowest: int
    acked: set[int] = field(default_factory=set)

    def is_acked(self, ordinal: int) -> bool:
        return ordinal < self.lowest or ordinal in self.acked

    def ack(self, ordinal: int, step: int) -> None:
        self.acked.add(ordinal)
        while self.lowest in self.acked:
            self.acked.remove(self.lowest)
            self.lowest += step

    def to_plain(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "acked": torch.tensor(sorted(self.acked), dtype=torch.int64)}


class Frontier:
    """Hands out prompts by ordinal, and remembers which of them were trained on.

    :meth:`pull` gives an ordinal when a rollout begins. :meth:`ack` takes it back at the training step that used the
    rollout, in any order. The state is the lowest ordinal that is not acknowledged, and the acknowledged ones above it.
    A restart hands all others out again, the lowest first. Rollouts in flight are thus repeated, and never lost.

    The state (:class:`bcp.protocols.ShardedState`) fits any number of readers up to ``shards``. Ordinal ``o`` belongs
    to virtual shard ``o % shards``, and this to reader ``o % shards % readers``. All methods are thread-safe.

    Args:
        prompts: a sequence with ordinal ``o`` at item ``o % len(prompts)``; or an iterable with ordinal ``o`` as its
            item ``o``. Both have the same items in the same order after a restart. A restart reads an iterable from its
            beginning.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are.
        shards: how many virtual shards, fixed for the life of a run.
        epochs: how often a sequence is handed out; None for without end. An iterable is handed out once.
        history: how many marked steps are remembered.

    Raises:
        InputError: arguments that contradict each other.

    Example::

        frontier = Frontier(["Add 2 and 2.", "Name a prime."])
        ordinal = frontier.pull()
        rollout = generate(frontier[ordinal])
        train_on(rollout)
        frontier.ack(ordinal)

    """

    def __init__(
        self,
        prompts: Sequence[Any] | Iterable[Any],
        *,
        reader: int = 0,
        readers: int = 1,
        shards: int = 64,
        epochs: int | None = 1,
        history: int = 8,
    ) -> None:
        if not 0 <= reader < readers <= shards or history < 1 or (epochs is not None and epochs < 1):
            raise InputError(
                f"Frontier(reader={reader}, readers={readers}, shards={shards}, epochs={epochs}, history={history}):"
                " need reader < readers <= shards, and at least 1 of the others"
            )
        self.reader, self.readers = reader, readers
        self._prompts, self._shards, self._epochs = prompts, shards, epochs
        is_sequence = hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__")
        self._size = len(cast("Sequence[Any]", prompts)) if is_sequence else None
        if self._size is None and epochs != 1:
            raise InputError(f"Frontier(epochs={epochs}): an iterable without len() and [i] is handed out once")
        self._lock = process_lock()
        self._history: deque[tuple[int, dict[str, Any]]] = deque(maxlen=history)
        self._reading: Iterator[Any] | None = None
        self._restart({shard: _Shard(shard) for shard in range(reader, shards, readers)})

    # -- the loop -----------------------------------------------------------------------------

    def pull(self) -> int | None:
        """Return the lowest ordinal that is neither acknowledged nor handed out; None if there is no other.

        An error of the prompts is raised as it is.

        Raises:
            StageError: reading an iterable has failed in an earlier call, and the rest cannot be told from its end.

        """
        with self._lock:
            while True:
                ordinal = self._next
                present, prompt = self._read(ordinal)
                if not present:
                    return None
                self._next += 1
                shard = self._own.get(ordinal % self._shards)
                if shard is not None and not shard.is_acked(ordinal):
                    self._outstanding[ordinal] = prompt
                    return ordinal

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        ordinal = self.pull()
        if ordinal is None:
            raise StopIteration
        return ordinal, self._outstanding[ordinal]

    def __getitem__(self, ordinal: int) -> Any:
        with self._lock:
            self._check_outstanding([ordinal])
            return self._outstanding[ordinal]

    def ack(self, *ordinals: int) -> None:
        """Acknowledge ordinals: a training step has used them, and they are never handed out again.

        Raises:
            InputError: one of them is not handed out, is acknowledged already, or is there twice. None is acknowledged.

        """
        with self._lock:
            self._check_outstanding(ordinals)
            for ordinal in ordinals:
                del self._outstanding[ordinal]
                self._own[ordinal % self._shards].ack(ordinal, self._shards)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Return the ordinals that are handed out and not acknowledged, ascending."""
        with self._lock:
            return tuple(sorted(self._outstanding))

    def mark(self, step: int) -> None:
        """Remember the present state as that of a training step, for a save that comes later.

        Call it after the step's :meth:`ack`. The last ``history`` marked steps are remembered; a step that is marked
        again has the later state.
        """
        with self._lock:
            kept = [(marked, states) for marked, states in self._history if marked != step]
            self._history.clear()
            self._history.extend([*kept, (step, self._plain())])

    # -- state --------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Return the values that a run must not change, equal on all readers."""
        return {"format": 1, "shards": self._shards, "prompts": self._size}

    def unit_states(self, step: int | None = None) -> dict[str, Any]:
        """Return the states of this reader's virtual shards by id, ``"00003"``: a few numbers each.

        Args:
            step: a marked step; None for the present state.

        Raises:
            InputError: the step was not marked, or too long ago.

        """
        with self._lock:
            if step is None:
                return self._plain()
            history = dict(self._history)
        if step not in history:
            raise InputError(
                f"Frontier: step {step} is not among the marked ones {list(history)}; see mark() and history"
            )
        return history[step]

    def prepare(self, step: int) -> None:
        """Do nothing: the state is always at hand."""

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> list[str]:
        """Return which units of a checkpoint this reader loads. Pure: nothing changes.

        Raises:
            MismatchError: the frontier that was saved had other shards, or another number of prompts.
            StateError: ids are missing, there twice, or of no frontier.

        """
        self._compare(shared)
        expected = {f"{shard:05d}" for shard in range(self._shards)}
        if len(set(ids)) < len(ids):
            raise StateError(
                f"units of the frontier are there twice: {sorted({i for i in ids if ids.count(i) > 1})[:8]}"
            )
        if expected != set(ids):
            raise StateError(
                f"the checkpoint lacks units {sorted(expected - set(ids))[:8]} of the frontier, and has foreign ones"
                f" {sorted(set(ids) - expected)[:8]}"
            )
        return [f"{shard:05d}" for shard in self._own]

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Ordinals that it does not acknowledge are handed out again, the lowest first.

        Raises:
            MismatchError: as for :meth:`wanted_units`.
            StateError: a unit is missing, of another reader, or damaged; or the prompts are an iterator that was read
                already. The frontier is as before.

        """
        self._compare(shared)
        expected = {f"{shard:05d}": shard for shard in self._own}
        if expected.keys() != units.keys():
            raise StateError(
                f"reader {self.reader} of {self.readers} lacks units {sorted(expected.keys() - units.keys())[:8]} of"
                f" the frontier, and has foreign ones {sorted(units.keys() - expected.keys())[:8]}"
            )
        shards = {shard: self._from_plain(name, units[name], shard) for name, shard in expected.items()}
        if self._reading is not None and iter(self._prompts) is self._prompts:
            raise StateError("the prompts are an iterator that was read already; load before the first pull")
        with self._lock:
            self._restart(shards)

    def _restart(self, shards: dict[int, _Shard]) -> None:
        self._own = shards
        self._outstanding: dict[int, Any] = {}
        self._next = min(shard.lowest for shard in shards.values())
        self._history.clear()
        self._reading = None
        self._failure: BaseException | None = None
        self._read_until = 0

    def _plain(self) -> dict[str, Any]:
        return {f"{number:05d}": shard.to_plain() for number, shard in self._own.items()}

    def _from_plain(self, name: str, value: Any, number: int) -> _Shard:
        try:
            shard = _Shard(int(value["lowest"]), set(torch.as_tensor(value["acked"]).tolist()))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"unit {name!r} is no state of a frontier: {type(error).__name__}: {error}") from error
        ordinals = [shard.lowest, *shard.acked]
        if any(ordinal % self._shards != number for ordinal in ordinals) or min(ordinals) < number:
            raise StateError(f"unit {name!r} of the frontier is damaged: it has ordinals of other units")
        if shard.lowest != min(ordinals) or shard.lowest in shard.acked:
            raise StateError(f"unit {name!r} of the frontier is damaged: {shard.lowest} is not its lowest ordinal")
        return shard

    def _compare(self, shared: Any) -> None:
        own = self.shared_state()
        if not isinstance(shared, Mapping) or shared.keys() != own.keys():
            raise StateError(f"the checkpoint has no frontier: its shared state is {shared!r:.200}")
        for name, value in own.items():
            if shared[name] != value:
                raise MismatchError(f"frontier: {name} is {value}, but {shared[name]} in the checkpoint")

    def _check_outstanding(self, ordinals: Sequence[int]) -> None:
        unknown = [ordinal for ordinal in ordinals if ordinal not in self._outstanding]
        if unknown or len(set(ordinals)) < len(ordinals):
            raise InputError(
                f"Frontier: ordinals {unknown or list(ordinals)} are not handed out, or acknowledged already"
            )

    # -- prompts ------------------------------------------------------------------------------

    def _read(self, ordinal: int) -> tuple[bool, Any]:
        """Return whether there is such an ordinal, and its prompt if it is to be handed out."""
        shard = self._own.get(ordinal % self._shards)
        wanted = shard is not None and not shard.is_acked(ordinal)
        if self._size is not None:
            if not self._size or (self._epochs is not None and ordinal >= self._size * self._epochs):
                return False, None
            return True, cast("Sequence[Any]", self._prompts)[ordinal % self._size] if wanted else None
        if self._failure is not None:
            raise StageError("read", f"prompt {self._read_until}, in an earlier call", self._failure)
        if self._reading is None:
            self._reading = iter(self._prompts)
        end = object()
        prompt: Any = None
        while self._read_until <= ordinal:
            try:
                prompt = next(self._reading, end)
            except BaseException as error:
                self._failure = error  # a generator that has raised looks ended
                raise
            if prompt is end:
                return False, None
            self._read_until += 1
        return True, prompt
