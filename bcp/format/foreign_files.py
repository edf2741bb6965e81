"""The table of contents over files of another library: a file and a first byte for each row of a layout's files.

It is made in memory when such files are opened, and sent from rank 0 to the other ranks of a load as ``metadata.arrow``
is. An import without a copy stores it, as ``metadata.arrow`` of version 2. ``docs/format.md`` specifies every column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bcp.format.container import INT, WORD, Buffer, encode_table, encode_tables, integers, read_table, schema, values
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout
from bcp.plan.shards import OPAQUE_KINDS

__all__ = [
    "FOREIGN_MAGIC",
    "UNREAD",
    "ForeignFiles",
    "check_files",
    "decode_about",
    "decode_files",
    "encode_files",
    "is_foreign",
    "is_inside",
    "is_unread",
    "unread",
]

FOREIGN_MAGIC = b"BCPFRGN"
"""The magic number of a table of contents over files of another library."""

UNREAD = "unread"
"""Begins the text of a value that bcp cannot read, in the place of a value's form; the reason follows."""
TEXT = pa.string()
ABOUT = schema("foreign", ranks=INT, is_file=INT)
FILES = schema("foreign files", key=TEXT, base=INT, nbytes=INT)
VALUES = schema("foreign values", kind=WORD, path=TEXT, value=TEXT)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignFiles:
    """The files of another library behind a layout; row i stands for row i of the layout's files.

    The rows of one file differ in kind, or in the remainder of ``base``: elements lie at any byte of such a file, and
    at a multiple of their size of a data section.

    Attributes:
        key: f keys, relative to the folder.
        base: int64[f], byte of the file: the begin of the data section of the row.
        nbytes: int64[f], bytes of the file when it was opened.
        ranks: how many ranks saved the files, if they say so; else 1.
        is_file: whether the caller has passed a file; keys are then relative to its folder.
        values: JSON text of the other leaves, by (kind, path).
    """

    key: Sequence[str]
    base: Ints
    nbytes: Ints
    ranks: int
    is_file: bool
    values: Mapping[tuple[str, str], str]


def is_foreign(data: Buffer) -> bool:
    """Whether a sealed table of contents is one over files of another library."""
    return bytes(memoryview(data)[-8:-1]) == FOREIGN_MAGIC


def is_inside(key: str) -> bool:
    """Whether a key stays in its folder: relative, '/'-separated, without ``..``, backslash and NUL."""
    return not {"", ".", ".."}.intersection(key.split("/")) and "\0" not in key and "\\" not in key


def unread(reason: str) -> str:
    """Return the text that stands for a value which bcp cannot read; :mod:`bcp.state.values` raises the reason."""
    return json.dumps({UNREAD: reason})


def is_unread(text: str) -> bool:
    """Whether a text was made by :func:`unread`."""
    return text.startswith(f'{{"{UNREAD}": ')


def encode_files(files: ForeignFiles, about: Mapping[str, object]) -> bytes:
    """Encode the tables before the layout; ``about`` is the commit record as JSON data."""
    names = list(files.values)
    head = encode_table(
        ABOUT, ([files.ranks], [int(files.is_file)]), compression=None, commit=json.dumps(about, sort_keys=True)
    )
    columns = (
        ([files.key, files.base, files.nbytes], FILES),
        ([[kind for kind, _ in names], [path for _, path in names], [files.values[name] for name in names]], VALUES),
    )
    return head + encode_tables([(table, rows) for rows, table in columns])


def decode_files(payload: Buffer) -> tuple[ForeignFiles, pa.RecordBatch, memoryview]:
    """Decode :func:`encode_files`; also return the table with the commit record, and the bytes of the layout.

    Raises:
        ValueError, OSError, pa.ArrowException: the bytes are something else, or a key leaves the folder.

    """
    about, left = decode_about(payload)
    files, left = read_table(left, FILES)
    named, left = read_table(left, VALUES)
    keys = [str(key) for key in values(files, "key")]
    if outside := [key for key in keys if not is_inside(key)]:
        raise ValueError(f"the file {outside[0]!r} leaves the folder")
    names = list(zip(values(named, "kind"), values(named, "path"), strict=True))
    found = ForeignFiles(
        keys,
        integers(files, "base"),
        integers(files, "nbytes"),
        int(integers(about, "ranks")[0]),
        bool(integers(about, "is_file")[0]),
        dict(zip(names, values(named, "value"), strict=True)),
    )
    return found, about, left


def decode_about(payload: Buffer) -> tuple[pa.RecordBatch, memoryview]:
    """Decode the first table, which has the commit record; also return the bytes that follow. Raises the same."""
    about, left = read_table(payload, ABOUT)
    if len(about) != 1:
        raise ValueError(f"table 'foreign' has {len(about)} rows instead of 1")
    return about, left


def check_files(files: ForeignFiles, layout: Layout) -> None:
    """Compare the files with their layout. Raises ValueError if they differ."""
    rows = np.arange(len(files.key))
    if not np.array_equal(layout.file_rank, rows) or layout.world_size != max(len(rows), 1) or files.ranks < 1:
        raise ValueError(f"{len(files.key)} files for {len(layout.file_nbytes)} of the layout, of {files.ranks} ranks")
    is_beyond = (files.base < 0) | (files.base > files.nbytes)
    if is_beyond.any():
        row = int(is_beyond.argmax())
        raise ValueError(f"data of {files.key[row]} at byte {files.base[row]} of {files.nbytes[row]}")
    if not np.array_equal(files.nbytes - files.base, layout.file_nbytes):
        raise ValueError("a file whose size is not that of the layout")
    if len(set(zip(layout.file_kind.tolist(), files.key, files.base.tolist(), strict=True))) < len(files.key):
        raise ValueError("a file twice, of one kind and with one first byte")
    if set(files.values) != set(layout.objects):
        raise ValueError("values that are not those of the layout")
    if len(layout.extra_kind) or any(kind in OPAQUE_KINDS for kind, _ in layout.objects):
        raise ValueError("opaque objects, which files of another library do not have")
