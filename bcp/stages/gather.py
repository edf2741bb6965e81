"""Copies the elements of a part from live tensors into one staging buffer, at the speed of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import ne

import numpy as np
import torch

from bcp.errors import StateChangedError
from bcp.plan.columns import Ints
from bcp.plan.write.files import PartInterval
from bcp.runtime.device import SMALL_BYTES, Fence, accelerators, on_side_stream
from bcp.stages.items import WriteItem
from bcp.stages.memcpy import INTEGER, flat_to_bytes, move, row_of, typed

__all__ = ["gather"]

_TOGETHER_BYTES = 1 << 22
"""Most bytes of small tensors in one transfer: what they are gathered in is free device memory."""

_ALIGNED = 16  # bytes of the largest element

Copy = tuple[torch.Tensor, PartInterval]
"""The live memory of a row, and what of it goes where."""


def gather(item: WriteItem, buffer: torch.Tensor, fence: Fence) -> None:
    """Copy every interval of a part to its place in the buffer; all of it is copied when this returns.

    Memory of a device is copied by its copy engine, on bcp's own stream, after the fence.
    """
    plain = item.address[item.part.columns[0]] > 0
    _check_in_place(item, item.part.columns[0][plain])
    if plain.all():
        _move(item, item.part.columns, buffer)
        return
    others = (item.part.spans[number] for number in np.flatnonzero(~plain).tolist())
    rest = [(item.tensors[span.row], span) for span in others]
    with torch.no_grad(), on_side_stream(accelerators([tensor for tensor, _ in rest]), fence):
        for run in _runs(rest):
            if len(run) > 1:
                _together(run, item, buffer)
            else:
                _alone(*run[0], item, buffer)
        _move(item, item.part.columns[:, plain], buffer)  # while the device copies


def host_copies(tensors: Sequence[torch.Tensor], fence: Fence) -> list[torch.Tensor]:
    """Return copies in host memory, with the strides of their tensors; small ones of a device come in one transfer."""
    copies: dict[int, torch.Tensor] = {}
    small = defaultdict[torch.device, list[int]](list)
    for at, tensor in enumerate(tensors):
        if not tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes < SMALL_BYTES:
            small[tensor.device].append(at)
    with torch.no_grad(), on_side_stream(accelerators(tensors), fence):
        for rows in small.values():
            copies |= zip(rows, _copies([tensors[at] for at in rows]), strict=True)
        rest = (at for at in range(len(tensors)) if at not in copies)
        copies |= {at: tensors[at].detach().to("cpu", copy=True) for at in rest}
    return [copies[at] for at in range(len(tensors))]


def _copies(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copy contiguous tensors of one device by one transfer."""
    sources = [row_of(tensor.detach()) for tensor in tensors]
    ends = np.cumsum([-(-source.nbytes // _ALIGNED) * _ALIGNED for source in sources])
    starts = [0, *ends[:-1].tolist()]
    here = _gathered(sources, starts, int(ends[-1])).to("cpu")
    for tensor, at in zip(tensors, starts, strict=True):
        yield typed(here, at, tuple(tensor.shape), tensor.dtype)


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
    """Group small neighbours on one device; all others stay alone."""
    begin, where, end = 0, None, -1
    for index, (tensor, span) in enumerate(copies):
        nbytes = (span.stop - span.start) * tensor.element_size()
        small = nbytes < SMALL_BYTES and tensor.is_contiguous() and not tensor.is_cpu
        own = tensor.device if small else None
        full = index > begin and span.at + nbytes - copies[begin][1].at > _TOGETHER_BYTES
        if index and (own is None or own != where or span.at != end or full):
            yield copies[begin:index]
            begin = index
        where, end = own, span.at + nbytes
    yield copies[begin:]


def _together(run: Sequence[Copy], item: WriteItem, buffer: torch.Tensor) -> None:
    """Copy neighbours in the buffer by one transfer, if the device has room to gather them."""
    sources = [_flat(tensor, span, item) for tensor, span in run]
    begin, nbytes = run[0][1].at, sum(source.nbytes for source in sources)
    try:
        there = _gathered(sources, [span.at - begin for _, span in run], nbytes)
    except torch.OutOfMemoryError:
        for tensor, span in run:
            _alone(tensor, span, item, buffer)
    else:
        buffer[begin : begin + nbytes].copy_(there, non_blocking=True)


def _gathered(sources: Sequence[torch.Tensor], starts: Sequence[int], nbytes: int) -> torch.Tensor:
    """Gather rows of one device in uint8 memory of that device, from these bytes on.

    20,000 tensors would be as many transfers.
    """
    there = torch.empty(nbytes, dtype=torch.uint8, device=sources[0].device)
    pairs = defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]](list)
    for source, at in zip(sources, starts, strict=True):
        size = source.element_size()
        size = size if size in INTEGER and at % size == 0 else 1
        pairs[size].append((there[at : at + source.nbytes].view(INTEGER[size]), source.view(INTEGER[size])))
    for each in pairs.values():  # few kernels for tensors of one dtype
        torch._foreach_copy_([target for target, _ in each], [source for _, source in each])
    return there


def _flat(tensor: torch.Tensor, span: PartInterval, item: WriteItem) -> torch.Tensor:
    return row_of(tensor)[_inside(span, item)]


def _alone(tensor: torch.Tensor, span: PartInterval, item: WriteItem, buffer: torch.Tensor) -> None:
    """Make one copy."""
    inside = _inside(span, item)
    out = buffer[span.at : span.at + (inside.stop - inside.start) * tensor.element_size()]
    flat_to_bytes(tensor.detach(), inside.start, inside.stop, out)


def _inside(span: PartInterval, item: WriteItem) -> slice:
    """Return which of the elements in memory a span shows."""
    first = int(item.table.start[span.row])
    return slice(span.start - first, span.stop - first)
