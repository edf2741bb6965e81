"""Where published weights come from: a checkpoint, or the live tensors of a job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from bcp.backends.place import Path
from bcp.errors import InputError
from bcp.plan.layout import Layout
from bcp.publication.encoding import Bytes
from bcp.read.checkpoint import AsyncCheckpoint, Checkpoint
from bcp.stages.load import require_codecs
from bcp.stages.memcpy import bytes_row_of
from bcp.tools.exports.chosen import Choice, Chosen, DType, Rename, choose, choose_rows
from bcp.tools.exports.hf import untied
from bcp.tools.exports.safetensors_file import check_storable

__all__ = [
    "Entry",
    "Order",
    "OwnWeights",
    "S",
    "SavedWeights",
    "Sized",
    "Weights",
    "WeightsSource",
    "check_live",
    "is_live",
    "live_tensors",
    "opened_weights",
]

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


class Sized(Protocol):
    """A tensor whose size is known."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""


S = TypeVar("S", bound=Sized)
T = TypeVar("T")


class Order(Protocol):
    """Puts tensors into the order in which they are read."""

    def __call__(self, tensors: Sequence[S], /) -> Sequence[S]:
        """Return the tensors in order."""


class OwnWeights(Protocol):
    """The tensors of a version that this rank writes."""

    @property
    def own(self) -> Weights:
        """The tensors, sorted by name. They can be read within :meth:`reading`."""

    def reading(self, order: Order) -> AbstractAsyncContextManager[None]:
        """Read each tensor once, in this order."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The tensors of a checkpoint, which are read at any time.

    Attributes:
        own: all of them.
    """

    own: Weights

    def reading(self, order: Order) -> AbstractAsyncContextManager[None]:
        """Do nothing."""
        del order
        return nullcontext()


async def opened_weights(
    source: Path | Checkpoint | AsyncCheckpoint,
    rename: Rename,
    dtype: DType,
    storage_options: Mapping[str, Any] | None,
    stack: AsyncExitStack,
) -> SavedWeights:
    """Return the tensors of a checkpoint, sorted by name.

    A tied tensor comes once, under the name that engines look for.

    Args:
        source: the checkpoint.
        rename: new names by old ones, or a function.
        dtype: of floating tensors; None for their own.
        storage_options: for the file system of a checkpoint's URL.
        stack: closes the checkpoint.

    Raises:
        InputError: the checkpoint has no tensors.
        NotACheckpointError: there is no checkpoint.

    """
    found = await _saved(source, rename, dtype, storage_options, stack)
    return SavedWeights(sorted(_some(found), key=lambda entry: entry.name))


def _some(found: list[T]) -> list[T]:
    """Return tensors. Raises InputError for none."""
    if not found:
        raise InputError("the source has no tensors to publish; pass a model, its state_dict(), or a checkpoint")
    return found


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
        return np.asarray(bytes_row_of(tensor.contiguous()).numpy())


# -- live tensors ------------------------------------------------------------------------------------


def is_live(source: object) -> bool:
    """Whether a source is a module, or tensors by name."""
    return isinstance(source, torch.nn.Module | Mapping)


def check_live(source: object) -> None:
    """Check that tensors by name have names, and bytes. Raises InputError for others; a planner checks modules."""
    if not isinstance(source, Mapping):
        return
    for name, value in source.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InputError(
                f"source has {name!r}, a {type(value).__name__} and no tensor; pass a state_dict of tensors by name, "
                "or leave the entry out"
            )
        if value.device.type == "meta" or value.layout is not torch.strided or value.is_quantized:
            raise InputError(f"tensor {name!r} is on the meta device, sparse or quantized, and has no bytes to publish")


def live_tensors(layout: Layout, rename: Rename, dtype: DType) -> list[Chosen]:
    """Return the tensors of a live model, sorted by name. A tied tensor comes once, as from a checkpoint.

    Args:
        layout: of the model.
        rename: new names by old ones, or a function.
        dtype: of floating tensors; None for their own.

    Raises:
        InputError: the model has no tensors, or a tensor of a dtype that safetensors lacks.

    """
    if layout.objects:
        raise InputError(
            f"the source has {layout.objects[0][1]!r}, which is no tensor; pass a state_dict of tensors by name"
        )
    tensors, _ = untied(choose_rows(layout, range(len(layout.tensors)), dtype, rename))
    check_storable(tensors)
    return sorted(_some(tensors), key=lambda each: each.name)
