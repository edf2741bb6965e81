"""Copies the elements of a part from live tensors into one staging buffer, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import ne

import numpy as np
import torch

from bcp.errors import StateChangedError
from bcp.plan.columns import Ints
from bcp.plan.save.parts import Span
from bcp.stages.device import SMALL_BYTES, Fence, cuda_devices, on_side_stream
from bcp.stages.flat import INTEGER, flat_to_bytes
from bcp.stages.items import WriteItem
from bcp.stages.memory import move

__all__ = ["gather"]

_TOGETHER = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8}

Copy = tuple[torch.Tensor, Span]
"""The live memory of a row, and what of it goes where."""


def gather(item: WriteItem, buffer: torch.Tensor, fence: Fence) -> None:
    """Copy every span of a part to its place in the buffer; what they show is copied when this returns.

    Memory of a CUDA device is copied by its copy engine, on bcp's own stream, after the fence.
    """
    plain = item.address[item.part.columns[0]] > 0
    _check_in_place(item, item.part.columns[0][plain])
    if plain.all():
        _move(item, item.part.columns, buffer)
        return
    others = (item.part.spans[number] for number in np.flatnonzero(~plain).tolist())
    rest = [(item.tensors[span.row], span) for span in others]
    with torch.no_grad(), on_side_stream(cuda_devices([tensor for tensor, _ in rest]), fence):
        for run in _runs(rest):
            if len(run) > 1:
                _together(run, item, buffer)
            else:
                _alone(*run[0], item, buffer)
        _move(item, item.part.columns[:, plain], buffer)  # while the device copies


def _check_in_place(item: WriteItem, rows: Ints) -> None:
    """Look whether memory is still where it was: ``share_memory_()`` frees it, whoever still looks there."""
    where = [*map(torch.Tensor.data_ptr, map(item.tensors.__getitem__, rows.tolist()))]
    if (known := item.address[rows].tolist()) != where:
        meta = item.table.meta(int(rows[list(map(ne, known, where)).index(True)]))
        raise StateChangedError(
            f"the memory of {meta.kind} tensor {meta.fqn!r} was replaced while its snapshot was being taken (moved "
            f"to shared memory, or resized; for {item.key}); do that before the save, or after the snapshot"
        )


def _move(item: WriteItem, spans: Ints, buffer: torch.Tensor) -> None:
    """Copy spans of plain memory, given as columns, as bytes.

    8,192 tensors of 4 KiB: one by one with ``copy_`` 9 us each, with ``torch.cat`` 4, like this 1.
    """
    table, (row, start, stop, at) = item.table, spans
    size = table.tensors.itemsize[table.tensor[row]]
    source = item.address[row] + (start - table.start[row]) * size
    move(buffer.data_ptr() + at, source, (stop - start) * size)


def _runs(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Put small neighbours of one dtype and device together; what cannot go together stays alone."""
    begin, kind, end = 0, None, -1
    for index, (tensor, span) in enumerate(copies):
        nbytes = (span.stop - span.start) * tensor.element_size()
        small = nbytes < SMALL_BYTES and tensor.is_contiguous() and not tensor.is_cpu
        own = (tensor.dtype, tensor.device) if small else None
        if index and (own is None or own != kind or span.at != end):
            yield copies[begin:index]
            begin = index
        kind, end = own, span.at + nbytes
    yield copies[begin:]


def _together(run: Sequence[Copy], item: WriteItem, buffer: torch.Tensor) -> None:
    """Copy from a device what are neighbours in the buffer, by one call."""
    sources = [_flat(tensor, span, item) for tensor, span in run]
    dtype = sources[0].dtype
    if dtype not in _TOGETHER and not dtype.is_complex:  # float8, unsigned integers: not all calls take them
        dtype = INTEGER[dtype.itemsize]
        sources = [source.view(dtype) for source in sources]
    at, nbytes = run[0][1].at, sum(source.nbytes for source in sources)
    out = buffer[at : at + nbytes].view(dtype)
    torch._foreach_copy_(torch.split(out, list(map(len, sources))), sources, non_blocking=True)


def _flat(tensor: torch.Tensor, span: Span, item: WriteItem) -> torch.Tensor:
    """View what a span shows of a contiguous tensor, as one row."""
    return tensor.view(-1)[_inside(span, item)]


def _alone(tensor: torch.Tensor, span: Span, item: WriteItem, buffer: torch.Tensor) -> None:
    """Make one copy."""
    inside = _inside(span, item)
    out = buffer[span.at : span.at + (inside.stop - inside.start) * tensor.element_size()]
    flat_to_bytes(tensor.detach(), inside.start, inside.stop, out)


def _inside(span: Span, item: WriteItem) -> slice:
    """Return which of the elements in memory a span shows."""
    first = int(item.table.start[span.row])
    return slice(span.start - first, span.stop - first)
