"""The receipts of a checkpoint: what each rank has written, with the checksum of every block.

Files of other libraries have none, and :func:`foreign_range` stands for them.

The claims of receipts are checked against the metadata before any memory is taken for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bcp.backends.small import get_small
from bcp.errors import CorruptError
from bcp.format.foreign_files import ForeignFiles
from bcp.format.metadata import Metadata
from bcp.format.receipt import Blocks, FileReceipt, Receipt, decode_receipt, receipt_digest
from bcp.pipeline import Budget, Pipeline, Stage
from bcp.plan.columns import Ints
from bcp.plan.read.copies import Chunk
from bcp.plan.shards import KINDS
from bcp.protocols import Backend

__all__ = ["RANKS_AT_ONCE", "fetch_receipts", "file_of", "foreign_range", "key_of"]

RECEIPTS_AT_ONCE = 16
"""Receipts that are read at once."""

RANKS_AT_ONCE = 64
"""Ranks whose receipts are in memory at once, in a tour of all ranks."""


@dataclass(frozen=True, slots=True)
class _ReceiptToFetch:
    """A receipt to fetch, as an item of a graph."""

    rank: int
    name: str
    nbytes: int = 1


async def fetch_receipts(backend: Backend, metadata: Metadata, ranks: Iterable[int]) -> dict[int, Receipt]:
    """Read the receipts of those ranks, and check them against the commit record."""

    async def fetch(wanted: _ReceiptToFetch) -> Receipt:
        return await _fetch_receipt(backend, metadata, wanted.rank)

    start: Pipeline[_ReceiptToFetch, _ReceiptToFetch] = Pipeline()
    commit = metadata.commit
    wanted = [_ReceiptToFetch(rank, commit.receipt_key(rank)) for rank in sorted(set(ranks))]
    graph = start.then(Stage("receipts", fetch, workers=RECEIPTS_AT_ONCE))
    receipts = await graph.run(wanted, budget=Budget(max(len(wanted), 1)))
    return {receipt.rank: receipt for receipt in receipts}


async def _fetch_receipt(backend: Backend, metadata: Metadata, rank: int) -> Receipt:
    commit = metadata.commit
    key = commit.receipt_key(rank)
    try:
        data = await get_small(backend, key)
    except FileNotFoundError as error:
        raise CorruptError(
            f"{key} is missing, but operation {commit.operation} was committed with it; restore it"
        ) from error
    if receipt_digest(data) != commit.receipt(rank):
        raise CorruptError(f"{key} is not the receipt that operation {commit.operation} was committed with; restore it")
    receipt = decode_receipt(data, key)
    if receipt.rank != rank:
        raise CorruptError(f"{key} is the receipt of rank {receipt.rank}, not of rank {rank}; restore it")
    return receipt


def file_of(metadata: Metadata, receipt: Receipt, kind: int, nbytes: int | None = None) -> tuple[str, FileReceipt]:
    """Return key and receipt of a rank's data file, if codecs, blocks and size are those of the metadata.

    Args:
        metadata: of the checkpoint.
        receipt: of the rank.
        kind: code of the kind.
        nbytes: bytes of the file's data section in the layout; None for a file that the layout does not list.

    Raises CorruptError if the receipt lacks the file, or describes it in another way than the metadata.
    """
    commit = metadata.commit
    key = commit.data_key(kind, receipt.rank)
    file = receipt.file(kind)
    if file is None:
        raise CorruptError(
            f"{key} is in the metadata, but the receipt of rank {receipt.rank} does not have it; restore the receipt"
        )
    if file.codecs != commit.codecs:
        raise CorruptError(
            f"the receipt of rank {receipt.rank} says that {key} went through codecs {list(file.codecs)}, the commit "
            f"record {list(commit.codecs)}; restore both"
        )
    if unknown := sorted({run.step for run in file.kept if run.count}.difference(commit.refers)):
        raise CorruptError(
            f"the receipt of rank {receipt.rank} says that {key} has blocks in step {unknown[0]}, and the commit "
            f"record refers to {list(commit.refers)}; restore both"
        )
    most = commit.part_bytes if commit.codecs else metadata.layout.block_bytes
    has_units = KINDS[kind] == "dataloader" and any(object_kind == KINDS[kind] for object_kind, _ in receipt.objects)
    _check_blocks(file, most, key, may_be_shorter=has_units and not commit.codecs)
    if nbytes is not None and file.nbytes - file.data_start != nbytes:
        raise CorruptError(
            f"the receipt of rank {receipt.rank} says that {key} has {file.nbytes - file.data_start} bytes of data, "
            f"the metadata {nbytes}; restore both"
        )
    return key, file


def _check_blocks(file: FileReceipt, most: int, key: str, *, may_be_shorter: bool) -> None:
    """Check that the data section is cut after every ``most`` bytes; the first block has the header as well.

    A file with units is also cut where a unit ends.
    """
    lengths, rest = file.blocks.raw_length, file.nbytes - file.data_start
    if may_be_shorter:
        lengths = _joined(lengths, most, file.data_start)
    count = max(-(-rest // most), 1)
    if len(lengths) != count:
        raise CorruptError(
            f"the receipt of {key} has {len(lengths)} blocks, and {rest} bytes of data in blocks of {most} bytes are "
            f"{count}; restore the receipt"
        )
    wanted = np.full(count, most, np.int64)
    wanted[-1] = rest - most * (count - 1)
    wanted[0] += file.data_start
    wrong = np.flatnonzero(lengths != wanted)
    if len(wrong):
        row = int(wrong[0])
        raise CorruptError(
            f"the receipt of {key} says that block {row} has {lengths[row]} bytes instead of {wanted[row]}; restore "
            "the receipt"
        )


def _joined(lengths: Ints, most: int, data_start: int) -> Ints:
    """Return the blocks as they are without the cuts at the ends of units."""
    if len(lengths) == 0 or lengths.min() <= 0 or lengths[0] <= data_start:
        return lengths
    ends = np.cumsum(lengths)
    kept = ((ends - data_start) % most == 0) | (np.arange(len(ends)) == len(ends) - 1)
    return np.asarray(np.diff(ends[kept], prepend=0), dtype=np.int64)


def key_of(metadata: Metadata, file: int) -> str:
    """Return the key of a data file, by its row in the layout."""
    if metadata.foreign is not None:
        return metadata.foreign.key[file]
    layout = metadata.layout
    return metadata.commit.data_key(int(layout.file_kind[file]), int(layout.file_rank[file]))


def foreign_range(files: ForeignFiles, kind: int, chunk: Chunk) -> FileReceipt:
    """Return the record of a foreign file with one block: the bytes of the chunk, which have no checksum."""
    row = chunk.file
    base, nbytes = int(files.base[row]), int(files.nbytes[row])
    start, length = np.array([base + chunk.start]), np.array([chunk.nbytes])
    return FileReceipt(kind, base, nbytes, nbytes, (), Blocks(start, length, start, length, ()))
