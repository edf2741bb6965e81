"""Live tensors as plain memory: where their bytes are, for those whose bytes can simply be written.

Copies between tensors of any layout and flat bytes, in row-major order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from bcp.errors import DtypeMismatchError
from bcp.plan.box import Box, flat_boxes
from bcp.plan.columns import Bools, Ints
from bcp.plan.read.copies import apart
from bcp.plan.shards import ShardTable

__all__ = [
    "addresses",
    "block_of",
    "bytes_at",
    "bytes_of",
    "bytes_row_of",
    "flat_to_bytes",
    "move",
    "row_of",
    "stretch",
    "torch_dtype",
    "typed",
    "writable",
    "written",
]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name, as in ``"bfloat16"``. Raises DtypeMismatchError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DtypeMismatchError(
            f"the checkpoint has a tensor of dtype {name[:80]!r}, which torch {torch.__version__} does not know; read "
            "it with the torch that saved it"
        )
    return dtype


def bytes_of(data: torch.Tensor) -> memoryview:
    """View a uint8 tensor in host memory as bytes; writable."""
    return memoryview(data.numpy().data)


def typed(data: torch.Tensor, offset: int, lengths: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """View the bytes of uint8 ``data`` from byte ``offset`` as an array of that shape and dtype, to be read.

    A copy of them, where they are not aligned for elements of that size.
    """
    count = 1
    for length in lengths:
        count *= length
    piece = data[offset : offset + count * dtype.itemsize]
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


def bytes_row_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes: uint8, one dimension of stride 1."""
    return row_of(tensor).view(torch.uint8)


def flat_to_bytes(tensor: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy the row-major elements [start, stop) of a tensor into uint8 ``out``; strides do not matter."""
    if tensor.is_contiguous():
        out.copy_(row_of(tensor)[start:stop].view(torch.uint8), non_blocking=True)
        return
    size = tensor.element_size()
    for first, box in flat_boxes(tuple(tensor.shape), start, stop):
        offset = (first - start) * size
        if (out.data_ptr() + offset) % size or (out.storage_offset() + offset) % size:
            out[offset : offset + box.numel * size].copy_(_packed(block_of(tensor, box)), non_blocking=True)
        else:
            typed(out, offset, box.lengths, tensor.dtype).copy_(block_of(tensor, box), non_blocking=True)


def _packed(block: torch.Tensor) -> torch.Tensor:
    return row_of(block.contiguous()).view(torch.uint8)


HOLD_BYTES = 1 << 15
"""Up to here a copy keeps the GIL. Two threads with copies of 16 KiB: 3.0 GB/s, and 2.6 if each gives it up; of 64 KiB:
3.7 and 4.3."""

ALIKE = 64
"""So many pieces of one size are copied together."""

CACHED_BYTES = 1 << 18
"""Size of a core's own cache."""

Memmove = Callable[[int, int, int], object]


def _memmove(library: ctypes.CDLL) -> Memmove:
    """Return the C library's function; copies 5 GB/s in one thread, where torch's ``copy_`` does 3.5."""
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_void_p
    return function


_move_holding, _move = _memmove(ctypes.PyDLL(None)), _memmove(ctypes.CDLL(None))


def addresses(tensors: Sequence[torch.Tensor], table: ShardTable) -> Ints:
    """int64[n]: where each tensor's first byte is, or 0 where its shard is not the bytes from there on.

    Args:
        tensors: live memory.
        table: their shards, row by row.

    """
    dtypes = list(map({name: torch_dtype(name) for name in set(table.tensors.dtype)}.get, table.tensors.dtype))
    rows = zip(tensors, table.tensor.tolist(), table.nbytes.tolist(), strict=True)
    return np.array(
        [
            tensor.data_ptr()
            if tensor.nbytes == size and tensor.dtype is dtypes[tensor_row] and _is_plain(tensor)
            else 0
            for tensor, tensor_row, size in rows
        ],
        np.int64,
    )


def writable(tensors: Sequence[torch.Tensor], address: Ints, nbytes: Ints, same: Bools) -> Ints:
    """int64[n]: where each tensor's first byte is, or 0 where its bytes cannot simply be written.

    They can where they share no byte with another of these tensors: then checksums may be computed over them while the
    others are being written, in whatever way.

    Args:
        tensors: live memory.
        address: int64[n], :func:`addresses`.
        nbytes: int64[n], their bytes.
        same: bool[n], which of them have the dtype that was saved.

    """
    start, stop = address.copy(), address + nbytes
    for row in np.flatnonzero(address == 0).tolist():
        if tensors[row].is_cpu:
            start[row], stop[row] = stretch(tensors[row])
    rows = np.flatnonzero(stop > start)
    alone = rows[apart(start[rows], (stop - start)[rows])]
    alone = alone[same[alone] & (address[alone] > 0)]
    writable_address = np.zeros_like(address)
    writable_address[alone] = address[alone]
    return writable_address


def stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address, one past the last) of a tensor's memory, a DTensor's local one.

    (0, 0) where there is none, or none of its own.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    start = local.data_ptr() if local.layout is torch.strided else 0
    if not start:
        return 0, 0
    if local.is_contiguous():
        return start, start + local.nbytes
    last = sum((count - 1) * stride for count, stride in zip(local.shape, local.stride(), strict=True))
    return start, start + (last + 1) * local.itemsize


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but memory of the CPU, in row-major order."""
    return (
        tensor.is_cpu
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def bytes_at(address: int, nbytes: int) -> memoryview:
    """View memory as bytes; writable. It does not keep the memory alive.

    1 us, where ``memoryview(tensor.view(torch.uint8).numpy())`` takes 5; and it knows all dtypes.
    """
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def move(targets: Ints, sources: Ints, nbytes: Ints) -> None:
    """Copy bytes from addresses to addresses; they do not overlap. Memory has to stay as long as this runs."""
    sizes, indices, count = np.unique(nbytes, return_inverse=True, return_counts=True)
    alike = (count >= ALIKE) & (sizes > 0) & (sizes <= HOLD_BYTES)
    for number in np.flatnonzero(alike).tolist():
        mask = indices == number
        _move_alike(targets[mask], sources[mask], int(sizes[number]))
    rest = ~alike[indices]
    for target, source, length in zip(
        targets[rest].tolist(), sources[rest].tolist(), nbytes[rest].tolist(), strict=True
    ):
        (_move_holding if length <= HOLD_BYTES else _move)(target, source, length)


def _move_alike(targets: Ints, sources: Ints, size: int) -> None:
    """Copy many pieces of one size. numpy takes half as long as one call for each of them, and gives up the GIL."""
    (into, target_rows), (out_of, source_rows) = _rows(targets, size), _rows(sources, size)
    step = max(1, CACHED_BYTES // size)  # numpy may need a copy in between
    for first in range(0, len(targets), step):
        part = slice(first, first + step)
        into[part if target_rows is None else target_rows[part]] = out_of[
            part if source_rows is None else source_rows[part]
        ]


def _rows(address: Ints, size: int) -> tuple[npt.NDArray[np.void], Ints | None]:
    """View memory as rows of that many bytes, which may overlap; return which of them the addresses are: None for all.

    Whatever lies between the addresses is never touched.
    """
    base = int(address.min())
    offset = address - base
    step = int(np.gcd.reduce(offset)) or 1
    number = int(offset.max()) // step + 1
    memory = bytes_at(base, (number - 1) * step + size)
    rows = np.ndarray((number,), np.dtype((np.void, size)), memory, strides=(step,))
    in_order = number == len(address) and bool((offset[1:] > offset[:-1]).all())
    return rows, None if in_order else offset // step


def written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd, and the guard of a save that may be under way, that these tensors were written to."""
    if _TAKES_MANY:
        increment_version(tensors)  # 0.3 us each, 0.9 one by one
        return
    for tensor in tensors:
        if not tensor.is_inference():  # has no version
            increment_version(tensor)


def _takes_many() -> bool:
    """Whether this torch can raise the versions of many tensors by one call; 2.6 could not."""
    try:
        increment_version(())
    except (TypeError, RuntimeError):
        return False
    return True


_TAKES_MANY = _takes_many()
