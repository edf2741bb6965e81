"""The checkpoint's table of contents: encode and decode; and the names of its files.

``metadata.arrow`` is the commit (which save this is, and the checksum of every rank's receipt) followed by the layout
(where every element lies; byte-identical between saves of one layout, so it is encoded and decoded once and cached).
Saves write version 1. In version 2 the files of a checkpoint were written by several operations, or by another library.
An import without a copy writes version 2. In version 3 earlier checkpoints of the run have some of the bytes.
``docs/format.md`` specifies every column.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from bcp.errors import CheckpointError, CorruptError, InputError
from bcp.format.container import (
    DIGEST_BYTES,
    VERSION,
    WORD,
    Buffer,
    digest,
    encode_table,
    first_table,
    fixed_bytes,
    read_table,
    schema,
    seal,
    translated,
    unseal,
    values,
    version_of,
)
from bcp.format.foreign_files import (
    FOREIGN_MAGIC,
    ForeignFiles,
    check_files,
    decode_about,
    decode_files,
    encode_files,
    is_foreign,
)
from bcp.format.layout_file import decode_layout, encode_layout
from bcp.plan.layout import Layout, check_block_bytes
from bcp.plan.shards import KINDS
from bcp.runtime.cache import LruCache

__all__ = [
    "DRAIN",
    "EXTRA_NAME",
    "LARGEST_STEP",
    "LEDGER_KEY",
    "METADATA_KEY",
    "Commit",
    "Metadata",
    "as_stored",
    "data_key",
    "decode_commit",
    "decode_layout",
    "decode_metadata",
    "encode_foreign",
    "encode_layout",
    "encode_metadata",
    "is_over_foreign",
    "is_record",
    "operation_of",
    "owner_of",
    "receipt_key",
    "stored_files",
    "stored_layout",
    "whole_metadata",
]

METADATA_KEY = "metadata.arrow"
"""Written last: where it is missing, there is no checkpoint."""

LEDGER_KEY = "run.json"
"""The ledger of a run, beside the directories of its checkpoints."""

EXTRA_NAME = "state"
"""Name of the one tensor (dtype U8) in a data file of an opaque object; see ``Layout.extra_kind``."""

MAGIC = b"BCPMETA"
OPERATION = re.compile(r"[0-9a-f]{16}")
KEY = re.compile(
    rf"(?:.*/)?(?:{'|'.join(KINDS)}|receipts)/(?:[0-9a-f]{{2}}-)?(\d{{5,}})-([0-9a-f]{{16}})\.(?:safetensors|bcp|arrow)"
)
DRAIN = "drain/"
"""Where records of uploads from the memories of hosts are, below the place of their checkpoint."""

RECORD = re.compile(rf"(?:.*/)?{DRAIN}[^/]+-([0-9a-f]{{16}})")
SPREAD_RANKS = 1000
"""From this rank on keys begin with a hash: object stores divide their servers by the first characters of keys."""

COMMIT = schema("commit", digest=pa.binary(DIGEST_BYTES))
WRITERS = schema("writers", digest=pa.binary(DIGEST_BYTES), operation=WORD)
"""The commit of version 2, for files of several operations."""

FOREIGN_TABLE = "foreign"
OF_SEVERAL, NEWEST = 2, 3
"""Versions of metadata, besides the first."""

LARGEST_STEP = (1 << 63) - 1
"""The largest step of a run."""

_layouts: LruCache[bytes, Layout] = LruCache(4)
"""By digest. A layout of 300,000 segments takes 14 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Which save this is; written anew by every save.

    A checkpoint is written by the ranks of a save, its first *writers*, and by edits, one writer each behind them.
    """

    operation: str  # id of the save or of the last edit, 16 lower-case hex digits; part of the names of its files
    created: str  # when it was committed, UTC, ISO 8601
    framework: str  # name of the planner that read the state
    codecs: tuple[str, ...]  # names of the codecs that the data files went through, in this order
    part_bytes: int  # data files were staged and encoded in parts of this size
    version: str  # version of the bcp that wrote the commit
    # finite numbers that the run has noted for the step, by name
    metrics: Mapping[str, float] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)  # the caller's own facts, as JSON values
    receipts: bytes  # xxh3-128 of the receipt file of every writer, 16 bytes each, in the order of the writers
    writers: Sequence[str] = ()  # the operation of each writer, in version 2; empty where all have that of the commit
    ranks: int = 0  # how many of the writers are ranks of the save, in version 2
    refers: tuple[int, ...] = ()  # steps of the run that have some of the bytes, ascending; not empty in version 3
    since_full: int = 0  # how many saves have referred to others in a row, with this one

    def receipt(self, writer: int) -> bytes:
        """Return the xxh3-128 of the receipt file of one writer."""
        return self.receipts[writer * DIGEST_BYTES : (writer + 1) * DIGEST_BYTES]

    def operation_of(self, writer: int) -> str:
        """Return the operation in the names of a writer's files."""
        return self.writers[writer] if self.writers else self.operation

    def data_key(self, kind: int, writer: int) -> str:
        """Return the key of a writer's data file, as :func:`data_key`."""
        return data_key(kind, writer, self.operation_of(writer), encoded=bool(self.codecs))

    def receipt_key(self, writer: int) -> str:
        """Return the key of a writer's receipt."""
        return receipt_key(writer, self.operation_of(writer))

    @property
    def operations(self) -> frozenset[str]:
        """All operations whose files belong to the checkpoint."""
        return frozenset((self.operation, *self.writers))


@dataclass(frozen=True, slots=True)
class Metadata:
    """The contents of ``metadata.arrow``: layout and commit record.

    Attributes:
        layout: the place of every element.
        commit: which save it is.
        foreign: the files, where another library has written them; they have no receipts and no checksums.
    """

    layout: Layout
    commit: Commit
    foreign: ForeignFiles | None = None

    @property
    def world_size(self) -> int:
        """How many ranks saved the checkpoint."""
        if self.foreign is not None:
            return self.foreign.ranks
        return self.commit.ranks or self.layout.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; those that several names share count once."""
        tensors = self.layout.tensors
        return int((tensors.numel * tensors.itemsize)[~tensors.tied].sum())


# -- names of files -----------------------------------------------------------------------------


def data_key(kind: int, rank: int, operation: str, *, encoded: bool) -> str:
    """Return the key of a data file, as in ``model/00003-0123456789abcdef.safetensors``; encoded ones end in ``.bcp``.

    ``kind`` is a code in ``KINDS``: a name from a checkpoint never becomes part of a path.

    Raises InputError if an argument is out of range, or of another form.
    """
    if not 0 <= kind < len(KINDS):
        raise InputError(f"kind {kind!r} is not one of the codes 0 to {len(KINDS) - 1}")
    return f"{KINDS[kind]}/{_stem(rank, operation)}.{'bcp' if encoded else 'safetensors'}"


def receipt_key(rank: int, operation: str) -> str:
    """Return the key of the receipt of one rank. Raises :class:`~bcp.errors.InputError` as :func:`data_key`."""
    return f"receipts/{_stem(rank, operation)}.arrow"


def operation_of(key: str) -> str | None:
    """Return the operation id in the key of a data file, a receipt or a record; None for any other key."""
    if match := KEY.fullmatch(key):
        return match[2]
    return match[1] if (match := RECORD.fullmatch(key)) else None


def is_record(key: str) -> bool:
    """Whether a key is that of the record of an upload, which metadata never name."""
    return RECORD.fullmatch(key) is not None


def owner_of(key: str) -> tuple[int, str] | None:
    """Return rank and operation id in the key of a data file or receipt; None for any other key, also in a folder."""
    match = KEY.fullmatch(key)
    return (int(match[1]), match[2]) if match and key.count("/") == 1 else None


def _stem(rank: int, operation: str) -> str:
    """Return ``00003-0123456789abcdef``, or ``e1-01003-0123456789abcdef`` for a rank from ``SPREAD_RANKS`` on."""
    if rank < 0 or not OPERATION.fullmatch(operation):
        raise InputError(f"rank {rank} and operation {operation!r} do not name a file; an id has 16 hex digits")
    spread = f"{rank * 40503 % 65536 // 256:02x}-" if rank >= SPREAD_RANKS else ""  # Fibonacci hashing: even shares
    return f"{spread}{rank:05d}-{operation}"


# -- metadata -----------------------------------------------------------------------------------


def encode_metadata(layout_bytes: bytes, commit: Commit) -> bytes:
    """Make the contents of ``metadata.arrow``; ``layout_bytes`` is the result of :func:`encode_layout`."""
    about = json.dumps(_about(commit), sort_keys=True)
    digests = np.frombuffer(commit.receipts, dtype=f"V{DIGEST_BYTES}")
    table = (COMMIT, [digests]) if not commit.writers else (WRITERS, [digests, commit.writers])
    version = NEWEST if commit.refers else OF_SEVERAL if commit.writers else VERSION
    return seal(encode_table(*table, commit=about) + layout_bytes, MAGIC, version)


def whole_metadata(data: Buffer, where: str, receipts: bytes) -> bytes:
    """Return metadata of the same checkpoint without references: all of its files are whole.

    Args:
        data: ``metadata.arrow`` of a checkpoint with references.
        where: its name for messages.
        receipts: digests of the receipts of the whole files, as in :class:`Commit`.

    Raises:
        As :func:`decode_metadata`.

    """
    commit, layout_bytes = stored_layout(data, where)
    return encode_metadata(layout_bytes, replace(commit, receipts=receipts, refers=(), since_full=0))


def encode_foreign(layout_bytes: bytes, commit: Commit, files: ForeignFiles) -> bytes:
    """Make the table of contents over files of another library, for :func:`decode_metadata`. It is not stored so."""
    return seal(encode_files(files, _about(commit)) + layout_bytes, FOREIGN_MAGIC)


def as_stored(foreign: bytes) -> bytes:
    """Return what :func:`encode_foreign` has made as contents of ``metadata.arrow``, in version 2."""
    return seal(bytes(unseal(foreign, FOREIGN_MAGIC, "the table of contents")), MAGIC, OF_SEVERAL)


def _about(commit: Commit) -> dict[str, object]:
    """Return a commit as JSON data."""
    about: dict[str, object] = {
        "operation": commit.operation,
        "created": commit.created,
        "framework": commit.framework,
        "codecs": list(commit.codecs),
        "part_bytes": commit.part_bytes,
        "version": commit.version,
    }
    if commit.metrics:  # so that all other files are as they were before
        about["metrics"] = dict(commit.metrics)
    if commit.user:  # as above
        about["user"] = dict(commit.user)
    if commit.writers:
        about["ranks"] = commit.ranks
    if commit.refers:
        about |= {"refers": list(commit.refers), "since_full": commit.since_full}
    return about


def is_over_foreign(data: Buffer) -> bool:
    """Whether ``metadata.arrow`` stands over files of another library; False for damaged ones.

    Only the name of the first table is read.
    """
    if bytes(memoryview(data)[-8:-1]) != MAGIC or version_of(data) != OF_SEVERAL:
        return False
    where = METADATA_KEY
    try:
        payload = unseal(data, MAGIC, where, first=1, newest=NEWEST)
        with translated(where):
            return first_table(payload) == FOREIGN_TABLE
    except CheckpointError:
        return False


def stored_files(data: Buffer, where: str) -> ForeignFiles | None:
    """Decode the files of another library that ``metadata.arrow`` stands over; None if it is one of bcp's own files.

    The layout is not looked at.

    Raises as :func:`decode_metadata`.
    """
    if not is_over_foreign(data):
        return None
    payload = unseal(data, MAGIC, where, newest=NEWEST)
    with translated(where):
        files, _, _ = decode_files(payload)
        _check_stored(files)
    return files


def decode_metadata(data: Buffer, where: str) -> Metadata:
    """Decode and check ``metadata.arrow``; ``where`` names it in messages.

    Raises:
        NotACheckpointError: no bcp wrote this file.
        FormatVersionError: a bcp of another version of the format wrote it.
        CorruptError: it is truncated or damaged, or points to something that does not exist.
    """
    if is_foreign(data):
        return _decode_foreign(unseal(data, FOREIGN_MAGIC, where), where)
    payload = unseal(data, MAGIC, where, newest=NEWEST)
    with translated(where):
        if version_of(data) == OF_SEVERAL and first_table(payload) == FOREIGN_TABLE:
            return _decode_foreign(payload, where, is_stored=True)
        commit, layout_bytes = _read_commit(payload, version_of(data))
    layout = _decoded(layout_bytes, where)
    if len(commit.receipts) != layout.world_size * DIGEST_BYTES:
        raise CorruptError(
            f"{where} is corrupt: it has {len(commit.receipts) // DIGEST_BYTES} receipts for a world of "
            f"{layout.world_size} ranks; restore the file, or load another checkpoint"
        )
    return Metadata(layout, commit)


def _decode_foreign(payload: memoryview, where: str, *, is_stored: bool = False) -> Metadata:
    """Undo :func:`encode_foreign`; ``is_stored``: :func:`as_stored` came after it."""
    with translated(where):
        files, table, layout_bytes = decode_files(payload)
        commit = _commit(table)
        if is_stored:
            _check_stored(files)
    layout = _decoded(layout_bytes, where)
    with translated(where):
        check_files(files, layout)
    return Metadata(layout, commit, files)


def _check_stored(files: ForeignFiles) -> None:
    """Raise ValueError if files cannot be those of a folder with ``metadata.arrow`` in it, beside files of bcp's own.

    Those of bcp's own go with the save that wrote them, and a checkpoint of one file would name files beside its path.
    """
    if files.is_file:
        raise ValueError("it stands for one file, and is stored in a folder")
    for key in files.key:
        if key == METADATA_KEY or operation_of(key) is not None:
            raise ValueError(f"the file {key!r} has a name of bcp's own files")


def decode_commit(data: Buffer, where: str) -> Commit:
    """Decode the commit record of ``metadata.arrow`` alone; the layout is not looked at.

    Raises as :func:`decode_metadata`.
    """
    payload = unseal(data, MAGIC, where, first=1, newest=NEWEST)
    with translated(where):
        if version_of(data) == OF_SEVERAL and first_table(payload) == FOREIGN_TABLE:
            return _commit(decode_about(payload)[0])
        return _read_commit(payload, version_of(data))[0]


def stored_layout(data: Buffer, where: str) -> tuple[Commit, bytes]:
    """Return the commit of ``metadata.arrow``, and its layout as :func:`encode_layout` has made it, not decoded.

    The layout of files of another library is empty. Raises as :func:`decode_metadata`.
    """
    payload = unseal(data, MAGIC, where, newest=NEWEST)
    with translated(where):
        if version_of(data) == OF_SEVERAL and first_table(payload) == FOREIGN_TABLE:
            return _commit(decode_about(payload)[0]), b""
        commit, layout_bytes = _read_commit(payload, version_of(data))
    return commit, bytes(layout_bytes)


def _read_commit(payload: memoryview, version: int) -> tuple[Commit, memoryview]:
    """Decode the commit of a version; also return the bytes of the layout. Raises ValueError if it is not sound."""
    by_ranks = version == VERSION or (version == NEWEST and first_table(payload) == "commit")
    table, layout_bytes = read_table(payload, COMMIT if by_ranks else WRITERS)
    commit = replace(_commit(table), receipts=fixed_bytes(table, "digest"))
    if version == NEWEST:
        refers, since_full = _references(json.loads(table.schema.metadata[b"bcp.commit"]))
        commit = replace(commit, refers=refers, since_full=since_full)
    if by_ranks:
        return commit, layout_bytes
    writers = [str(operation) for operation in values(table, "operation")]
    if not all(map(OPERATION.fullmatch, writers)):
        raise ValueError("the operation id of a writer does not have 16 hex digits")
    ranks = json.loads(table.schema.metadata[b"bcp.commit"]).get("ranks")
    if type(ranks) is not int or not 1 <= ranks <= len(writers):
        raise ValueError(f"the commit says that {ranks!r} of {len(writers)} writers were ranks of the save")
    return replace(commit, writers=writers, ranks=ranks), layout_bytes


def _decoded(layout_bytes: Buffer, where: str) -> Layout:
    """Decode a layout, or find it among the last ones: a checkpoint of the same layout was read before."""
    key = digest(layout_bytes)
    layout = _layouts.get(key)
    if layout is None:
        layout = decode_layout(layout_bytes, where)
        _layouts.put(key, layout)
    return layout


def _commit(table: pa.RecordBatch) -> Commit:
    """Decode the commit without receipts; ValueError where it is not sound."""
    about = json.loads(table.schema.metadata.get(b"bcp.commit", b"{}"))
    types = {"operation": str, "created": str, "framework": str, "codecs": list, "part_bytes": int, "version": str}
    wrong = [name for name, kind in types.items() if not isinstance(about, dict) or type(about.get(name)) is not kind]
    if wrong or not all(isinstance(name, str) for name in about["codecs"]):
        raise ValueError(f"the commit has no sound {', '.join(wrong) or 'codecs'}")
    if not OPERATION.fullmatch(about["operation"]):
        raise ValueError(f"the operation id {about['operation']!r} does not have 16 hex digits")
    check_block_bytes("part_bytes", about["part_bytes"])
    "".join([about["created"], about["framework"], about["version"], *about["codecs"]]).encode()  # no lone surrogates
    fields = {name: about[name] for name in types if name != "codecs"}
    metrics = _metrics(about.get("metrics", {}))
    return Commit(codecs=tuple(about["codecs"]), receipts=b"", metrics=metrics, user=_user(about), **fields)


def _metrics(values: object) -> dict[str, float]:
    """Return the metrics of a commit; ValueError where they are not sound."""
    if not isinstance(values, dict) or not all(type(value) in (int, float) for value in values.values()):
        raise ValueError("the commit has no sound metrics")
    numbers = {name: float(value) for name, value in values.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("the commit has a metric that is not finite")
    return numbers


def _references(about: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the steps to which a commit refers, and the count in a row; ValueError where they are not sound."""
    refers, since_full = about.get("refers"), about.get("since_full")
    if not isinstance(refers, list) or not refers or not all(type(step) is int for step in refers):
        raise ValueError("the commit does not say to which steps it refers")
    if refers != sorted(set(refers)) or not 0 <= refers[0] <= refers[-1] <= LARGEST_STEP:
        raise ValueError("the commit refers to steps that cannot be any")
    if codecs := about["codecs"]:
        raise ValueError(f"the commit refers to other steps, and has codecs {codecs}")
    if type(since_full) is not int or since_full < 1:
        raise ValueError(f"the commit has {since_full!r} as the number of saves since a full one")
    return tuple(refers), since_full


def _user(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the caller's own facts; ValueError where they are not sound."""
    user = about.get("user", {})
    if isinstance(user, dict):
        return user
    raise ValueError("the commit has no sound user metadata")
