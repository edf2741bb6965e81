"""Copies the elements of a part from live tensors into one staging buffer, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bcp.plan.save.parts import Span
from bcp.stages.device import Fence, cuda_devices, on_side_stream
from bcp.stages.flat import flat_to_bytes
from bcp.stages.items import WriteItem

__all__ = ["gather"]

SMALL_BYTES = 1 << 18
"""Below this a tensor is copied together with its neighbours. 8,192 tensors of 4 KiB: one by one 9 us each, all in
Python, together 4. And the GIL is given back once instead of 8,192 times: a thread that trains may keep it for 5 ms."""

_TOGETHER = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Copy = tuple[torch.Tensor, Span]
"""The live memory of a row, and what of it goes where."""


def gather(item: WriteItem, buffer: torch.Tensor, fence: Fence) -> None:
    """Copy every span of a part to its place in the buffer; what they show is copied when this returns.

    Memory of a CUDA device is copied by its copy engine, on bcp's own stream, after the fence.
    """
    copies = [(item.tensors[span.row], span) for span in item.part.spans]
    with torch.no_grad(), on_side_stream(cuda_devices([tensor for tensor, _ in copies]), fence):
        for run in _runs(copies):
            if len(run) > 1:
                _together(run, item, buffer)
            else:
                _alone(*run[0], item, buffer)


def _runs(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Put small neighbours of one dtype and device together; what cannot go together stays alone."""
    begin, kind = 0, None
    for index, (tensor, span) in enumerate(copies):
        small = (span.stop - span.start) * tensor.element_size() < SMALL_BYTES and tensor.is_contiguous()
        own = (tensor.dtype, tensor.device) if small else None
        if index and (own is None or own != kind):
            yield copies[begin:index]
            begin = index
        kind = own
    yield copies[begin:]


def _together(run: Sequence[Copy], item: WriteItem, buffer: torch.Tensor) -> None:
    """Make the copies, which are neighbours in the buffer, by one call."""
    starts = item.table.start
    sources = []
    for tensor, span in run:
        flat = tensor.view(-1)
        if span.stop - span.start < len(flat):
            first = int(starts[span.row])
            flat = flat[span.start - first : span.stop - first]
        sources.append(flat)
    dtype, itemsize = sources[0].dtype, sources[0].element_size()
    if dtype not in _TOGETHER and not dtype.is_complex:  # float8, unsigned integers: not all calls take them
        dtype = _INTEGER[itemsize]
        sources = [flat.view(dtype) for flat in sources]
    count = sum(map(len, sources))
    at = run[0][1].at
    out = buffer[at : at + count * itemsize].view(dtype)
    if out.device == sources[0].device:
        torch.cat(sources, out=out)
    else:
        torch._foreach_copy_(torch.split(out, list(map(len, sources))), sources, non_blocking=True)


def _alone(tensor: torch.Tensor, span: Span, item: WriteItem, buffer: torch.Tensor) -> None:
    """Make one copy."""
    first = int(item.table.start[span.row])
    start, stop = span.start - first, span.stop - first
    out = buffer[span.at : span.at + (stop - start) * tensor.element_size()]
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_complex() or tensor.is_neg()):
        # memcpy, in this thread: 4 GB/s, 7 above 80 MiB; torch's copy_ has 3.4, and more only with a team of threads
        np.copyto(out.numpy(), tensor.detach().view(-1)[start:stop].view(torch.uint8).numpy())
    else:
        flat_to_bytes(tensor.detach(), start, stop, out)
