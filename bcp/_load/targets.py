"""What this rank asks of the checkpoint, compared with what there is, before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bcp._job import LoadJob
from bcp.errors import DtypeMismatchError, FqnMismatchError, MismatchError, ShapeMismatchError
from bcp.metadata import Metadata
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout
from bcp.plan.load.pieces import fitted
from bcp.plan.load.reads import Wants, wants
from bcp.plan.load.saved import Saved
from bcp.plan.lookup import find_all
from bcp.plan.shards import KINDS, OPAQUE_KINDS, TensorTable
from bcp.protocols import LoadTargets, ObjectKey, States
from bcp.receipt import Receipt
from bcp.stages.load import require_codecs

__all__ = ["Wanted", "extra_ranks", "find_targets", "some"]

SHOWN = 10  # names in an error message


@dataclass(frozen=True, slots=True)
class Wanted:
    """What this rank asks of the checkpoint.

    Attributes:
        targets: live memory, and where values go.
        saved: int64[n], the checkpoint's row of each tensor of the targets; -1 where it has none.
        rows: the checkpoint's names that this rank wants: rows of its tensors, and behind these of its objects.
        kinds: codes of the kinds that this rank loads.
        missing: names that the checkpoint lacks.
        wants: where the bytes are.
        receipts: of the ranks that own values of these kinds.
        objects: these values.
    """

    targets: LoadTargets
    saved: Ints
    rows: Ints
    kinds: tuple[int, ...]
    missing: tuple[str, ...]
    wants: Wants
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    objects: Mapping[ObjectKey, Any] = field(default_factory=dict)


def find_targets(job: LoadJob, metadata: Metadata) -> Wanted:
    """Ask the planner where this rank wants what, and compare it with what there is; nothing is touched yet."""
    layout, states, options = metadata.layout, job.states, job.options
    require_codecs(metadata.commit.codecs, options.codecs)
    targets = job.planner().load_targets(states, Saved.of(layout))
    table = targets.shards.table
    saved = find_all(layout, table.tensors)
    rows = saved[saved >= 0].tolist()
    missing = [_name(table.tensors, tensor) for tensor in np.flatnonzero(saved < 0).tolist()]
    places = {key: place for place, key in enumerate(layout.objects, start=len(layout.tensors))}
    for key in targets.shards.objects:
        if key in places:
            rows.append(places[key])
        elif key[0] == "model":  # hyper-parameters of an optimizer come and go with torch's versions
            missing.append(": ".join(key))
    missing += [f"{kind} of any rank" for kind in OPAQUE_KINDS if kind in states and not extra_ranks(layout, kind)]
    if missing and options.strict:
        raise FqnMismatchError(
            f"rank {job.rank} wants {len(missing)} names that the checkpoint lacks: {some(missing)}; "
            "pass strict=False to load what both have"
        )
    _check_same(table.tensors, layout.tensors, saved, job.rank, cast=options.cast)
    _check_dataloader(states, layout, job.world_size)
    kinds = tuple(code for code, kind in enumerate(KINDS) if kind in states)
    found = wants(layout, table, saved)
    return Wanted(targets, saved, np.array(rows, np.int64), kinds, tuple(missing), found)


def _name(tensors: TensorTable, row: int) -> str:
    return f"{KINDS[int(tensors.kind[row])]}: {tensors.fqn[row]}"


def _check_same(target: TensorTable, saved: TensorTable, found: Ints, rank: int, *, cast: bool) -> None:
    """Compare shapes and dtypes of everything that both have; ``found``: the saved row of each target, or -1."""
    both = np.flatnonzero(found >= 0)
    here, there = both.tolist(), found[both].tolist()
    width = max(target.shape.shape[1], saved.shape.shape[1])
    other = (fitted(target.shape, width, 1)[both] != fitted(saved.shape, width, 1)[found[both]]).any(axis=1)
    other |= target.ndim[both] != saved.ndim[found[both]]
    shapes = [
        f"{_name(target, here[row])} is {list(saved[there[row]].shape)} in the checkpoint, "
        f"{list(target[here[row]].shape)} in the target"
        for row in np.flatnonzero(other).tolist()
    ]
    dtypes = [
        f"{_name(target, new)} is {saved.dtype[old]} in the checkpoint, {target.dtype[new]} in the target"
        for new, old in zip(here, there, strict=True)
        if saved.dtype[old] != target.dtype[new]
    ]
    if shapes:
        raise ShapeMismatchError(
            f"rank {rank}: {len(shapes)} global shapes differ: {some(shapes)}; build the target as it was saved"
        )
    if dtypes and not cast:
        raise DtypeMismatchError(
            f"rank {rank}: {len(dtypes)} dtypes differ: {some(dtypes)}; pass LoadOptions(cast=True) to convert"
        )


def _check_dataloader(states: States, layout: Layout, world_size: int) -> None:
    saved = extra_ranks(layout, "dataloader")
    if "dataloader" in states and saved and layout.world_size != world_size:
        raise MismatchError(
            f"the dataloader state was saved by {layout.world_size} ranks and this job has {world_size}; "
            "this version cannot reshard it: leave 'dataloader' out of the states, and rebuild it from your step count"
        )


def some(names: Sequence[str]) -> str:
    """Join the first few."""
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def extra_ranks(layout: Layout, kind: str) -> list[int]:
    """Return the ranks that saved an object of that kind."""
    return sorted(layout.extra_rank[layout.extra_kind == KINDS.index(kind)].tolist())
