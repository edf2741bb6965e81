"""Stored bytes are compared with the checksums that were written down when they were saved, and decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import xxhash

from bcp.errors import CorruptError
from bcp.protocols import Buffer, Codec, flat_view
from bcp.receipt import FileReceipt
from bcp.stages.load_items import Stored

__all__ = ["SEAL_BYTES", "check", "check_seal", "decoded", "digests", "seal"]

SEAL_BYTES = 16
_UNSEALED = bytes(SEAL_BYTES)


def check(stored: Stored, file: FileReceipt, rank: int) -> None:
    """Compare the digest of every block with the one that was written down when it was saved.

    Raises:
        CorruptError: they differ; names the file and the bytes.

    """
    item, blocks, rows = stored.item, file.blocks, stored.item.rows
    lengths = blocks.stored_length[rows].tolist()
    for row, found in enumerate(digests(stored.outs, lengths), rows.start):
        wanted = blocks.checksum[row]
        if found != wanted:
            start, length = int(blocks.stored_start[row]), int(blocks.stored_length[row])
            raise CorruptError(
                f"{item.key} is corrupt: bytes {start} to {start + length} have checksum {found.hex()}, "
                f"saved as {wanted.hex()} (rank {rank}, {item.name}); restore the file, or load another checkpoint"
            )


def digests(outs: Sequence[memoryview], lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the xxh3-128 of blocks of these lengths, which lie one behind the other in the buffers.

    ``update`` and not ``xxh3_128_digest``: before xxhash 4 the latter keeps the GIL.
    """
    more, rest = iter(outs), memoryview(b"")
    for length in lengths:
        state, left = xxhash.xxh3_128(), length
        while left:
            rest = rest or next(more)
            piece, rest = rest[:left], rest[left:]
            state.update(piece)
            left -= len(piece)
        yield state.digest()


def seal(data: Buffer, *, verify: bool) -> bytes:
    """Return the digest that travels behind the bytes of a chunk to other ranks; zeros if nothing is to be checked."""
    view = flat_view(data)
    return next(digests([view], [len(view)])) if verify else _UNSEALED


def check_seal(data: memoryview, name: str, sender: int, rank: int) -> None:
    """Compare bytes that another rank has sent with the digest behind them.

    A sender that loads with ``verify=False`` sends none, and nothing is compared.

    Raises:
        CorruptError: they differ; names the sender, the file and the bytes.

    """
    sent = bytes(data[-SEAL_BYTES:])
    found = seal(data[:-SEAL_BYTES], verify=True)
    if sent not in (_UNSEALED, found):
        raise CorruptError(
            f"{name}: the {len(data) - SEAL_BYTES} bytes that rank {rank} received from rank {sender} have digest "
            f"{found.hex()}, rank {sender} sent them with {sent.hex()}: they changed in the memory of one of the two "
            "hosts or on the network between them; the checkpoint itself may be sound: load it again"
        )


def decoded(
    stored: Stored, file: FileReceipt, codecs: Mapping[str, Codec], rank: int, *, room: int = 0
) -> torch.Tensor:
    """Undo the codecs of every part, last one first; return the raw bytes, uint8, with ``room`` bytes behind them.

    Raises:
        CorruptError: a codec gave back another number of bytes than it was given.

    """
    blocks, (view,), at, end = file.blocks, stored.outs, 0, 0
    rows = stored.item.rows
    raw = np.empty(room, np.uint8)
    for row in range(rows.start, rows.stop):
        length, wanted = int(blocks.stored_length[row]), int(blocks.raw_length[row])
        data: Buffer = view[at : at + length]
        for name in reversed(file.codecs):
            data = flat_view(codecs[name].decode(data))
        if len(data) != wanted:
            raise CorruptError(
                f"{stored.item.key}: codecs {list(file.codecs)} decoded part {row} to {len(data)} bytes, {wanted} were "
                f"encoded (rank {rank}); decode() must be the exact inverse of encode()"
            )
        if not end:  # a part has decoded to the size that the receipt claims: only now is memory taken for all of them
            raw = np.empty(int(blocks.raw_length[rows].sum()) + room, np.uint8)
        raw[end : end + wanted] = np.frombuffer(data, np.uint8)
        at, end = at + length, end + wanted
    return torch.from_numpy(raw)
