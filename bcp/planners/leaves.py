"""Collects the leaves of a state and turns them into shards: what may be saved, what is tied, what lies where."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from bcp.errors import InputError, StateError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.planners.dtensor import dtensor_blocks, hooked_blocks, local_tensor
from bcp.protocols import LocalShards, ObjectKey

__all__ = ["Leaves", "dtype_name", "memory", "probe", "state_dict_of"]

Name = tuple[str, str]
"""(kind, FQN)."""

_HOOKS = ("__create_chunk_list__", "__get_tensor_shard__")
"""By these methods, torch's own name for them, a tensor subclass says itself which blocks it holds."""


def _rank() -> int:
    """Return this rank, 0 outside of torch.distributed."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@dataclass(slots=True)
class Leaves:
    """The leaves of one rank's state, by kind and name.

    Attributes:
        tensors: every tensor leaf as the user has it.
        objects: every other leaf.
        aliases: further names of tensors in ``tensors``, to the FQN there; a load asks for them as well.
        rank: this rank, for messages.
    """

    tensors: dict[Name, torch.Tensor] = field(default_factory=dict)
    objects: dict[ObjectKey, Any] = field(default_factory=dict)
    aliases: dict[Name, str] = field(default_factory=dict)
    rank: int = field(default_factory=_rank)

    def add(self, kind: str, fqn: str, value: object) -> None:
        """Take one leaf, a tensor or not.

        Raises:
            StateError: there is a leaf of that name already, the name is no text, or the tensor cannot be read.

        """
        if isinstance(value, torch.Tensor):
            name = self._new_name(kind, fqn)
            if reason := _unsupported(value):
                raise StateError(f"{self._label(name)} {reason}")
            self.tensors[name] = value
        else:
            self.objects[self._new_name(kind, fqn)] = value

    def add_object(self, kind: str, fqn: str, value: object) -> None:
        """Take one leaf that is stored as an object even if it is a tensor.

        Raises:
            StateError: there is a leaf of that name already, or the name is no text.

        """
        self.objects[self._new_name(kind, fqn)] = value

    def add_alias(self, kind: str, fqn: str, tensor: str) -> None:
        """Say that a tensor that was taken, by its FQN, has another name in the checkpoint; raises as :meth:`add`."""
        self.aliases[self._new_name(kind, fqn)] = tensor

    def to_save(self) -> LocalShards:
        """Return what this rank holds. Of tensors that share all their memory, the first name holds the data.

        Raises:
            StateError: a leaf cannot be saved.

        """
        return self._shards((sorted(names) for names in self._tied()), _readable)

    def to_load(self, saved: Collection[Name]) -> LocalShards:
        """Return writable memory. Tensors that share all their memory are read once.

        Of several names that the checkpoint has, the first in sorted order is read: where they were saved untied, with
        different values, its values win. The others are in the table without shards, so that they are known to be
        wanted. Names that the checkpoint lacks are left out as long as it has one of the same memory.

        Raises:
            StateError: a leaf cannot be written to.

        """
        groups = (sorted([name for name in names if name in saved] or names) for names in self._tied())
        return self._shards(groups, _writable)

    def _new_name(self, kind: str, fqn: str) -> Name:
        """Return the leaf's name if it can be one."""
        name = (kind, fqn)
        if name in self.tensors or name in self.objects:
            raise StateError(f"two leaves of {kind} are named {fqn!r} on rank {self.rank}; rename one of them")
        if not fqn.isascii() and any("\ud800" <= char <= "\udfff" for char in fqn):
            raise StateError(
                f"the {kind} leaf {fqn!r} on rank {self.rank} has a lone surrogate in its name, which UTF-8 cannot "
                "encode; rename it"
            )
        return name

    def _label(self, name: Name) -> str:
        """Name a tensor for messages."""
        return f"{name[0]} tensor {name[1]!r} on rank {self.rank}"

    def _tied(self) -> list[list[Name]]:
        """Group the names of tensors that are the same memory seen in the same way."""
        groups: dict[object, list[Name]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault((name[0], memory(tensor) if tensor.numel() else name[1]), []).append(name)
        return list(groups.values())

    def _shards(
        self, groups: Iterable[Sequence[Name]], view_for: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> LocalShards:
        """Make a table of names that are the same memory: the first of each group has shards, the others are tied."""
        rows, views, more = [], [], []
        for first, *others in groups:
            tensor, label = self.tensors[first], self._label(first)
            meta = _meta(*first, tensor)
            for box, view in _blocks(tensor, label):
                rows.append(ShardRow(meta, box))
                views.append(view_for(view, label))
            more += [_meta(*name, self.tensors[name], tied_to=first[1]) for name in others]
            if not math.prod(meta.shape):
                more.append(meta)
        more += [_meta(*name, self.tensors[name[0], first], tied_to=first) for name, first in self.aliases.items()]
        table = ShardTable.build(rows, objects=list(self.objects), more=more)
        return LocalShards(table, views, dict(self.objects))


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


def state_dict_of(owner: Any, where: str, **how: bool) -> Any:
    """Return ``owner.state_dict(**how)``.

    Raises:
        StateError: it raised; the original error is the cause. ``where`` says which part of the states it is.

    """
    try:
        return owner.state_dict(**how)
    except Exception as error:
        raise StateError(
            f"state_dict() of the {type(owner).__name__} at {where} raised {type(error).__name__}: {error}; "
            "repair it, or leave it out of the states"
        ) from error


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


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
    plain = tensor if type(tensor) in (torch.Tensor, nn.Parameter) else tensor.as_subclass(torch.Tensor)
    return [(Box.whole(tuple(tensor.shape)), plain.detach())]


def _has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is no DTensor says itself which blocks it holds, as torch's planners ask it to."""
    return _is_hooked(type(tensor))


@cache
def _is_hooked(kind: type) -> bool:
    """Whether tensors of that type have the hooks; asked thousands of times a save, of a few types."""
    return not issubclass(kind, DTensor) and all(hasattr(kind, hook) for hook in _HOOKS)


def _readable(view: torch.Tensor, _: str) -> torch.Tensor:
    """Return the view, or a copy with the same values of one that torch conjugates or negates when it is read."""
    return view.resolve_conj().resolve_neg()


def _writable(view: torch.Tensor, label: str) -> torch.Tensor:
    """Return the view if writing into it changes exactly its own elements, else refuse."""
    if view.is_conj() or view.is_neg():
        raise StateError(f"{label} is a lazy conjugate or negative; load into a clone of it, made with .resolve_conj()")
    if any(stride == 0 and count > 1 for stride, count in zip(view.stride(), view.shape, strict=True)):
        raise StateError(f"{label} is an expanded tensor whose elements share memory; load into a .contiguous() one")
    if view.is_inference():
        raise StateError(
            f"{label} was made under torch.inference_mode(), outside of which torch refuses to write to it; "
            "load into a .clone() of it, or make it under torch.no_grad()"
        )
    return view


def _unsupported(tensor: torch.Tensor) -> str:  # noqa: PLR0911 -- one line a reason
    """Say why a tensor has no plain memory here, and what to do; "" for one that has."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if is_lazy(tensor):
        return "is uninitialized; run one forward pass of its lazy module first"
    if local.is_meta:
        return "is on the meta device and has no values; materialise it with to_empty() first"
    if local.is_nested:
        return "is a nested tensor; pass its parts, as in tensor.unbind(), or a padded tensor"
    if local.is_quantized:
        return "is quantized; pass int_repr(), scale and zero point as leaves of their own"
    if local.layout is not torch.strided:
        return f"has the layout {local.layout}; pass to_dense(), or its parts as leaves of their own"
    if not _copies(local.dtype):
        return f"is {dtype_name(local.dtype)}, which torch cannot copy; pass a view of it, as in .view(torch.uint8)"
    wrapper = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wrapper and not _has_hooks(local):
        return (
            f"is a {type(local).__name__}, which does not say where its memory is; "
            f"pass the plain tensors inside it, or give it {' and '.join(_HOOKS)}"
        )
    return ""


@cache
def _copies(dtype: torch.dtype) -> bool:
    """Whether torch can copy elements of that dtype and view them as bytes; of int4 and its like it only has a name."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone().view(torch.uint8)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True
