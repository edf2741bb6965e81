"""Live tensors as plain memory: where their bytes are, for those whose bytes can simply be written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from bcp.plan.columns import Ints
from bcp.plan.load.straight import apart
from bcp.stages.flat import torch_dtype

__all__ = ["addresses", "bytes_at", "is_plain", "move", "written"]

HOLD_BYTES = 1 << 15
"""Up to here a copy keeps the GIL. Two threads with copies of 16 KiB: 3.0 GB/s, and 2.6 if each gives it up; of 64 KiB:
3.7 and 4.3."""

Memmove = Callable[[int, int, int], object]


def _memmove(library: ctypes.CDLL) -> Memmove:
    """Return the C library's function; copies 5 GB/s in one thread, where torch's ``copy_`` does 3.5."""
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_void_p
    return function


_move_holding, _move = _memmove(ctypes.PyDLL(None)), _memmove(ctypes.CDLL(None))


def addresses(tensors: Sequence[torch.Tensor], dtypes: Sequence[str], nbytes: Ints) -> Ints:
    """int64[n]: where each tensor's first byte is, or 0 where its bytes cannot simply be written.

    They can where it lies on the CPU in row-major order, has the dtype that was saved, and shares no byte with another
    of these tensors: then checksums may be computed over it while the others are being written.

    Args:
        tensors: live memory.
        dtypes: for each of them, the dtype that was saved, or "" where it was not saved.
        nbytes: int64[n], for each of them, the bytes that its shard has.

    """
    kinds = {name: torch_dtype(name) for name in set(dtypes) if name}
    plain = [
        is_plain(tensor) and tensor.dtype is kinds.get(name) and tensor.nbytes == size
        for tensor, name, size in zip(tensors, dtypes, nbytes.tolist(), strict=True)
    ]
    rows = np.flatnonzero(np.array(plain, np.bool_) & (nbytes > 0))
    found = np.array([tensors[row].data_ptr() for row in rows.tolist()], dtype=np.int64)
    address = np.zeros(len(tensors), dtype=np.int64)
    address[rows] = np.where(apart(found, nbytes[rows]), found, 0)
    return address


def is_plain(tensor: torch.Tensor) -> bool:
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
    for target, source, count in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
        (_move_holding if count <= HOLD_BYTES else _move)(target, source, count)


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
