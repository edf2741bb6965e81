"""Patches reach a mock of vLLM's loader: written from the description of its pull requests 50723 and 53751 alone.

The loader makes a tensor of the checkpoint's shape that is NaN where nothing changes, and lets the model's own
``load_weights`` place it: names, fused weights and shards of tensor parallelism are the model's matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import bcp
from bcp.publication.subscriber import Patch

HEAD, HEADS, WIDTH, INNER = 4, 4, 16, 24


def checkpoint() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = {f"layers.0.{name}_proj.weight": (HEADS * HEAD, WIDTH) for name in "qkv"}
    shapes |= {f"layers.0.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    shapes |= {"layers.0.down_proj.weight": (WIDTH, INNER), "norm.weight": (WIDTH,)}
    return {name: torch.randn(shape, generator=made).bfloat16() for name, shape in shapes.items()}


def trained(old: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Change some elements of some tensors."""
    made = torch.Generator().manual_seed(seed)
    new = {name: value.clone() for name, value in old.items()}
    for name in sorted(new)[seed % 2 :: 2]:
        moved = torch.rand(new[name].shape, generator=made) < 0.1
        new[name][moved] += 1
    return new


class VllmWorker:
    """One rank of tensor parallelism, with qkv and gate_up fused."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, rows = rank, world, HEADS * HEAD // world
        self.parameters = {
            "layers.0.qkv_proj.weight": torch.zeros(3 * rows, WIDTH).bfloat16(),
            "layers.0.gate_up_proj.weight": torch.zeros(2 * INNER // world, WIDTH).bfloat16(),
            "layers.0.down_proj.weight": torch.zeros(WIDTH, INNER // world).bfloat16(),
            "norm.weight": torch.zeros(WIDTH).bfloat16(),
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Place tensors of the checkpoint. Elements that are NaN stay."""
        for name, tensor in weights:
            target, part = self._place(name, tensor)
            target.copy_(torch.where(part.isnan(), target, part))

    def _place(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if name == "norm.weight":
            return self.parameters[name], tensor
        if "down_proj" in name:
            return self.parameters[name], tensor.chunk(self.world, 1)[self.rank]
        kind = name.split(".")[2].removesuffix("_proj")
        fused, order = ("qkv", ["q", "k", "v"]) if kind in "qkv" else ("gate_up", ["gate", "up"])
        whole = self.parameters[f"layers.0.{fused}_proj.weight"]
        return whole.chunk(len(order))[order.index(kind)], tensor.chunk(self.world)[self.rank]

    def load_patches(self, patches: Iterable[Patch]) -> None:
        """Load changed elements through the model's own loader."""
        for name, shape, indices, values in patches:
            assert values.dtype == torch.bfloat16
            assert int(indices[-1]) < torch.Size(shape).numel() < 1 << 31
            staged = torch.full(shape, torch.nan, dtype=values.dtype)
            staged.view(-1).index_copy_(0, indices.int().long(), values)
            self.load_weights([(name, staged)])


def expected(rank: int, world: int, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    worker = VllmWorker(rank, world)
    worker.load_weights(model.items())
    return worker.parameters


@pytest.mark.parametrize("world", [1, 2])
def test_a_sparse_loader_follows_by_patches(tmp_path: Path, world: int) -> None:
    models = [checkpoint()]
    for seed in range(3):
        models.append(trained(models[-1], seed))
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    workers = [VllmWorker(rank, world) for rank in range(world)]
    for version, model in enumerate(models, 1):
        bcp.publish(model, tmp_path / "pub", version, anchor_every=3)
        for rank, worker in enumerate(workers):
            worker.load_patches(subscriber.patches(version))
            want = expected(rank, world, model)
            assert all(torch.equal(value, want[name]) for name, value in worker.parameters.items()), version
