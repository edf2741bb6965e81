"""Units of sharded dataloader states: each rank reads those that its readers want, and no others (paper sec. 3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bcp._job import LoadJob
from bcp._messages.planning import Claim
from bcp.errors import BcpError, CorruptError, FqnMismatchError, StateError
from bcp.plan.shards import KINDS
from bcp.plan.units import check_readers, unit_path
from bcp.protocols import ShardedState
from bcp.read.objects import unit_places
from bcp.read.ranges import range_item, read_ranges
from bcp.read.source import Source
from bcp.runtime.threads import in_thread
from bcp.stages.items import ReadItem
from bcp.state.units import remember, sharded_states, unit_in

__all__ = ["ReadState", "check_wanted", "put_units", "read_units"]

_DATALOADER = KINDS.index("dataloader")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ReadState:
    """The units that a sharded state of this rank will take."""

    claim: Claim  # the rank's reader, and the ids of the units that it wants
    state: ShardedState  # takes the units
    shared: Any  # the saved state's shared part
    units: Mapping[str, Any] = field(repr=False)  # the wanted units, by id
    nbytes: int  # how many bytes were read for them


async def read_units(
    job: LoadJob, source: Source, saved: Mapping[str, Mapping[str, int]]
) -> tuple[list[ReadState], list[str]]:
    """Ask this rank's sharded states which units they want, and read these units.

    ``saved`` is the result of :func:`~bcp.read.objects.saved_units`. Returns the units for each state, and the names of
    states that the checkpoint lacks.

    Raises:
        FqnMismatchError: the load is strict, and the checkpoint has other sharded states than the target.
        StateError: a state wants a unit that the checkpoint lacks, or one twice.
    """
    states = sharded_states(job.states)
    remember(states)
    missing = [f"dataloader: {name or 'its units'}" for name in states if name not in saved]
    if job.options.strict and "dataloader" in job.states:
        _compare(missing, [name for name in saved if name not in states], job.rank)
    return [await _read(source, name, state, saved[name]) for name, state in states.items() if name in saved], missing


def _compare(missing: Sequence[str], unexpected: Sequence[str], rank: int) -> None:
    if missing:
        raise FqnMismatchError(
            f"rank {rank} wants {len(missing)} names that the checkpoint lacks: {'; '.join(missing[:_SHOWN])}; it has "
            "no units of them: pass strict=False to leave them as they are"
        )
    if unexpected:
        raise FqnMismatchError(
            f"the checkpoint has units of dataloaders that rank {rank} does not have: "
            f"{', '.join(repr(name) for name in unexpected[:_SHOWN])}; pass a sharded state at each of these keys, or "
            "strict=False to leave them out"
        )


async def _read(source: Source, name: str, state: ShardedState, ranks: Mapping[str, int]) -> ReadState:
    """Read the shared part, and the units that the state then wants."""
    if "" not in ranks:
        raise CorruptError(f"the metadata has units of the dataloader {name!r}, and no shared part of it; restore it")
    reader = _Reader(source)
    (shared,) = await reader.read([(unit_path(name), ranks[""])])
    ids = [unit for unit in ranks if unit]
    wanted = await in_thread(_wanted, state, name, shared, ids)
    units = await reader.read([(unit_path(name, unit), ranks[unit]) for unit in wanted])
    claim = Claim(name, int(state.reader), int(state.readers), tuple(wanted))
    return ReadState(claim, state, shared, dict(zip(wanted, units, strict=True)), reader.nbytes)


def _wanted(state: ShardedState, name: str, shared: Any, ids: Sequence[str]) -> list[str]:
    """Ask a state which units it wants; there have to be such."""
    try:
        wanted = list(state.wanted_units(shared, ids))
    except BcpError as error:
        error.add_note(f"bcp: raised by the {type(state).__name__} at dataloader {name!r}")
        raise
    except Exception as error:
        raise StateError(
            f"the {type(state).__name__} at dataloader {name!r} was asked which units it wants and raised "
            f"{type(error).__name__}: {error}; repair it, or leave it out of the states"
        ) from error
    twice = [unit for unit, count in Counter(wanted).items() if count > 1]
    strange = sorted(set(wanted) - set(ids))
    if twice or strange:
        raise StateError(
            f"the {type(state).__name__} at dataloader {name!r} wants units {(twice or strange)[:_SHOWN]} "
            f"{'twice' if twice else 'that the checkpoint lacks'}; wanted_units() has to choose from its ids, each once"
        )
    return wanted


@dataclass(slots=True)
class _Reader:
    """Reads units for one rank."""

    source: Source
    nbytes: int = 0  # how many bytes were read
    places: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)

    async def read(self, paths: Sequence[tuple[str, int]]) -> list[Any]:
        """Read the states at these paths, with the rank that has each; several at once."""
        ranks = {rank for _, rank in paths}
        receipts = await self.source.read_receipts(ranks)
        self.places |= {rank: unit_places(receipts[rank]) for rank in ranks - self.places.keys()}
        items = [self._item(path, rank) for path, rank in paths]
        self.nbytes += sum(item.stored_nbytes for item in items)
        return await read_ranges(self.source, items, self._unpacked)

    def _item(self, path: str, rank: int) -> ReadItem:
        """Return the blocks of a unit. Blocks end where units do, unless they are encoded."""
        key, file = self.source.file_of(rank, _DATALOADER)
        start, stop = self.places[rank].get(path, (0, 0))
        if not start < stop <= file.nbytes - file.data_start:
            raise CorruptError(
                f"the receipt of rank {rank} says that {path} lies in bytes {start} to {stop} of {key}, which has "
                f"{file.nbytes - file.data_start} bytes of data; restore the receipt"
            )
        return range_item(self.source, f"{key} (dataloader {path})", key, file, start, stop)

    def _unpacked(self, item: ReadItem, image: torch.Tensor) -> Any:
        return unit_in(image, allow_pickle=self.source.options.allow_pickle, where=item.name)


def check_wanted(
    saved: Mapping[str, Mapping[str, int]], claims: Iterable[tuple[int, Sequence[Claim]]], *, strict: bool
) -> None:
    """Check on rank 0 that the readers of each state are complete.

    If ``strict``, every unit of the checkpoint must have a reader too. ``saved`` is the result of
    :func:`~bcp.read.objects.saved_units`, and ``claims`` has each rank with the units that it wants.

    Raises StateError, which names the state, and ranks or units, if a reader is missing, or a unit has none.
    """
    held: dict[str, dict[int, Claim]] = {}
    for rank, wanted in claims:
        for claim in wanted:
            held.setdefault(claim.name, {})[rank] = claim
    for name, by_rank in held.items():
        check_readers(by_rank)
        left = sorted(saved.get(name, {}).keys() - {""} - {unit for claim in by_rank.values() for unit in claim.ids})
        if left and strict:
            first = next(iter(by_rank.values()))
            raise StateError(
                f"{first}: {len(left)} units of the checkpoint are wanted by none of {first.readers} readers: "
                f"{left[:_SHOWN]}; their samples would be lost. Give each data-parallel rank its own reader number, or "
                "pass strict=False"
            )


def put_units(states: Iterable[ReadState]) -> None:
    """Give the states their units."""
    for read in states:
        try:
            read.state.load_units(read.shared, read.units)
        except Exception as error:
            error.add_note(f"bcp: raised while the {type(read.state).__name__} at {read.claim} took its units")
            raise
