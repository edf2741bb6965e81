"""Sharded state dicts in which one rank has several shards of one key: through bcp, and through Megatron itself."""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

import itertools
import multiprocessing.dummy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from frameworks.cuda_as_cpu import cuda_as_cpu
from torch import distributed as dist

import bcp

__all__ = ["CUTS", "SHAPES", "exchanged", "reformed", "values"]

Shape = tuple[int, ...]
Block = tuple[Shape, Shape]
"""(offsets, lengths)."""

SHAPES: dict[str, Shape] = {"line": (29,), "flat": (13, 10), "cube": (12, 4, 5), "short": (6, 5)}
"""By key; some cuts give ``short`` empty shards, of which Megatron loses what begins at the same place."""


def values(key: str) -> torch.Tensor:
    """Return the whole tensor of a key."""
    shape = SHAPES[key]
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * len(shape)


def _rows(shape: Shape, cuts: Sequence[int]) -> list[Block]:
    """Cut the first dimension at these rows, as shares of 12."""
    ends = [0, *(shape[0] * cut // 12 for cut in cuts), shape[0]]
    pairs = itertools.pairwise(ends)
    return [((low, *(0 for _ in shape[1:])), (high - low, *shape[1:])) for low, high in pairs]


def _columns(shape: Shape) -> list[Block]:
    """Cut the last dimension into single indices."""
    return [((*(0 for _ in shape[1:]), at), (*shape[:-1], 1)) for at in range(shape[-1])]


def _dealt(blocks: Sequence[Block], rank: int) -> list[Block]:
    return list(blocks[rank::4])


CUTS: dict[str, Callable[[Shape, int], list[Block]]] = {
    "even rows": lambda shape, rank: [_rows(shape, (3, 6, 9))[rank]],
    "uneven rows": lambda shape, rank: _dealt(_rows(shape, (1, 2, 4, 5, 9, 11)), rank),
    "backwards": lambda shape, rank: _dealt(_rows(shape, (1, 2, 4, 5, 9, 11))[::-1], rank),
    "columns": lambda shape, rank: _dealt(_columns(shape), rank),
    "on one rank": lambda shape, rank: _rows(shape, (5, 7)) if rank == 2 else [],
    "on all ranks": lambda shape, _: _rows(shape, (4, 8)),
    "two and two": lambda shape, rank: (
        _dealt(_rows(shape, (2, 7, 9)), rank % 2) + _dealt(_rows(shape, (2, 7, 9)), rank % 2 + 2)
    ),
}


def _state(cut: str, *, zeros: bool, without: str = "") -> dict[str, Any]:
    """Return a sharded state dict; of equal shards on several ranks, Megatron wants one to be the main one."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, state = dist.get_rank(), {}
    replica = {"on all ranks": rank, "two and two": rank // 2}.get(cut, 0)
    for key, shape in SHAPES.items():
        for number, (offsets, lengths) in enumerate(CUTS[cut](shape, rank) if key != without else ()):
            data = torch.zeros(lengths) if zeros else _block(values(key), offsets, lengths).clone()
            state[f"{key}.{number}"] = ShardedTensor(
                key, data, data.dtype, lengths, shape, offsets, None, replica_id=replica
            )
    return state


def _block(whole: torch.Tensor, offsets: Shape, lengths: Shape) -> torch.Tensor:
    return whole[tuple(slice(low, low + length) for low, length in zip(offsets, lengths, strict=True))]


def exchanged(path: Path, before: str, after: str) -> list[str]:
    """Save under one partition and load under another; return the shards that differ, from Megatron's or at all."""
    target = _state(after, zeros=True)
    bcp.save(path / "bcp", {"model": _state(before, zeros=False)})
    bcp.load(path / "bcp", {"model": target})
    loaded = _through_megatron(
        path, _state(before, zeros=False, without="short"), _state(after, zeros=True, without="short")
    )
    tensors = {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
    assert {name for name in target if not name.startswith("short")} == tensors.keys()
    wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor, target[name].data)]
    expected = {name: _block(values(each.key), each.global_offset, each.local_shape) for name, each in target.items()}
    return wrong + [name for name, tensor in expected.items() if not torch.equal(tensor, target[name].data)]


def _through_megatron(path: Path, saved: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Save and load through Megatron itself."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        (path / "megatron").mkdir()
    dist.barrier()
    # it writes in forked processes, which must not be made of one with threads
    as_threads = patch.object(torch.multiprocessing, "get_context", lambda _: multiprocessing.dummy)
    with cuda_as_cpu(), warnings.catch_warnings(), as_threads:
        warnings.simplefilter("ignore")
        dist_checkpointing.save(saved, path / "megatron")
        loaded: dict[str, Any] = dist_checkpointing.load(target, path / "megatron")
    return loaded


STACK = (4, 3, 5)
"""Shape of a tensor whose first dimensions may be prepended axes."""


def _stacked(form: str, *, zeros: bool) -> dict[str, Any]:
    """Return one tensor, with some axes prepended or none, under a key with a place for numbers and one without."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = dist.get_rank()
    whole = torch.zeros(STACK) if zeros else torch.arange(60.0).view(STACK) + 1
    blocks: dict[str, list[Block]] = {
        "no axis": [((rank, 0, 0), (1, 3, 5))],
        "no axis, on two ranks": [((2 * rank, 0, 0), (2, 3, 5))] if rank < 2 else [],
        "no axis, columns": [((0, 0, rank), (4, 3, 1 + (rank == 3)))],
        "one axis": [((rank, 0, 0), (1, 3, 5))],
        "two axes": [((rank, row, 0), (1, 1, 5)) for row in range(3)],
    }
    axes = {"one axis": 1, "two axes": 2}.get(form, 0)
    state = {}
    for key in ("stack", "decoder.layers.mlp.weight"):
        for number, (offsets, lengths) in enumerate(blocks[form]):
            data = _block(whole, offsets, lengths).reshape(lengths[axes:]).clone()
            grid = tuple(size // length for size, length in zip(STACK, lengths, strict=True)) if axes else None
            state[f"{key}.{number}"] = ShardedTensor(
                key, data, data.dtype, tuple(data.shape), STACK, offsets, grid, prepend_axis_num=axes
            )
    return state


def _padded(shape: Shape, *, zeros: bool) -> dict[str, Any]:
    """Return a tensor whose lengths may differ from those of the checkpoint, cut into rows."""
    from megatron.core.dist_checkpointing import ShardedTensor

    whole, rows = torch.zeros(shape) if zeros else torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape), 4
    low, high = (shape[0] * (dist.get_rank() + more) // rows for more in (0, 1))
    data = whole[low:high].clone()
    offsets = (low, *(0 for _ in shape[1:]))
    tensor = ShardedTensor(
        "padded", data, data.dtype, tuple(data.shape), shape, offsets, None, allow_shape_mismatch=True
    )
    return {"padded": tensor}


def reformed(path: Path, before: Any, after: Any) -> list[str]:
    """Do as :func:`exchanged` with prepended axes, or with lengths that differ; return the shards that differ."""
    make: Callable[..., dict[str, Any]] = _stacked if isinstance(before, str) else _padded
    target = make(after, zeros=True)
    bcp.save(path / "bcp", {"model": make(before, zeros=False)})
    bcp.load(path / "bcp", {"model": target})
    loaded = _through_megatron(path, make(before, zeros=False), make(after, zeros=True))
    assert dist.get_rank() or all(tensor.data.any() for tensor in target.values())
    return [name for name, each in target.items() if not torch.equal(loaded[name], each.data)]
