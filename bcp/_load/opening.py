"""The table of contents: read by rank 0, and given to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from bcp._agree import gather_broadcast
from bcp._job import LoadJob
from bcp._messages.planning import Opened
from bcp.format.metadata import METADATA_KEY, decode_metadata
from bcp.protocols import Agreement
from bcp.read.opening import read_metadata
from bcp.read.source import Source
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["RESTARTS", "open_checkpoint"]

RESTARTS = 8
"""Times that a load begins again because a save has replaced the checkpoint under it."""


async def open_checkpoint(agreement: Agreement, job: LoadJob) -> Source:
    """Let rank 0 read the metadata, check it, and send it to all ranks: one GET for the whole job."""

    async def answer(_: Sequence[bytes]) -> bytes:
        data = await read_metadata(job.backend, job.path)
        await in_thread_gc_paused(decode_metadata, data, where)
        return Opened(job.watch.trace, data).encode()

    where = f"{job.path}/{METADATA_KEY}"
    opened = Opened.decode(await gather_broadcast(agreement, "open", job.rank, b"", answer), sender=0)
    metadata = await in_thread_gc_paused(decode_metadata, opened.metadata, where)
    job.watch.join(metadata.commit.operation, opened.trace, metadata.commit.created)
    return Source.of(job.backend, job.path, metadata, job.options, job.rank, beside=job.beside)
