"""Values and opaque objects of one rank: read, unpacked and compared with the target before any tensor is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bcp._job import LoadJob
from bcp._load.targets import LoadRequest, check_taken, extra_ranks, find_targets
from bcp._load.units import put_units, read_units
from bcp.errors import FqnMismatchError
from bcp.format.metadata import Metadata
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.protocols import Stateful
from bcp.read.objects import read_extras, saved_units, values_of
from bcp.read.source import Source
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.state.objects import restore
from bcp.state.random_states import AddedRngState
from bcp.state.taken import Taken
from bcp.state.units import opaque_states

__all__ = ["ask", "put_values"]


async def ask(job: LoadJob, source: Source) -> LoadRequest:
    """Find the tensors that this rank wants, and read all values that are no tensors.

    Raises BcpError if the checkpoint cannot be loaded into the target.
    """
    layout, opaque, saved = source.metadata.layout, opaque_states(job.states), saved_units(source.metadata.layout)
    wanted = await in_thread_gc_paused(_find, job, source.metadata, opaque)
    names = wanted.renamed.objects.items()
    rows = {key: row for key, row in names if key[0] not in OPAQUE_KINDS and KINDS.index(key[0]) in wanted.kinds}
    held = wanted.targets.shards.objects
    rows = {key: row for key, row in rows.items() if key in held or not source.is_unread(row)}
    owners = np.unique(layout.object_rank[np.fromiter(rows.values(), np.int64)]).tolist()
    sources = extra_sources(layout, opaque, job.rank)
    await source.read_receipts({*owners, *sources.values()})
    objects = await in_thread_gc_paused(values_of, source, rows)
    await in_thread(wanted.targets.check, objects)
    units, lacking = await read_units(job, source, saved)
    extras, nbytes = await read_extras(source, sources)
    return replace(
        wanted,
        objects=objects,
        missing=(*wanted.missing, *lacking, *missing_keys(job, opaque, extras)),
        extras=extras,
        sources=sources,
        extras_nbytes=nbytes + sum(read.nbytes for read in units),
        units=units,
        saved_units=saved,
    )


def _find(job: LoadJob, metadata: Metadata, opaque: Mapping[str, Any]) -> LoadRequest:
    """Find the targets. States that the planner makes for them are made as the caller would make them.

    The caller's queued device work is over when this returns: it may copy from or to targets in host memory.
    """
    with job.caller.streams_in_use():
        wanted = find_targets(job, metadata, opaque)
    job.caller.wait()
    return wanted


def put_values(job: LoadJob, wanted: LoadRequest) -> None:
    """Set values, dataloader, extra states, random states, in this order; called when every rank has all its tensors.

    The owners of each kind take their states in the order of their keys, so that they may communicate. Work
    that they queue on devices is done when this returns.
    """
    with job.caller.streams_in_use():
        wanted.targets.finish(wanted.objects)
        if job.options.strict:
            check_taken(wanted.targets, job.rank)
        last: list[Callable[[], None]] = []
        taken = Taken(job.states)
        put_units(wanted.units)
        for kind, value in wanted.extras.items():
            foreign = wanted.sources[kind] != job.rank
            derive_for = job.rank if foreign else None
            restore(job.states[kind], value, kind, last, derive_for=derive_for, taken=taken)
        for function in last:
            function()
    job.caller.wait()


def extra_sources(layout: Layout, opaque: Iterable[str], rank: int) -> dict[str, int]:
    """Return the saved rank whose object this rank takes, by kind: its own number, modulo how many ranks saved one."""
    sources = {}
    for kind in opaque:
        saved = extra_ranks(layout, kind)
        if saved:
            sources[kind] = rank if rank in saved else saved[rank % len(saved)]
    return sources


def missing_keys(job: LoadJob, opaque: Mapping[str, Any], loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the top-level keys of the target's mappings that the checkpoint lacks.

    Keys that only the checkpoint has are loaded into the mapping: an empty one asks for all of them.

    Raises FqnMismatchError if the checkpoint lacks keys, and the load is strict.
    """
    missing = tuple(
        f"{kind}: {key}"
        for kind, loaded_object in loaded.items()
        for key in _keys(opaque[kind])
        if isinstance(loaded_object, Mapping) and key not in loaded_object
    )
    if missing and job.options.strict:
        raise FqnMismatchError(
            f"rank {job.rank} wants {len(missing)} keys that the checkpoint lacks: {'; '.join(missing)}; pass "
            "strict=False to keep the target's values of these, or leave the keys out"
        )
    return missing


def _keys(target: object) -> list[Any]:
    """Return the top-level keys that a checkpoint has to have."""
    if not isinstance(target, Mapping) or isinstance(target, Stateful):
        return []
    return [key for key, value in target.items() if not isinstance(value, AddedRngState)]
