"""The result of a load, and the last word on one that failed half way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bcp._job import LoadJob
from bcp._load.reads import LoadPlan
from bcp._load.targets import LoadRequest
from bcp.events import LoadResult
from bcp.format.metadata import Metadata
from bcp.protocols import retries_of
from bcp.runtime.device import stream_count
from bcp.runtime.threads import thread_count
from bcp.stages.load import LoadContext

__all__ = ["result", "say_if_half_loaded"]


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
        saved_world_size=metadata.world_size,
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
        unverified=metadata.foreign is not None,
    )
