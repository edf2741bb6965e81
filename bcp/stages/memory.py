"""Live tensors as plain memory: where their bytes are, for those whose bytes can simply be written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from bcp.plan.columns import Bools, Ints
from bcp.plan.load.straight import apart
from bcp.plan.shards import ShardTable
from bcp.stages.flat import torch_dtype

__all__ = ["addresses", "bytes_at", "move", "stretch", "writable", "written"]

HOLD_BYTES = 1 << 15
"""Up to here a copy keeps the GIL. Two threads with copies of 16 KiB: 3.0 GB/s, and 2.6 if each gives it up; of 64 KiB:
3.7 and 4.3."""

ALIKE = 64
"""So many pieces of one size are copied together."""

CACHED_BYTES = 1 << 18
"""What fits into a core's own cache."""

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
        table: what they are, row by row.

    """
    dtypes = list(map({name: torch_dtype(name) for name in set(table.tensors.dtype)}.get, table.tensors.dtype))
    rows = zip(tensors, table.tensor.tolist(), table.nbytes.tolist(), strict=True)
    return np.array(
        [
            tensor.data_ptr() if tensor.nbytes == size and tensor.dtype is dtypes[of] and _is_plain(tensor) else 0
            for tensor, of, size in rows
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
    found = np.zeros_like(address)
    found[alone] = address[alone]
    return found


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
    sizes, which, count = np.unique(nbytes, return_inverse=True, return_counts=True)
    alike = (count >= ALIKE) & (sizes > 0) & (sizes <= HOLD_BYTES)
    for number in np.flatnonzero(alike).tolist():
        mine = which == number
        _move_alike(targets[mine], sources[mine], int(sizes[number]))
    rest = ~alike[which]
    for target, source, length in zip(
        targets[rest].tolist(), sources[rest].tolist(), nbytes[rest].tolist(), strict=True
    ):
        (_move_holding if length <= HOLD_BYTES else _move)(target, source, length)


def _move_alike(targets: Ints, sources: Ints, size: int) -> None:
    """Copy many pieces of one size. numpy takes half as long as one call for each of them, and gives up the GIL."""
    (into, there), (out_of, here) = _rows(targets, size), _rows(sources, size)
    step = max(1, CACHED_BYTES // size)  # numpy may need a copy in between
    for first in range(0, len(targets), step):
        part = slice(first, first + step)
        into[part if there is None else there[part]] = out_of[part if here is None else here[part]]


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
