"""The memory behind a leaf: its readable and writable part, its storage, and its identity."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.plan.strided import overlaps_itself
from bcp.runtime.accelerator import kind
from bcp.state.dtensor import dtensor_blocks, is_dtensor, is_ragged, local_tensor, placement_key, stated_orders
from bcp.state.hooks import HOOKS, hooked_blocks, is_hooked, ragged_placement, unstated
from bcp.state.placement import Leaf, LocalShard, ShardedLeaf

__all__ = [
    "FLATTENED",
    "ON_META",
    "dtype_name",
    "is_wrapper",
    "memory",
    "parts_of",
    "readable",
    "unsupported",
    "writable",
]

ON_META = "is on the meta device and has no values; materialise it with to_empty() first"

FLATTENED = "_fsdp_flattened"
"""An attribute of parameters that FSDP1 has made views of a flat one."""


def memory(tensor: Leaf) -> object:
    """Return a key that is equal for two tensors that are the same elements in the same order.

    Two DTensors, and two leaves that were placed, are the same if their local tensors are, and they are placed alike.
    """
    if isinstance(tensor, ShardedLeaf):
        return tensor.placement.shape, tensor.placement.spans, memory(tensor.tensor), *map(memory, tensor.more)
    if is_dtensor(tensor):
        keys = tuple(placement_key(placement) for placement in tensor.placements)
        return tuple(tensor.shape), keys, stated_orders(tensor), memory(local_tensor(tensor))
    if is_wrapper(type(tensor)):
        return id(tensor)
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 -- data_ptr() is 0 for every empty storage
    lazily = tensor.is_conj(), tensor.is_neg()  # other values of the same memory
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazily


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


def parts_of(leaf: Leaf, label: str) -> Iterator[LocalShard]:
    """Yield the parts of the logical tensor that this rank holds, as plain detached views.

    Raises StateError if the leaf does not state its local shards, or states impossible ones.
    """
    if isinstance(leaf, torch.Tensor) and is_ragged(leaf):
        leaf = ShardedLeaf(local_tensor(leaf), ragged_placement(leaf, label))
    if isinstance(leaf, ShardedLeaf):
        yield from leaf.parts(label)
        return
    for box, view in _blocks(leaf, label):
        yield LocalShard(box, 0, box.numel, view)


def readable(view: torch.Tensor) -> torch.Tensor:
    """Return the view, or a copy with the same values of one that torch conjugates or negates when it is read."""
    return view.resolve_conj().resolve_neg()


def writable(view: torch.Tensor, label: str) -> torch.Tensor:
    """Return the view if writing into it changes exactly its own elements, else refuse."""
    if view.is_conj() or view.is_neg():
        raise StateError(f"{label} is a lazy conjugate or negative; load into a clone of it, made with .resolve_conj()")
    if not view.is_contiguous() and overlaps_itself(view.shape, view.stride()):
        description = "an expanded tensor" if 0 in view.stride() else "a view (as of unfold or as_strided)"
        raise StateError(f"{label} is {description} whose elements share memory; load into a .contiguous() one")
    if view.is_inference():
        raise StateError(
            f"{label} was made under torch.inference_mode(), outside of which torch refuses to write to it; "
            "load into a .clone() of it, or make it under torch.no_grad()"
        )
    return view


def unsupported(leaf: Leaf) -> str:
    """Return the reason why a tensor has no plain memory here, and the remedy; "" for one that has."""
    if not isinstance(leaf, ShardedLeaf):
        return _reason(leaf, None)
    reasons = (_reason(sharded_leaf.tensor, sharded_leaf.placement.numel) for sharded_leaf in (leaf, *leaf.more))
    return next(filter(None, reasons), "")


def _reason(tensor: torch.Tensor, placed: int | None) -> str:
    """Say why one tensor has no plain memory here; ``placed``: how many elements a planner placed, if one did."""
    try:
        return (unstated(tensor) if placed is None else "") or _known_reason(tensor, placed)
    except Exception as error:  # noqa: BLE001 -- a subclass may run any code when it is asked for its layout
        return (
            f"is a {type(tensor).__name__}, which raises {type(error).__name__} when it is asked what it is; pass the "
            "plain tensors inside it"
        )


def _known_reason(tensor: torch.Tensor, placed: int | None) -> str:  # noqa: PLR0911 -- one line a reason
    """Say why one tensor has no plain memory here, as :func:`_reason`; raises whatever its subclass raises."""
    local = local_tensor(tensor)
    if is_lazy(tensor):
        return "is uninitialized; run one forward pass of its lazy module first"
    if placed is None and getattr(tensor, FLATTENED, False):
        return "is a part of an FSDP1 unit whose wrapper was not passed; pass the FullyShardedDataParallel module"
    if not local.is_cpu and (reason := _elsewhere(local)):
        return reason
    if local.is_nested:
        return "is a nested tensor; pass its parts, as in tensor.unbind(), or a padded tensor"
    if local.is_quantized:
        return "is quantized; pass int_repr(), scale and zero point as leaves of their own"
    if local.layout is not torch.strided:
        return f"has the layout {local.layout}; pass to_dense(), or its parts as leaves of their own"
    if not _copies(local.dtype):
        return f"is {dtype_name(local.dtype)}, which torch cannot copy; pass a view of it, as in .view(torch.uint8)"
    if is_wrapper(type(local)) and not is_hooked(local):
        return (
            f"is a {type(local).__name__}, which does not say where its memory is; "
            f"pass the plain tensors inside it, or give it {' and '.join(HOOKS)}"
        )
    if placed != 0 and local.numel() and not is_hooked(local) and not _has_address(local):
        return (
            f"has {local.numel()} elements but no memory: its storage was freed, or it stands for another tensor "
            "inside of torch.func or torch.compile; pass a .clone() of it that was made outside, or a new tensor"
        )
    return ""


def _elsewhere(tensor: torch.Tensor) -> str:
    """Say why nothing can be copied from where a tensor is, other than the CPU."""
    if tensor.is_meta:
        return ON_META
    if tensor.device.type != kind():
        return f"is on {tensor.device}, which is no device of torch.accelerator ({kind()}); move it to the CPU first"
    return ""


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are anywhere in memory."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # torch's word for a tensor without a storage
        return False


def _blocks(tensor: torch.Tensor, label: str) -> list[tuple[Box, torch.Tensor]]:
    """Return the non-empty blocks of the global tensor that are here, as plain detached views."""
    if is_hooked(local := local_tensor(tensor)):
        stated = hooked_blocks(local, label, tuple(tensor.shape))
        return [(box, _plain(view, box, label)) for box, view in stated]
    if is_dtensor(tensor):
        return dtensor_blocks(tensor, label)
    if not tensor.numel():
        return []
    plain = tensor if type(tensor) in (torch.Tensor, nn.Parameter) else tensor.as_subclass(torch.Tensor)
    return [(Box.whole(tuple(tensor.shape)), plain.detach())]


def _plain(view: torch.Tensor, box: Box, label: str) -> torch.Tensor:
    """Return the detached view of a block that a tensor states, or refuse one without plain memory."""
    reason = unsupported(view)
    if not reason and is_wrapper(type(view)):
        reason = f"is a {type(view).__name__}; return a plain tensor"
    if reason:
        raise StateError(f"{label}: its block {box}, as {HOOKS[1]} returns it, {reason}")
    return view.detach()


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class stand for other tensors, by code of their own."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]  # a tensor's


@cache
def _copies(dtype: torch.dtype) -> bool:
    """Whether torch can copy elements of that dtype and view them as bytes; of int4 and its like it only has a name."""
    if dtype.is_complex:  # all of them; torch warns when a complex32 tensor is made
        return True
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone().view(torch.uint8)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True
