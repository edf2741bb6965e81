"""What the planner tests do in place of a storage: a dict of whole tensors, and the layout that names them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from bcp.plan.layout import Layout
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import TensorMeta, TensorTable
from bcp.protocols import LoadTargets, LocalShards
from bcp.state.tensor_specs import PLAIN

Name = tuple[str, str]
Piece = tuple[TensorMeta, tuple[int, ...], tuple[int, ...], torch.Tensor]


def pieces(shards: LocalShards) -> list[Piece]:
    """(tensor, offsets, lengths, copy of the values) of every shard."""
    out = []
    for row, tensor in enumerate(shards.tensors):
        box = shards.table.box(row)
        assert tuple(tensor.shape) == box.lengths
        assert type(tensor) in PLAIN
        assert not tensor.requires_grad
        out.append((shards.table.meta(row), box.offsets, box.lengths, tensor.clone()))
    return out


def assembled(parts: Iterable[Piece]) -> dict[Name, torch.Tensor]:
    """Put the pieces of all ranks together; every element is there, and replicas agree."""
    whole: dict[Name, tuple[torch.Tensor, torch.Tensor]] = {}
    for meta, offsets, lengths, values in parts:
        new = (torch.zeros(meta.shape, dtype=values.dtype), torch.zeros(meta.shape, dtype=torch.bool))
        tensor, seen = whole.setdefault((meta.kind, meta.fqn), new)
        at = tuple(slice(first, first + count) for first, count in zip(offsets, lengths, strict=True))
        known = seen[at].reshape(-1)
        assert torch.equal(_bytes(tensor[at])[known], _bytes(values)[known]), meta.fqn
        tensor[at] = values
        seen[at] = True
    assert all(seen.all() for _, seen in whole.values())
    return {name: tensor for name, (tensor, _) in whole.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element; torch 2.6 cannot index elements of eight bits."""
    row = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))  # a view of one may have any stride
    return row.view(torch.uint8).view(tensor.numel(), tensor.itemsize)


def saved_by(*ranks: LocalShards) -> CheckpointNames:
    """What a checkpoint of these ranks has, by name."""
    tables = [rank.table for rank in ranks]
    metas = {(m.kind, m.fqn): m for t in tables for m in (t.tensors[row] for row in range(len(t.tensors)))}
    objects = sorted({(kind, path) for t in tables for kind, path in t.objects})
    none = np.zeros(0, dtype=np.int64)
    empty = dict.fromkeys(Layout.__slots__, none)
    known = {"world_size": len(ranks), "block_bytes": 1, "tensors": TensorTable.build(list(metas.values()))}
    return CheckpointNames.of(Layout(**{**empty, **known, "objects": objects}))


def fill(
    targets: LoadTargets, values: Mapping[Name, torch.Tensor], saved: CheckpointNames, objects: Mapping[Name, Any]
) -> None:
    """Do a load: check, write every target from the saved tensors, following ties, then finish."""
    targets.check(objects)
    tied = dict(zip(saved.tensors.fqn, saved.tensors.tied_to, strict=True))
    for row, tensor in enumerate(targets.shards.tensors):
        meta, box = targets.shards.table.meta(row), targets.shards.table.box(row)
        whole = values[meta.kind, tied[meta.fqn] or meta.fqn]
        assert tuple(whole.shape) == meta.shape
        assert math.prod(box.lengths) == tensor.numel()
        at = tuple(slice(first, first + count) for first, count in zip(box.offsets, box.lengths, strict=True))
        tensor.copy_(whole[at])
    targets.finish(objects)


def names(shards: LocalShards, kind: str = "model") -> dict[str, str]:
    """FQN to tied_to of all tensors of a kind."""
    table = shards.table.tensors
    return {table[row].fqn: table[row].tied_to for row in range(len(table)) if table[row].kind == kind}
