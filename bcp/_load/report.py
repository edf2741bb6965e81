"""What the stages of a load share, and what is said of it in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bcp._job import LoadJob
from bcp._load.reads import Reading
from bcp._load.targets import Wanted
from bcp.events import LoadReport
from bcp.metadata import Metadata
from bcp.protocols import Agreement
from bcp.stages.load import LoadContext
from bcp.stages.staging import Lease

__all__ = ["everyone_is_done", "load_context", "report", "say_if_half_loaded"]


@contextmanager
def say_if_half_loaded(context: LoadContext) -> Iterator[None]:
    """Add a note to whatever goes wrong once bytes have been put into the target."""
    try:
        yield
    except BaseException as error:
        if context.touched:
            error.add_note(
                f"The target of rank {context.rank} is half loaded: at least {context.placed_nbytes} bytes of it were "
                "replaced already. Load again before using it."
            )
        raise


def load_context(
    job: LoadJob, agreement: Agreement, metadata: Metadata, wanted: Wanted, reading: Reading, lease: Lease
) -> LoadContext:
    """Gather what the stages of the load share."""
    layout, table = metadata.layout, wanted.targets.shards.table
    saved = wanted.saved[table.tensor].tolist()
    return LoadContext(
        rank=job.rank,
        world_size=job.world_size,
        backend=job.backend,
        lease=lease,
        layout=layout,
        table=table,
        tensors=wanted.targets.shards.tensors,
        dtypes=["" if row < 0 else layout.tensors.dtype[row] for row in saved],
        wants=wanted.wants,
        assignment=reading.assignment,
        codecs={codec.name: codec for codec in job.options.codecs},
        verify=job.options.verify,
        all_to_all=agreement.all_to_all,
    )


async def everyone_is_done(_: Sequence[bytes]) -> bytes:
    """Answer nothing: that every rank asked is the answer (paper sec. 3.3, step 6)."""
    return b""


def report(job: LoadJob, metadata: Metadata, wanted: Wanted, reading: Reading, context: LoadContext) -> LoadReport:
    """Sum up the load for the caller."""
    return LoadReport(
        path=job.path,
        operation=metadata.commit.operation,
        rank=job.rank,
        world_size=job.world_size,
        saved_world_size=metadata.layout.world_size,
        nbytes=context.placed_nbytes,
        read_nbytes=context.read_nbytes,
        received_nbytes=context.received_nbytes,
        seconds=job.clock.seconds,
        stage_seconds=job.clock.stage_seconds,
        missing=wanted.missing,
        unexpected=reading.unexpected,
    )
