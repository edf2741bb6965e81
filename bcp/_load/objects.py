"""Values and opaque objects of one rank: read, unpacked and compared with the target before any tensor is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bcp._job import LoadJob
from bcp._load.opening import check_stored, checked, fetch, fetch_receipts, file_of, own_item
from bcp._load.targets import LoadRequest, check_taken, extra_ranks, find_targets
from bcp._load.units import put_units, read_units, saved_units, unit_places
from bcp.errors import CorruptError, FqnMismatchError
from bcp.format.metadata import Metadata
from bcp.format.receipt import Receipt
from bcp.options import LoadOptions
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.protocols import ObjectKey, Stateful
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.stages.items import Stored
from bcp.stages.memcpy import bytes_of
from bcp.state.objects import restore
from bcp.state.packed import unpack
from bcp.state.random_states import AddedRngState
from bcp.state.taken import Taken
from bcp.state.units import opaque_states
from bcp.state.values import decode_values

__all__ = ["ask", "put_values"]


async def ask(job: LoadJob, metadata: Metadata) -> LoadRequest:
    """Find the tensors that this rank wants, and read all values that are no tensors.

    Raises BcpError if the checkpoint cannot be loaded into the target.
    """
    layout, opaque, saved = metadata.layout, opaque_states(job.states), saved_units(metadata.layout)
    wanted = await in_thread_gc_paused(_find, job, metadata, opaque)
    names = wanted.renamed.objects.items()
    rows = {key: row for key, row in names if key[0] not in OPAQUE_KINDS and KINDS.index(key[0]) in wanted.kinds}
    owners = np.unique(layout.object_rank[np.fromiter(rows.values(), np.int64)]).tolist()
    sources = extra_sources(layout, opaque, job.rank)
    receipts = await fetch_receipts(job.backend, metadata, {*owners, *sources.values()})
    objects = await in_thread_gc_paused(_read_objects, rows, layout, receipts, job.options)
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


def _find(job: LoadJob, metadata: Metadata, opaque: Mapping[str, Any]) -> LoadRequest:
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
    return decode_values(_texts(rows, layout, receipts), allow_pickle=options.allow_pickle)


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


async def read_extras(
    job: LoadJob, metadata: Metadata, receipts: Mapping[int, Receipt], sources: Mapping[str, int]
) -> tuple[dict[str, Any], int]:
    """Read and unpack the opaque objects of this rank; return them by kind, and the number of bytes read."""
    loaded: dict[str, Any] = {}
    nbytes = 0
    for kind, source in sources.items():
        key, file = file_of(metadata, receipts[source], KINDS.index(kind))
        units = unit_places(receipts[source]).values() if kind == "dataloader" else ()  # before the opaque object
        start, stop = max((stop for _, stop in units), default=0), file.nbytes - file.data_start
        item = own_item(job, f"{key} ({kind} of rank {source})", key, file, start, stop)
        await check_stored(job.backend, [item], job.options.read_bytes, 1)
        stored = await fetch(job, item)
        loaded[kind] = await in_thread(_unpacked, job, stored)
        nbytes += stored.nbytes
    return loaded, nbytes


def _unpacked(job: LoadJob, stored: Stored) -> Any:
    image = bytes_of(checked(job, stored))
    return unpack(image, allow_pickle=job.options.allow_pickle, where=stored.item.key)


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
