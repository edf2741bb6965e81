"""Collects the leaves of a state and turns them into shards: what may be saved, what is tied, what lies where."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from bcp.errors import InputError, StateError
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.planners.hooks import is_hooked
from bcp.planners.memory import dtype_name, memory, parts_of, readable, unsupported, writable
from bcp.planners.placement import Leaf, Sharded, memory_of, numel_of
from bcp.protocols import LocalShards, ObjectKey

__all__ = ["Leaves", "probe", "state_dict_of"]

Name = tuple[str, str]
"""(kind, FQN)."""


def _rank() -> int:
    """Return this rank, 0 outside of torch.distributed."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@dataclass(slots=True)
class Leaves:
    """The leaves of one rank's state, by kind and name.

    Attributes:
        tensors: every tensor leaf as the user has it, or as a planner placed it.
        objects: every other leaf.
        aliases: further names of tensors in ``tensors``, to the FQN there; a load asks for them as well.
        copies: further memory that a load fills with the values of a tensor; a save takes no notice of it.
        rank: this rank, for messages.
    """

    tensors: dict[Name, Leaf] = field(default_factory=dict)
    objects: dict[ObjectKey, Any] = field(default_factory=dict)
    aliases: dict[Name, str] = field(default_factory=dict)
    copies: dict[Name, list[Leaf]] = field(default_factory=dict)
    rank: int = field(default_factory=_rank)

    def add(self, kind: str, fqn: str, value: object) -> None:
        """Take one leaf, a tensor or not. Of placed ones (:class:`Sharded`), one object under two names is tied.

        Raises:
            StateError: there is a leaf of that name already, the name is no text, or the tensor cannot be read.

        """
        if isinstance(value, (torch.Tensor, Sharded)):
            name = self._new_name(kind, fqn)
            self._check_readable(name, value)
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

    def also(self, kind: str, fqn: str, leaf: Leaf) -> None:
        """Say that a tensor that was taken has its values in a second place too, which a load has to fill as well."""
        self._check_readable((kind, fqn), leaf)
        self.copies.setdefault((kind, fqn), []).append(leaf)

    def to_save(self) -> LocalShards:
        """Return what this rank holds. Of tensors that share all their memory, the first name holds the data.

        Raises:
            StateError: a leaf cannot be saved.

        """
        return self._shards((sorted(names) for names in self._tied()), readable, {})

    def to_load(self, saved: Collection[Name]) -> LocalShards:
        """Return writable memory. Tensors that share all their memory are read once.

        Of several names that the checkpoint has, the first in sorted order is read: where they were saved untied, with
        different values, its values win. The others are in the table without shards, so that they are known to be
        wanted. Names that the checkpoint lacks are left out as long as it has one of the same memory.

        Raises:
            StateError: a leaf cannot be written to.

        """
        groups = (sorted([name for name in names if name in saved] or names) for names in self._tied())
        return self._shards(groups, writable, self.copies)

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

    def _check_readable(self, name: Name, leaf: Leaf) -> None:
        """Refuse a tensor that has no plain memory here."""
        if reason := unsupported(leaf):
            raise StateError(f"{self._label(name)} {reason}")

    def _label(self, name: Name) -> str:
        """Name a tensor for messages."""
        return f"{name[0]} tensor {name[1]!r} on rank {self.rank}"

    def _tied(self) -> list[list[Name]]:
        """Group the names of tensors that are the same memory seen in the same way."""
        groups: dict[object, list[Name]] = {}
        for name, leaf in self.tensors.items():
            same = memory(leaf) if numel_of(leaf) else id(leaf) if isinstance(leaf, Sharded) else name[1]
            groups.setdefault((name[0], same), []).append(name)
        return list(groups.values())

    def _shards(
        self,
        groups: Iterable[Sequence[Name]],
        view_for: Callable[[torch.Tensor, str], torch.Tensor],
        copies: Mapping[Name, Sequence[Leaf]],
    ) -> LocalShards:
        """Make a table of names that are the same memory: the first of each group has shards, the others are tied."""
        rows, views, more = [], [], []
        for first, *others in groups:
            label, meta = self._label(first), _meta(*first, self.tensors[first])
            same = (copy for name in (first, *others) for copy in copies.get(name, ()))
            for leaf in (self.tensors[first], *same):
                for part in parts_of(leaf, label):
                    rows.append(ShardRow(meta, part.box, part.start, part.stop))
                    views.append(view_for(part.view, label))
            more += [_meta(*name, self.tensors[name], tied_to=first[1]) for name in others]
            if not math.prod(meta.shape):
                more.append(meta)
        more += [_meta(*name, self.tensors[name[0], first], tied_to=first) for name, first in self.aliases.items()]
        table = ShardTable.build(rows, objects=list(self.objects), more=more)
        return LocalShards(table, views, dict(self.objects))


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


def _meta(kind: str, fqn: str, leaf: Leaf, tied_to: str = "") -> TensorMeta:
    """Describe the logical tensor."""
    tensor = memory_of(leaf)
    return TensorMeta(
        kind=kind,
        fqn=fqn,
        dtype=dtype_name(tensor.dtype),
        itemsize=tensor.dtype.itemsize,
        shape=leaf.placement.shape if isinstance(leaf, Sharded) else tuple(tensor.shape),
        stride=_stride(leaf),
        device=tensor.device.type,
        requires_grad=tensor.requires_grad,
        tied_to=tied_to,
    )


def _stride(leaf: Leaf) -> tuple[int, ...]:
    """Return the strides of the logical tensor in elements; () where its parts do not tell."""
    if isinstance(leaf, Sharded):
        shape = leaf.placement.shape
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return () if is_hooked(leaf) else tuple(leaf.stride())
