"""The table of contents: found, checked, given to all ranks; and the receipts behind it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from bcp._agree import agree
from bcp._job import LoadJob
from bcp.errors import BcpError, CorruptError, NotACheckpointError, UncommittedError
from bcp.metadata import METADATA_KEY, Metadata, decode_metadata, operation_of, receipt_key
from bcp.pipeline import Budget, Pipeline, Stage, planning
from bcp.protocols import Agreement, Backend
from bcp.receipt import Receipt, decode_receipt, receipt_digest
from bcp.telemetry.store import FOLDER as TELEMETRY

__all__ = ["fetch_receipts", "open_checkpoint", "say_if_replaced"]

SHOWN = 10  # names in an error message
STEP = re.compile(r"\d$|^(latest|last|best|final)$")
"""Names of checkpoints of a run: ``step-1000``, ``100``, ``latest``. Others may be roles: ``actor``."""

RECEIPTS_AT_ONCE = 16


async def open_checkpoint(agreement: Agreement, job: LoadJob) -> Metadata:
    """Let rank 0 read the metadata, check it, and give it to everyone: one GET for the whole job."""

    async def answer(_: Sequence[bytes]) -> bytes:
        data = await _read_metadata(job.backend, job.path)
        await planning(decode_metadata, data, where)
        return f"{job.watch.trace}\n".encode() + data

    where = f"{job.path}/{METADATA_KEY}"
    trace, _, data = (await agree(agreement, "open", job.rank, b"", answer)).partition(b"\n")
    metadata = await planning(decode_metadata, data, where)
    job.watch.join(metadata.commit.operation, trace.decode(), metadata.commit.created)
    return metadata


async def _read_metadata(backend: Backend, path: str) -> bytes:
    try:
        return bytes(await backend.get(METADATA_KEY))
    except FileNotFoundError:
        keys = [info.key for info in await backend.list()]
    below = {key.removesuffix("/" + METADATA_KEY) for key in keys if key.endswith("/" + METADATA_KEY)}
    if below:
        raise NotACheckpointError(f"{path} holds {_below(path, below)}")
    saved = [key for key in keys if not key.startswith(TELEMETRY)]
    if any(operation_of(key) for key in saved):
        raise UncommittedError(
            f"{path} holds data of a save that never committed ({len(saved)} files, no {METADATA_KEY}): the job died "
            "or is still saving; load an older checkpoint"
        )
    raise NotACheckpointError(f"{path} is not a checkpoint: it has no {METADATA_KEY}; check the path")


def _below(path: str, names: Collection[str]) -> str:
    """Say which checkpoints lie below a path, and how to load one: steps of a run are not taken for roles."""
    checkpoints = {name.partition("/")[0] for name in names}
    ordered = sorted(checkpoints, key=lambda name: [(len(run), run) for run in re.split(r"(?<=\D)(?=\d)", name)])
    if any("/" in name or STEP.search(name) for name in names):
        return f"checkpoints {_first(ordered)}; pass one of them, as in {path}/{ordered[-1]}"
    return f"no checkpoint of its own, but roles below it: {_first(ordered)}; pass role=..."


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@asynccontextmanager
async def say_if_replaced(backend: Backend, metadata: Metadata, path: str) -> AsyncIterator[None]:
    """Add a note to a CorruptError if a save has replaced the checkpoint meanwhile, and deleted its files."""
    try:
        yield
    except CorruptError as error:
        with suppress(BcpError, FileNotFoundError):
            now = await planning(decode_metadata, await backend.get(METADATA_KEY), path)
            if now.commit.operation != metadata.commit.operation:
                error.add_note(
                    f"Operation {now.commit.operation} has replaced the checkpoint at {path} during this load, and its "
                    "files were deleted. Nothing has to be restored: load again."
                )
        raise


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A receipt to fetch, as an item of a graph."""

    rank: int
    name: str
    nbytes: int = 1


async def fetch_receipts(backend: Backend, metadata: Metadata, ranks: Iterable[int]) -> dict[int, Receipt]:
    """Read what those ranks wrote down when they saved, and check it against the commit record."""

    async def fetch(wanted: _Wanted) -> Receipt:
        return await _fetch_receipt(backend, metadata, wanted.rank)

    start: Pipeline[_Wanted, _Wanted] = Pipeline()
    wanted = [_Wanted(rank, receipt_key(rank, metadata.commit.operation)) for rank in sorted(set(ranks))]
    graph = start.then(Stage("receipts", fetch, workers=RECEIPTS_AT_ONCE))
    receipts = await graph.run(wanted, budget=Budget(max(len(wanted), 1)))
    return {receipt.rank: receipt for receipt in receipts}


async def _fetch_receipt(backend: Backend, metadata: Metadata, rank: int) -> Receipt:
    commit = metadata.commit
    key = receipt_key(rank, commit.operation)
    try:
        data = await backend.get(key)
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
