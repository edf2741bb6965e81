"""Iterators with states of their own, dealt to any number of readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

from bcp.data.adapters.checks import check_ids, check_reader, check_units, compare, fields_of, methods_of
from bcp.data.closing import Closing
from bcp.errors import InputError, StageError, StateError

__all__ = ["VirtualShards"]


@dataclass(slots=True)
class _Shard:
    """One virtual shard.

    Attributes:
        iterator: its samples, with a state.
        turns: how many samples it has given.
        ended: whether there are no more.
    """

    iterator: Any
    turns: int = 0
    ended: bool = False


class VirtualShards(Closing):
    """Reads a fixed number of iterators in turn, and deals them to the readers.

    Reader ``r`` has the virtual shards ``r`` modulo ``readers``. The shard that has given the fewest samples is next,
    the lowest of several. Sample ``g`` of a run thus comes from shard ``g % shards``, until a shard ends. Readers that
    divide the shards and go in step see the samples of a step in one order, for any number of readers. Other numbers
    see each sample once, in another order. Readers stop when their own shards have ended.

    The state (:class:`bcp.protocols.ShardedState`) is one unit for each virtual shard, and moves as a whole. A sample
    is consumed as soon as the iterator has returned it.

    Args:
        open_shard: makes the iterator of a virtual shard, from its beginning, in every process alike. The iterator has
            ``state_dict()`` and ``load_state_dict()``, or ``get_state()`` and ``set_state()``. Its state is that of the
            last sample it has returned, also if it reads ahead.
        shards: how many virtual shards, fixed for the life of a run.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are, at most ``shards``.

    Raises:
        InputError: more readers than virtual shards, an iterator without a state, or a reader that is out of range.

    Example::

        shards = VirtualShards(lambda shard: Lines(files[shard::32]), shards=32, reader=rank, readers=world_size)
        for sample in shards:
            train(sample)

    """

    reader: int
    readers: int
    _failure: Exception | None

    def __init__(self, open_shard: Callable[[int], Any], *, shards: int, reader: int = 0, readers: int = 1) -> None:
        check_reader(self._adapter(), reader, readers)
        if readers > shards:
            raise InputError(
                f"{self._adapter()}(shards={shards}, readers={readers}): each reader needs a virtual shard; pass at"
                f" least {readers} shards, or at most {shards} readers"
            )
        self.reader, self.readers = reader, readers
        self._count, self._open = shards, open_shard
        self._own: dict[int, _Shard] = {}
        self._restart({shard: _Shard(open_shard(shard)) for shard in range(reader, shards, readers)})
        for shard in self._own.values():
            methods_of(self._adapter(), shard.iterator)

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next sample, which is consumed with that.

        Raises:
            StopIteration: all shards of this reader have ended.
            StageError: a shard has failed. Its iterator may have lost its place, so later calls raise it too, and there
                is no state until one is loaded.

        """
        self._check_whole()
        while live := [(shard.turns, number) for number, shard in self._own.items() if not shard.ended]:
            number = min(live)[1]
            shard = self._own[number]
            try:
                sample = next(shard.iterator)
            except StopIteration:
                shard.ended = True
                continue
            except BaseException as error:
                failure = StageError("read", f"virtual shard {number} of {self._count}", error)
                self._failure = failure
                if isinstance(error, Exception):
                    raise failure from error
                raise
            shard.turns += 1
            return sample
        raise StopIteration

    def close(self) -> None:
        """Close the iterators that can be closed. There is nothing to read until a state is loaded. Idempotent."""
        own, self._own = self._own, {}
        self._failure = InputError("the dataloader is closed; make another one, or load a state into it")
        for shard in own.values():
            close(shard.iterator)

    # -- state --------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Return the values that a run must not change, equal on all readers."""
        return {"format": 1, "adapter": self._adapter(), "shards": self._count}

    def unit_states(self) -> dict[str, Any]:
        """Return the state of each of this reader's virtual shards by id, ``"00003"``.

        Raises:
            StageError: a shard has failed, and its place may be lost with it. Resume from the checkpoint before.
            InputError: the loader is closed.

        """
        self._check_whole()
        return {
            f"{number:05d}": {
                "turns": shard.turns,
                "ended": shard.ended,
                "state": deepcopy(methods_of(self._adapter(), shard.iterator)[0]()),
            }
            for number, shard in self._own.items()
        }

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> list[str]:
        """Return the ids of this reader's virtual shards. Pure: nothing changes.

        Raises:
            MismatchError: the run that was saved had another number of shards, or was of other data.
            StateError: ids are missing, there twice, or foreign.

        """
        compare(self.shared_state(), shared)
        check_ids(ids, (f"{number:05d}" for number in range(self._count)))
        return [f"{number:05d}" for number in self._numbers()]

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with iterators that are opened again.

        Raises:
            MismatchError: as for :meth:`wanted_units`.
            StateError: a unit is missing, of another reader, or damaged. The loader is as before.

        """
        compare(self.shared_state(), shared)
        wanted = {f"{number:05d}": number for number in self._numbers()}
        check_units(units, wanted, self.reader, self.readers)
        fresh: dict[int, _Shard] = {}
        try:
            for name, number in wanted.items():
                saved = fields_of(name, units[name], {"turns": int, "ended": bool, "state": object})
                fresh[number] = _Shard(self._open(number), saved["turns"], saved["ended"])
                self._load(name, fresh[number].iterator, saved["state"])
        except BaseException:
            for shard in fresh.values():
                close(shard.iterator)
            raise
        self.close()
        self._restart(fresh)

    def prepare(self, step: int) -> None:
        """Do nothing: the state is always at hand."""

    def _adapter(self) -> str:
        return type(self).__name__

    def _numbers(self) -> range:
        return range(self.reader, self._count, self.readers)

    def _load(self, name: str, iterator: Any, state: Any) -> None:
        try:
            methods_of(self._adapter(), iterator)[1](state)
        except Exception as error:
            raise StateError(
                f"unit {name!r} of the dataloader cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def _check_whole(self) -> None:
        if self._failure:
            raise self._failure

    def _restart(self, shards: dict[int, _Shard]) -> None:
        self._own = shards
        self._failure = None


def close(iterator: Any) -> None:
    """Close an iterator that has ``close()``; an error of it changes nothing any more."""
    if callable(method := getattr(iterator, "close", None)):
        with suppress(Exception):
            method()
