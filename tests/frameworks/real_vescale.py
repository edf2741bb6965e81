"""Check veScale's own ``RaggedShard`` against bcp, by hand on 4 ranks.

No package index has this version of veScale. Put its repository (commit 20cf5c71) on PYTHONPATH, beside bcp, in an
environment with torch 2.7.1::

    torchrun --nproc-per-node 4 tests/frameworks/real_vescale.py FOLDER

The oracles are the tensors before they are cut, and veScale's ``full_tensor``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from vescale.dtensor import DTensor, distribute_tensor
from vescale.dtensor.placement_types import (
    DTensorSpec,
    RaggedShard,
    Replicate,
    Shard,
    TensorMeta,
    _StridedRaggedShard,
)

import bcp

ADAMW = {"lr": 0.125, "betas": (0.5, 0.75), "foreach": False}
SHAPES = ((8, 6), (12,), (4, 2, 6))
Layout = tuple[tuple[int, ...], tuple[Any, ...]]
"""Shape of a mesh, and placements."""


def layouts(shape: Sequence[int]) -> list[Layout]:
    """Return layouts of a tensor whose rows are a multiple of 4, and whose columns are even."""
    every, rows, numel = tuple(range(len(shape))), shape[0], math.prod(shape)
    half, odd = numel // 2, (1, numel // 2 - 1)
    found: list[Layout] = [
        ((4,), (RaggedShard((0,), (1, 0, rows - 3, 2)),)),
        ((4,), (RaggedShard(every, (0, 5, 7, numel - 12)),)),
        ((4,), (RaggedShard((), (0, 0, 1, 0)),)),
        ((2, 2), (RaggedShard(every, (3, numel - 3)), Replicate())),
        ((2, 2), (Replicate(), RaggedShard(every, (3, numel - 3)))),
        ((2, 2), (RaggedShard(every, (5, half - 5)), Shard(0))),
        ((2, 2), (_StridedRaggedShard(every, (5, half - 5), 2), Shard(0))),
        ((2, 2), (_StridedRaggedShard((0,), (0, 1), 2), Shard(0))),
        ((1, 4), (_StridedRaggedShard(every, (1,), 4), Shard(0))),
        ((4, 1), (_StridedRaggedShard(every, (1, *odd, numel - half - 1), 1), Shard(0))),
        ((2, 2), (_StridedRaggedShard(every, (1, 3), 1), Replicate())),
        ((4,), (Shard(0),)),
    ]
    if len(shape) > 1:
        found += [((2, 2), (RaggedShard((0,), (1, rows - 1)), Shard(1)))]
    return found


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return the one mesh of this shape: each has process groups of its own."""
    return init_device_mesh("cpu", shape)


def cut(whole: torch.Tensor, layout: Layout) -> Any:
    """Return veScale's DTensor of those values. Rows and columns are cut first, then flat memory."""
    mesh = mesh_of(layout[0])
    plain = [Replicate() if isinstance(placement, RaggedShard) else placement for placement in layout[1]]
    block = distribute_tensor(whole.detach(), mesh, plain)._local_tensor
    for dimension, placement in enumerate(layout[1]):
        if isinstance(placement, RaggedShard):
            parts = placement._split_tensor(block.contiguous(), mesh.size(dimension))
            block = parts[mesh.get_local_rank(dimension)].clone()
            if not placement.dims and len(block):
                block = block.view(whole.shape)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(block, DTensorSpec(mesh, layout[1], tensor_meta=meta), requires_grad=False)


def uneven_all_gather(parts: list[torch.Tensor], local: torch.Tensor, group: Any = None) -> None:
    """Gather tensors of different sizes, as NCCL does and gloo does not; veScale's ``full_tensor`` needs it."""
    found: list[Any] = [None] * len(parts)
    distributed.all_gather_object(found, local.detach(), group=group)
    for part, value in zip(parts, found, strict=True):
        part.copy_(value.reshape(part.shape))


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_layouts(folder: Path) -> int:
    """Save each layout of each shape, and load it as each other one; return the number of loaded tensors."""
    loaded = 0
    for shape in SHAPES:
        whole = torch.arange(float(math.prod(shape))).view(shape) + 1
        choices = layouts(shape)
        tensors = [cut(whole, layout) for layout in choices]
        assert all(torch.equal(full(tensor), whole) for tensor in tensors)
        path = folder / "x".join(map(str, shape))
        bcp.save(path, {"model": {f"t{number}": tensor for number, tensor in enumerate(tensors)}})
        with bcp.Checkpoint(path) as checkpoint:
            assert all(torch.equal(checkpoint.read(name), whole) for name in checkpoint.names())
        for shift in range(len(choices)):
            targets = [cut(torch.zeros(shape), layout) for layout in choices[shift:] + choices[:shift]]
            bcp.load(path, {"model": {f"t{number}": target for number, target in enumerate(targets)}})
            assert all(torch.equal(full(target), whole) for target in targets), (shape, shift)
            loaded += len(targets)
    return loaded


class Net(nn.Module):
    """Parameters of the given layouts, on which each rank takes the same steps."""

    def __init__(self, seed: int, shift: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        for number, shape in enumerate(SHAPES):
            choices = layouts(shape)
            for place in range(len(choices)):
                weight = cut(torch.rand(shape, generator=made), choices[(place + shift) % len(choices)])
                self.register_parameter(f"p{number}_{place}", nn.Parameter(weight))

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        made = torch.Generator().manual_seed(100 + number)
        for parameter in self.parameters():
            layout = (tuple(parameter.device_mesh.shape), parameter.placements)
            parameter.grad = cut(torch.rand(parameter.shape, generator=made), layout)
        optimizer.step()

    def values(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        states = [optimizer.state[parameter] for parameter in self.parameters()]
        return [full(value).detach() for state in states for value in (state["exp_avg"], state["exp_avg_sq"])] + [
            full(parameter).detach() for parameter in self.parameters()
        ]


def check_training(folder: Path) -> int:
    """Train, save, load into other layouts, and go on; return the number of tensors that were compared."""
    net = Net(seed=0, shift=0)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    for number in range(2):
        net.step(optimizer, number)
    bcp.save(folder / "training", {"model": net, "optimizer": optimizer})
    net.step(optimizer, 2)
    expected, compared = net.values(optimizer), 0
    for shift in (1, 5):
        other = Net(seed=9, shift=shift)
        again = torch.optim.AdamW(other.parameters(), **ADAMW)
        bcp.load(folder / "training", {"model": other, "optimizer": again})
        other.step(again, 2)
        found = other.values(again)
        assert all(map(torch.equal, found, expected)), shift
        compared += len(found)
    return compared


def check_refusals(folder: Path) -> None:
    """A factor that contradicts the mesh is refused by name, before a byte is written or loaded."""
    whole = torch.arange(48.0).view(8, 6)
    good: Layout = ((2, 2), (_StridedRaggedShard((0, 1), (5, 19), 2), Shard(0)))
    bcp.save(folder / "good", {"model": {"layer.w": cut(whole, good)}})
    wrong = cut(whole, ((2, 2), (_StridedRaggedShard((0, 1), (5, 19), 4), Shard(0))))
    before = wrong._local_tensor.clone()
    said = [refusal(bcp.save, folder / "wrong", wrong), refusal(bcp.load, folder / "good", wrong)]
    for words in ("layer.w", "_StridedRaggedShard(dims=(0, 1), local_units=(5, 19)) has split_factor=4"):
        assert all(words in text for text in said), said
    assert torch.equal(wrong._local_tensor, before)
    distributed.barrier()
    assert not (folder / "wrong").exists()


def refusal(call: Any, path: Path, tensor: Any) -> str:
    try:
        call(path, {"model": {"layer.w": tensor}})
    except bcp.BcpError as error:
        return str(error)
    return "nothing was refused"


def main() -> None:
    distributed.init_process_group("gloo")
    distributed.all_gather = uneven_all_gather
    folder = Path(sys.argv[1])
    loaded, compared = check_layouts(folder), check_training(folder)
    check_refusals(folder)
    if distributed.get_rank() == 0:
        sys.stdout.write(f"{loaded} loaded tensors, and {compared} after a step, are equal to the bit\n")
    distributed.destroy_process_group()


main()
