"""Collects the leaves of a state and turns them into shards: saveable leaves, ties, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import distributed

from bcp.errors import InputError, StateError
from bcp.protocols import LocalShards, ObjectKey, Refused
from bcp.state.dtensor import torchs
from bcp.state.hooks import is_sharded_tensor, sharded_leaf
from bcp.state.memory import readable, unsupported, writable
from bcp.state.meta_tensors import MetaTensors
from bcp.state.placement import Leaf, ShardedLeaf
from bcp.state.shard_table import ShardTableCache, TableRows, recall, remember
from bcp.state.tensor_specs import PLAIN, LeafInspection, Ties, firsts_of, inspect_leaves, ties_of

__all__ = ["Leaves", "named_state_of", "probe", "state_dict_of"]

Name = tuple[str, str]
"""(kind, FQN)."""

Group = tuple[str, Sequence[str], Mapping[str, Any]]
"""(kind, prefixes, values): objects ``<prefix>.<key>``, which have the same values for all prefixes."""

_ASKED_LATER = PLAIN | {ShardedLeaf}
"""Types of tensor leaves that, as DTensors, are looked at when all are there; others may be nothing to be asked."""

_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@dataclass(slots=True)
class Leaves:
    """The leaves of one rank's state, by kind and name."""

    # tensor leaves by kind, by FQN: the user's, or as a planner placed them; shards of a ``ShardedTensor`` are placed
    tensors: dict[str, dict[str, Leaf]] = field(default_factory=dict)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)  # every other leaf, by kind, by FQN
    groups: list[Group] = field(default_factory=list)  # further values, many of them equal
    # further names of tensors, each with the FQN in ``tensors``; a load asks for these names as well
    aliases: dict[Name, str] = field(default_factory=dict)
    marks: dict[Name, int] = field(default_factory=dict)  # those of ShardTable.marks; tensors without any are left out
    # entries of a checkpoint for a leaf of the target that do not fit it, each with the class that cannot take it
    foreign: dict[str, str] = field(default_factory=dict)
    copies: dict[Name, list[Leaf]] = field(default_factory=dict)  # more memory that a load fills; a save ignores it
    rank: int = field(default_factory=_rank)  # for messages
    loading: bool = False  # whether these are the targets of a load
    meta: MetaTensors | None = None  # what makes memory for meta tensors of modules; None: they are refused
    # tensors of the user by their FQN in the model, where ``tensors`` has other memory that a load fills first
    originals: dict[str, torch.Tensor] = field(default_factory=dict)
    # names as in "model: weight" that a module misses in, or does not take of, its own state dict
    refused: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    # -- what there is ---------------------------------------------------------------------------------------------

    def add(self, kind: str, fqn: str, value: object) -> None:
        """Add one leaf; a :class:`ShardedLeaf` under two names is tied.

        Raises StateError if the name is taken, or the tensor cannot be read.
        """
        self.add_all(kind, ((fqn, value),))

    def add_all(self, kind: str, named: Iterable[tuple[str, Any]]) -> None:
        """Take many leaves of one kind, as (FQN, leaf); otherwise as :meth:`add`."""
        tensors, objects = self.tensors.setdefault(kind, {}), self.objects.setdefault(kind, {})
        asked_later = _ASKED_LATER | {torchs("DTensor")}
        for fqn, value in named:
            if fqn in tensors or fqn in objects:
                raise self._named_twice((kind, fqn))
            if type(value) in asked_later:
                tensors[fqn] = value
            elif isinstance(value, torch.Tensor):
                tensors[fqn] = self._readable((kind, fqn), value)
            elif isinstance(value, _STORAGES):
                raise StateError(
                    f"the {kind} leaf {fqn!r} on rank {self.rank} is a {type(value).__name__}, which has no shape; "
                    "pass a tensor of it, as in torch.tensor([], dtype=torch.uint8).set_(storage)"
                )
            else:
                objects[fqn] = value

    def add_object(self, kind: str, fqn: str, value: object) -> None:
        """Take one leaf that is stored as an object even if it is a tensor. Raises StateError if the name is taken."""
        objects = self.objects.setdefault(kind, {})
        if fqn in objects or fqn in self.tensors.get(kind, ()):
            raise self._named_twice((kind, fqn))
        objects[fqn] = value

    def add_group(self, kind: str, prefixes: Sequence[str], values: Mapping[str, Any]) -> None:
        """Take an object ``<prefix>.<key>`` for every prefix and every key of ``values``."""
        self.groups.append((kind, prefixes, values))

    def mark(self, kind: str, marks: Iterable[tuple[str, int]]) -> None:
        """Say how the replicas of tensors are written, as (FQN, bits of :data:`bcp.plan.shards.ONE_WRITER` ...)."""
        self.marks.update(((kind, fqn), bits) for fqn, bits in marks)

    def add_alias(self, kind: str, fqn: str, tensor: str) -> None:
        """Say that a tensor that was taken, by its FQN, has another name in the checkpoint."""
        self.aliases[kind, fqn] = tensor

    def also(self, kind: str, fqn: str, leaf: Leaf) -> None:
        """Say that a tensor that was taken has its values in a second place too, which a load has to fill as well."""
        self._readable((kind, fqn), leaf)
        self.copies.setdefault((kind, fqn), []).append(leaf)

    def join(self, kind: str, fqn: str, part: ShardedLeaf) -> None:
        """Add a further local tensor to a placed tensor: another part of the same logical tensor.

        Raises StateError if the part has another global shape or dtype than the tensor, or cannot be read.
        """
        first = self.tensors[kind][fqn]
        if not isinstance(first, ShardedLeaf):
            raise self._named_twice((kind, fqn))
        shapes, dtypes = (first.placement.shape, part.placement.shape), (first.tensor.dtype, part.tensor.dtype)
        if shapes[0] != shapes[1] or dtypes[0] != dtypes[1]:
            raise StateError(
                f"two shards of {self._label((kind, fqn))} are of tensors of shape {list(shapes[0])} and "
                f"{list(shapes[1])}, with dtypes {dtypes[0]} and {dtypes[1]}; rename one of them, or correct it"
            )
        self._readable((kind, fqn), part)
        self.tensors[kind][fqn] = ShardedLeaf.joined([first, *first.more, part])

    def stand_in(self, kind: str, fqn: str, original: torch.Tensor) -> None:
        """Say that a tensor that will be taken is filled in the place of the user's own."""
        if kind == "model":
            self.originals[fqn] = original

    def refuse(self, missing: Iterable[str], unexpected: Iterable[str]) -> None:
        """Note names that a module misses, and names that it does not take."""
        self.refused[0].extend(missing)
        self.refused[1].extend(unexpected)

    def refusals(self) -> Refused:
        """Return the names that were refused so far."""
        return Refused(*map(tuple, self.refused))

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def to_save(self) -> LocalShards:
        """Return the shards of this rank. The first name of tensors that share all their memory holds the data.

        A table that was made of the same names, forms and ties before is used again; views and values are always new.
        Raises StateError if a leaf cannot be saved, or two leaves have one name.
        """
        names, leaves = self._listed()
        looks = inspect_leaves(leaves, lambda number: self._label(names[number]))
        ties = ties_of(names, looks)
        stock = self._stock(names, looks, ties)
        if stock.plain:
            return self._plain(stock, looks)
        views: list[torch.Tensor] = []
        for number in stock.stored:
            if looks.forms[number].whole:
                views.append(looks.memory[number].detach())
            else:
                views += map(readable, looks.views(number, self._label(names[number])))
        return LocalShards(stock.table, views, self._objects(stock.keys))

    def _stock(self, names: Sequence[Name], looks: LeafInspection, ties: Ties) -> ShardTableCache:
        """Return the table of names, specs and ties; a table of equal ones is used again."""
        seen = (names, looks.forms, ties, *self._grouped(), self.marks)
        stock = recall(seen)
        if stock is None:
            rows, keys = TableRows.of(names, looks.forms, firsts_of(ties, names), {}), self._keys(names)
            plain, tracked = all(form.plain for form in rows.held), any(form.tracked for form in rows.held)
            table = rows.table(sorted(keys), self.marks)
            stock = ShardTableCache(seen, table, rows.stored, keys, plain, tracked)
            remember(stock)
        return stock

    def to_load(self, saved: Collection[Name]) -> LocalShards:
        """Return writable memory. Tensors that share all their memory are read once.

        The first in sorted order of the names that the checkpoint has gets the memory. The others are in the table
        without shards: they are known to be wanted, and a load compares their values with those of the first. Names
        that the checkpoint lacks are left out as long as it has one of the same memory. Raises StateError if a
        leaf cannot be written to, or two leaves have one name.
        """
        names, leaves = self._listed()
        seconds = [(name, copy) for name, copies in self.copies.items() for copy in copies]
        labels, leaves = [*names, *(name for name, _ in seconds)], [*leaves, *(copy for _, copy in seconds)]
        looks = inspect_leaves(leaves, lambda number: self._label(labels[number]))
        ties = ties_of(names, looks)
        if not (ties or seconds or self.aliases):  # as a rule: then a load wants what a save would hold
            stock = self._stock(names, looks, ties)
            if stock.plain and True not in map(torch.Tensor.is_inference, looks.memory):
                return self._plain(stock, looks)
            return LocalShards(stock.table, self._writable(stock.stored, looks, names), self._objects(stock.keys))
        firsts = firsts_of(ties, names, saved)
        numbers = {name: number for number, name in enumerate(names)} if seconds or self.aliases else {}
        kept = {number: next(n for n in group if n not in firsts) for group in ties for number in group}
        copies: dict[int, list[int]] = {}
        for number, (name, _) in enumerate(seconds, len(names)):
            if name in numbers:
                copies.setdefault(kept.get(numbers[name], numbers[name]), []).append(number)
        rows, keys = TableRows.of(names, looks.forms, firsts, copies), self._keys([*names, *self.aliases])
        for (kind, alias), first in self.aliases.items():
            rows.add(kind, alias, looks.forms[numbers[kind, first]], tied_to=first)
        views = self._writable(rows.stored, looks, labels)
        return LocalShards(rows.table(sorted(keys)), views, self._objects(keys))

    def _plain(self, stock: ShardTableCache, looks: LeafInspection) -> LocalShards:
        """Return the shards of a rank whose leaves are all plain.

        A storage keeps the memory of a tensor as well as a detached view of it, which takes four times as long to make.
        """
        memory = list(map(looks.memory.__getitem__, stock.stored))
        if stock.tracked:
            memory = [tensor.detach() if tensor.requires_grad else tensor for tensor in memory]
        address = looks.addresses[np.array(stock.stored, np.int64)]
        storages = list(map(torch.Tensor.untyped_storage, memory))
        return LocalShards(stock.table, memory, self._objects(stock.keys), address, storages)

    def _writable(self, stored: Sequence[int], looks: LeafInspection, labels: Sequence[Name]) -> list[torch.Tensor]:
        """Return the memory of these leaves, to be written to."""
        views: list[torch.Tensor] = []
        for number in stored:
            whole = looks.memory[number].detach() if looks.forms[number].whole else None
            if whole is not None and whole.is_contiguous() and not whole.is_inference():
                views.append(whole)  # as a rule; a whole one is never lazy
                continue
            label = self._label(labels[number])
            leaf_views = looks.views(number, label) if whole is None else [whole]
            views += (writable(view, label) for view in leaf_views)
        return views

    def _listed(self) -> tuple[list[Name], list[Leaf]]:
        """Return the names of all tensors, and the tensors."""
        names = [(kind, fqn) for kind, named in self.tensors.items() for fqn in named]
        return names, [leaf for named in self.tensors.values() for leaf in named.values()]

    def _grouped(self) -> tuple[object, object]:
        """Return all that the names of the objects follow from."""
        single = [(kind, list(named)) for kind, named in self.objects.items()]
        return single, [(kind, prefixes, list(map(str, values))) for kind, prefixes, values in self.groups]

    def _keys(self, names: Sequence[Name]) -> list[ObjectKey]:
        """Return the names of the objects; checks them, and those of the tensors, which are ``names``."""
        keys = [(kind, fqn) for kind, named in self.objects.items() for fqn in named]
        for kind, prefixes, values in self.groups:
            keys += [(kind, f"{prefix}.{key}") for prefix in prefixes for key in values]
        count = Counter([*names, *keys])
        for kind, fqn in count:
            if not fqn.isascii() and any("\ud800" <= char <= "\udfff" for char in fqn):
                raise StateError(
                    f"the {kind} leaf {fqn!r} on rank {self.rank} has a lone surrogate in its name, which UTF-8 cannot "
                    "encode; rename it"
                )
        if len(count) < len(names) + len(keys):
            raise self._named_twice(count.most_common(1)[0][0])
        return keys

    def _objects(self, keys: Sequence[ObjectKey]) -> dict[ObjectKey, Any]:
        """Return the values of the objects as they are now; ``keys`` are :meth:`_keys`."""
        values = [value for named in self.objects.values() for value in named.values()]
        for _, prefixes, group in self.groups:
            values += [*group.values()] * len(prefixes)
        return dict(zip(keys, values, strict=True))

    def _readable(self, name: Name, leaf: Leaf) -> Leaf:
        """Return a tensor leaf, of a ShardedTensor its local shards; refuse one without plain memory here."""
        if is_sharded_tensor(leaf):
            leaf = sharded_leaf(leaf, self._label(name))
        if reason := unsupported(leaf):
            raise StateError(f"{self._label(name)} {reason}")
        return leaf

    def _named_twice(self, name: Name) -> StateError:
        return StateError(f"two leaves of {name[0]} are named {name[1]!r} on rank {self.rank}; rename one of them")

    def _label(self, name: Name) -> str:
        return f"{name[0]} tensor {name[1]!r} on rank {self.rank}"


def state_dict_of(owner: Any, where: str, **options: bool) -> Any:
    """Return the state dict of the owner at ``where`` in the states.

    Raises StateError if the owner's method raised.
    """
    try:
        return owner.state_dict(**options)
    except Exception as error:
        raise StateError(
            f"state_dict() of the {type(owner).__name__} at {where} raised {type(error).__name__}: {error}; "
            "repair it, or leave it out of the states"
        ) from error


def named_state_of(module: Any, where: str) -> Mapping[str, Any]:
    """Return a module's state dict with its live tensors.

    Raises StateError if the method raised, or did not return a mapping with strings as keys.
    """
    state = state_dict_of(module, where, keep_vars=True)
    if not isinstance(state, Mapping):
        raise StateError(
            f"state_dict() of the {type(module).__name__} at {where} returned a {type(state).__name__}; return a "
            "mapping of names to values"
        )
    for key in state:
        if not isinstance(key, str):
            raise StateError(
                f"state_dict() of the {type(module).__name__} at {where} has the key {key!r} of type "
                f"{type(key).__name__}; use strings, so that entries have names"
            )
    return state


def probe(needed: Mapping[Any, Collection[str]], planner: str) -> str:
    """Check that torch has the private attributes that a planner reads; return the running and the tested versions.

    Raises InputError, which names the missing attributes, if there are any.
    """
    tested = f"planner {planner!r} was tested with torch 2.13.0; this is torch {torch.__version__}"
    for owner, names in needed.items():
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise InputError(f"{tested}, in which {owner!r} has no {', '.join(missing)}; pin torch or upgrade bcp")
    return tested
