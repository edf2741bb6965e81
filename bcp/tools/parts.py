"""Parts of new data files, filled from other checkpoints and files: the stage ``d2h`` of an import or edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from bcp.options import Graph, SaveOptions
from bcp.pipeline import Stage
from bcp.plan.box import Box, decompose
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import LocalShards, ObjectKey
from bcp.read.boxes import fill_boxes
from bcp.read.source import Source
from bcp.stages.items import HostPart, WriteItem
from bcp.stages.memcpy import torch_dtype, typed
from bcp.tools.calls import Progress

__all__ = ["Origin", "Origins", "plain_meta", "shards_of"]

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
    """The stage that fills parts; elements are converted to the dtype of the new tensor."""

    def __init__(self, origin: Callable[[TensorMeta], Origin], progress: Progress, nbytes: int) -> None:
        self._origin, self._progress = origin, progress
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
            origin = self._origin(meta)
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
        self._done += sum(_nbytes(item, span.row, span.stop - span.start) for span in item.part.spans)
        self._progress(self._done, self._nbytes)
        return HostPart(item, buffer)


def _nbytes(item: WriteItem, row: int, count: int) -> int:
    """Return the bytes of some elements of a shard."""
    return item.table.meta(row).itemsize * count


def plain_meta(meta: TensorMeta) -> TensorMeta:
    """Return a tensor as it lies in row-major order on the CPU."""
    stride = tuple(prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape)))
    return replace(meta, stride=stride, device="cpu", requires_grad=False)


def shards_of(metas: Sequence[TensorMeta], objects: Sequence[ObjectKey] = ()) -> LocalShards:
    """Return whole tensors as the shards of this rank; their memory is a single element each."""
    filled = [meta for meta in metas if not meta.tied_to and 0 not in meta.shape]
    table = ShardTable.build(
        [ShardRow(meta, Box.whole(meta.shape)) for meta in filled],
        objects,
        more=[meta for meta in metas if meta.tied_to or 0 in meta.shape],
    )
    return LocalShards(table, [torch.zeros((), dtype=torch_dtype(meta.dtype)).expand(meta.shape) for meta in filled])


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a flat interval of a tensor, each with the flat position of its first element."""
    if not shape:
        yield Box((), ()), 0
        return
    found = decompose(np.array([shape]), np.array([start]), np.array([stop]))
    for first, offset, length in zip(found.flat.tolist(), found.offset.tolist(), found.length.tolist(), strict=True):
        yield Box(tuple(offset), tuple(length)), first
