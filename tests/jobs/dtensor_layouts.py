"""Real models under FSDP2, TP, HSDP, EP and stages on parts of the ranks: trained, saved, and loaded otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from exact import ADAMW, Block, Exact, batch
from layouts import mesh_of
from silent import load, load_in_place
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bcp

STEPS = 2


def data_parallel(how: str) -> tuple[int, int]:
    """Return this rank's data-parallel rank, and how many of them there are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shared = {"tp": world, "tp_fsdp2": 2, "tp4_fsdp2": 4, "plain": world}.get(how, 1)
    return rank // shared, world // shared


def shard(how: str, model: nn.Module) -> nn.Module:
    """Shard a model in one of the ways, with torch's own functions."""
    world = dist.get_world_size()
    if how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    place: dict[str, Any] = {}
    if how == "fsdp2":
        mesh = mesh_of((world,))
    elif how in ("hsdp", "last_dim"):
        mesh = mesh_of((world // 2, 2), ("replicate", "shard"))
        last = how == "last_dim"
        place = {"shard_placement_fn": lambda p: Shard(p.ndim - 1 if p.shape[-1] % 2 == 0 else 0)} if last else {}
    else:
        _, dp = data_parallel(how)
        whole = mesh_of((dp, world // dp), ("dp", "tp"))
        for block in _blocks(model):
            plan = {
                "up": ColwiseParallel(output_layouts=Replicate()),
                "down": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(block, whole["tp"], plan)
        mesh = whole["dp"]
    if how != "tp":
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, **place)
        fully_shard(model, mesh=mesh, **place)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, Block) and part is not model]


def optimizer_of(parameters: Iterable[nn.Parameter], *, reverse: bool = False) -> torch.optim.AdamW:
    """Return an optimizer of two groups; in reverse with other names and other learning rates."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() != 1], "label": "matrix"},
        {"params": [p for p in parameters if p.dim() == 1], "label": "vector"},
    ]
    if reverse:
        groups = [group | {"label": "none", "lr": 0.5 + index} for index, group in enumerate(reversed(groups))]
    return torch.optim.AdamW(groups, **ADAMW)


def take(how: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take a step with the batch of this data-parallel rank."""
    rank, ranks = data_parallel(how)
    rows = torch.cat([batch(step, r) for r in range(4)]) if ranks == 1 else batch(step, rank)
    (model(rows) / (4 if ranks == 1 else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def built(how: str, make: Callable[[int], nn.Module], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(how, make(seed))
    return model, optimizer_of(model.parameters(), reverse=seed != 0)


def exact(seed: int) -> nn.Module:
    return Exact(seed)


def nine(seed: int) -> nn.Module:
    """Return one block with a dimension of 9, which neither 2 nor 4 ranks can halve evenly."""
    torch.manual_seed(seed)
    block = Block(4, 9)
    nn.init.uniform_(block.scale)
    return nn.Sequential(block)


def train_and_save(how: str, path: Path, make: Callable[[int], nn.Module] = exact) -> None:
    model, optimizer = built(how, make)
    for step in range(STEPS):
        take(how, model, optimizer, step)
    bcp.save(path, {"model": model, "optimizer": optimizer})


def load_and_save(
    how: str, path: Path, again: Path, after: Path | None = None, make: Callable[[int], nn.Module] = exact
) -> None:
    """Load into other weights and an optimizer that never stepped; save, step, and save once more."""
    model, optimizer = built(how, make, seed=9)
    states = {"model": model, "optimizer": optimizer}
    load_in_place(path, states, model.parameters())
    groups = [(group["label"], group["lr"]) for group in optimizer.param_groups]
    assert groups == [("vector", ADAMW["lr"]), ("matrix", ADAMW["lr"])]
    bcp.save(again, states)
    if after:
        take(how, model, optimizer, STEPS)
        bcp.save(after, states)


# -- stages of a pipeline, each on its part of the ranks -----------------------------------------------


class Stage(nn.Module):
    """The blocks of one stage, under their names in the whole model."""

    def __init__(self, blocks: dict[str, Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)


def stages(path: Path) -> None:
    """Save blocks 0 and 1 each from two of four ranks; every rank knows only its own."""
    whole, mine = Exact(), dist.get_rank() // 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]  # every rank makes both: that is collective
    stage = Stage({str(mine): whole.blocks[mine]})
    fully_shard(stage, mesh=meshes[mine])
    bcp.save(path, {"model": stage})
    _empty(stage)
    load_in_place(path, {"model": stage}, stage.parameters())
    for name, parameter in Exact().blocks[mine].named_parameters():
        assert torch.equal(dict(stage.blocks[str(mine)].named_parameters())[name].full_tensor(), parameter)


def _empty(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter).zero_()


# -- experts -----------------------------------------------------------------------------------------

EXPERTS = 6


class Mixture(nn.Module):
    """A dense matrix, stacked experts, and the same as one module each; every element is another number."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(5, EXPERTS, bias=False)
        self.stacked = nn.Module()
        self.stacked.weight = nn.Parameter(torch.empty(EXPERTS, 5, 3))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))


def experts(seed: int) -> list[nn.Linear]:
    """Return one module an expert."""
    torch.manual_seed(seed)
    return [nn.Linear(3, 5) for _ in range(EXPERTS)]


def expert_parallel(seed: int, ep: int) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Shard as MoE trainers do: dense parameters over all ranks, experts over ``ep`` and then over the rest."""
    mesh = mesh_of((4 // ep, ep), ("rest", "ep"))
    model = Mixture(seed)
    weight = model.stacked.weight
    model.stacked.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)], src_data_rank=None))
    fully_shard(model.stacked, mesh=mesh["rest"])
    fully_shard(model, mesh=mesh_of((4,)))
    per_rank, me = EXPERTS // ep, mesh["ep"].get_local_rank()
    own = {at: expert for at, expert in enumerate(experts(seed)) if at // per_rank == me}
    for expert in own.values():
        fully_shard(expert, mesh=mesh["rest"])
    return model, own


def _with_gradients(model: nn.Module, own: dict[int, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients that are all 1: states then follow from the step alone."""
    for parameter in _parameters(model, own):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _parameters(model: nn.Module, own: dict[int, nn.Module]) -> list[nn.Parameter]:
    return [*model.parameters(), *(p for expert in own.values() for p in expert.parameters())]


def save_experts(path: Path, ep: int) -> None:
    """Save; experts that are modules of their own go by their global numbers."""
    model, own = expert_parallel(0, ep)
    optimizer = torch.optim.AdamW(_parameters(model, own), **ADAMW)
    _with_gradients(model, own, optimizer)
    bcp.save(path, {"model": {"moe": model, "experts": own}, "optimizer": optimizer})


def load_experts(path: Path, ep: int, again: Path) -> None:
    model, own = expert_parallel(5, ep)
    parameters = _parameters(model, own)
    states = {"model": {"moe": model, "experts": own}, "optimizer": torch.optim.AdamW(parameters, lr=3.0)}
    load_in_place(path, states, parameters)
    bcp.save(again, states)


# -- FSDP2 over a mesh of two dimensions --------------------------------------------------------------

GRID = {"even": 16, "uneven": 13, "few": 9}
"""Rows of the parameters that FSDP2, EP and TP all shard, in this order of the mesh dimensions."""


def grid(*, empty: bool = False) -> nn.Module:
    """Return plain parameters whose elements are their positions."""
    model = nn.Module()
    for name, rows in GRID.items():
        whole = torch.arange(rows * 3.0).view(rows, 3)
        model.register_parameter(name, nn.Parameter(torch.zeros_like(whole) if empty else whole))
    return model


def sharded_grid(*, empty: bool = False) -> nn.Module:
    """Return the same over 2 x 2 x 2 ranks, as ``fully_shard`` makes them of DTensors on a mesh of two dimensions."""
    model, mesh = grid(empty=empty), mesh_of((2, 2, 2), ("dp", "ep", "tp"))
    for name, parameter in list(model.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh["ep", "tp"], [Shard(0), Shard(0)], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(placed))
    return fully_shard(model, mesh=mesh["dp"])


def save_grid(path: Path) -> dict[str, torch.Tensor]:
    """Save, and return what torch gathers."""
    model = sharded_grid()
    bcp.save(path, {"model": model})
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def load_grid(path: Path) -> dict[str, torch.Tensor]:
    """Load, and return what torch gathers."""
    model = sharded_grid(empty=True)
    load_in_place(path, {"model": model}, model.parameters())
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


# -- tensors that say themselves which blocks they hold ------------------------------------------------


ROWS = {"saved": (0, 5, 2, 4), "loaded": (3, 1, 7, 0)}
"""How many of 11 rows each rank holds: not what torch.chunk gives."""


def uneven(whole: torch.Tensor, counts: Sequence[int]) -> DTensor:
    """Return a DTensor whose local tensor says by closures which rows it has, as Megatron-FSDP's do."""
    rank, mesh = dist.get_rank(), mesh_of((4,))
    first = sum(counts[:rank])
    local = whole[first : first + counts[rank]].clone()
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    chunk = ChunkStorageMetadata(torch.Size([first, *(0,) * (whole.dim() - 1)]), local.shape)
    made._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]  # as they do
    return made


def hooked_parameters(path: Path) -> None:
    """Save a parameter with its states, and load it with other counts into states that do not exist yet."""
    whole = torch.arange(33.0).view(11, 3)
    model = nn.Module()
    model.w = nn.Parameter(uneven(whole, ROWS["saved"]))
    _copy_closure(model.w, uneven(whole, ROWS["saved"]))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    model.w.grad = DTensor.from_local(
        model.w._local_tensor.detach() + 1,
        model.w.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    optimizer.step()
    bcp.save(path, {"model": model, "optimizer": optimizer})

    target = nn.Module()
    target.w = nn.Parameter(uneven(torch.zeros(11, 3), ROWS["loaded"]))
    _copy_closure(target.w, uneven(whole, ROWS["loaded"]))
    fresh = torch.optim.AdamW(target.parameters(), lr=3.0)
    load_in_place(path, {"model": target, "optimizer": fresh}, target.parameters())
    bcp.save(path.with_name("again"), {"model": target, "optimizer": fresh})


def _copy_closure(parameter: DTensor, source: DTensor) -> None:
    """Making a parameter of a DTensor loses what was set on the local tensor."""
    parameter._local_tensor.__create_chunk_list__ = source._local_tensor.__create_chunk_list__  # type: ignore[attr-defined]  # as they do


def wrapped(whole: torch.Tensor, halves: int) -> DTensor:
    """Return a DTensor of several local shards: this rank's rows, cut into columns, as embedding tables are."""
    rank = dist.get_rank()
    rows = whole.chunk(4)[rank]
    first = rank * len(whole.chunk(4)[0])
    parts = [part.contiguous() for part in rows.chunk(halves, 1)]
    offsets = [(first, sum(part.shape[1] for part in parts[:at])) for at in range(len(parts))]
    mesh = mesh_of((4,))
    local = LocalShardsWrapper(parts, offsets)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def wrapped_shards(path: Path) -> None:
    """Save two shards a rank, and load three a rank."""
    whole = torch.arange(8.0 * 7).view(8, 7)
    bcp.save(path, {"model": {"table": wrapped(whole, 2)}})
    target = wrapped(torch.zeros(8, 7), 3)
    load(path, {"model": {"table": target}})
    expected = wrapped(whole, 3)._local_tensor.local_shards()
    for found, right in zip(target._local_tensor.local_shards(), expected, strict=True):
        assert torch.equal(found, right)
