"""The context that the stages of a load share, and the result of a load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import eq

import numpy as np

from bcp._job import LoadJob
from bcp._load.reads import LoadPlan, key_of
from bcp._load.targets import LoadRequest
from bcp.events import LoadResult
from bcp.format.metadata import Metadata
from bcp.options import unchanged
from bcp.plan.read.copies import check_complete, copies, zero_copy_reads
from bcp.protocols import ScatterReader, retries_of
from bcp.runtime.device import Lanes, stream_count
from bcp.runtime.staging import Lease
from bcp.runtime.threads import thread_count
from bcp.stages.load import AllToAll, LoadContext
from bcp.stages.memcpy import addresses, writable
from bcp.stages.place import LoadBuffers

__all__ = ["lay_out", "load_context", "result", "say_if_half_loaded"]


@contextmanager
def say_if_half_loaded(context: LoadContext) -> Iterator[None]:
    """Add a note to every error after the first bytes have been written to the target."""
    try:
        yield
    except BaseException as error:
        if context.touched:
            error.add_note(
                f"The target of rank {context.rank} is half loaded: at least {context.placed_nbytes} bytes of it were "
                "replaced already. Load again before using it."
            )
        raise


def lay_out(job: LoadJob, metadata: Metadata, wanted: LoadRequest, reading: LoadPlan, lanes: Lanes) -> LoadBuffers:
    """Say where every byte goes that this rank reads or receives, and which chunks need no staging memory on their way.

    Every chunk does where codecs have to decode it, and where the caller edits the graph: the stages that were put in
    may look at the bytes, and may change them.
    """
    layout, shards, assignment = metadata.layout, wanted.targets.shards, reading.assignment
    table, tensors, chunks = shards.table, shards.tensors, assignment.chunks
    all_copies = copies(layout, table, wanted.wants, chunks)
    check_complete(all_copies, table, wanted.wants)
    saved = layout.tensors.dtypes_of(wanted.saved)
    same = np.fromiter(map(eq, saved, table.tensors.dtype), np.bool_, len(saved))[table.tensor]
    dtypes = list(map(saved.__getitem__, table.tensor.tolist()))
    known = wanted.targets.shards.address
    address = writable(tensors, addresses(tensors, table) if known is None else known, table.nbytes, same)
    able = isinstance(job.backend, ScatterReader) and job.options.edit is unchanged and not metadata.commit.codecs
    private = np.arange(len(chunks)) < (len(assignment.private) if able else 0)
    way = zero_copy_reads(all_copies, private, address > 0)
    return LoadBuffers(tensors, table.tensors.itemsize[table.tensor], dtypes, address, all_copies, way, lanes)


def load_context(
    job: LoadJob,
    all_to_all: AllToAll,
    metadata: Metadata,
    reading: LoadPlan,
    targets: LoadBuffers,
    lease: Lease,
    is_replaced: Callable[[], Awaitable[bool]],
) -> LoadContext:
    """Build the context that the stages of the load share."""
    return LoadContext(
        rank=job.rank,
        world_size=job.world_size,
        backend=job.backend,
        scatter=job.backend if isinstance(job.backend, ScatterReader) else None,
        lease=lease,
        targets=targets,
        assignment=reading.assignment,
        codecs={codec.name: codec for codec in job.options.codecs},
        verify=job.options.verify,
        all_to_all=all_to_all,
        device=job.exchange_device,
        edited=job.options.edit is not unchanged,
        is_replaced=is_replaced,
        file_name=partial(key_of, metadata),
    )


def result(
    job: LoadJob, metadata: Metadata, wanted: LoadRequest, reading: LoadPlan, context: LoadContext
) -> LoadResult:
    """Sum up the load for the caller."""
    refused = wanted.targets.refused()
    return LoadResult(
        path=job.path,
        operation=metadata.commit.operation,
        rank=job.rank,
        world_size=job.world_size,
        saved_world_size=metadata.layout.world_size,
        nbytes=context.placed_nbytes,
        read_nbytes=context.read_nbytes + wanted.extras_nbytes,
        received_nbytes=context.received_nbytes,
        seconds=job.watch.seconds,
        stage_seconds=job.watch.stage_seconds,
        missing=tuple(dict.fromkeys((*wanted.missing, *refused.missing))),
        unexpected=tuple(dict.fromkeys((*reading.unexpected, *refused.unexpected, *wanted.targets.foreign))),
        unmatched=wanted.unmatched,
        retries=retries_of(job.backend),
        threads=thread_count(),
        streams=stream_count(),
        pinned_nbytes=context.lease.pinned_nbytes,
    )
