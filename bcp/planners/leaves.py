"""Collects the leaves of a state and turns them into shards: what may be saved, what is tied, what lies where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from bcp.errors import InputError, StateError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.planners.dtensor import dtensor_blocks, hooked_blocks, local_tensor
from bcp.protocols import LocalShards, ObjectKey

__all__ = ["Leaves", "dtype_name", "memory", "probe"]

Name = tuple[str, str]
"""(kind, FQN)."""


@dataclass(slots=True)
class Leaves:
    """The leaves of one rank's state, by kind and name.

    Attributes:
        tensors: every tensor leaf as the user has it.
        objects: every other leaf.
    """

    tensors: dict[Name, torch.Tensor] = field(default_factory=dict)
    objects: dict[ObjectKey, Any] = field(default_factory=dict)

    def add(self, kind: str, fqn: str, value: object) -> None:
        """Take one leaf, a tensor or not.

        Raises:
            StateError: there is a leaf of that name already.

        """
        if isinstance(value, torch.Tensor):
            self._refuse_second(kind, fqn)
            self.tensors[kind, fqn] = value
        else:
            self.add_object(kind, fqn, value)

    def add_object(self, kind: str, fqn: str, value: object) -> None:
        """Take one leaf that is stored as an object even if it is a tensor; raises as :meth:`add` does."""
        self._refuse_second(kind, fqn)
        self.objects[kind, fqn] = value

    def to_save(self) -> LocalShards:
        """Return what this rank holds. Of tensors that share all their memory, the first name holds the data.

        Raises:
            StateError: a leaf cannot be saved.

        """
        rows: list[tuple[ShardRow, torch.Tensor]] = []
        more: list[TensorMeta] = []
        for names in self._tied():
            first, *others = sorted(names)
            meta, blocks = self._shards(first, for_writing=False)
            rows += [(ShardRow(meta, box), view) for box, view in blocks]
            more += [] if _numel(meta) else [meta]
            more += [_meta(*name, self.tensors[name], tied_to=first[1]) for name in others]
        return self._finish(rows, more)

    def to_load(self, saved: Collection[Name]) -> LocalShards:
        """Return writable memory. Tensors that share all their memory appear once, by a name that was saved if any was.

        Raises:
            StateError: a leaf cannot be written to.

        """
        rows: list[tuple[ShardRow, torch.Tensor]] = []
        more: list[TensorMeta] = []
        for names in self._tied():
            first = min(names, key=lambda name: (name not in saved, name))
            meta, blocks = self._shards(first, for_writing=True)
            rows += [(ShardRow(meta, box), view) for box, view in blocks]
            more += [] if _numel(meta) else [meta]
        return self._finish(rows, more)

    def _refuse_second(self, kind: str, fqn: str) -> None:
        if (kind, fqn) in self.tensors or (kind, fqn) in self.objects:
            raise StateError(f"two leaves of {kind} are named {fqn!r} on rank {_rank()}; rename one of them")

    def _tied(self) -> list[list[Name]]:
        """Group the names of tensors that are the same memory seen in the same way."""
        groups: dict[object, list[Name]] = {}
        for (kind, fqn), tensor in self.tensors.items():
            _refuse_unsupported(tensor, _label(kind, fqn))
            groups.setdefault((kind, memory(tensor) if tensor.numel() else fqn), []).append((kind, fqn))
        return list(groups.values())

    def _shards(self, name: Name, *, for_writing: bool) -> tuple[TensorMeta, list[tuple[Box, torch.Tensor]]]:
        """Return one tensor's record, and the blocks of it that are here."""
        tensor, label = self.tensors[name], _label(*name)
        meta = _meta(*name, tensor)
        if for_writing:
            blocks = [(box, _writable(view, label)) for box, view in _blocks(tensor, label)]
        else:
            blocks = [(box, view.resolve_conj().resolve_neg()) for box, view in _blocks(tensor, label)]
        return meta, blocks

    def _finish(self, rows: list[tuple[ShardRow, torch.Tensor]], more: list[TensorMeta]) -> LocalShards:
        table = ShardTable.build([row for row, _ in rows], objects=list(self.objects), more=more)
        return LocalShards(table, [view for _, view in rows], dict(self.objects))


def memory(tensor: torch.Tensor) -> object:
    """Return a key that is equal for two tensors that are the same elements in the same order.

    Two DTensors are the same if their local tensors are, and they are placed alike.
    """
    if isinstance(tensor, DTensor):
        spec = (tuple(tensor.shape), tuple(str(placement) for placement in tensor.placements))
        return (*spec, memory(local_tensor(tensor)))
    if _has_hooks(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 -- data_ptr() is 0 for every empty storage
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _numel(meta: TensorMeta) -> int:
    """Return how many elements the global tensor has."""
    return Box.whole(meta.shape).numel


def probe(needed: Mapping[Any, Collection[str]], planner: str) -> str:
    """Check that torch still has the private attributes that a planner reads.

    Returns:
        The version of torch that runs, and those that the planner was tested with.

    Raises:
        InputError: an attribute is gone; the message names it.

    """
    tested = f"planner {planner!r} was tested with torch 2.13.0; this is torch {torch.__version__}"
    for owner, names in needed.items():
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise InputError(f"{tested}, in which {owner!r} has no {', '.join(missing)}; pin torch or upgrade bcp")
    return tested


def _meta(kind: str, fqn: str, tensor: torch.Tensor, tied_to: str = "") -> TensorMeta:
    """Describe the global tensor."""
    return TensorMeta(
        kind=kind,
        fqn=fqn,
        dtype=dtype_name(tensor.dtype),
        itemsize=tensor.dtype.itemsize,
        shape=tuple(tensor.shape),
        stride=() if _has_hooks(tensor) else tuple(tensor.stride()),
        device=tensor.device.type,
        requires_grad=tensor.requires_grad,
        tied_to=tied_to,
    )


def _blocks(tensor: torch.Tensor, label: str) -> list[tuple[Box, torch.Tensor]]:
    """Return the non-empty blocks of the global tensor that are here, as plain detached views."""
    if isinstance(tensor, DTensor):
        local = local_tensor(tensor)
        return hooked_blocks(local, label) if _has_hooks(local) else dtensor_blocks(tensor, label)
    if _has_hooks(tensor):
        return hooked_blocks(tensor, label)
    if not tensor.numel():
        return []
    return [(Box.whole(tuple(tensor.shape)), tensor.as_subclass(torch.Tensor).detach())]


def _has_hooks(tensor: object) -> bool:
    """Whether a tensor that is no DTensor says itself which blocks it holds, as torch's planners ask it to."""
    hooks = ("__create_chunk_list__", "__get_tensor_shard__")
    return not isinstance(tensor, DTensor) and all(hasattr(tensor, hook) for hook in hooks)


def _writable(view: torch.Tensor, label: str) -> torch.Tensor:
    """Return the view if writing into it changes exactly its own elements, else refuse."""
    if view.is_conj() or view.is_neg():
        raise StateError(f"{label} is a lazy conjugate or negative; load into a clone of it, made with .resolve_conj()")
    if any(stride == 0 and count > 1 for stride, count in zip(view.stride(), view.shape, strict=True)):
        raise StateError(f"{label} is an expanded tensor whose elements share memory; load into a .contiguous() one")
    return view


def _refuse_unsupported(tensor: torch.Tensor, label: str) -> None:
    """Raise :class:`~bcp.errors.StateError` for a tensor that has no plain memory here."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if is_lazy(tensor):
        raise StateError(f"{label} is uninitialized; run one forward pass of its lazy module first")
    if local.is_meta:
        raise StateError(f"{label} is on the meta device and has no values; materialise it with to_empty() first")
    if local.is_nested:
        raise StateError(f"{label} is a nested tensor; pass its parts, as in tensor.unbind(), or a padded tensor")
    if local.is_quantized:
        raise StateError(f"{label} is quantized; pass int_repr(), scale and zero point as leaves of their own")
    if local.layout is not torch.strided:
        raise StateError(f"{label} has the layout {local.layout}; pass to_dense(), or its parts as leaves of their own")
    wrapper = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wrapper and not _has_hooks(local):
        raise StateError(
            f"{label} is a {type(local).__name__}, which does not say where its memory is; "
            "pass the plain tensors inside it, or give it __create_chunk_list__ and __get_tensor_shard__"
        )


def _label(kind: str, fqn: str) -> str:
    """Name a leaf for messages."""
    return f"{kind} tensor {fqn!r} on rank {_rank()}"


def _rank() -> int:
    """Return this rank, 0 outside of torch.distributed."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
