"""The stages of a load: ``read`` -> ``deserialize`` -> ``h2d`` -> ``exchange`` (paper sec. 4.2, Fig. 10).

A chunk goes one of two ways. *Straight*: ``read`` fills the tensors themselves, and ``deserialize`` checks the bytes
where they lie. *Staged*: it is read into a buffer, checked and decoded there, copied into the tensors by ``h2d``, and
sent to other ranks by ``exchange``.

Stored bytes are compared with the checksums that were written down when they were saved, and decoded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio
import numpy as np
import torch

from bcp.errors import BcpError, CorruptError, MissingCodecError, StorageError
from bcp.format.checksums import digests
from bcp.format.receipt import FileReceipt
from bcp.pipeline import Pipeline, Stage
from bcp.plan.read.copies import Assignment, Chunk
from bcp.protocols import Backend, Buffer, Codec, ScatterReader, flat_view
from bcp.runtime.device import Mark
from bcp.runtime.staging import Lease
from bcp.runtime.threads import in_thread
from bcp.stages import zstd
from bcp.stages.items import Loaded, ReadItem, Stored
from bcp.stages.memcpy import bytes_of
from bcp.stages.place import LoadBuffers

__all__ = ["SEAL_BYTES", "AllToAll", "LoadContext", "check", "decoded", "load_graph", "never_replaced"]

SEAL_BYTES = 16
_UNSEALED = bytes(SEAL_BYTES)


def check(stored: Stored, file: FileReceipt, rank: int) -> None:
    """Compare the digest of every block with the one that was written down when it was saved, if one was.

    Raises:
        CorruptError: they differ; names the file and the bytes.

    """
    item, blocks, rows = stored.item, file.blocks, stored.item.rows
    if not blocks.checksum:  # a file of another library
        return
    lengths = blocks.stored_length[rows].tolist()
    for row, digest in enumerate(digests(stored.outs, lengths), rows.start):
        wanted = blocks.checksum[row]
        if digest != wanted:
            start, length = int(blocks.stored_start[row]), int(blocks.stored_length[row])
            raise CorruptError(
                f"{item.key} is corrupt: bytes {start} to {start + length} have checksum {digest.hex()}, "
                f"saved as {wanted.hex()} (rank {rank}, {item.name}); restore the file, or load another checkpoint"
            )


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
    digest = seal(data[:-SEAL_BYTES], verify=True)
    if sent not in (_UNSEALED, digest):
        raise CorruptError(
            f"{name}: the {len(data) - SEAL_BYTES} bytes that rank {rank} received from rank {sender} have digest "
            f"{digest.hex()}, rank {sender} sent them with {sent.hex()}: they changed in the memory of one of the two "
            "hosts or on the network between them; the checkpoint itself may be sound: load it again"
        )


def decoded(
    stored: Stored, file: FileReceipt, codecs: Mapping[str, Codec], rank: int, *, room: int = 0
) -> torch.Tensor:
    """Undo the codecs of every part, last one first; return the raw bytes, uint8, with ``room`` bytes behind them.

    Raises:
        CorruptError: a codec gave back another number of bytes than it was given.

    """
    blocks, (view,), offset, end = file.blocks, stored.outs, 0, 0
    rows = stored.item.rows
    raw = np.empty(room, np.uint8)
    for row in range(rows.start, rows.stop):
        length, wanted = int(blocks.stored_length[row]), int(blocks.raw_length[row])
        data: Buffer = view[offset : offset + length]
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
        offset, end = offset + length, end + wanted
    return torch.from_numpy(raw)


AllToAll = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Awaitable[None]]
"""Sends a tensor to every rank and fills one from every rank; uint8, contiguous, empty for no message."""


async def never_replaced() -> bool:
    """Say that no other save has replaced the checkpoint."""
    return False


@dataclass(slots=True)
class LoadContext:
    """Shared context of the stages of one load.

    Attributes:
        rank: this rank.
        world_size: how many ranks load together.
        backend: where the data files are.
        scatter: the same, where it can read straight into tensors.
        lease: staging memory.
        targets: the tensors, and the destination of each byte.
        assignment: the chunks that this rank reads, sends and receives.
        codecs: the ones that the caller passed, by name.
        verify: whether to check the blocks, and chunks of other ranks.
        all_to_all: exchanges chunks with all other ranks.
        device: where chunks are exchanged, after their reader has checked them. None: in host memory, with a digest
            behind each that the receiver checks.
        edited: whether the caller has put in stages, which may change bytes after they were checked.
        checked: whether the backend has checked the blocks that it returns. Those for other ranks are checked again,
            behind their seal: so bytes that change meanwhile are noticed.
        is_replaced: asks storage whether another save has replaced the checkpoint, and may have deleted its files.
        file_name: returns the key of a file, by its row in the layout.
        late: the data of the last round; it is placed while the next one is under way.
        is_lost: whether this rank has met a file of a replaced checkpoint that is gone. It reads no more, and sends
            zeros, until all ranks begin again.
        touched: whether any tensor may have been written to; set before the first byte.
        placed_nbytes: bytes that are in their tensors by now.
        read_nbytes: bytes read from storage by now.
        received_nbytes: bytes received from other ranks by now.
    """

    rank: int
    world_size: int
    backend: Backend
    scatter: ScatterReader | None
    lease: Lease
    targets: LoadBuffers
    assignment: Assignment
    codecs: Mapping[str, Codec]
    verify: bool
    all_to_all: AllToAll
    device: torch.device | None = None
    edited: bool = False
    checked: bool = False
    is_replaced: Callable[[], Awaitable[bool]] = never_replaced
    file_name: Callable[[int], str] = "file {}".format
    late: Sequence[tuple[Chunk, torch.Tensor]] = field(default=())
    is_lost: bool = field(default=False)
    touched: bool = field(default=False)
    placed_nbytes: int = field(default=0)
    read_nbytes: int = field(default=0)
    received_nbytes: int = field(default=0)


def load_graph(context: LoadContext, *, copy_workers: int, io_workers: int) -> Pipeline[ReadItem, None]:
    """Build the graph that fills one rank's tensors."""
    start: Pipeline[ReadItem, ReadItem] = Pipeline()
    loaded = start.then(read(context, io_workers)).then(deserialize(context, copy_workers))
    return loaded.then(h2d(context, copy_workers)).then(exchange(context))


def read(context: LoadContext, workers: int) -> Stage[ReadItem, Stored]:
    """Fetch the stored bytes of a chunk; whole blocks, so that they can be checked."""

    async def run(item: ReadItem) -> Stored:
        if item.chunk is None or item.file is None or context.is_lost:
            return Stored(item)
        try:
            stored = await _fetch(context, item, item.chunk, item.file)
        except (FileNotFoundError, CorruptError, StorageError) as error:
            if await _loses(context):
                return Stored(item)
            if not isinstance(error, FileNotFoundError):
                raise
            raise CorruptError(
                f"{item.key} is missing, but the checkpoint names it (rank {context.rank}, {item.name}); "
                "restore the file, or load another checkpoint"
            ) from error
        context.read_nbytes += stored.nbytes
        return stored

    return Stage("read", run, workers=workers)


async def _loses(context: LoadContext) -> bool:
    """Return whether a file is gone because another save has replaced the checkpoint; note that."""
    context.is_lost = context.is_lost or await context.is_replaced()
    return context.is_lost


async def _fetch(context: LoadContext, item: ReadItem, chunk: Chunk, file: FileReceipt) -> Stored:
    """Read the blocks of a chunk: into the tensors, or into staging memory."""
    start, nbytes = int(file.blocks.stored_start[item.rows.start]), item.stored_nbytes
    if item.straight and context.scatter is not None:
        first = start - file.data_start
        outs = await in_thread(context.targets.views, chunk, first, first + nbytes)
        context.touched = True
        await context.scatter.read_scattered(item.key, start, outs)
        return Stored(item, nbytes, outs)
    room = nbytes if item.round < 0 else nbytes + SEAL_BYTES
    buffer = await in_thread(context.lease.take, max(room, item.room))
    out = bytes_of(buffer)[:nbytes]
    await context.backend.read_into(item.key, start, out)
    return Stored(item, nbytes, [out], buffer)


def deserialize(context: LoadContext, workers: int) -> Stage[Stored, Loaded]:
    """Check every block, undo the codecs, drop the header."""

    async def run(stored: Stored) -> Loaded:
        item = stored.item
        if item.chunk is None or item.file is None:
            return Loaded(item)
        if stored.buffer is None and not _verifies(context, stored):  # the bytes are in the tensors, and are checked
            return Loaded(item)
        try:
            if not context.is_lost:
                return await in_thread(_deserialize, context, stored, item.chunk, item.file)
        except CorruptError:
            if not await _loses(context):
                raise
        return Loaded(item, buffer=stored.buffer)

    return Stage("deserialize", run, workers=workers)


def _verifies(context: LoadContext, stored: Stored) -> bool:
    """Whether blocks are to be checked here, and not by the storage that has read them."""
    return context.verify and not (context.checked and stored.item.round < 0)


def _deserialize(context: LoadContext, stored: Stored, chunk: Chunk, file: FileReceipt) -> Loaded:
    verify = _verifies(context, stored)
    if verify and (stored.buffer is None or file.codecs):
        check(stored, file, context.rank)
    if stored.buffer is None:
        return Loaded(stored.item)
    image = stored.buffer
    if file.codecs:
        image = decoded(stored, file, context.codecs, context.rank, room=SEAL_BYTES)
    skip = file.data_start + chunk.start - int(file.blocks.raw_start[stored.item.rows.start])
    end = skip + chunk.nbytes
    data, sealed = image[skip:end], None
    if stored.item.round >= 0:
        sealed = image[skip : end + SEAL_BYTES]
        digest = seal(bytes_of(data), verify=context.verify)  # before the check: bytes that change after it are noticed
    if verify and not file.codecs:
        check(stored, file, context.rank)
    if sealed is not None:
        bytes_of(sealed)[-SEAL_BYTES:] = digest  # over stored bytes behind the chunk, which nobody needs any more
    return Loaded(stored.item, data, stored.buffer, sealed=sealed)


def require_codecs(names: Sequence[str], codecs: Sequence[Codec]) -> dict[str, Codec]:
    """Return the codecs by name, or say which one of those that the checkpoint needs is missing.

    Raises:
        MissingCodecError: one is neither passed nor bcp's own.
        MissingExtraError: bcp's own needs a package.

    """
    known = {codec.name: codec for codec in codecs}
    if zstd.NAME in names and zstd.NAME not in known:
        known[zstd.NAME] = zstd.zstd()
    missing = [name for name in names if name not in known]
    if missing:
        raise MissingCodecError(
            f"the checkpoint was saved with codec {', '.join(map(repr, missing))}, which this load does not have "
            f"(it has {sorted(known)}); pass LoadOptions(codecs=[...])"
        )
    return known


def h2d(context: LoadContext, workers: int) -> Stage[Loaded, Loaded]:
    """Put this rank's bytes of its own chunk into its tensors, on whatever device they are."""

    async def run(loaded: Loaded) -> Loaded:
        item = loaded.item
        if item.chunk is None or context.is_lost:
            return loaded
        if item.straight:
            context.placed_nbytes += context.targets.filled(item.chunk)
            return loaded
        data = loaded.data
        if data.dtype != torch.uint8 or data.shape != (item.chunk.nbytes,) or not data.is_cpu:
            raise BcpError(
                f"{item.name} is {data.dtype}{list(data.shape)} on {data.device} where {item.chunk.nbytes} bytes were "
                f"read (rank {context.rank}): a custom stage changed them; use "
                "LoadOptions(codecs=[bcp.extend.Codec(...)]) for stages that do"
            )
        loaded = replace(loaded, data=data.contiguous())
        if context.device is not None and item.round >= 0:  # one copy to the device, for this rank and for all others
            loaded = replace(loaded, data=await in_thread(_on_device, context, loaded.data))
        return replace(loaded, mark=await _place(context, item.chunk, loaded.data))

    return Stage("h2d", run, workers=workers)


async def _place(context: LoadContext, chunk: Chunk, data: torch.Tensor) -> Mark:
    """Copy this rank's bytes of a chunk into its tensors; return when that is done."""
    context.touched = True
    placed, mark = await in_thread(context.targets.place, chunk, data)
    context.placed_nbytes += placed  # apart from the await: other workers count too
    return mark


def exchange(context: LoadContext) -> Stage[Loaded, None]:
    """Send this chunk to the ranks that want it too, and receive the chunks that they read for this one.

    Rounds are collective: they run one at a time, in plan order, as often on every rank. The data of a round is placed
    while the next one is under way, so that no rank keeps the others waiting while it copies.
    """

    async def run(loaded: Loaded) -> None:
        item = loaded.item
        if item.round >= 0:
            await _round(context, loaded)
            if item.round == context.assignment.rounds - 1:
                await _place_late(context)
        if loaded.buffer is not None:
            await _reached(loaded.mark)
            context.lease.give(loaded.buffer)

    return Stage("exchange", run, ordered=True)


async def _round(context: LoadContext, loaded: Loaded) -> None:
    """Take part in one all-to-all; place the data of the one before meanwhile."""
    assignment, number = context.assignment, loaded.item.round
    nothing = torch.empty(0, dtype=torch.uint8) if context.device is None else await in_thread(_room, context, 0)
    outgoing, incoming = [nothing] * context.world_size, [nothing] * context.world_size
    if peers := assignment.sends(number):
        parcel = await in_thread(_parcel, context, loaded)
        for peer in peers:
            outgoing[peer] = parcel
    extra = SEAL_BYTES if context.device is None else 0
    landing = [(chunk, await in_thread(_room, context, chunk.nbytes + extra)) for chunk in assignment.receives(number)]
    for chunk, buffer in landing:
        incoming[chunk.reader] = buffer[: chunk.nbytes + extra]
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_place_late, context, name="bcp placing a round")
            await context.all_to_all(outgoing, incoming)
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    context.late = landing


def _parcel(context: LoadContext, loaded: Loaded) -> torch.Tensor:
    """Return the message of a chunk: on a device its bytes; else these and a digest of when they were checked.

    If the caller has put in stages, the digest is of the bytes as they are now.
    """
    if context.is_lost and loaded.item.chunk is not None:
        extra = SEAL_BYTES if context.device is None else 0
        zeros = torch.zeros(loaded.item.chunk.nbytes + extra, dtype=torch.uint8)
        return zeros if context.device is None else _on_device(context, zeros)
    if context.device is not None:
        return _on_device(context, loaded.data)
    if loaded.sealed is None or context.edited:
        digest = torch.frombuffer(bytearray(seal(bytes_of(loaded.data), verify=context.verify)), dtype=torch.uint8)
        return torch.cat((loaded.data, digest))
    return loaded.sealed


def _room(context: LoadContext, nbytes: int) -> torch.Tensor:
    """Return memory for a chunk of another rank."""
    if context.device is None:
        return context.lease.take(nbytes)
    with context.targets.lanes.opened():
        return torch.empty(nbytes, dtype=torch.uint8, device=context.device)


def _on_device(context: LoadContext, data: torch.Tensor) -> torch.Tensor:
    """Queue a copy of a chunk to the device on which it is exchanged, unless it is there."""
    with context.targets.lanes.opened():
        return data.to(context.device, non_blocking=True).contiguous()


async def _place_late(context: LoadContext) -> None:
    """Place the data of the last round."""
    late, context.late = context.late, ()
    for chunk, buffer in late:
        context.received_nbytes += chunk.nbytes
        if context.verify and context.device is None:
            name = f"{context.file_name(chunk.file)} data bytes {chunk.start} to {chunk.stop}"
            data = bytes_of(buffer)[: chunk.nbytes + SEAL_BYTES]
            await in_thread(check_seal, data, name, chunk.reader, context.rank)
        await _reached(await _place(context, chunk, buffer[: chunk.nbytes]))
        context.lease.give(buffer)


async def _reached(mark: Mark) -> None:
    if mark.events:
        await in_thread(mark.wait)
