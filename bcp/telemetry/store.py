"""Recordings as files: Arrow IPC files that any Arrow library opens, and whose contents bcp never trusts."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from bcp.errors import CorruptError, FormatVersionError
from bcp.format.container import decoded_nbytes
from bcp.protocols import Buffer, ObjectInfo
from bcp.telemetry.recording import EVENTS, FailureRecord, RankRecord, Recording

__all__ = ["FOLDER", "MOST_BYTES", "decode", "encode", "outdated"]

FOLDER = "telemetry/"
"""Begins the keys of all recordings of a checkpoint."""

KEPT = 20
"""Recordings of one checkpoint; each save and load that leaves one deletes the oldest ones beyond."""

VERSION = "1"
VERSION_KEY, ABOUT_KEY = b"bcp.telemetry", b"bcp.recording"
MAGIC, END = b"ARROW1\0\0", b"ARROW1"

MOST_BYTES = 64 << 20
"""Largest size of a recording. A recording of 1,024 ranks with 150 events each has 1 MB."""

MOST_DECODED_BYTES = 512 << 20
MOST_ABOUT_BYTES = 64 << 20
MOST_RANKS = 1 << 24
MOST_NAMES = 1000
"""Names of phases, stages and requests in a recording. Reports look at all events once for each of them."""

MOST_CELLS = 1 << 24
"""Names times ranks: a table of so many cells is made of a recording. One of 100,000 ranks has a million."""

KINDS = frozenset({"phase", "budget", "stage", "request"})
STATUSES = frozenset({"ok", "again", "failed"})


def outdated(objects: Sequence[ObjectInfo]) -> list[str]:
    """Return the keys of the oldest recordings among these objects: all but the newest 19, which leaves room for one.

    The time is part of each key, because storage does not tell when an object was written.
    """
    keys = (info.key for info in objects if info.key.startswith(FOLDER))
    return sorted(keys, key=lambda key: key.partition("-")[2])[: 1 - KEPT]


def encode(recording: Recording) -> bytes:
    """Return the contents of a file."""
    about = _plain(recording, _ABOUT)
    about["ranks"] = [_plain(rank, _RANK) for rank in recording.ranks]
    about["failures"] = [_plain(failure, _FAILURE) for failure in recording.failures]
    text = json.dumps(about, separators=(",", ":"), allow_nan=False).encode()
    metadata = {VERSION_KEY: VERSION.encode(), ABOUT_KEY: base64.b64encode(zlib.compress(text))}
    table = recording.events.cast(EVENTS).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)  # threads cost more than they save
    with pa.ipc.new_file(sink, table.schema, options=options) as file:
        file.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _plain(record: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def decode(data: Buffer, where: str) -> Recording:
    """Decode and check a file. Its footer is not read, and its size in memory is known before it is decoded.

    Args:
        data: the whole file.
        where: its name, for messages.

    Raises:
        FormatVersionError: a newer bcp wrote it.
        CorruptError: it is cut, damaged, forged or too large.

    """
    try:
        payload = _payload(memoryview(data))
        nbytes = decoded_nbytes(payload)
        if nbytes > MOST_DECODED_BYTES:
            raise ValueError(f"it would take {nbytes} bytes of memory, more than {MOST_DECODED_BYTES}")  # noqa: TRY301
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(payload)), options=options) as stream:
            _check_schema(stream.schema, where)
            table = stream.read_all()
        about = _about(table.schema.metadata[ABOUT_KEY])
        recording = _recording(about, table.replace_schema_metadata(None))
        _check_events(recording)
    except (ValueError, OSError, RecursionError, zlib.error, pa.ArrowException) as error:
        raise CorruptError(f"{where} is no sound recording: {error}; delete it, no checkpoint needs it") from error
    return recording


def _payload(view: memoryview) -> memoryview:
    """Return the stream inside of an Arrow file."""
    if len(view) > MOST_BYTES:
        raise ValueError(f"it has {len(view)} bytes, more than {MOST_BYTES}")
    if view[: len(MAGIC)] != MAGIC or view[-len(END) :] != END or len(view) < len(MAGIC) + len(END) + 4:
        raise ValueError("it is cut, or no Arrow file")
    (footer,) = struct.unpack("<i", view[-len(END) - 4 : -len(END)])
    stop = len(view) - len(END) - 4 - footer
    if footer < 0 or stop < len(MAGIC):
        raise ValueError(f"its footer claims {footer} bytes")
    return view[len(MAGIC) : stop]


def _check_schema(schema: pa.Schema, where: str) -> None:
    metadata = schema.metadata or {}
    version = metadata.get(VERSION_KEY)
    if version is None or ABOUT_KEY not in metadata:
        raise ValueError("bcp has not written it")
    if version != VERSION.encode():
        raise FormatVersionError(
            f"{where} is a recording in version {version.decode(errors='replace')}, this bcp reads version {VERSION}; "
            "use a newer bcp"
        )
    if not schema.equals(EVENTS):
        raise ValueError(f"it has other columns: {', '.join(f'{column.name} {column.type}' for column in schema)}")


def _check_events(recording: Recording) -> None:
    """Raise ValueError if an event lacks a value, or has a number or word that no event can have."""
    table = recording.events
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise ValueError("an event lacks a value")
    columns = {name: table.column(name).to_numpy() for name in ("rank", "nbytes", "start", "seconds", "waited")}
    if len(table) and not (columns["rank"].min() >= 0 and columns["rank"].max() < recording.world_size):
        raise ValueError(f"an event of a rank outside of {recording.world_size}")
    if not all(np.isfinite(columns[name]).all() for name in ("start", "seconds", "waited")):
        raise ValueError("an event at no time")
    if min(columns[name].min(initial=0) for name in ("nbytes", "seconds", "waited")) < 0:
        raise ValueError("an event with a negative number")
    names, ranks = len(table.column("name").unique()), len(table.column("rank").unique())
    if names > MOST_NAMES or names * ranks > MOST_CELLS:
        raise ValueError(f"events with {names} names on {ranks} ranks")
    for name, known in (("kind", KINDS), ("status", STATUSES)):
        unknown = set(table.column(name).unique().to_pylist()) - known
        if unknown:
            raise ValueError(f"an event of {name} {min(unknown)!r}")


# -- the facts beside the events ------------------------------------------------------------------

_NUMBER = (int, float)
_ABOUT: Mapping[str, tuple[type, ...]] = {
    "kind": (str,),
    "path": (str,),
    "operation": (str,),
    "step": (int, type(None)),
    "run": (str,),
    "background": (bool,),
    "version": (str,),
    "world_size": (int,),
    "time": _NUMBER,
    "dropped": (int,),
    "probed": (int, float, type(None)),
    "more": (dict,),
}
_RANK: Mapping[str, tuple[type, ...]] = {
    "rank": (int,),
    "host": (str,),
    "local_rank": (int,),
    "coordinates": (dict,),
    "started": _NUMBER,
    "figures": (dict,),
}
_FAILURE: Mapping[str, tuple[type, ...]] = {
    "rank": (int,),
    "host": (str,),
    "time": _NUMBER,
    "guilty": (int, type(None)),
    "phase": (str,),
    "stage": (str,),
    "item": (str,),
    "tensors": (list,),
    "file": (str,),
    "attempt": (int,),
    "errors": (list,),
    "notes": (list,),
}


def _about(packed: bytes) -> Mapping[str, Any]:
    """Decode the facts. Raises ValueError if they are cut, too large, or lack a field."""
    inflate = zlib.decompressobj()
    text = inflate.decompress(base64.b64decode(packed, validate=True), MOST_ABOUT_BYTES)
    if not inflate.eof or inflate.unconsumed_tail or inflate.unused_data:
        raise ValueError(f"its facts are cut, or take more than {MOST_ABOUT_BYTES} bytes")
    about = json.loads(text, parse_constant=_refuse)
    return _fields(about, {**_ABOUT, "ranks": (list,), "failures": (list,)})


def _recording(about: Mapping[str, Any], events: pa.Table) -> Recording:
    """Build the recording. Raises ValueError if its facts contradict each other or are out of bounds."""
    if about["kind"] not in ("save", "load") or not 1 <= about["world_size"] <= MOST_RANKS or about["dropped"] < 0:
        raise ValueError(f"it is of a {about['kind']!r} by {about['world_size']} ranks")
    ranks = tuple(_rank(record, about["world_size"]) for record in about["ranks"])
    if len({record.rank for record in ranks}) != len(ranks):
        raise ValueError("two records of one rank")
    failures = tuple(map(_failure, about["failures"]))
    return Recording(**{name: about[name] for name in _ABOUT}, ranks=ranks, failures=failures, events=events)


def _rank(value: object, world_size: int) -> RankRecord:
    fields = _fields(value, _RANK)
    numbers = [*fields["coordinates"].values(), fields["rank"], fields["local_rank"]]
    if (
        not _all(int, numbers)
        or not all(0 <= number < MOST_RANKS for number in numbers)
        or fields["rank"] >= world_size
    ):
        raise ValueError(f"the record of a rank with numbers {numbers[:8]}")
    if not all(type(figure) in _NUMBER and _is_sane(figure) for figure in fields["figures"].values()):
        raise ValueError(f"rank {fields['rank']} has figures that are no numbers")
    return RankRecord(**fields)


def _failure(value: object) -> FailureRecord:
    fields = dict(_fields(value, _FAILURE))
    errors = fields["errors"]
    pairs = all(type(pair) is list and len(pair) == 2 and _all(str, pair) for pair in errors)  # noqa: PLR2004 -- a pair
    if not (pairs and _all(str, fields["tensors"]) and _all(str, fields["notes"])):
        raise ValueError("a failure whose words are none")
    fields |= {
        "errors": tuple(map(tuple, errors)),
        "tensors": tuple(fields["tensors"]),
        "notes": tuple(fields["notes"]),
    }
    return FailureRecord(**fields)


def _fields(value: object, kinds: Mapping[str, tuple[type, ...]]) -> Mapping[str, Any]:
    """Return these fields of a JSON object; more may be there. Raises ValueError if one has another type."""
    fields = {name: value.get(name) for name in kinds} if isinstance(value, dict) else {}
    wrong = [name for name, kind in kinds.items() if type(fields.get(name)) not in kind]
    wrong += [name for name, field in fields.items() if isinstance(field, int | float) and not _is_sane(field)]
    if wrong:
        raise ValueError(f"it has no sound {', '.join(wrong[:4])}")
    return fields


def _is_sane(number: float) -> bool:
    return abs(number) < 1 << 63


def _all(kind: type, values: Sequence[object]) -> bool:
    return all(type(value) is kind for value in values)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the number {constant}")
