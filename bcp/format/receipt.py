"""The receipt of one rank in one save: its data files, the checksum of every block, and its objects.

Checksums change with every save and do not compress, so ``metadata.arrow`` holds one checksum per receipt instead.
Together, these checksums are a chain of trust from the metadata to every stored byte. See ``docs/format.md``.

A receipt has version 2 if an earlier checkpoint of the run has blocks of its files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bcp.format.container import (
    DIGEST_BYTES,
    Buffer,
    counted,
    digest,
    encode_tables,
    integers,
    read_tables,
    schema,
    seal,
    translated,
    unseal,
    values,
    version_of,
)
from bcp.format.kept import KEPT, KeptRun, check_runs, kept_blocks, kept_columns, kept_rows
from bcp.format.metadata import OPERATION, data_key
from bcp.plan.columns import Ints, concat
from bcp.plan.shards import KINDS

__all__ = ["Blocks", "FileReceipt", "Receipt", "decode_receipt", "encode_receipt", "receipt_digest"]

MAGIC = b"BCPRCPT"
NEWEST = 2
"""The newest version of receipts."""

INT, TEXT = pa.int64(), pa.string()
RECEIPT = schema("receipt", rank=INT, operation=TEXT)
FILES = schema("files", kind=INT, data_start=INT, nbytes=INT, stored_nbytes=INT, codecs=pa.list_(TEXT), blocks=INT)
BLOCKS = schema("blocks", stored_length=INT, raw_length=INT, checksum=pa.binary(DIGEST_BYTES))
OBJECTS = schema("objects", kind=TEXT, path=TEXT, value=TEXT)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The checksummed units of one file, in file order; together they tile it."""

    stored_start: Ints  # int64[b], first byte in the stored file
    stored_length: Ints  # int64[b], bytes
    raw_start: Ints  # int64[b], first byte in the raw image: the safetensors file, header included
    raw_length: Ints  # int64[b], bytes
    checksum: Sequence[bytes]  # b digests, xxh3-128 of the stored bytes; none for a file of another library

    def __len__(self) -> int:
        return len(self.stored_start)

    def whole_in(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and the end of the blocks that lie in bytes [start, stop) of the stored file whole.

        Not by numpy: its search lets go of the GIL, and gets it back late while other threads work.
        """
        first, last = bisect_left(self.stored_start, start), bisect_right(self.stored_start, stop) - 1
        if last >= 0 and stop >= self.stored_start[last] + self.stored_length[last]:
            last += 1
        return first, max(first, last)

    @classmethod
    def build(cls, stored_length: npt.ArrayLike, raw_length: npt.ArrayLike, checksum: Sequence[bytes]) -> Blocks:
        """Make the table of a file from lengths; running sums are computed."""
        stored, raw = np.asarray(stored_length, dtype=np.int64), np.asarray(raw_length, dtype=np.int64)
        return cls(np.cumsum(stored) - stored, stored, np.cumsum(raw) - raw, raw, checksum)


@dataclass(frozen=True, slots=True, eq=False)
class FileReceipt:
    """One data file as it was written."""

    kind: int  # code in ``KINDS``
    data_start: int  # bytes of the safetensors header, padding included: where the data section starts in the raw image
    nbytes: int  # bytes of the raw image, header included
    stored_nbytes: int  # bytes of the stored file, as if it were whole; other than ``nbytes`` only with codecs
    codecs: tuple[str, ...]  # names of the codecs its parts went through, in this order
    blocks: Blocks  # the byte ranges that can be verified and decoded by themselves
    kept: tuple[KeptRun, ...] = ()  # blocks that earlier checkpoints of the run have; not empty for a packed file

    @property
    def own_nbytes(self) -> int:
        """Bytes of the file itself, without blocks of earlier checkpoints."""
        is_kept = kept_blocks(self.kept, len(self.blocks))
        return self.stored_nbytes - int(self.blocks.stored_length[is_kept].sum())

    def own(self) -> FileReceipt:
        """Return the receipt of the file as it is stored, without blocks of earlier checkpoints."""
        rows, nbytes = np.flatnonzero(~kept_blocks(self.kept, len(self.blocks))), self.own_nbytes
        checksums = [self.blocks.checksum[row] for row in rows.tolist()]
        blocks = Blocks.build(self.blocks.stored_length[rows], self.blocks.raw_length[rows], checksums)
        return replace(self, nbytes=nbytes, stored_nbytes=nbytes, blocks=blocks, kept=()) if self.kept else self

    def covering(self, start: int, stop: int) -> slice:
        """Return the rows of the blocks that hold bytes [start, stop) of the raw image; an empty range has none."""
        if start >= stop:
            return slice(0, 0)
        first = bisect_right(self.blocks.raw_start, start) - 1
        return slice(max(first, 0), bisect_left(self.blocks.raw_start, stop))


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """The data files and objects that one rank wrote."""

    rank: int
    operation: str  # id of the save
    files: Sequence[FileReceipt]  # its data files, at most one of a kind
    # (kind, path) -> JSON text, the values of the leaves that are not tensors and that this rank owns
    objects: Mapping[tuple[str, str], str]

    @property
    def refers(self) -> frozenset[int]:
        """Steps of the run whose checkpoints have blocks of the files."""
        return frozenset(run.step for file in self.files for run in file.kept if run.count)

    def key_of(self, file: FileReceipt) -> str:
        """Return the key under which a file is stored; a packed one has another name than a whole one."""
        return data_key(file.kind, self.rank, self.operation, encoded=bool(file.codecs or file.kept))

    def whole(self) -> Receipt:
        """Return the receipt of the same files, each of them whole."""
        return replace(self, files=[replace(file, kept=()) for file in self.files])

    def file(self, kind: int) -> FileReceipt | None:
        """Return the file of that kind (code in ``KINDS``), if this rank wrote one."""
        return next((file for file in self.files if file.kind == kind), None)


def encode_receipt(receipt: Receipt) -> bytes:
    """Make the contents of the receipt file; equal receipts give equal bytes."""
    files = sorted(receipt.files, key=lambda file: file.kind)
    blocks = [file.blocks for file in files]
    objects = sorted(receipt.objects)
    kept = [(row, run) for row, file in enumerate(files) for run in file.kept]
    tables: list[tuple[pa.Schema, Sequence[Any]]] = [
        (RECEIPT, ([receipt.rank], [receipt.operation])),
        (
            FILES,
            (
                [file.kind for file in files],
                [file.data_start for file in files],
                [file.nbytes for file in files],
                [file.stored_nbytes for file in files],
                [list(file.codecs) for file in files],
                [len(table) for table in blocks],
            ),
        ),
        (
            BLOCKS,
            (
                concat([table.stored_length for table in blocks]),
                concat([table.raw_length for table in blocks]),
                [checksum for table in blocks for checksum in table.checksum],
            ),
        ),
        (
            OBJECTS,
            ([kind for kind, _ in objects], [path for _, path in objects], [receipt.objects[key] for key in objects]),
        ),
    ]
    if not kept:
        return seal(encode_tables(tables), MAGIC)
    return seal(encode_tables([*tables, (KEPT, kept_columns(kept))]), MAGIC, NEWEST)


def receipt_digest(data: Buffer) -> bytes:
    """Return the xxh3-128 of a whole receipt file, as the commit holds it."""
    return digest(data)


def decode_receipt(data: Buffer, where: str) -> Receipt:
    """Decode and check a receipt file; ``where`` names it in messages.

    Raises:
        NotACheckpointError: no bcp wrote this file.
        FormatVersionError: a bcp of another version of the format wrote it.
        CorruptError: it is truncated or damaged, or its numbers do not add up.
    """
    payload = unseal(data, MAGIC, where, newest=NEWEST)
    tables = [RECEIPT, FILES, BLOCKS, OBJECTS, *([KEPT] if version_of(data) == NEWEST else [])]
    with translated(where):
        about, files, blocks, objects, *kept = read_tables(payload, tables)
        if len(about) != 1 or not OPERATION.fullmatch(values(about, "operation")[0]):
            raise ValueError(f"table 'receipt' has {len(about)} rows, or no operation id of 16 hex digits")
        keys = list(zip(values(objects, "kind"), values(objects, "path"), strict=True))
        if len(set(keys)) != len(keys):
            raise ValueError("two values of one name")
        return Receipt(
            rank=values(about, "rank")[0],
            operation=values(about, "operation")[0],
            files=_files(files, blocks, kept_rows(kept[0], len(files)) if kept else {}),
            objects=dict(zip(keys, values(objects, "value"), strict=True)),
        )


def _files(files: pa.RecordBatch, blocks: pa.RecordBatch, kept: Mapping[int, tuple[KeptRun, ...]]) -> list[FileReceipt]:
    """Put the files and their blocks together; ValueError where they do not fit."""
    owner = counted(integers(files, "blocks"), len(blocks), "blocks")
    stored, raw = integers(blocks, "stored_length"), integers(blocks, "raw_length")
    checksum = values(blocks, "checksum")
    rows = files.to_pylist()
    if len({row["kind"] for row in rows}) != len(rows):
        raise ValueError("two files of one kind")
    receipts = []
    for index, row in enumerate(rows):
        first, stop = np.searchsorted(owner, (index, index + 1)).tolist()
        receipt = FileReceipt(
            kind=row["kind"],
            data_start=row["data_start"],
            nbytes=row["nbytes"],
            stored_nbytes=row["stored_nbytes"],
            codecs=tuple(row["codecs"]),
            blocks=Blocks.build(stored[first:stop], raw[first:stop], checksum[first:stop]),
            kept=kept.get(index, ()),
        )
        _check(receipt)
        receipts.append(receipt)
    return receipts


def _check(file: FileReceipt) -> None:
    """Check that the blocks of a file tile it; ValueError where they do not."""
    stored, raw = file.blocks.stored_length, file.blocks.raw_length
    if not 0 <= file.kind < len(KINDS) or not 0 <= file.data_start <= file.nbytes or not all(file.codecs):
        raise ValueError(f"file of kind {file.kind} with {file.nbytes} bytes, data from {file.data_start}")
    # each at most the whole, so that a sum that wraps around is never taken for the whole
    if ((stored < 0) | (stored > file.stored_nbytes) | (raw < 1) | (raw > file.nbytes)).any():
        raise ValueError(f"{KINDS[file.kind]} file with a block of impossible length")
    if sum(stored.tolist()) != file.stored_nbytes or sum(raw.tolist()) != file.nbytes:
        raise ValueError(f"the blocks of the {KINDS[file.kind]} file do not add up to its {file.nbytes} bytes")
    check_runs(file.kept, len(file.blocks))
    if file.kept and file.codecs:
        raise ValueError(f"{KINDS[file.kind]} file with codecs and blocks of earlier checkpoints")
    if not file.codecs and not np.array_equal(stored, raw):
        raise ValueError(f"{KINDS[file.kind]} file without codecs whose blocks change their length")
