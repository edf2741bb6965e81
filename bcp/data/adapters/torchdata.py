"""torchdata's ``StatefulDataLoader``: its workers' states as units. Read with torchdata 0.11.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from bcp.data.adapters.checks import check_ids, check_reader, check_units, compare, fields_of
from bcp.errors import InputError, MismatchError, MissingExtraError, StateError

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    raise MissingExtraError(
        "bcp.data.adapters.torchdata needs torchdata, which is not installed: pip install 'bcp-checkpoint[torchdata]'"
    ) from error

__all__ = ["TorchdataWorkers", "WorkerNumber", "worker_number"]

_SEEDS = 2**63  # base seeds of workers are below


class WorkerNumber(NamedTuple):
    """The place of a worker among the workers of all readers.

    Attributes:
        number: number of the worker.
        workers: how many workers all readers have together.
    """

    number: int
    workers: int


def worker_number(reader: int, readers: int) -> WorkerNumber:
    """Return the place of the process that calls this, for a dataset that divides its samples by it.

    Worker ``i`` of reader ``r`` has the number ``r + readers * i``. Without worker processes a reader is one worker.
    """
    info = get_worker_info()
    if info is None:
        return WorkerNumber(reader, readers)
    return WorkerNumber(reader + readers * info.id, readers * info.num_workers)


class TorchdataWorkers:
    """Keeps each worker of a ``StatefulDataLoader`` as one unit, which can move to another reader.

    The number of readers may change while the number of workers of all readers together stays: 4 readers of 2 workers
    become 2 readers of 4, or 8 of 1. Worker ``i`` of reader ``r`` is number ``r + readers * i`` of all. Its unit goes
    to the worker that has this number later. The dataset has to divide its samples by :func:`worker_number`, and by
    nothing else that changes with the readers. Then each sample is fed once. The batches of all readers together also
    come in the same order until the first worker has ended. This needs readers in step, and a new number of readers
    that divides the consumed batches.

    The state (:class:`bcp.protocols.ShardedState`) is that of the batches that the loader has returned. Prefetched ones
    are read again. It has the same limits as the loader's own. The dataset has to keep all of its state itself, random
    generators included. It has to stay at its end when a state of its end is loaded. Workers that have moved have other
    seeds.

    For datasets with ``[i]`` and for loaders without workers use :class:`bcp.data.adapters.PerReader`. Their samplers
    belong to one reader.

    Args:
        loader: the loader of an ``IterableDataset`` which, or whose iterator, has ``state_dict`` and
            ``load_state_dict``.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are.

    Raises:
        InputError: the loader is no ``StatefulDataLoader``, has no workers or has samplers, or returns batches out of
            order.

    Example::

        dataset = Lines(files, reader=rank, readers=world_size)  # divides the files by worker_number(reader, readers)
        loader = StatefulDataLoader(dataset, batch_size=8, num_workers=4)
        state = TorchdataWorkers(loader, reader=rank, readers=world_size)

    """

    reader: int
    readers: int

    def __init__(self, loader: Any, *, reader: int = 0, readers: int = 1) -> None:
        check_reader("TorchdataWorkers", reader, readers)
        problems = {
            f"{type(loader).__name__} is no StatefulDataLoader": not isinstance(loader, StatefulDataLoader),
            "it has no worker processes": not getattr(loader, "num_workers", 0),
            "its dataset is no IterableDataset, and its sampler belongs to one reader": not isinstance(
                getattr(loader, "dataset", None), IterableDataset
            ),
            "it returns batches out of order": not getattr(loader, "in_order", True),
        }
        if problem := next((text for text, applies in problems.items() if applies), None):
            raise InputError(f"TorchdataWorkers: the workers of this loader have no states of their own: {problem}")
        self.reader, self.readers = reader, readers
        self._loader, self._workers = loader, int(loader.num_workers)

    def shared_state(self) -> dict[str, Any]:
        """Return the numbers of readers and of their workers."""
        return {"format": 1, "adapter": "TorchdataWorkers", "readers": self.readers, "workers": self._workers}

    def unit_states(self) -> dict[str, Any]:
        """Return the state of each worker of this reader by its number among all, ``"worker-00003"``.

        The first call starts the workers, if there was no batch yet.

        Raises:
            StateError: the dataset keeps no state of its own: torchdata would read it from the beginning again.

        """
        state = self._loader.state_dict()
        snapshot = state["_snapshot"]
        main = {
            "snapshot": deepcopy(snapshot["_main_snapshot"]),
            "step": int(snapshot["_snapshot_step"]),
            "since": int(state["_steps_since_snapshot"]),
            "last": int(snapshot["_last_yielded_worker_id"]),
            "finished": bool(state["_iterator_finished"]),
        }
        workers = [snapshot["_worker_snapshots"][f"worker_{worker}"] for worker in range(self._workers)]
        for worker in workers:
            _check_state("the dataset", worker)
        return {
            name: {"worker": worker, "turns": _turns(main["step"], number, self._workers), "main": main}
            for number, (name, worker) in enumerate(zip(self._names(), workers, strict=True))
        }

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> list[str]:
        """Return the ids of the units of this reader's workers. Pure: nothing changes.

        Raises:
            MismatchError: all readers together had another number of workers.
            StateError: ids are missing, there twice, or foreign.

        """
        self._compare(shared)
        check_ids(ids, (_name(number) for number in range(self.readers * self._workers)))
        return self._names()

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Let the loader go on from these states. Its workers start with the next batch.

        Raises:
            MismatchError: all readers together had another number of workers; or the readers have changed since a save
                between two of the loader's snapshots.
            StateError: a unit is missing, of another reader or step, or damaged. The loader is as before.

        """
        self._compare(shared)
        names = self._names()
        check_units(units, names, self.reader, self.readers)
        saved = [fields_of(name, units[name], {"worker": dict, "turns": int, "main": dict}) for name in names]
        mains = [
            fields_of(name, unit["main"], {"snapshot": dict, "step": int, "since": int, "last": int, "finished": bool})
            for name, unit in zip(names, saved, strict=True)
        ]
        for name, unit in zip(names, saved, strict=True):
            _check_state(f"unit {name!r}", unit["worker"])
        if shared["readers"] == self.readers:
            main = self._same(names, mains)
        else:
            main = self._moved(int(shared["readers"]), mains, sum(unit["turns"] for unit in saved))
        workers = {f"worker_{number}": {**unit["worker"], "worker_id": number} for number, unit in enumerate(saved)}
        snapshot = {
            "_snapshot_step": main["step"],
            "_last_yielded_worker_id": main["last"],
            "_main_snapshot": main["snapshot"],
            "_worker_snapshots": workers,
        }
        self._loader.load_state_dict(
            {
                "_snapshot": snapshot,
                "_steps_since_snapshot": main["since"],
                "_iterator_finished": main["finished"],
            }
        )

    def prepare(self, step: int) -> None:
        """Do nothing: the workers send their states with the batches, by ``snapshot_every_n_steps``."""

    def _same(self, names: Sequence[str], mains: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the main process's state, which all units of one save have alike."""
        for name, main in zip(names, mains, strict=True):
            differing = [field for field in ("step", "since", "last", "finished") if main[field] != mains[0][field]]
            if differing:
                raise StateError(
                    f"units {names[0]!r} and {name!r} of the dataloader differ in {differing}: of one save?"
                )
        return mains[0]

    def _moved(self, before: int, mains: Sequence[dict[str, Any]], turns: int) -> dict[str, Any]:
        """Return the state of a main process that goes on with workers of several."""
        if pending := max(main["since"] for main in mains):
            raise MismatchError(
                f"this dataloader was saved by {before} readers, {pending} batches after the snapshot of its workers,"
                f" and this job has {self.readers} readers: resume with {before}, or save at multiples of"
                " snapshot_every_n_steps"
            )
        snapshot = dict(mains[0]["snapshot"])
        seed = int(snapshot["_base_seed"]) + self.reader * self.readers * self._workers  # no two workers share one
        return {
            "snapshot": snapshot | {"_num_workers": self._workers, "_base_seed": seed % _SEEDS},
            "step": turns,
            "since": 0,
            "last": (turns - 1) % self._workers,
            "finished": all(main["finished"] for main in mains),
        }

    def _names(self) -> list[str]:
        return [_name(self.reader + self.readers * worker) for worker in range(self._workers)]

    def _compare(self, shared: Any) -> None:
        own = self.shared_state()
        if isinstance(shared, Mapping) and shared.keys() == own.keys() and shared["adapter"] == own["adapter"]:
            before, now = shared["readers"] * shared["workers"], self.readers * self._workers
            if before != now:
                raise MismatchError(
                    f"TorchdataWorkers: {shared['readers']} readers of {shared['workers']} workers saved {before}"
                    f" units, and {self.readers} readers of {self._workers} workers want {now}; choose num_workers so"
                    f" that readers * num_workers is {before}"
                )
            own |= {"readers": shared["readers"], "workers": shared["workers"]}
        compare(own, shared)


def _turns(step: int, worker: int, workers: int) -> int:
    return step // workers + (worker < step % workers)


def _check_state(owner: str, worker: Mapping[str, Any]) -> None:
    """Refuse a worker whose dataset keeps no state."""
    try:
        fetcher = worker["fetcher_state"]
        has_state = worker["dataset_state"] is not None or fetcher["dataset_iter_state"] is not None
    except (KeyError, TypeError) as error:
        raise StateError(f"{owner} has no state of a worker of torchdata: {type(error).__name__}: {error}") from error
    if not has_state:
        raise StateError(
            f"{owner} keeps no state of its own, and torchdata would read it again from its beginning: give the"
            " dataset state_dict() and load_state_dict(), or use PerReader"
        )


def _name(number: int) -> str:
    return f"worker-{number:05d}"
