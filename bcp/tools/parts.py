"""Parts of new data files, filled from other checkpoints and files: the stage ``d2h`` of an import or edit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from bcp.errors import StateError
from bcp.options import Graph, SaveOptions
from bcp.pipeline import Stage
from bcp.plan.box import Box, decompose
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import LoadTargets, LocalShards, ObjectKey, States
from bcp.read.boxes import fill_boxes
from bcp.read.source import Source
from bcp.stages.items import HostPart, WriteItem
from bcp.stages.memcpy import torch_dtype, typed
from bcp.tools.calls import Progress

__all__ = ["KnownShards", "Origin", "Origins", "plain_meta", "shards_of"]

READERS = 3


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the elements of a tensor come from.

    Attributes:
        source: an open checkpoint, or files of another library.
        row: row of the tensor in its layout.
        tensor: a tensor in memory instead; None for none.
    """

    source: Source | None = None
    row: int = 0
    tensor: torch.Tensor | None = None


class Origins:
    """The stage that fills parts; elements are converted to the dtype of the new tensor.

    Args:
        places: where the elements of each tensor come from, by (kind, name).
        progress: told after each part.
        nbytes: bytes of all tensors.

    """

    def __init__(self, places: Mapping[ObjectKey, Origin], progress: Progress, nbytes: int) -> None:
        self._places, self._progress = places, progress
        self._done, self._nbytes = 0, nbytes

    def options(self, options: SaveOptions) -> SaveOptions:
        """Return options of a save whose parts are filled here."""

        def edit(graph: Graph) -> Graph:
            return options.edit(graph.replacing("d2h", Stage("d2h", self.fill, workers=READERS)))

        return replace(options, edit=edit, guard=False, replicas="ignore", record=False)

    async def fill(self, item: WriteItem) -> HostPart:
        """Read the elements of a part."""
        buffer = torch.empty(item.nbytes, dtype=torch.uint8)
        reads: dict[int, tuple[Source, list[tuple[int, Box]], list[torch.Tensor]]] = {}
        for span in item.part.spans:
            meta = item.table.meta(span.row)
            elements = typed(buffer, span.at, (span.stop - span.start,), torch_dtype(meta.dtype))
            origin = self._places[meta.kind, meta.fqn]
            self._done += elements.nbytes
            if origin.tensor is not None:
                elements.copy_(origin.tensor.reshape(-1)[span.start : span.stop])
            if origin.source is None:
                continue
            _, boxes, tensors = reads.setdefault(id(origin.source), (origin.source, [], []))
            for box, first in _boxes(meta.shape, span.start, span.stop):
                at = first - span.start
                boxes.append((origin.row, box))
                tensors.append(elements[at : at + box.numel].view(box.lengths))
        for source, boxes, tensors in reads.values():
            await fill_boxes(source, boxes, tensors)
        self._progress(self._done, self._nbytes)
        return HostPart(item, buffer)


class KnownShards:
    """A planner whose shards are known; it saves only."""

    def __init__(self, name: str, shards: LocalShards) -> None:
        self.name, self._shards = name, shards

    def local_shards(self, _: States) -> LocalShards:
        """Return the shards."""
        return self._shards

    def load_targets(self, _: States, __: CheckpointNames) -> LoadTargets:
        """Refuse to load."""
        raise StateError(f"the planner of an {self.name} saves only; load with bcp.load")


def plain_meta(meta: TensorMeta) -> TensorMeta:
    """Return a tensor as it lies in row-major order on the CPU."""
    stride = tuple(prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape)))
    return replace(meta, stride=stride, device="cpu", requires_grad=False)


def shards_of(metas: Sequence[TensorMeta], objects: Mapping[ObjectKey, Any]) -> LocalShards:
    """Return whole tensors, and values, as the shards of this rank; the memory of a tensor is a single element."""
    filled = [meta for meta in metas if not meta.tied_to and 0 not in meta.shape]
    table = ShardTable.build(
        [ShardRow(meta, Box.whole(meta.shape)) for meta in filled],
        list(objects),
        more=[meta for meta in metas if meta.tied_to or 0 in meta.shape],
    )
    memory = [torch.zeros((), dtype=torch_dtype(meta.dtype)).expand(meta.shape) for meta in filled]
    return LocalShards(table, memory, objects)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a flat interval of a tensor, each with the flat position of its first element."""
    if not shape:
        yield Box((), ()), 0
        return
    found = decompose(np.array([shape]), np.array([start]), np.array([stop]))
    for first, offset, length in zip(found.flat.tolist(), found.offset.tolist(), found.length.tolist(), strict=True):
        yield Box(tuple(offset), tuple(length)), first
