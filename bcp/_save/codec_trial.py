"""How fast a codec is on this rank's state, and how fast storage takes bytes: what a choice between them needs."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TypeVar

import anyio
import numpy as np
import torch

from bcp._messages.planning import CodecTrial
from bcp._save.local_state import LocalState
from bcp.protocols import Backend, Codec, at_once_of, flat_view
from bcp.runtime.threads import in_thread
from bcp.stages.memcpy import bytes_of

__all__ = ["measured", "pays", "tried"]

T = TypeVar("T")

PIECES, PIECE_BYTES = 16, 1 << 20
"""A sample of the state, from all over it."""

PART_BYTES, PARTS = 8 << 20, 8
"""A small file of one part and a large one of many. What storage takes for any file is in both, and does not count."""

CLEARLY = 1.1
"""So much sooner a save has to end with the codec: loads decode, and read whole parts."""


def sampled(held: LocalState) -> bytes:
    """Return bytes of this rank's tensors, from places that are evenly spaced; empty for no tensors."""
    tensors = [tensor for tensor in held.shards.tensors if tensor.numel()]
    ends = np.cumsum([tensor.numel() * tensor.element_size() for tensor in tensors])
    if not tensors:
        return b""
    places = np.unique(np.linspace(0, ends[-1], PIECES, endpoint=False).astype(np.int64) // PIECE_BYTES * PIECE_BYTES)
    rows = np.searchsorted(ends, places, side="right")
    starts = places - np.concatenate([[0], ends])[rows]
    return b"".join(_piece(tensors[row], int(start)) for row, start in zip(rows.tolist(), starts.tolist(), strict=True))


def _piece(tensor: torch.Tensor, start: int) -> bytes:
    """Return bytes of a tensor from about there on; no more than its rows there are copied."""
    tensor = tensor.detach().resolve_conj().resolve_neg().reshape(tensor.shape or (1,))
    row_bytes = tensor[0].numel() * tensor.element_size()
    first, count = start // row_bytes, -(-PIECE_BYTES // row_bytes)
    rows = tensor[first : first + count].to("cpu", copy=True).contiguous()
    return bytes(bytes_of(rows.reshape(-1).view(torch.uint8))[:PIECE_BYTES])


async def tried(backend: Backend, held: LocalState, codec: Codec) -> CodecTrial:
    """Encode a sample of this rank's state, and write files, which are gone when this returns.

    Raises:
        StorageError: storage failed.

    """
    key, sample = f".bcp-trial-{os.urandom(8).hex()}", await in_thread(sampled, held)
    stored, seconds = await _encoded(sample, codec)
    await _written(backend, key, 1)  # connections and folders are made here
    small, large = await _written(backend, key, 1), await _written(backend, key, 1 + PARTS)
    return CodecTrial(held.nbytes, len(sample), stored, seconds, PARTS * PART_BYTES, max(large - small, 0.0))


async def _encoded(sample: bytes, codec: Codec) -> tuple[int, float]:
    """Encode a sample in as many threads as a save does; return the bytes of one, and the seconds for one."""

    async def encode(_: int) -> int:
        return len(flat_view(await in_thread(codec.encode, sample)))

    begin = perf_counter()
    lengths = await _each(range(codec.workers), encode, codec.workers)
    return lengths[0], (perf_counter() - begin) / codec.workers


async def _written(backend: Backend, key: str, parts: int) -> float:
    """Write a file of so many parts, as a save does, and delete it; return the seconds of the write."""
    data = os.urandom(PART_BYTES)  # storage may not compress it
    begin = perf_counter()
    try:
        async with backend.open_write(key, parts * PART_BYTES) as writer:

            async def write(index: int) -> None:
                await writer.write_part(index, index * PART_BYTES, data)

            await _each(range(parts), write, at_once_of(backend))
        return perf_counter() - begin
    finally:
        with anyio.CancelScope(shield=True):
            # bcp/_deletion.py need not be asked: no metadata names the file of a trial
            await backend.delete([key])


async def _each(numbers: Sequence[int], call: Callable[[int], Awaitable[T]], at_once: int) -> list[T]:
    """Make a call for each number, so many at once; return the results as they come. Raises the first error."""
    results, limit = list[T](), anyio.CapacityLimiter(at_once)

    async def run(number: int) -> None:
        async with limit:
            results.append(await call(number))

    try:
        async with anyio.create_task_group() as group:
            for number in numbers:
                group.start_soon(run, number)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return results


def pays(trials: Sequence[CodecTrial]) -> bool:
    """Whether the last rank's save ends clearly sooner with the codec. Without any tensor it does not."""
    plain = max((each.nbytes * _per_byte(each) for each in trials), default=0.0)
    encoded = max((each.nbytes * _per_byte_encoded(each) for each in trials), default=0.0)
    return plain > CLEARLY * encoded and math.isfinite(encoded)


def measured(trials: Sequence[CodecTrial]) -> dict[str, float]:
    """Return what the trials have shown, for a log: rates of a rank in MB/s, and bytes stored of bytes given."""
    sample, seconds = sum(each.sample for each in trials), sum(each.encode_seconds for each in trials)
    slowest = max(map(_per_byte, trials))
    return {
        "storage_mbps": round(1e-6 / slowest, 1) if slowest else math.inf,
        "codec_mbps": round(sample / seconds / 1e6, 1) if seconds else math.inf,
        "stored": round(sum(each.stored for each in trials) / sample, 3) if sample else 1.0,
    }


def _per_byte(trial: CodecTrial) -> float:
    """Return the seconds that storage takes for a byte."""
    return trial.written_seconds / trial.written


def _per_byte_encoded(trial: CodecTrial) -> float:
    """Return the seconds for a byte of the state: encoding and storage work at once, and the slower one counts."""
    if not trial.sample:
        return _per_byte(trial)
    return max(trial.encode_seconds / trial.sample, _per_byte(trial) * trial.stored / trial.sample)
