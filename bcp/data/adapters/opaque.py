"""Loaders whose state cannot be divided: one unit for each reader, or one state for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from bcp.data.adapters.checks import check_ids, check_reader, check_units, compare, methods_of

__all__ = ["PerReader", "Replicated"]


class _Opaque:
    """Keeps the loader of one reader, whose state no adapter looks into."""

    reader: int
    readers: int

    def __init__(self, loader: Any, *, reader: int = 0, readers: int = 1) -> None:
        """Take the loader, and read no state yet.

        Args:
            loader: anything with ``state_dict()`` and ``load_state_dict()``, or with ``get_state()`` and
                ``set_state()``.
            reader: number of this reader, its data-parallel rank.
            readers: how many readers there are.

        Raises:
            InputError: the loader has no state, or the reader is out of range.

        """
        check_reader(type(self).__name__, reader, readers)
        self._read, self._write = methods_of(type(self).__name__, loader)
        self.reader, self.readers = reader, readers

    def prepare(self, step: int) -> None:
        """Do nothing: there is no state before it is asked for."""


class PerReader(_Opaque):
    """Keeps the whole state of a loader as one unit of its reader, for the same number of readers only.

    The state (:class:`bcp.protocols.ShardedState`) is a copy of the loader's, and nothing looks into it. It is as exact
    as the loader's own ``state_dict``.

    Example::

        loader = StatefulDataLoader(dataset, batch_size=8, sampler=StatefulDistributedSampler(dataset))
        state = PerReader(loader, reader=rank, readers=world_size)

    """

    def shared_state(self) -> dict[str, Any]:
        """Return the number of readers, which a run must not change."""
        return {"format": 1, "adapter": "PerReader", "readers": self.readers}

    def unit_states(self) -> dict[str, Any]:
        """Return the loader's state by this reader's id, ``"reader-00003"``."""
        return {_name(self.reader): deepcopy(self._read())}

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> list[str]:
        """Return the id of this reader's unit. Pure: nothing changes.

        Raises:
            MismatchError: another number of readers saved it.
            StateError: ids are missing, there twice, or foreign.

        """
        self._compare(shared)
        check_ids(ids, map(_name, range(self.readers)))
        return [_name(self.reader)]

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Let the loader load its state. Errors of the loader itself come after these.

        Raises:
            MismatchError: another number of readers saved it.
            StateError: the unit is missing, or there are others.

        """
        self._compare(shared)
        check_units(units, [_name(self.reader)], self.reader, self.readers)
        self._write(units[_name(self.reader)])

    def _compare(self, shared: Any) -> None:
        advice = (
            "the state of this loader belongs to one reader and cannot be divided: resume with as many readers as saved"
            " it, or use a loader with virtual shards (docs/data.md)"
        )
        compare(self.shared_state(), shared, {"readers": advice})


class Replicated(_Opaque):
    """Keeps a state that is equal on all readers, for any number of them.

    It suits loaders whose order is a function of one global position: Mosaic streaming
    (:class:`bcp.data.adapters.mosaic.MosaicLoader`) and Grain's ``ElasticIterator``. There are no units, and all
    readers load the shared state of one reader. **All readers have to save at the same step.** A reader at another
    position goes on from the written position.

    Example::

        iterator = iter(ElasticIterator(dataset, global_batch_size=64, shard_options=ShardOptions(rank, world_size)))
        state = Replicated(iterator, reader=rank, readers=world_size)

    """

    def shared_state(self) -> dict[str, Any]:
        """Return the loader's state."""
        return {"format": 1, "adapter": type(self).__name__, "state": deepcopy(self._read())}

    def unit_states(self) -> dict[str, Any]:
        """Return nothing: all of the state is shared."""
        return {}

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> list[str]:
        """Return no ids.

        Raises:
            StateError: the shared state is of another adapter, or there are units.

        """
        self._state(shared)
        check_ids(ids, ())
        return []

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Let the loader load the shared state. Errors of the loader itself come after this one.

        Raises:
            StateError: the shared state is of another adapter, or there are units.

        """
        state = self._state(shared)
        check_units(units, (), self.reader, self.readers)
        self._write(state)

    def _state(self, shared: Any) -> Any:
        state = shared.get("state") if isinstance(shared, Mapping) else None
        compare({"format": 1, "adapter": type(self).__name__, "state": state}, shared)
        return state


def _name(reader: int) -> str:
    return f"reader-{reader:05d}"
