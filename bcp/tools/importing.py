"""Make a checkpoint of files of another library: one save whose bytes come from these files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from bcp._api import asave
from bcp._text import shown
from bcp.backends.place import Path
from bcp.errors import InputError, StateError
from bcp.options import Graph, SaveOptions
from bcp.pipeline import Stage
from bcp.plan.box import Box, decompose
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import Coordinator, LoadTargets, LocalShards, ObjectKey, States
from bcp.read.boxes import fill_boxes
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.source import Source
from bcp.stages.items import HostPart, WriteItem
from bcp.stages.memcpy import torch_dtype, typed
from bcp.tools.calls import Progress, called, ignore_progress

__all__ = ["ImportResult", "aimport_files", "import_files"]

READERS = 3


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The outcome of :func:`bcp.tools.import_files`.

    Attributes:
        path: of the new checkpoint, absolute.
        operation: id of the save.
        tensors: number of tensors.
        values: number of values that are not tensors.
        nbytes: bytes of data that this rank has written.
        seconds: how long it took.
    """

    path: str
    operation: str
    tensors: int
    values: int
    nbytes: int
    seconds: float


def import_files(
    source: Path,
    target: Path,
    *,
    values: bool = True,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> ImportResult:
    """Make a checkpoint of a Hugging Face folder, a DCP folder, a safetensors file, or a file of ``torch.save``.

    ``bcp.load`` and :class:`bcp.Checkpoint` read such files as they are. Import them for checksums, for one atomic
    commit, or to move them to another storage. The bytes are streamed: no tensor has to fit into memory. Under torchrun
    every rank reads and writes an equal share.

    The new checkpoint has the names of the source, as :class:`bcp.Checkpoint` shows them.

    Args:
        source: the files, as for :class:`bcp.Checkpoint`.
        target: path or URL of the new checkpoint.
        values: take over the values that are not tensors, as learning rates. False leaves all of them out.
        overwrite: replace a committed checkpoint at the target, atomically.
        options: how to save: codecs, for instance.
        storage_options: for the file system of the source's URL.
        target_options: for the file system of the target's URL.
        coordinator: of several ranks, as for :func:`bcp.save`.
        progress: called with the bytes that this rank has read, and with the bytes of all tensors.

    Returns:
        The figures of this rank.

    Raises:
        InputError: the source is a checkpoint of bcp: :func:`bcp.tools.copy` copies it.
        NotACheckpointError: there are no files that bcp reads.
        CheckpointError: a value cannot be read; ``values=False`` leaves all values out.
        CorruptError: a file is damaged. Nothing is committed.
        ExistsError: a committed checkpoint is at the target, and ``overwrite`` is not set.
        StorageError: storage failed. Nothing is committed.

    Example:
        >>> _ = torch.save({"w": torch.ones(3)}, "weights.pt")
        >>> _ = bcp.tools.import_files("weights.pt", "ckpt/imported", overwrite=True)
        >>> bcp.Checkpoint("ckpt/imported").names()
        ['w']

    """
    return called(
        lambda: aimport_files(
            source,
            target,
            values=values,
            overwrite=overwrite,
            options=options,
            storage_options=storage_options,
            target_options=target_options,
            coordinator=coordinator,
            progress=progress,
        ),
        f"import {shown(str(source))} into {shown(str(target))}",
    )


async def aimport_files(
    source: Path,
    target: Path,
    *,
    values: bool = True,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> ImportResult:
    """Do the same as :func:`import_files` from a coroutine."""
    began = time.monotonic()
    saving = options or SaveOptions()
    if target_options is not None:
        saving = replace(saving, storage_options=target_options)
    async with AsyncCheckpoint(source, storage_options=storage_options) as ckpt:
        if ckpt.metadata.foreign is None:
            raise InputError(f"{ckpt.path} is a checkpoint of bcp: bcp.tools.copy (bcp cp) copies it")
        objects = await ckpt.values() if values else {}
        files = _Files(ckpt.source, objects, progress)
        result = await asave(
            target,
            {"model": {}, "optimizer": {}},
            framework=files,
            overwrite=overwrite or None,
            options=files.options(saving),
            coordinator=coordinator,
        )
    seconds = time.monotonic() - began
    return ImportResult(result.path, result.operation, len(ckpt.tensors), len(objects), result.nbytes, seconds)


class _Files:
    """A planner whose shards are all tensors of the files; their memory is a single element each."""

    name = "import"

    def __init__(self, source: Source, objects: Mapping[ObjectKey, Any], progress: Progress) -> None:
        self._source, self._objects, self._progress = source, objects, progress
        tensors = source.metadata.layout.tensors
        self._rows = {(tensors[row].kind, tensors[row].fqn): row for row in range(len(tensors))}
        self._done, self._nbytes = 0, source.metadata.nbytes

    def local_shards(self, _: States) -> LocalShards:
        """Return every tensor as a whole; ranks divide replicas among themselves."""
        tensors = self._source.metadata.layout.tensors
        metas = [_plain(tensors[row]) for row in range(len(tensors))]
        filled = [meta for meta in metas if not meta.tied_to and 0 not in meta.shape]
        table = ShardTable.build(
            [ShardRow(meta, Box.whole(meta.shape)) for meta in filled],
            list(self._objects),
            more=[meta for meta in metas if meta.tied_to or 0 in meta.shape],
        )
        memory = [torch.zeros((), dtype=torch_dtype(meta.dtype)).expand(meta.shape) for meta in filled]
        return LocalShards(table, memory, self._objects)

    def load_targets(self, _: States, __: CheckpointNames) -> LoadTargets:
        """Refuse: files of other libraries are loaded by ``bcp.load``."""
        raise StateError("the planner of an import saves only; load with bcp.load")

    def options(self, options: SaveOptions) -> SaveOptions:
        """Return options of a save whose parts are read from the files."""

        def edit(graph: Graph) -> Graph:
            return options.edit(graph.replacing("d2h", Stage("d2h", self.read, workers=READERS)))

        return replace(options, edit=edit, guard=False, replicas="ignore", record=False)

    async def read(self, item: WriteItem) -> HostPart:
        """Read the elements of a part from the files."""
        buffer = torch.empty(item.nbytes, dtype=torch.uint8)
        boxes: list[tuple[int, Box]] = []
        tensors: list[torch.Tensor] = []
        for span in item.part.spans:
            meta = item.table.meta(span.row)
            elements = typed(buffer, span.at, (span.stop - span.start,), torch_dtype(meta.dtype))
            for box, first in _boxes(meta.shape, span.start, span.stop):
                at = first - span.start
                boxes.append((self._rows[meta.kind, meta.fqn], box))
                tensors.append(elements[at : at + box.numel].view(box.lengths))
        await fill_boxes(self._source, boxes, tensors)
        self._done += sum(tensor.nbytes for tensor in tensors)
        self._progress(self._done, self._nbytes)
        return HostPart(item, buffer)


def _plain(meta: TensorMeta) -> TensorMeta:
    """Return a tensor as it lies in row-major order on the CPU."""
    stride = tuple(prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape)))
    return replace(meta, stride=stride, device="cpu", requires_grad=False)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a flat interval of a tensor, each with the flat position of its first element."""
    if not shape:
        yield Box((), ()), 0
        return
    found = decompose(np.array([shape]), np.array([start]), np.array([stop]))
    for first, offset, length in zip(found.flat.tolist(), found.offset.tolist(), found.length.tolist(), strict=True):
        yield Box(tuple(offset), tuple(length)), first
