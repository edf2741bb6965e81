"""A plan of torch.distributed.checkpoint as shards: a chunk of a tensor is a box, and a byte object is a value."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.strided import row_major
from bcp.protocols import LoadTargets, LocalShards, ObjectKey, States
from bcp.state.memory import dtype_name, readable, unsupported

__all__ = ["FRAMEWORK", "PlannedShards", "shard_table"]

FRAMEWORK = "dcp"
"""Name of the planner in the commit of a checkpoint. Its first receipt has a record of names."""


def shard_table(items: Sequence[WriteItem], keys: Mapping[str, ObjectKey]) -> ShardTable:
    """Return the shards of one rank, row by row in the order of the items; chunks without elements have no row.

    Args:
        items: of the plan of the rank.
        keys: kind and name of each name in DCP.

    Raises:
        StateError: a chunk has no bounds, or its tensor has another layout than strided.

    """
    rows, empty, objects = [], [], []
    for item in items:
        key = keys[item.index.fqn]
        if item.type is WriteItemType.BYTE_IO:
            objects.append(key)
            continue
        data = _tensor_data(item)
        meta = _meta(key, data)
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        if box.numel:
            rows.append(ShardRow(meta, box))
        else:
            empty.append(meta)
    return ShardTable.build(rows, objects, more=empty)


def _tensor_data(item: WriteItem) -> TensorWriteData:
    """Return the description of a chunk. Raises StateError if there is none, or none that has plain memory."""
    data = item.tensor_data
    if data is None or data.chunk is None:
        raise StateError(f"the plan of {item.index.fqn!r} has no bounds; use DCP's DefaultSavePlanner, or set them")
    if data.properties.layout is not torch.strided:
        raise StateError(
            f"the tensor {item.index.fqn!r} has the layout {data.properties.layout}; pass to_dense(), or its parts as "
            "tensors of their own"
        )
    return data


def _meta(key: ObjectKey, data: TensorWriteData) -> TensorMeta:
    """Return what all ranks say alike of a tensor: DCP's plans tell neither its device nor its strides."""
    kind, name = key
    dtype, shape = data.properties.dtype, tuple(data.size)
    return TensorMeta(kind, name, dtype_name(dtype), dtype.itemsize, shape, row_major(shape))


@dataclass(slots=True)
class PlannedShards:
    """A planner of bcp whose shards are those of DCP's plan.

    Attributes:
        items: of the plan of this rank.
        keys: kind and name of each name in DCP.
        planner: resolves the items.
        name: of the planner, in the commit.
    """

    items: Sequence[WriteItem]
    keys: Mapping[str, ObjectKey]
    planner: SavePlanner
    name: str = FRAMEWORK

    def local_shards(self, _: States) -> LocalShards:
        """Resolve the items of the plan; see :meth:`bcp.protocols.Planner.local_shards`."""
        tensors, objects = [], {}
        for item in self.items:
            data = self.planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                objects[self.keys[item.index.fqn]] = _value(item, data)
                continue
            tensor = _tensor(item, data)
            if tensor.numel():
                tensors.append(tensor)
        return LocalShards(shard_table(self.items, self.keys), tensors, objects)

    def load_targets(self, _: States, __: CheckpointNames) -> LoadTargets:
        """Refuse: ``dcp.load`` has targets of its own."""
        raise StateError("the shards of a plan of DCP are for saves; load with bcp.dcp.StorageReader")


def _tensor(item: WriteItem, data: object) -> torch.Tensor:
    """Return the memory of a chunk. Raises StateError if the planner gives something else than it has planned."""
    planned = _tensor_data(item)
    label = f"the tensor {item.index.fqn!r}"
    if not isinstance(data, torch.Tensor):
        raise StateError(f"{label}: the planner gives a {type(data).__name__}; return a tensor from resolve_data()")
    if data.shape != planned.chunk.sizes or data.dtype != planned.properties.dtype:
        raise StateError(
            f"{label}: the planner gives {data.dtype}{list(data.shape)}, and its plan has {planned.properties.dtype}"
            f"{list(planned.chunk.sizes)}; state both alike in create_local_plan() and resolve_data()"
        )
    if reason := unsupported(data):
        raise StateError(f"{label} {reason}")
    return readable(data.detach())


def _value(item: WriteItem, data: object) -> Any:
    """Return the object that the planner of this process has packed.

    Raises StateError if the bytes are not those of ``torch.save``.
    """
    if not isinstance(data, io.BytesIO):
        raise StateError(
            f"the value {item.index.fqn!r}: the planner gives a {type(data).__name__}; return io.BytesIO from "
            "resolve_data()"
        )
    data.seek(0)
    try:
        # The bytes are this process's own: SavePlanner.transform_object() ran torch.save on an object of the state dict
        # a moment ago, and DCP has no other way to the object. weights_only=True would refuse values that bcp stores
        # without a pickle, as numpy generators. bcp.state.values then refuses other classes without allow_pickle.
        return torch.load(data, map_location="cpu", weights_only=False)
    except Exception as error:
        raise StateError(
            f"the value {item.index.fqn!r}: the planner gives bytes that torch.load cannot read: "
            f"{type(error).__name__}: {error}; let transform_object() return those of torch.save"
        ) from error
