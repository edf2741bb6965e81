"""Where published weights come from: a checkpoint, or live tensors of this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bcp.backends.place import Path
from bcp.errors import InputError
from bcp.interop.safetensors_files import CODES
from bcp.publication.encoding import Bytes
from bcp.read.checkpoint import AsyncCheckpoint, Checkpoint
from bcp.runtime.threads import in_thread
from bcp.stages.load import require_codecs
from bcp.stages.memcpy import bytes_row_of
from bcp.state.dtensor import is_dtensor
from bcp.state.hooks import is_sharded_tensor
from bcp.tools.exports.chosen import Choice, DType, Rename, choose, float_dtype, new_names
from bcp.tools.exports.hf import best_name, untied
from bcp.tools.exports.safetensors_file import check_storable

__all__ = ["Entry", "Weights", "WeightsSource", "opened_weights"]

WeightsSource = Path | Checkpoint | AsyncCheckpoint | torch.nn.Module | Mapping[str, Any]
"""A path, a URL or a backend of a checkpoint, an open one, a module, or tensors by name as of ``state_dict()``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to publish.

    Attributes:
        name: in the publication.
        dtype: torch's name of the dtype there.
        shape: of the tensor.
        itemsize: bytes of an element.
        nbytes: bytes of the tensor.
        read: reads the bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    read: Callable[[], Awaitable[Bytes]]


Weights = Sequence[Entry]


async def opened_weights(
    source: WeightsSource,
    rename: Rename,
    dtype: DType,
    storage_options: Mapping[str, Any] | None,
    stack: AsyncExitStack,
) -> Weights:
    """Return the tensors of a source, sorted by name. A tied tensor comes once, under the name that engines look for.

    Args:
        source: the weights.
        rename: new names by old ones, or a function.
        dtype: of floating tensors; None for their own.
        storage_options: for the file system of a checkpoint's URL.
        stack: closes the checkpoint.

    Raises:
        InputError: the source has no tensors, or tensors that one process does not have whole.
        NotACheckpointError: there is no checkpoint.

    """
    if isinstance(source, torch.nn.Module):
        source = source.state_dict(keep_vars=True)
    if isinstance(source, Mapping):
        found = _live(source, rename, dtype)
    else:
        found = await _saved(source, rename, dtype, storage_options, stack)
    if not found:
        raise InputError("the source has no tensors to publish; pass a model, its state_dict(), or a checkpoint")
    return sorted(found, key=lambda entry: entry.name)


# -- a checkpoint ------------------------------------------------------------------------------------


async def _saved(
    source: Path | Checkpoint | AsyncCheckpoint,
    rename: Rename,
    dtype: DType,
    storage_options: Mapping[str, Any] | None,
    stack: AsyncExitStack,
) -> list[Entry]:
    ckpt = source._inner if isinstance(source, Checkpoint) else source  # noqa: SLF001 -- as an export reads
    if isinstance(ckpt, AsyncCheckpoint):
        await ckpt.open()
    else:
        ckpt = await stack.enter_async_context(AsyncCheckpoint(ckpt, storage_options=storage_options))
    require_codecs(ckpt.metadata.commit.codecs, ckpt.source.options.codecs)
    tensors, _ = untied(choose(ckpt, Choice("model", "*", dtype, rename)))
    check_storable(tensors)
    return [
        Entry(each.name, each.dtype, each.shape, each.itemsize, each.nbytes, _Saved(ckpt, each.saved, each.dtype))
        for each in tensors
    ]


@dataclass(frozen=True, slots=True)
class _Saved:
    ckpt: AsyncCheckpoint
    name: str
    dtype: str

    async def __call__(self) -> Bytes:
        tensor = await self.ckpt.read(self.name, dtype=getattr(torch, self.dtype))
        return await in_thread(_bytes, tensor, tensor.dtype)


# -- live tensors ------------------------------------------------------------------------------------


def _live(tensors: Mapping[str, Any], rename: Rename, dtype: DType) -> list[Entry]:
    """List the tensors of a mapping; entries that are no tensors are refused."""
    cast = float_dtype(dtype)
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(_place(name, value), []).append(name)
    names = new_names(rename, list(tensors))
    entries = []
    for group in groups.values():
        saved = best_name(group, key=names.__getitem__)
        tensor = tensors[saved]
        name = cast if cast is not None and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
        if name not in CODES:
            raise InputError(f"tensor {saved!r}: safetensors has no dtype {name}; leave the tensor out, or pass dtype=")
        wanted: torch.dtype = getattr(torch, name)
        nbytes = tensor.numel() * wanted.itemsize
        entries.append(Entry(names[saved], name, tuple(tensor.shape), wanted.itemsize, nbytes, _Live(tensor, wanted)))
    return entries


def _place(name: object, value: Any) -> tuple[object, ...]:
    """Return what tied tensors have in common. Raises InputError for what cannot be published."""
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise InputError(
            f"source has {name!r}, a {type(value).__name__} and no tensor; pass a state_dict of tensors by name, or "
            "leave the entry out"
        )
    if is_dtensor(value) or is_sharded_tensor(value):
        raise InputError(
            f"tensor {name!r} is sharded over ranks, and a live model has to be whole in one process; save a "
            "checkpoint and publish that, or gather the state_dict on one rank"
        )
    if value.device.type == "meta" or value.layout is not torch.strided or value.is_quantized:
        raise InputError(f"tensor {name!r} is on the meta device, sparse or quantized, and has no bytes to publish")
    if not value.numel():
        return (name,)
    return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())


@dataclass(frozen=True, slots=True)
class _Live:
    tensor: torch.Tensor
    dtype: torch.dtype

    async def __call__(self) -> Bytes:
        return await in_thread(_bytes, self.tensor, self.dtype)


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> Bytes:
    """Return the row-major bytes of a tensor in host memory, as a dtype; a view of them where that is possible."""
    whole = tensor.detach().to(device="cpu", dtype=dtype).resolve_conj().resolve_neg().contiguous()
    return np.asarray(bytes_row_of(whole).numpy())
