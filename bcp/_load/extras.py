"""The opaque objects of one rank: read, unpacked and compared with the target before any tensor is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bcp._job import LoadJob
from bcp._load.claims import check_stored, checked, fetch, file_of, own_item
from bcp._load.targets import extra_ranks
from bcp._load.units import unit_places
from bcp.errors import FqnMismatchError
from bcp.metadata import Metadata
from bcp.pipeline import in_thread
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS
from bcp.planners.packed import unpack
from bcp.protocols import Stateful
from bcp.receipt import Receipt
from bcp.stages.flat import bytes_of
from bcp.stages.load_items import Stored

__all__ = ["extra_sources", "missing_keys", "read_extras"]


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
    """Read and unpack the opaque objects of this rank.

    Returns:
        The objects by kind, and the number of bytes read.

    """
    loaded: dict[str, Any] = {}
    nbytes = 0
    for kind, source in sources.items():
        key, file = file_of(metadata, receipts[source], KINDS.index(kind))
        start, stop = _behind_units(receipts[source], kind), file.nbytes - file.data_start
        item = own_item(job, f"{key} ({kind} of rank {source})", key, file, start, stop)
        await check_stored(job.backend, [item], job.options.read_bytes, 1)
        stored = await fetch(job, item)
        loaded[kind] = await in_thread(_unpacked, job, stored)
        nbytes += stored.nbytes
    return loaded, nbytes


def _behind_units(receipt: Receipt, kind: str) -> int:
    """Return where the opaque object begins in the data section of its file."""
    return max((stop for _, stop in unit_places(receipt).values()), default=0) if kind == "dataloader" else 0


def _unpacked(job: LoadJob, stored: Stored) -> Any:
    image = bytes_of(checked(job, stored))
    return unpack(image, trust=job.options.trust, where=stored.item.key)


def missing_keys(job: LoadJob, opaque: Mapping[str, Any], loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the top-level keys of the target's mappings that the checkpoint lacks.

    Keys that only the checkpoint has are loaded into the mapping: an empty one asks for all of them.

    Args:
        job: the load.
        opaque: the target's opaque states, by kind.
        loaded: the checkpoint's, by kind.

    Raises:
        FqnMismatchError: there are such keys, and the load is strict.

    """
    missing = tuple(
        f"{kind}: {key}"
        for kind, found in loaded.items()
        for key in _keys(opaque[kind])
        if isinstance(found, Mapping) and key not in found
    )
    if missing and job.options.strict:
        raise FqnMismatchError(
            f"rank {job.rank} wants {len(missing)} keys that the checkpoint lacks: {'; '.join(missing)}; pass "
            "strict=False to keep the target's values of these, or leave the keys out"
        )
    return missing


def _keys(target: object) -> list[Any]:
    return list(target) if isinstance(target, Mapping) and not isinstance(target, Stateful) else []
