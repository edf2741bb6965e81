"""Compare two checkpoints: names, shapes, dtypes, values, and all elements. Equal blocks are not read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

from bcp._messages.tools import Compared
from bcp._text import shown
from bcp.backends.place import Path
from bcp.options import LoadOptions, timeout_of
from bcp.plan.shards import KINDS
from bcp.protocols import Coordinator
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.shares import Share
from bcp.runtime.imports import imported
from bcp.tools.calls import Progress, called, ignore_progress
from bcp.tools.pairs import ALL, Pair, joined
from bcp.tools.sharing import sharing

__all__ = ["Difference", "TensorDifference", "ValueDifference", "adiff", "diff"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor of both checkpoints that differs.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``.
        name: fully qualified name.
        before: dtype and shape in the first checkpoint, as in ``"float32[2, 4]"``.
        after: the same in the second one.
        elements: the number of elements with other bits; 0 if dtype or shape differ, as nothing is compared then.
        numel: the number of all elements.
        largest: the largest absolute difference; None if it has none, as with other dtypes. It may be nan.
    """

    kind: str
    name: str
    before: str
    after: str
    elements: int = 0
    numel: int = 0
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value without tensors that differs.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``.
        name: its path, as in ``"param_groups.w.lr"``.
        before: the value in the first checkpoint, as JSON text; "" if there is none.
        after: the same in the second one.
    """

    kind: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The outcome of :func:`bcp.tools.diff`. True if the checkpoints differ.

    Attributes:
        first: path of the first checkpoint.
        second: path of the second one.
        removed: tensors of the first one alone, as (kind, name).
        added: tensors of the second one alone.
        tensors: tensors of both that differ.
        values: values that differ, or that one of them lacks.
        objects: opaque objects that differ, or that one of them lacks, as ``"extra_states of rank 0"``.
        equal: the number of tensors that are equal in shape, dtype and all bits.
        read_nbytes: bytes of tensors that were read from each checkpoint.
    """

    first: str
    second: str
    removed: tuple[tuple[str, str], ...] = ()
    added: tuple[tuple[str, str], ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    objects: tuple[str, ...] = ()
    equal: int = 0
    read_nbytes: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.tensors or self.values or self.objects)


def diff(
    first: Path,
    second: Path,
    *,
    role: str | None = None,
    glob: str = ALL,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> Difference:
    """Compare two checkpoints, whatever the parallelism of the jobs that saved them.

    Tensors are compared bit by bit. If both checkpoints have one layout and no codecs, as two steps of one job, their
    checksums are compared first, and only blocks with other checksums are read. Otherwise all common tensors are read.
    Opaque objects are compared by their checksums, so equal objects that were packed in another order differ. Files of
    other libraries are compared as checkpoints, too.

    The ranks of a job share the bytes: call the function on all of them.

    Args:
        first: a checkpoint, as for :class:`bcp.Checkpoint`.
        second: another one.
        role: the role of the checkpoint below both paths, if they were saved with one.
        glob: pattern of the shell for the names of tensors and values; all others are left out. Opaque objects have no
            names, and are compared only without a pattern.
        options: how to read, as for :class:`bcp.Checkpoint`: codecs are passed here.
        storage_options: for the file system of both URLs.
        coordinator: of several ranks that share the work, as for :func:`bcp.save`. None: the ranks of this job.
        progress: called with the bytes that this rank has compared, and with those that it has to compare.

    Returns:
        All differences, the same on every rank; the result is true if there are any.

    Raises:
        FqnMismatchError: no tensor and no value matches the pattern.
        InputError: another rank has other arguments, or other checkpoints.
        NotACheckpointError: one of the paths has no checkpoint.
        PeerError: another rank failed.
        CorruptError: a file is missing or damaged.
        StorageError: storage failed.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = bcp.save("ckpt/a", {"model": model}, overwrite=True)
        >>> _ = model.bias.data.add_(0.5)
        >>> _ = bcp.save("ckpt/b", {"model": model}, overwrite=True)
        >>> (found,) = bcp.tools.diff("ckpt/a", "ckpt/b").tensors
        >>> found.name, found.elements, found.largest
        ('bias', 2, 0.5)

    """
    return called(
        lambda: adiff(
            first,
            second,
            role=role,
            glob=glob,
            options=options,
            storage_options=storage_options,
            coordinator=coordinator,
            progress=progress,
        ),
        f"compare {shown(str(first))} with {shown(str(second))}",
    )


async def adiff(
    first: Path,
    second: Path,
    *,
    role: str | None = None,
    glob: str = ALL,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> Difference:
    """Do the same as :func:`diff` from a coroutine."""
    async with sharing("diff", coordinator, timeout_of(options)) as ranks, AsyncExitStack() as stack:

        async def opened() -> Pair:
            sources = []
            for path in (first, second):
                ckpt = AsyncCheckpoint(path, role=role, options=options, storage_options=storage_options)
                sources.append((await stack.enter_async_context(ckpt)).source)
            pair = Pair(sources[0], sources[1], glob)
            pair.check_names()
            return pair

        pair = await ranks.agreed(opened(), str)
        own = await _compared(pair, ranks.share, progress)
        return _difference(pair, await ranks.merged(own, joined))


async def _compared(pair: Pair, share: Share, progress: Progress) -> Compared:
    """Compare a share of two checkpoints."""
    found, ranges = await pair.tour(share)
    counted = Compared()
    if ranges:
        counted = await imported("bcp.tools.elements").in_ranges(*pair.both, ranges, progress)  # imports torch
    elif not pair.is_one_layout and pair.comparable:
        counted = await imported("bcp.tools.elements").in_tensors(*pair.both, pair.comparable, share, progress)
    return joined([found, counted])


def _difference(pair: Pair, found: Compared) -> Difference:
    """Return the findings of all ranks as the caller gets them."""
    counts = {(count.row, count.other): count for count in found.counts}
    changed = []
    for one, two, rows in pair.common:
        words = one.type_words, two.type_words
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            changed.append(TensorDifference(one.kind, one.name, *words))
        elif count := counts.get(rows):  # of a tied tensor, those of the tensor with its data
            numel = prod(one.shape)
            changed.append(TensorDifference(one.kind, one.name, *words, count.elements, numel, count.largest))
    a, b = pair.both
    return Difference(
        a.path,
        b.path,
        removed=tuple(sorted(pair.names[0] - pair.names[1])),
        added=tuple(sorted(pair.names[1] - pair.names[0])),
        tensors=tuple(changed),
        values=tuple(ValueDifference(each.kind, each.name, each.before, each.after) for each in found.values),
        objects=tuple(f"{KINDS[each.kind]} of rank {each.rank}" for each in found.objects),
        equal=len(pair.common) - len(changed),
        read_nbytes=found.read_nbytes,
    )
