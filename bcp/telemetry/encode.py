"""From the watches of all ranks to one recording: each rank packs its events, and rank 0 puts them together."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from bcp._version import __version__
from bcp.events import BudgetEvent, LoadResult, PhaseEvent, RequestEvent, SaveResult, StageEvent
from bcp.plan.arrow import arrow_array, numbers_of
from bcp.telemetry.failures import host_name
from bcp.telemetry.recording import EVENTS, FailureRecord, RankRecord, Recording
from bcp.telemetry.settings import settings
from bcp.telemetry.watch import Watch

__all__ = ["MOST_ROWS", "drained", "figures_of", "joined", "merged", "packed", "recording_of_failure"]

MOST_ROWS = 1_000_000
"""Events in one recording."""

LEAST_ROWS = 500
"""Events that each rank may have in it, however many ranks there are."""

MOST_TEXT = 500
"""Characters of an item's name or of an error."""

SKEW_SECONDS = 2.0
"""Clocks that differ by more are set right: ranks hear the answer that ends a save or load at nearly the same time."""

SAME_SECONDS = 60.0
"""Most seconds between the calls of the ranks of one failed load. Failed saves have ids."""

LENGTHS = struct.Struct("<II")
"""Head of a packed record: bytes of the JSON, and of everything before compression."""

Recorded = StageEvent | RequestEvent | BudgetEvent | PhaseEvent
"""Events that are rows. The others say nothing that these do not say."""

Row = tuple[str, str, str, int, float, float, float, int, str, str]
"""All columns of :data:`~bcp.telemetry.recording.EVENTS` but the rank."""

_COLUMNS = pa.schema(list(EVENTS)[1:])


def figures_of(result: SaveResult | LoadResult) -> dict[str, float]:
    """Return the fields of a report that are numbers."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return {
        name: round(value, 6)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in ("rank", "world_size")
    }


def packed(watch: Watch, coordinates: Mapping[str, int], local_rank: int, figures: Mapping[str, float]) -> bytes:
    """Return this rank's record for rank 0: some kilobytes.

    Args:
        watch: of the save or load.
        coordinates: this rank's place in the parallel topology.
        local_rank: its number on its host; -1 if it is not known.
        figures: numbers of its report.

    """
    batch, dropped = _batch(watch, max(LEAST_ROWS, MOST_ROWS // max(watch.world_size, 1)))
    ends = [event.ended for event in watch.events if isinstance(event, PhaseEvent)]
    about = {
        "host": host_name(),
        "local_rank": local_rank,
        "coordinates": dict(coordinates),
        "started": watch.time,
        "figures": dict(figures),
        "dropped": dropped,
        "heard": watch.time + ends[-1] - watch.started if ends else 0.0,
    }
    text = json.dumps(about, separators=(",", ":")).encode()
    body = text + batch.serialize().to_pybytes()
    return LENGTHS.pack(len(text), len(body)) + bytes(pa.compress(body, codec="zstd", asbytes=True))


def merged(watch: Watch, messages: Sequence[bytes]) -> Recording:
    """Return the recording of all ranks; on rank 0.

    Args:
        watch: rank 0's.
        messages: the results of :func:`packed` on each rank; empty if a rank has no record.

    """
    known = {rank: _unpacked(message) for rank, message in enumerate(messages) if message}
    about = {rank: facts for rank, (facts, _) in known.items()}
    clocks = _clocks(about)
    started = {rank: facts["started"] - clocks.get(rank, 0.0) for rank, facts in about.items()}
    first = min(started.values(), default=watch.time)
    stores = sorted({event.store for event in watch.events if isinstance(event, RequestEvent)})
    more: dict[str, Any] = {"stores": stores[:8]} if stores else {}
    if clocks:
        more["clocks"] = {str(rank): round(seconds, 3) for rank, seconds in clocks.items()}
    tables = [_placed(rank, batch, started[rank] - first) for rank, (_, batch) in known.items()]
    return Recording(
        **_head(watch),
        time=first,
        ranks=_ranks(about, started),
        events=pa.concat_tables(tables).combine_chunks() if tables else EVENTS.empty_table(),
        dropped=sum(facts["dropped"] for facts in about.values()),
        more=more,
    )


def drained(recording: Recording, handed: float, durable: float) -> Recording:
    """Return the recording of a save into memory that agents have made durable since: with a phase ``drain`` of rank 0.

    Args:
        recording: of the save, until all ranks had marked their files.
        handed: seconds from rank 0's call until agents were to make it durable.
        durable: seconds from rank 0's call until rank 0 knew of the commit.

    """
    later = next((rank.started - recording.time for rank in recording.ranks if rank.rank == 0), 0.0)
    row: Row = "phase", "drain", "", 0, later + handed, durable - handed, 0.0, 1, "ok", ""
    arrays = [arrow_array([value], kind) for value, kind in zip((0, *row), EVENTS.types, strict=True)]
    events = pa.concat_tables([recording.events, pa.table(arrays, schema=EVENTS)]).combine_chunks()
    ranks = tuple(replace(rank, figures=_two_ends(rank.figures, durable)) for rank in recording.ranks)
    return replace(recording, ranks=ranks, events=events)


def _two_ends(figures: Mapping[str, float], durable: float) -> Mapping[str, float]:
    """Return a rank's figures with both durations: those until now are of the first end."""
    return {**figures, "released_seconds": figures.get("seconds", 0.0), "seconds": round(durable, 6)}


def recording_of_failure(watch: Watch, failure: FailureRecord, place: Mapping[str, int], local_rank: int) -> Recording:
    """Return the recording of one rank of a save or load that has failed."""
    batch, dropped = _batch(watch, MOST_ROWS)
    rank_record = RankRecord(
        rank=watch.rank,
        host=failure.host,
        local_rank=max(local_rank, 0),
        coordinates=place,
        started=watch.time,
        figures={"seconds": round(watch.seconds, 6)},
    )
    table = _placed(watch.rank, batch, 0.0)
    return Recording(
        **_head(watch), time=watch.time, ranks=(rank_record,), events=table, dropped=dropped, failures=(failure,)
    )


def _head(watch: Watch) -> dict[str, Any]:
    """Return the fields that every rank knows."""
    return {
        "kind": watch.kind,
        "path": watch.path,
        "operation": watch.operation,
        "step": watch.step,
        "run": settings.run,
        "background": watch.background,
        "version": __version__,
        "world_size": watch.world_size,
    }


# -- events ---------------------------------------------------------------------------------------


def _batch(watch: Watch, most: int) -> tuple[pa.RecordBatch, int]:
    """Return the events of one rank, its own start being 0, and how many more there were."""
    rows = [_row(event, watch.started) for event in watch.events if isinstance(event, Recorded)]
    dropped = watch.dropped + max(len(rows) - most, 0)
    if len(rows) > most:
        rows = _telling(rows, most)
    columns = zip(*rows, strict=True) if rows else [()] * len(_COLUMNS)
    arrays = [arrow_array(column, kind) for column, kind in zip(columns, _COLUMNS.types, strict=True)]
    return pa.record_batch(arrays, schema=_COLUMNS), dropped


def _row(event: Recorded, zero: float) -> Row:
    """Return an event as a row."""
    match event:
        case StageEvent(stage, item, nbytes, started, ended, waited, error):
            text, took = error[:MOST_TEXT], ended - started
            return "stage", stage, item[:MOST_TEXT], nbytes, started - zero, took, waited, 1, _status(error), text
        case PhaseEvent(phase, started, ended, error):
            return "phase", phase, "", 0, started - zero, ended - started, 0.0, 1, _status(error), error[:MOST_TEXT]
        case BudgetEvent(item, nbytes, started, ended):
            return "budget", "", item[:MOST_TEXT], nbytes, started - zero, ended - started, 0.0, 1, "ok", ""
        case RequestEvent(_, verb, key, nbytes, started, ended, attempt, status, text):
            took, item = ended - started, key[:MOST_TEXT]
            return "request", verb, item, nbytes, started - zero, took, 0.0, attempt, status, text[:MOST_TEXT]


def _status(error: str) -> str:
    return "failed" if error else "ok"


def _telling(rows: Sequence[Row], most: int) -> list[Row]:
    """Return so many of the rows: phases, errors, and the longest of the others, in their old order."""
    weights = [-math.inf if row[0] == "phase" or row[8] != "ok" else -row[5] for row in rows]
    kept = np.sort(np.argsort(weights, kind="stable")[:most])
    return [rows[index] for index in kept.tolist()]


# -- on rank 0 ------------------------------------------------------------------------------------


def _unpacked(message: bytes) -> tuple[dict[str, Any], pa.RecordBatch]:
    """Undo :func:`packed`."""
    length, nbytes = LENGTHS.unpack_from(message)
    body = pa.decompress(message[LENGTHS.size :], decompressed_size=nbytes, codec="zstd", asbytes=True)
    about: dict[str, Any] = json.loads(body[:length])
    return about, pa.ipc.read_record_batch(pa.py_buffer(body[length:]), _COLUMNS)


def _clocks(about: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return by how many seconds the clocks of ranks are ahead of rank 0's, if that is much."""
    heard = {rank: facts["heard"] for rank, facts in about.items() if facts["heard"]}
    ahead = {rank: seconds - heard[0] for rank, seconds in heard.items()} if 0 in heard else {}
    return {rank: seconds for rank, seconds in ahead.items() if abs(seconds) > SKEW_SECONDS}


def _placed(rank: int, batch: pa.RecordBatch, later: float) -> pa.Table:
    """Return a rank's events with the rank, at their places in the recording."""
    ranks = arrow_array(np.full(len(batch), rank), pa.int32())
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["start"] = _later(columns["start"], later)
    return pa.table([ranks, *columns.values()], schema=EVENTS)


def _later(starts: pa.Array, seconds: float) -> pa.Array:
    """Return times that are so many seconds later."""
    return arrow_array(numbers_of(starts) + seconds, pa.float64())


def _ranks(about: Mapping[int, Mapping[str, Any]], started: Mapping[int, float]) -> tuple[RankRecord, ...]:
    """Return the records of the ranks; one that does not know its number on its host gets its place among the host's.

    Ranks are numbered host by host, as a rule.
    """
    places: Counter[str] = Counter()
    records = []
    for rank, facts in sorted(about.items()):
        host, local_rank = facts["host"], facts["local_rank"]
        record = RankRecord(
            rank=rank,
            host=host,
            local_rank=places[host] if local_rank < 0 else local_rank,
            coordinates=facts["coordinates"],
            started=round(started[rank], 6),
            figures=facts["figures"],
        )
        places[host] += 1
        records.append(record)
    return tuple(records)


# -- failures that several ranks tell of ----------------------------------------------------------


def joined(recordings: Sequence[Recording]) -> list[Recording]:
    """Put the recordings of one failed save or load together, which several ranks have left; oldest first.

    The guilty rank's words come first.
    """
    joined_recordings: list[Recording] = []
    for recording in sorted(recordings, key=lambda recording: recording.time):
        partner = next(
            (index for index, candidate in enumerate(joined_recordings) if _are_one(candidate, recording)), None
        )
        if partner is None:
            joined_recordings.append(recording)
        else:
            joined_recordings[partner] = _together(joined_recordings[partner], recording)
    return joined_recordings


def _are_one(first: Recording, later: Recording) -> bool:
    """Return whether two recordings are of one failed operation."""
    return (
        bool(first.failures and later.failures)
        and (first.kind, first.path, first.operation) == (later.kind, later.path, later.operation)
        and later.time - first.time < SAME_SECONDS
        and {record.rank for record in first.ranks}.isdisjoint(record.rank for record in later.ranks)
    )


def _together(first: Recording, later: Recording) -> Recording:
    """Return one recording of two; times are counted from the first one's."""
    columns = {name: later.events.column(name) for name in EVENTS.names}
    columns["start"] = _later(columns["start"].combine_chunks(), later.time - first.time)
    return replace(
        first,
        ranks=sorted((*first.ranks, *later.ranks), key=lambda record: record.rank),
        events=pa.concat_tables([first.events, pa.table(list(columns.values()), schema=EVENTS)]).combine_chunks(),
        dropped=first.dropped + later.dropped,
        failures=sorted(
            (*first.failures, *later.failures), key=lambda failure: (failure.rank != failure.guilty, failure.rank)
        ),
    )
