"""Copies the elements of a part from live tensors into one staging buffer, at the speed of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import ne

import torch

from bcp.errors import StateChangedError
from bcp.plan.columns import Ints
from bcp.runtime.device import SMALL_BYTES, Fence, accelerators, on_side_stream
from bcp.stages.items import WriteItem
from bcp.stages.memcpy import bytes_row_of, flat_to_bytes, move, typed

__all__ = ["gather"]

_TOGETHER_BYTES = 1 << 22
"""Most bytes of small tensors in one transfer: what they are gathered in is free device memory."""

Copy = tuple[torch.Tensor, int, int, int]
"""The live memory of a row, the flat interval [start, stop) of its elements, and their first byte in the part."""


def gather(item: WriteItem, buffer: torch.Tensor, fence: Fence) -> None:
    """Copy every interval of a part to its place in the buffer; all of it is copied when this returns.

    Memory of a device is copied by its copy engine, on bcp's own stream, after the fence.
    """
    plain = item.address[item.part.columns[0]] > 0
    if plain.any():
        _check_in_place(item, item.part.columns[0][plain])
    if plain.all():
        _move(item, item.part.columns, buffer)
        return
    rows, start, stop, offset = item.part.columns[:, ~plain]
    first = item.table.start[rows]
    tensors = [item.tensors[row] for row in rows.tolist()]
    rest = list(zip(tensors, (start - first).tolist(), (stop - first).tolist(), offset.tolist(), strict=True))
    with torch.no_grad(), on_side_stream(accelerators(tensors), fence):
        for run in _runs(rest):
            _together(run, buffer)
        if plain.any():
            _move(item, item.part.columns[:, plain], buffer)  # while the device copies


def host_copies(tensors: Sequence[torch.Tensor], fence: Fence) -> list[torch.Tensor]:
    """Return copies in host memory, with the strides of their tensors; small ones of a device come in one transfer."""
    copies: dict[int, torch.Tensor] = {}
    small = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for row, tensor in enumerate(tensors):
        if not tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes < SMALL_BYTES:
            small[tensor.device, tensor.dtype].append(row)
    with torch.no_grad(), on_side_stream(accelerators(tensors), fence):
        for rows in small.values():
            copies |= zip(rows, _copies([tensors[row] for row in rows]), strict=True)
        rest = (row for row in range(len(tensors)) if row not in copies)
        copies |= {row: tensors[row].detach().to("cpu", copy=True) for row in rest}
    return [copies[row] for row in range(len(tensors))]


def _copies(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copy contiguous tensors of one device by one transfer; they have one dtype, so that each copy is aligned."""
    host_bytes, offset = _packed(tensors).to("cpu"), 0
    for tensor in tensors:
        yield typed(host_bytes, offset, tuple(tensor.shape), tensor.dtype)
        offset += tensor.nbytes


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
    table, (row, start, stop, offset) = item.table, spans
    size = table.tensors.itemsize[table.tensor[row]]
    source = item.address[row] + (start - table.start[row]) * size
    move(buffer.data_ptr() + offset, source, (stop - start) * size)


def _runs(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Group whole, small, neighbouring tensors of one device; all others stay alone."""
    begin, device, end = 0, None, -1
    for index, (tensor, start, stop, offset) in enumerate(copies):
        nbytes = (stop - start) * tensor.itemsize
        small = nbytes < SMALL_BYTES and not tensor.is_cpu and stop - start == tensor.numel() and tensor.is_contiguous()
        own = tensor.device if small else None
        if index and (
            own is None or own != device or offset != end or offset + nbytes - copies[begin][3] > _TOGETHER_BYTES
        ):
            yield copies[begin:index]
            begin = index
        device, end = own, offset + nbytes
    yield copies[begin:]


def _together(run: Sequence[Copy], buffer: torch.Tensor) -> None:
    """Copy neighbours in the buffer by one transfer, if the device has room to gather them."""
    if len(run) > 1:
        try:
            device_bytes = _packed([tensor for tensor, *_ in run])
        except torch.OutOfMemoryError:
            pass
        else:
            buffer[run[0][3] :][: device_bytes.numel()].copy_(device_bytes, non_blocking=True)
            return
    for tensor, start, stop, offset in run:
        flat_to_bytes(tensor.detach(), start, stop, buffer[offset : offset + (stop - start) * tensor.itemsize])


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of contiguous tensors of one device, one behind the other on the device."""
    return torch.cat([bytes_row_of(tensor) for tensor in tensors])
