"""Who reads what: agreed on by all ranks, once per load (paper sec. 3.3 steps 3 and 4, 4.1)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bcp._agree import agree
from bcp._load.targets import Wanted, some
from bcp.errors import BcpError, CorruptError, FqnMismatchError
from bcp.metadata import Metadata, data_key, resolve
from bcp.options import LoadOptions
from bcp.pipeline import in_thread
from bcp.plan.assign import Assignment, Chunk, assign
from bcp.plan.layout import Layout
from bcp.plan.reads import decode_ranges, encode_ranges
from bcp.plan.shards import KINDS, Ints
from bcp.protocols import Agreement
from bcp.receipt import FileReceipt, Receipt
from bcp.stages.items import ReadItem

__all__ = ["Reading", "file_of", "plan_reads", "read_items"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What all ranks agreed to read.

    Attributes:
        assignment: who reads which chunks, and sends them to whom.
        unexpected: names of the checkpoint that no rank wants, within the kinds that are loaded.
    """

    assignment: Assignment
    unexpected: tuple[str, ...]


async def plan_reads(
    agreement: Agreement, rank: int, mine: Wanted | BcpError, metadata: Metadata, options: LoadOptions
) -> tuple[Wanted, Reading]:
    """Share the reading: bytes that several ranks want are read by one of them (paper sec. 4.1)."""
    layout = metadata.layout

    async def answer(messages: Sequence[bytes]) -> bytes:
        unexpected = _unexpected(layout, [_decode_wanted(message) for message in messages])
        if unexpected and options.strict:
            raise FqnMismatchError(
                f"the checkpoint has {len(unexpected)} names that no rank wants: {some(unexpected)}; "
                "pass strict=False to leave them out"
            )
        return struct.pack(f"<{len(messages) + 1}q", len(messages), *map(len, messages)) + b"".join(messages)

    if isinstance(mine, BcpError):
        await agree(agreement, "reads", rank, mine, answer)
        raise mine
    reply = await agree(agreement, "reads", rank, _encode_wanted(mine), answer)
    everyone = [_decode_wanted(part) for part in _split(reply)]
    block_bytes = metadata.commit.part_bytes if metadata.commit.codecs else layout.block_bytes
    assignment = await in_thread(_assign, layout, [one.ranges for one in everyone], block_bytes, options)
    return mine, Reading(assignment, tuple(_unexpected(layout, everyone)))


def _assign(layout: Layout, ranges: Sequence[Ints], block_bytes: int, options: LoadOptions) -> Assignment:
    return assign(
        layout,
        ranges,
        read_bytes=options.read_bytes,
        exchange_bytes=options.exchange_bytes,
        share=options.overlap_loading,
        block_bytes=block_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one rank told the others: kinds that it loads, tensors and byte ranges that it wants."""

    kinds: int
    rows: Ints
    ranges: Ints


def _encode_wanted(wanted: Wanted) -> bytes:
    kinds = sum(1 << code for code in wanted.kinds)
    return (
        struct.pack("<2q", kinds, len(wanted.rows))
        + wanted.rows.astype("<i8").tobytes()
        + encode_ranges(wanted.wants.ranges())
    )


def _decode_wanted(data: bytes) -> _Asked:
    kinds, count = struct.unpack_from("<2q", data)
    return _Asked(kinds, np.frombuffer(data, "<i8", count, 16), decode_ranges(data[16 + 8 * count :]))


def _split(data: bytes) -> Iterator[bytes]:
    """Undo the framing of a list of messages."""
    (count,) = struct.unpack_from("<q", data)
    at = 8 * (count + 1)
    for length in struct.unpack_from(f"<{count}q", data, 8):
        yield data[at : at + length]
        at += length


def _unexpected(layout: Layout, asked: Sequence[_Asked]) -> list[str]:
    """List the names that no rank wants, of the kinds that any rank loads; a tied name goes with its holder."""
    count = len(layout.tensors)
    wanted = np.zeros(count + len(layout.objects), bool)
    kinds = 0
    for one in asked:
        wanted[one.rows] = True
        kinds |= one.kinds
    tensors = [
        f"{KINDS[int(layout.tensors.kind[row])]}: {layout.tensors.fqn[row]}"
        for row in np.flatnonzero(~wanted[:count]).tolist()
        if kinds >> int(layout.tensors.kind[row]) & 1 and not wanted[resolve(layout, row)]
    ]
    model = kinds >> KINDS.index("model") & 1  # an optimizer's hyper-parameters come and go with torch's versions
    left = [layout.objects[place] for place in np.flatnonzero(~wanted[count:]).tolist()]
    return tensors + [f"{kind}: {path}" for kind, path in left if model and kind == "model"]


def read_items(
    reading: Reading, wanted: Wanted, metadata: Metadata, receipts: Mapping[int, Receipt], rank: int
) -> list[ReadItem]:
    """List the chunks that this rank reads, and the rounds in which it only receives, in plan order."""
    layout, commit, assignment = metadata.layout, metadata.commit, reading.assignment
    items = []
    for chunk in assignment.items(rank):
        incoming = assignment.receives(rank, chunk.round) if chunk.round >= 0 else {}
        nbytes = chunk.stop - chunk.start + sum(part.hi - part.lo for part in incoming.values())
        if chunk.stop == chunk.start:
            items.append(ReadItem(f"round {chunk.round}", nbytes, None, chunk.round, "", None))
            continue
        writer, kind = int(layout.file_rank[chunk.file]), int(layout.file_kind[chunk.file])
        key = data_key(kind, writer, commit.operation, encoded=bool(commit.codecs))
        name = f"{key} data bytes {chunk.start} to {chunk.stop}: {_first_name(wanted, chunk)}"
        items.append(ReadItem(name, nbytes, chunk, chunk.round, key, file_of(receipts[writer], kind, key)))
    return items


def file_of(receipt: Receipt, kind: int, key: str) -> FileReceipt:
    file = receipt.file(kind)
    if file is None:
        raise CorruptError(
            f"{key} is in the layout, but rank {receipt.rank}'s receipt does not have it; restore the receipt"
        )
    return file


def _first_name(wanted: Wanted, chunk: Chunk) -> str:
    """Name the first tensor that this rank wants of a chunk."""
    table, mine = wanted.targets.shards.table, wanted.wants
    hits = np.flatnonzero((mine.file == chunk.file) & (mine.start < chunk.stop) & (mine.stop > chunk.start))
    if not len(hits):
        return "for other ranks"
    names = list(dict.fromkeys(table.meta(int(mine.row[hit])).fqn for hit in hits.tolist()))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
