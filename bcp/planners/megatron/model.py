"""Leaves of Megatron models: of everything that has a ``sharded_state_dict``, or is one."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bcp.errors import StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.planners.megatron.logical import LogicalShard, fresh_placement, logical_shards, regrouped, whole_placement
from bcp.protocols import ObjectKey
from bcp.state.hooks import ATTACH, MEGATRON_FSDP
from bcp.state.inventory import Leaves
from bcp.state.load_path import Customs, customs_of, give
from bcp.state.modules import Finish, in_turn, put
from bcp.state.names import Path, dotted, walk
from bcp.state.optimizers import OPTIMIZER
from bcp.state.placement import Placement, ShardedLeaf

__all__ = ["MODEL", "LogicalShards", "add_model", "has_base", "unwrapped"]

MODEL = "model"
"""The kind of everything here."""

_WHERE = "states['model']"

_WRAPPERS = frozenset({"_BaseDataParallel", "Float16Module", "DistributedDataParallel", "OptimizedModule"})
"""Classes that hold the module that is trained, and would put themselves into its names."""

_KNOWN = ("megatron.", "transformer_engine.")
"""Python modules whose own hooks and overrides have nothing to do where the weights are loaded in place."""

_METADATA = {"non_homogeneous_layers": True}
"""Asks Megatron to number the layers in the keys, so that neither pipeline nor depth are part of any shape."""


@dataclass(slots=True)
class LogicalShards:
    """The logical tensor, and the part of it, of every local tensor of a model."""

    saved: CheckpointNames | None = None  # the names of the checkpoint, in a load: padded tensors get its shapes
    # in a save, by ``id`` of the local tensor: the interval of elements that are this step's; without an entry, all are
    fresh: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    by_id: dict[int, list[LogicalShard]] = field(default_factory=dict)  # the shards by the ``id`` of the local tensor
    # in a load: by parameter, the name of one of its saved states
    states: dict[str, ObjectKey] = field(default_factory=dict)

    def of(self, parameter: torch.Tensor) -> list[LogicalShard]:
        """Return the shards of a parameter. Raises StateError if the model does not have the parameter."""
        if id(parameter) not in self.by_id:
            raise StateError(
                f"states['optimizer'] has a parameter of shape {list(parameter.shape)} that is not in the "
                "sharded_state_dict() of states['model']; pass the modules that the optimizer was built for, and "
                "framework='fsdp2' if torch's FSDP2 shards them"
            )
        return self.by_id[id(parameter)]

    def take(self, leaf: Any) -> list[LogicalShard]:
        """Read a ``ShardedTensor`` or a factory of them, and remember whose shards they are."""
        if leaf.data is None:
            raise StateError(f"{_WHERE}: {leaf.key!r} has no data; pass the sharded state dict as the model makes it")
        shards = logical_shards(leaf)
        if self.saved is not None and not hasattr(leaf, "build"):
            shards = regrouped(leaf, self._saved_shape) or shards
        self.by_id[id(leaf.data)] = shards = [self._fitted(shard) for shard in shards]
        return shards

    def _saved_shape(self, fqn: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor in the checkpoint, as a weight or by its optimizer states; None for none."""
        if self.saved is None:
            return None
        if not self.states:
            for kind, path in self.saved.rows:
                section, _, rest = path.partition(".")
                if kind == OPTIMIZER and section == "state" and not rest.endswith(".step"):
                    self.states.setdefault(rest.rpartition(".")[0], (kind, path))
        name = (MODEL, fqn) if (MODEL, fqn) in self.saved.rows else self.states.get(fqn)
        return None if name is None else tuple(self.saved.meta(name).shape)

    def _fitted(self, shard: LogicalShard) -> LogicalShard:
        """Give a padded tensor the length that it has in the checkpoint."""
        if self.saved is None or not shard.flexible:
            return shard
        of_state = f"state.{shard.fqn}."
        rows = [name for name in self.saved.rows if name == (MODEL, shard.fqn) or name[1].startswith(of_state)]
        shapes = (self.saved.meta(name).shape for name in rows)
        return shard.fitted(next((shape for shape in shapes if len(shape) == len(shard.shape)), shard.shape))


def add_model(leaves: Leaves, shards: LogicalShards, state: object) -> Finish:
    """Take every leaf of a chunk, of a list of chunks, or of nested containers of them and of sharded leaves.

    ``shards`` receives the logical tensors of the local ones. Return the function that puts loaded objects back. Raises
    StateError if something cannot be read, or two leaves have one name.
    """
    finishes: list[Finish] = []
    for path, wrapped in walk(state, _WHERE):
        leaf = unwrapped(wrapped)
        if callable(getattr(leaf, "sharded_state_dict", None)):
            finishes.append(_add_owner(leaves, shards, leaf))
        elif isinstance(leaf, nn.Module):
            location = f" at {dotted(path)!r}" if path else ""
            raise StateError(
                f"{_WHERE} has a {type(leaf).__name__}{location}, which has no sharded_state_dict(); pass Megatron's "
                "modules, or name another framework"
            )
        elif name := _add_leaf(leaves, shards, path, leaf):
            finishes.append(_setter(state, path, leaf, name))
    return in_turn(finishes)


def has_base(value: object, names: Collection[str]) -> bool:
    """Whether a class of one of these names is among a value's: nothing has to be imported to ask that."""
    return any(base.__name__ in names for base in type(value).__mro__)


def unwrapped(module: Any) -> Any:
    """Return the module inside of Megatron's and torch's wrappers."""
    while has_base(module, _WRAPPERS):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # noqa: SLF001 -- torch.compile's
    return module


def _refuse_fsdp(owner: Any) -> None:
    """Raise StateError for a module that Megatron-FSDP shards: its ``sharded_state_dict`` takes shards for wholes."""
    parameters = owner.named_parameters() if isinstance(owner, nn.Module) else ()
    for name, parameter in parameters:
        if not MEGATRON_FSDP.isdisjoint(parameter.__dict__):
            raise StateError(
                f"{_WHERE} has a {type(owner).__name__} whose parameter {name!r} is sharded by Megatron-FSDP; pass it "
                f"with framework='fsdp2', and {ATTACH}"
            )


def _add_owner(leaves: Leaves, shards: LogicalShards, owner: Any) -> Finish:
    """Add the leaves of an object with a ``sharded_state_dict``; its objects go back through ``load_state_dict``.

    Raises StateError for a load into a module with code of its own that changes entries before they are copied.
    """
    wanted: dict[ObjectKey, tuple[str, Any]] = {}
    _refuse_fsdp(owner)
    customs = customs_of(owner, _KNOWN) if leaves.loading and isinstance(owner, nn.Module) else Customs()
    if customs.before:
        raise StateError(
            f"{_WHERE}: {next(iter(customs.before.values()))} is not Megatron's, and a load fills the weights "
            "in place, without it; use a post-hook instead, or remove it before the load"
        )
    sharded = owner.sharded_state_dict(metadata=dict(_METADATA))  # a new one: Megatron writes into it
    live: dict[str, Any] = {}
    for path, leaf in walk(sharded, f"sharded_state_dict() of {type(owner).__name__}"):
        if name := _add_leaf(leaves, shards, path, leaf):
            wanted[name] = dotted(path), leaf
        elif hasattr(leaf, "replica_id") and isinstance(leaf.data, torch.Tensor):
            live[dotted(path)] = leaf.data

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        loaded = {key: _as_was(leaf, objects[name]) for name, (key, leaf) in wanted.items() if name in objects}
        if loaded or customs:
            found = give(owner, {**live, **loaded} if customs else loaded, _WHERE)
            names = {key: f"{MODEL}: {fqn}" for (_, fqn), (key, _) in wanted.items() if key in loaded}
            leaves.refuse([], [names[key] for key in found.unexpected if key in names])

    return finish


def _setter(state: object, path: Path, leaf: Any, name: ObjectKey) -> Finish:
    """Return the setter of a leaf that stands in the state itself."""

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        if name in objects and has_base(leaf, ("ShardedObject",)):
            leaf.data = _as_was(leaf, objects[name])
        elif name in objects:
            put(state, path, objects[name], _WHERE)

    return finish


def _add_leaf(leaves: Leaves, shards: LogicalShards, path: Path, leaf: Any) -> ObjectKey | None:
    """Take one leaf of a sharded state dict; return its name if it is an object."""
    if has_base(leaf, ("LocalNonpersistentObject",)):
        return None
    if has_base(leaf, ("ShardedObject",)):
        return _add_object(leaves, leaf, loading=shards.saved is not None)
    if hasattr(leaf, "replica_id"):
        for shard in shards.take(leaf):
            _add_shard(leaves, shard, leaf.data, shards.fresh.get(id(leaf.data)))
        return None
    name = dotted(path) if path else MODEL
    leaves.add(MODEL, name, leaf)
    return None if isinstance(leaf, torch.Tensor) else (MODEL, name)


def _add_shard(leaves: Leaves, shard: LogicalShard, local: torch.Tensor, fresh: tuple[int, int] | None) -> None:
    """Take one shard. Shards of one name and place (tied embeddings) are copies of the first."""
    placement = whole_placement(shard, local)
    if fresh is not None:
        placement = fresh_placement(shard, local, *(fresh if shard.main else (0, 0)))
    leaf, first = ShardedLeaf(local, placement), leaves.tensors.get(MODEL, {}).get(shard.fqn)
    if not isinstance(first, ShardedLeaf):
        leaves.add(MODEL, shard.fqn, leaf)
    elif any(_same_place(known_leaf.placement, placement) for known_leaf in (first, *first.more)):
        leaves.also(MODEL, shard.fqn, leaf)
    else:
        leaves.join(MODEL, shard.fqn, leaf)


def _same_place(placement: Placement, other: Placement) -> bool:
    return (placement.shape, placement.spans) == (other.shape, other.spans)


def _add_object(leaves: Leaves, leaf: Any, *, loading: bool) -> ObjectKey | None:
    """Take a ``ShardedObject`` by its unique key, which says which of how many shards it is.

    Empty ones (extra states without Transformer Engine) are left out, so that other frameworks can load strictly. Only
    the first of several replicas is saved, as Megatron does: replicas need not be equal.
    """
    value = leaf.data.getvalue() if isinstance(leaf.data, io.BytesIO) else leaf.data
    empty = value is None or (isinstance(value, torch.Tensor) and not value.numel()) or value == b""
    replica = leaf.replica_id if isinstance(leaf.replica_id, tuple) else (leaf.replica_id,)
    if empty or not (loading or not any(replica)):
        return None
    leaves.add_object(MODEL, leaf.unique_key, value)
    return MODEL, leaf.unique_key


def _as_was(leaf: Any, value: Any) -> Any:
    return io.BytesIO(value) if has_base(leaf, ("ShardedObject",)) and isinstance(leaf.data, io.BytesIO) else value
