"""Values of leaves that are no tensors, and the opaque objects of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bcp._job import LoadJob
from bcp._load.extras import extra_sources, missing_keys, read_extras
from bcp._load.opening import fetch_receipts
from bcp._load.reads import Reading
from bcp._load.targets import Wanted, find_targets
from bcp._load.units import put_units, read_units, saved_units
from bcp.errors import CorruptError
from bcp.metadata import Metadata
from bcp.options import LoadOptions
from bcp.pipeline import in_thread, planning
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.planners.extras import restore
from bcp.planners.sharded import opaque_states
from bcp.planners.values import decode_values
from bcp.protocols import ObjectKey
from bcp.receipt import Receipt

__all__ = ["ask", "needed_receipts", "put_values"]


def needed_receipts(reading: Reading, wanted: Wanted, layout: Layout) -> set[int]:
    """Return the ranks whose receipts this rank still has to read."""
    files = {chunk.file for chunk in reading.assignment.items() if chunk.stop > chunk.start}
    return {int(layout.file_rank[file]) for file in files} - set(wanted.receipts)


async def ask(job: LoadJob, metadata: Metadata) -> Wanted:
    """Find the tensors that this rank wants, and read all values that are no tensors.

    Raises:
        BcpError: the checkpoint cannot be loaded into the target.

    """
    layout, opaque, saved = metadata.layout, opaque_states(job.states), saved_units(metadata.layout)
    wanted = await planning(_find, job, metadata, opaque)
    names = wanted.renamed.objects.items()
    rows = {key: row for key, row in names if key[0] not in OPAQUE_KINDS and KINDS.index(key[0]) in wanted.kinds}
    owners = np.unique(layout.object_rank[np.fromiter(rows.values(), np.int64)]).tolist()
    sources = extra_sources(layout, opaque, job.rank)
    receipts = await fetch_receipts(job.backend, metadata, {*owners, *sources.values()})
    objects = await planning(_read_objects, rows, layout, receipts, job.options)
    await in_thread(wanted.targets.check, objects)
    units, lacking = await read_units(job, metadata, saved)
    extras, nbytes = await read_extras(job, metadata, receipts, sources)
    return replace(
        wanted,
        receipts=receipts,
        objects=objects,
        missing=(*wanted.missing, *lacking, *missing_keys(job, opaque, extras)),
        extras=extras,
        sources=sources,
        extras_nbytes=nbytes + sum(read.nbytes for read in units),
        units=units,
        saved_units=saved,
    )


def _find(job: LoadJob, metadata: Metadata, opaque: Mapping[str, Any]) -> Wanted:
    """Find the targets. States that the planner makes for them are made as the caller would make them.

    The caller's queued device work is over when this returns: it may copy from or to targets in host memory.
    """
    with job.caller.streams_in_use():
        wanted = find_targets(job, metadata, opaque)
    job.caller.wait()
    return wanted


def _read_objects(
    rows: Mapping[ObjectKey, int], layout: Layout, receipts: Mapping[int, Receipt], options: LoadOptions
) -> dict[ObjectKey, Any]:
    """Decode the values of the leaves that are not tensors; ``rows`` are their rows in ``layout.objects``."""
    return decode_values(_texts(rows, layout, receipts), trust=options.trust)


def _texts(
    rows: Mapping[ObjectKey, int], layout: Layout, receipts: Mapping[int, Receipt]
) -> Iterator[tuple[ObjectKey, str, str]]:
    """Find the texts of these values, by their names in the checkpoint."""
    owners = layout.object_rank.tolist()
    for name, row in rows.items():
        kind, path = layout.objects[row]
        text = receipts[owners[row]].objects.get((kind, path))
        if text is None:
            raise CorruptError(
                f"the receipt of rank {owners[row]} lacks the value of {kind}: {path}; restore the receipt"
            )
        yield name, text, f"{kind}: {path}"


def put_values(job: LoadJob, wanted: Wanted) -> None:
    """Set values, dataloader, extra states, random states, in this order; called when every rank has all its tensors.

    The owners of each kind take their states in the order of their keys, so that they may communicate. Work
    that they queue on devices is done when this returns.
    """
    with job.caller.streams_in_use():
        wanted.targets.finish(wanted.objects)
        last: list[Callable[[], None]] = []
        put_units(wanted.units)
        for kind, value in wanted.extras.items():
            foreign = wanted.sources[kind] != job.rank
            restore(job.states[kind], value, kind, last, derive_for=job.rank if foreign else None)
        for function in last:
            function()
    job.caller.wait()
