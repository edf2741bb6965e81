"""The names that this rank wants, compared with the checkpoint before any target is touched.

Advice for names that a checkpoint lacks: a prefix that one side has, or names that are nearly the same.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from operator import ne
from typing import Any

import numpy as np
import torch

from bcp._job import LoadJob
from bcp._load.overlaps import OverlappingTargets, relocated, without_overlaps
from bcp._load.units import ReadState
from bcp.errors import CorruptError, DtypeMismatchError, FqnMismatchError, MismatchError, ShapeMismatchError
from bcp.format.metadata import Metadata
from bcp.plan.columns import Ints, concat
from bcp.plan.layout import Layout
from bcp.plan.read.reads import ReadRequest, fitted, wants
from bcp.plan.read.renamed import MASTER, CheckpointNames, RenamedLayout, renamed
from bcp.plan.shards import KINDS, OPAQUE_KINDS, TensorTable
from bcp.protocols import LoadTargets, LocalShards, ObjectKey, States
from bcp.read.tensors import Wanted, both_names, tensor_name
from bcp.stages.load import require_codecs
from bcp.state.objects import check_changeable
from bcp.state.optimizer_entries import OWN
from bcp.state.random_states import asks_for_nothing
from bcp.state.saved_order import is_numbered

__all__ = ["LoadRequest", "advice", "check_taken", "extra_ranks", "find_targets", "some"]

EXAMINED = 3
"""Missing names that are looked at: each costs a walk over all names of the checkpoint."""

NEIGHBOURS = 100
"""Names that are compared letter by letter, which takes 50 us each."""

CLOSE = 0.7


def advice(missing: Sequence[str], saved: Collection[str]) -> str:
    """Say how names of the model that the checkpoint lacks might be meant; empty if there is no guess."""
    known = saved if isinstance(saved, (set, frozenset)) else set(saved)
    examined = missing[:EXAMINED]
    first = examined[0]
    for prefix in (first[: index + 1] for index, letter in enumerate(first) if letter == "."):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in known for name in examined):
            return f"the checkpoint has them without {prefix!r}: pass LoadOptions(rename=[('^', {prefix!r})])"
    longer = min((name for name in known if name.endswith("." + first)), key=lambda name: (len(name), name), default="")
    prefix = longer.removesuffix(first)
    if prefix and all(prefix + name in known for name in examined):
        pattern = "^" + re.escape(prefix)
        return f"the checkpoint has them with {prefix!r} in front: pass LoadOptions(rename=[({pattern!r}, '')])"
    ordered = sorted(known)
    pairs = [(name, near) for name in examined for near in _near(name, ordered)]
    return f"the checkpoint has {', '.join(f'{near!r} (for {name!r})' for name, near in pairs)}" if pairs else ""


def _near(name: str, ordered: Sequence[str]) -> list[str]:
    """Return the name of the checkpoint that is nearest, of those about where this one would stand."""
    position = bisect_left(ordered, name)
    ending = name.rpartition(".")[2]
    alike = [other for other in ordered if other.endswith(ending) and abs(len(other) - len(name)) <= len(ending)]
    return get_close_matches(
        name, {*ordered[max(position - NEIGHBOURS // 2, 0) : position + NEIGHBOURS // 2], *alike[:NEIGHBOURS]}, 1, CLOSE
    )


SHOWN = 10  # names in an error message


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The tensors, values and units that this rank wants of the checkpoint."""

    # live memory, and the destination of values. Tensors that are assembled from blocks of saved tensors are listed as
    # one part for each saved tensor (see :func:`~bcp._load.overlaps.relocated`).
    targets: LoadTargets
    saved: Ints  # int64[n], the checkpoint's row of each tensor of the targets; -1 where it has none
    # the checkpoint's names that this rank wants, as numbers: first come the rows of its tensors, then those of its
    # objects, then those of the tensors that ``renamed`` assembles
    rows: Ints
    kinds: tuple[int, ...]  # codes of the kinds that this rank loads
    missing: tuple[str, ...]  # names that the checkpoint lacks
    wants: ReadRequest  # where the bytes are
    renamed: RenamedLayout  # the checkpoint's names, as the target has them
    objects: Mapping[ObjectKey, Any] = field(default_factory=dict)  # these values, by the target's names
    unmatched: tuple[str, ...] = ()  # kinds that this rank loads, though the checkpoint has none of their names
    extras: Mapping[str, Any] = field(default_factory=dict)  # the opaque objects of this rank, by kind
    sources: Mapping[str, int] = field(default_factory=dict)  # the rank that saved each of these objects
    extras_nbytes: int = 0  # bytes that were read for these objects
    # targets that share memory; their values are put there when all are loaded
    shared: Sequence[OverlappingTargets] = ()
    units: Sequence[ReadState] = ()  # the units that sharded dataloader states will take
    # the units of the checkpoint (see :func:`~bcp._load.units.saved_units`)
    saved_units: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def tensors(self) -> Wanted:
        """The tensors to fill, and where their bytes are."""
        return Wanted(self.targets.shards, self.saved, self.wants)


def find_targets(job: LoadJob, metadata: Metadata, opaque: Mapping[str, Any]) -> LoadRequest:
    """Ask the planner for this rank's targets, and compare them with the checkpoint; no target is touched yet."""
    layout, states, options = metadata.layout, job.states, job.options
    require_codecs(metadata.commit.codecs, options.codecs)
    _check_elements(layout.tensors)
    names = renamed(layout, options.rename, states)
    targets = job.planner().load_targets(states, names.saved)
    tensors, objects = targets.shards.table.tensors, targets.shards.objects
    saved_rows = names.saved.find(tensors)
    source = _from_masters(names.saved, tensors, saved_rows)
    missing = _whole_optimizer(names, objects)
    missing += [tensor_name(tensors, tensor) for tensor in np.flatnonzero(source < 0).tolist()]
    # hyper-parameters of an optimizer come and go with torch's versions; its own entries do not
    needed = [key for key in objects if key[0] == "model" or key[1].startswith(OWN)]
    missing += [": ".join(key) for key in needed if key not in names.objects]
    wanted_kinds = [kind for kind in opaque if not asks_for_nothing(states[kind])]
    missing += [f"{kind} of any rank" for kind in wanted_kinds if not extra_ranks(layout, kind)]
    if missing and options.strict:
        raise FqnMismatchError(
            f"rank {job.rank} wants {len(missing)} names that the checkpoint lacks: {some(missing)}; "
            f"pass strict=False to load what both have{_advice(missing, names)}"
        )
    if options.strict:
        check_taken(targets, job.rank)
    _check_shapes(tensors, names, source, job.rank)
    shards, shared = without_overlaps(targets.shards, source, names)
    shards, saved = relocated(shards, source, names)
    _check_dtypes(shards.table.tensors, layout.tensors, saved, job.rank, cast=options.cast)
    _check_dataloader(opaque, metadata, job.world_size)
    for kind in opaque:
        check_changeable(states[kind], kind)
    return LoadRequest(
        replace(targets, shards=shards),
        saved,
        _wanted_rows(names, concat([saved_rows, source]), objects),
        tuple(code for code, kind in enumerate(KINDS) if kind in states),
        tuple(missing),
        wants(layout, shards.table, saved),
        names,
        unmatched=_unmatched(states, names, tensors.kind[source >= 0], targets.shards, layout),
        shared=shared,
    )


def check_taken(targets: LoadTargets, rank: int) -> None:
    """Raise MismatchError for entries of another optimizer, or that a module does not take back from its state dict."""
    if targets.foreign:
        kinds = " or ".join(dict.fromkeys(targets.foreign.values()))
        raise MismatchError(
            f"rank {rank}: the checkpoint has {len(targets.foreign)} entries that {kinds} cannot take: "
            f"{some(list(targets.foreign))}; make an optimizer of the class that was saved, leave it out, or "
            "pass strict=False to load the other entries"
        )
    refused = targets.refused()
    if refused:
        lists = [("does not take", refused.unexpected), ("misses", refused.missing)]
        told = " and ".join(f"{verb} {some(names)}" for verb, names in lists if names)
        raise FqnMismatchError(
            f"rank {rank}: load_state_dict() of a module {told}, with what its own state_dict() returns, so that "
            "torch's strict load fails as well; give the module a load hook for these names, or pass strict=False to "
            "load the others"
        )


def _advice(missing: Sequence[str], names: RenamedLayout) -> str:
    """Return the end of a message on missing names: how those of the model might be meant."""
    front = "model: "
    model = [name.removeprefix(front) for name in missing if name.startswith(front)]
    saved = {fqn for kind, fqn in (*names.saved.rows, *names.objects) if kind == "model"} if model else set()
    text = advice(model, saved) if model else ""
    return f"; {text}" if text else ""


def _unmatched(
    states: States, names: RenamedLayout, found_kinds: Ints, shards: LocalShards, layout: Layout
) -> tuple[str, ...]:
    """Return the requested kinds without any found tensor; ``found_kinds``: kinds of the found tensors."""
    wanted = {KINDS[code] for code in set(shards.table.tensors.kind.tolist())} | {kind for kind, _ in shards.objects}
    saved_kinds = {KINDS[code] for code in set(found_kinds.tolist())} | {
        kind for kind, path in shards.objects if (kind, path) in names.objects
    }
    saved_kinds |= {kind for kind in OPAQUE_KINDS if extra_ranks(layout, kind)} | {kind for kind, _ in layout.objects}
    return tuple(kind for kind in KINDS if kind in states and kind in wanted.union(OPAQUE_KINDS) - saved_kinds)


def _from_masters(saved: CheckpointNames, wanted: TensorTable, saved_rows: Ints) -> Ints:
    """Choose the model's tensor for a master that the checkpoint lacks, and the master for a model tensor of its dtype.

    A master is only saved where the parameter is of another dtype, so either has the values that the other one had.
    A checkpoint whose optimizer was named by an order does not tell whose master is whose.
    ``saved_rows``, int64[n], has the row in ``saved.tensors`` of each wanted tensor, or -1.
    """
    source, rows, dtypes = saved_rows.copy(), saved_rows.tolist(), saved.tensors.dtype
    for tensor in np.flatnonzero(saved_rows < 0).tolist():
        fqn = wanted.fqn[tensor]
        if KINDS[wanted.kind[tensor]] == "optimizer" and fqn.startswith("state.") and fqn.endswith(f".{MASTER}"):
            source[tensor] = saved.rows.get(("model", fqn.removeprefix("state.").removesuffix(f".{MASTER}")), -1)
    differing = [row for row in _differ(wanted, saved.tensors, saved_rows) if KINDS[wanted.kind[row]] == "model"]
    if differing and is_numbered(saved):
        return source
    for tensor in differing:
        names = (wanted.fqn[tensor], saved.tensors.tied_to[rows[tensor]])
        masters = (saved.rows.get(("optimizer", f"state.{name}.{MASTER}")) for name in names)
        master = next((row for row in masters if row is not None), -1)
        if master >= 0 and dtypes[master] == wanted.dtype[tensor]:
            source[tensor] = master
    return source


def _whole_optimizer(names: RenamedLayout, wanted: Collection[ObjectKey]) -> list[str]:
    """Say that the checkpoint has nothing of any optimizer, where one is wanted: a new one wants no tensors by name."""
    code = KINDS.index("optimizer")
    is_saved = code in names.saved.tensors.kind or any(kind == "optimizer" for kind, _ in names.objects)
    return [] if is_saved or all(kind != "optimizer" for kind, _ in wanted) else ["the optimizer, all of it"]


def _wanted_rows(names: RenamedLayout, saved_rows: Ints, objects: Collection[ObjectKey]) -> Ints:
    """Return ``LoadRequest.rows``: the found names, and those that no rank is expected to want."""
    count, behind = len(names.layout.tensors), len(names.layout.objects)
    values = np.array([count + names.objects[key] for key in objects if key in names.objects], np.int64)
    wanted = np.zeros(len(names.saved.tensors) + behind, np.bool_)
    for rows in (
        np.where(saved_rows < count, saved_rows, saved_rows + behind)[saved_rows >= 0],
        values,
        np.array(names.left_out, np.int64),
    ):
        wanted[rows] = True
    return np.flatnonzero(wanted)


def _check_shapes(target: TensorTable, names: RenamedLayout, saved_rows: Ints, rank: int) -> None:
    """Compare shapes of everything that both have.

    ``saved_rows`` has the row of each target in ``names.saved.tensors``, or -1.
    """
    saved, origin = names.saved.tensors, names.layout.tensors
    both = np.flatnonzero(saved_rows >= 0)
    width = max(target.shape.shape[1], saved.shape.shape[1])
    other = (fitted(target.shape, width, 1)[both] != fitted(saved.shape, width, 1)[saved_rows[both]]).any(axis=1)
    other |= target.ndim[both] != saved.ndim[saved_rows[both]]
    shapes = [
        f"{both_names(target, new, origin, names.sources(old)[0])} is {list(saved[old].shape)} in the checkpoint, "
        f"{list(target[new].shape)} in the target"
        for new, old in ((tensor, int(saved_rows[tensor])) for tensor in both[other].tolist())
    ]
    if shapes:
        raise ShapeMismatchError(
            f"rank {rank}: {len(shapes)} global shapes differ: {some(shapes)}; build the target as it was saved"
        )


def _check_dtypes(target: TensorTable, saved: TensorTable, saved_rows: Ints, rank: int, *, cast: bool) -> None:
    """Compare dtypes of everything that both have; ``saved_rows``: the saved row of each target, or -1."""
    if cast:
        _check_known(target, saved, saved_rows, rank)
        return
    dtypes = [
        f"{both_names(target, new, saved, old)} is {saved.dtype[old]} in the checkpoint, "
        f"{target.dtype[new]} in the target"
        for new, old in ((tensor, int(saved_rows[tensor])) for tensor in _differ(target, saved, saved_rows))
    ]
    if dtypes:
        raise DtypeMismatchError(
            f"rank {rank}: {len(dtypes)} dtypes differ: {some(dtypes)}; pass LoadOptions(cast=True) to convert"
        )


def _check_known(target: TensorTable, saved: TensorTable, saved_rows: Ints, rank: int) -> None:
    """Check that torch knows the dtypes to convert from; ``saved_rows`` as in :func:`_check_dtypes`."""
    for tensor in _differ(target, saved, saved_rows):
        if not isinstance(getattr(torch, saved.dtype[saved_rows[tensor]], None), torch.dtype):
            raise DtypeMismatchError(
                f"rank {rank}: {both_names(target, tensor, saved, int(saved_rows[tensor]))} is "
                f"{saved.dtype[saved_rows[tensor]]!r} in the checkpoint, which torch {torch.__version__} does not "
                "know; load it with the torch that saved it"
            )


def _check_elements(saved: TensorTable) -> None:
    """Check that elements have as many bytes as those of their dtype: more would be written behind their tensors."""
    sizes = saved.itemsize.tolist()
    for name, nbytes in set(zip(saved.dtype, sizes, strict=True)):
        dtype = getattr(torch, name, None)  # one that this torch does not know is an error where it is wanted
        if isinstance(dtype, torch.dtype) and dtype.itemsize != nbytes:
            tensor = tensor_name(saved, list(zip(saved.dtype, sizes, strict=True)).index((name, nbytes)))
            raise CorruptError(
                f"the metadata is corrupt: {tensor} is {name}, of {dtype.itemsize} bytes an element, and is said to "
                f"have {nbytes}; restore metadata.arrow, or load another checkpoint"
            )


def _differ(target: TensorTable, saved: TensorTable, saved_rows: Ints) -> list[int]:
    """Return the tensors of the target that both have, with different dtypes.

    ``saved_rows`` is as in :func:`_check_dtypes`.
    """
    other = np.fromiter(map(ne, saved.dtypes_of(saved_rows), target.dtype), np.bool_, len(saved_rows))
    return np.flatnonzero(other & (saved_rows >= 0)).tolist()


def _check_dataloader(opaque: Mapping[str, Any], metadata: Metadata, world_size: int) -> None:
    """Refuse to give opaque objects of so many ranks to another number of ranks."""
    saved = extra_ranks(metadata.layout, "dataloader")
    if "dataloader" in opaque and saved and metadata.world_size != world_size:
        raise MismatchError(
            f"the dataloader state was saved by {metadata.world_size} ranks, one opaque object each, and this job has "
            f"{world_size}: bcp cannot reshard it. Pass a bcp.protocols.ShardedState, as bcp.data.TokenLoader and the "
            "adapters of bcp.data are; put plain values that are equal on all ranks under 'extra_states'; or leave "
            "'dataloader' out of the states, and rebuild it from your step count"
        )


def some(names: Sequence[str]) -> str:
    """Join the first few."""
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def extra_ranks(layout: Layout, kind: str) -> list[int]:
    """Return the ranks that saved an object of that kind."""
    return sorted(layout.extra_rank[layout.extra_kind == KINDS.index(kind)].tolist())
