"""Mosaic streaming: one state for all readers. Read with mosaicml-streaming 0.13.0, which is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bcp.data.adapters.opaque import Replicated
from bcp.errors import InputError, StateError

__all__ = ["MosaicLoader"]

_FIELDS = ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes")


class MosaicLoader(Replicated):
    """Keeps the state of a ``StreamingDataLoader``: how many samples all readers together have seen in this epoch.

    The order of a ``StreamingDataset`` is a function of its canonical nodes, and the present readers share the samples
    that are left. Any number of readers can load the state. ``streaming`` deals each reader as many samples, and
    repeats some at the end of an epoch for that; their number follows the number of readers.

    All readers save at the same step, with batches of one size. A batch counts as soon as the loader has returned it.

    Args:
        loader: a ``StreamingDataLoader`` on a ``StreamingDataset``. With another loader, the code that counts the
            samples calls ``dataset.state_dict(num_samples, from_beginning)``.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are. ``streaming`` finds both in RANK and WORLD_SIZE.

    Raises:
        InputError: the loader does not count samples, or the reader is out of range.

    Example::

        loader = StreamingDataLoader(StreamingDataset(local=path, batch_size=8), batch_size=8)
        state = MosaicLoader(loader, reader=rank, readers=world_size)

    """

    def __init__(self, loader: Any, *, reader: int = 0, readers: int = 1) -> None:
        if not hasattr(loader, "num_samples_yielded"):
            raise InputError(f"MosaicLoader: {type(loader).__name__} is no StreamingDataLoader; it counts no samples")
        super().__init__(loader, reader=reader, readers=readers)
        self._loader = loader

    def shared_state(self) -> dict[str, Any]:
        """Return the loader's state.

        Raises:
            StateError: the loader has none: its dataset is no ``StreamingDataset``.

        """
        shared = super().shared_state()
        _check(shared["state"])
        return shared

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Let the loader go on after these samples, with its next iterator. Load before the first batch.

        Raises:
            StateError: the shared state is of another adapter or damaged, there are units, or the dataset has begun
                the state's epoch already.

        """
        state = self._state(shared)
        _check(state)
        begun = int(getattr(self._loader.dataset, "next_epoch", 0)) - 1
        if begun >= max(state["epoch"], 0):
            raise StateError(
                f"this StreamingDataset has begun epoch {begun}, and streaming would ignore a state of epoch"
                f" {state['epoch']} and leave out the rest of it: make another dataset, and load before its first batch"
            )
        super().load_units(shared, units)
        self._loader.num_samples_yielded = 0  # or a save before the next iterator would count those of the last one


def _check(state: Any) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(state.get(field), int) for field in _FIELDS):
        raise StateError(
            f"this is no state of a StreamingDataset, which has the integers {', '.join(_FIELDS)}: {state!r:.200}"
        )
