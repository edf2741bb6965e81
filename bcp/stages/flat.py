"""Copies between tensors of any layout and flat bytes, in row-major order."""

from __future__ import annotations

import torch

from bcp.plan.box import Box, flat_boxes

__all__ = ["INTEGER", "block_of", "bytes_of", "flat_to_bytes", "row_of", "torch_dtype", "typed"]

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, what to view elements as to copy them: not every call takes every dtype."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name, as in ``"bfloat16"``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def bytes_of(data: torch.Tensor) -> memoryview:
    """View a uint8 tensor in host memory as bytes; writable."""
    return memoryview(data.numpy().data)


def typed(data: torch.Tensor, at: int, lengths: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """View the bytes of uint8 ``data`` from byte ``at`` as an array of that shape and dtype, to be read.

    A copy of them, where they are not aligned for elements of that size.
    """
    count = 1
    for length in lengths:
        count *= length
    piece = data[at : at + count * dtype.itemsize]
    if piece.data_ptr() % dtype.itemsize or piece.storage_offset() % dtype.itemsize:  # only foreign buffers ever are
        piece = piece.clone()
    return piece.view(dtype).view(lengths)


def block_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """View a block of a tensor; offsets are the tensor's own."""
    for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as one row, of stride 1: a single element may have any other, which ``view`` keeps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_to_bytes(tensor: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy the row-major elements [start, stop) of a tensor into uint8 ``out``; strides do not matter."""
    if tensor.is_contiguous():
        out.copy_(row_of(tensor)[start:stop].view(torch.uint8), non_blocking=True)
        return
    size = tensor.element_size()
    for first, box in flat_boxes(tuple(tensor.shape), start, stop):
        at = (first - start) * size
        if (out.data_ptr() + at) % size or (out.storage_offset() + at) % size:
            out[at : at + box.numel * size].copy_(_packed(block_of(tensor, box)), non_blocking=True)
        else:
            typed(out, at, box.lengths, tensor.dtype).copy_(block_of(tensor, box), non_blocking=True)


def _packed(block: torch.Tensor) -> torch.Tensor:
    """Return the elements of a block in row-major order, as bytes."""
    return row_of(block.contiguous()).view(torch.uint8)
