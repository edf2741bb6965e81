"""Parameters that the real Megatron-FSDP shards, on the CPU: saved, loaded, and refused as long as they say nothing."""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from exact import ADAMW
from frameworks.cuda_as_cpu import cuda_as_cpu
from layouts import mesh_of
from megatron_details import said
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import bcp

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"


def net(seed: int = 0) -> nn.Module:
    """Return a model of whose parameters no one has a row for each of four ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


@contextmanager
def cuda() -> Iterator[None]:
    """Make CUDA mean the CPU, also for a device that is named by a number; Megatron-FSDP's imports warn."""
    with warnings.catch_warnings(), cuda_as_cpu(), mock.patch.object(torch.cuda, "current_device", return_value=0):
        warnings.simplefilter("ignore")
        yield


def wrapped(seed: int = 0) -> Any:
    """Shard a model by Megatron-FSDP: flat buffers, of which each rank has an interval."""
    with cuda():
        from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model

        mesh = mesh_of((4,), ("dp",))
        how: dict[str, Any] = {"dp_shard_dim": "dp", "fsdp_unit_modules": [nn.Linear], "zero_dp_strategy": 3}
        return fully_shard_model(net(seed), device_mesh=mesh, **how)


def attach(named: dict[str, Any]) -> None:
    """Let Megatron-FSDP's own helper say which rows each rank has."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    preprocess_state_dict_for_uneven_dtensor(named)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Take a step whose gradients are the parameters themselves."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def save_and_load(path: Path) -> None:
    """Save a sharded model and its optimizer; load both into other values; save again."""
    model = wrapped().module
    attach(dict(model.named_parameters()))
    bcp.save(path / "first", {"model": model, "optimizer": stepped(model)})
    target = wrapped(seed=3).module
    attach(dict(target.named_parameters()))
    fresh = torch.optim.AdamW(target.parameters(), lr=3.0)
    bcp.load(path / "first", {"model": target, "optimizer": fresh})
    bcp.save(path / "again", {"model": target, "optimizer": fresh})


def save_state_dict(path: Path) -> None:
    """Save the state dict to which Megatron-FSDP itself attaches what is where."""
    bcp.save(path, {"model": wrapped().state_dict()})


def without_statements(path: Path) -> dict[str, str]:
    """Try to save what says nothing, and return the errors."""
    whole = wrapped()
    stated = whole.state_dict()  # whose tensors are others than the parameters: these go on saying nothing
    optimizer = stepped(whole.module)
    states: dict[str, Any] = {
        "wrapper": {"model": whole},
        "module": {"model": whole.module},
        "parameters": {"model": dict(whole.module.named_parameters())},
        "optimizer": {"model": stated, "optimizer": optimizer},
        "version 2, DTensor": {
            "model": {"w": version_2(DTensor.from_local(torch.ones(2, 3), mesh_of((4,)), [Shard(0)]))}
        },
        "version 2, local": {"model": {"w": version_2(torch.ones(2, 3))}},
    }
    return {name: said(bcp.save, path, each) for name, each in states.items()}


def version_2(tensor: torch.Tensor) -> nn.Parameter:
    """Mark a parameter as version 2 does."""
    parameter = nn.Parameter(tensor)
    parameter._mfsdp_parameter_group = object()  # type: ignore[attr-defined]  # as they do
    return parameter


# -- with tensor parallelism, whose mesh dimension cuts first -----------------------------------------


ROWS = {"uneven": (5, 3), "even": (4, 4)}
"""How many rows of a tensor parallel rank's 8 each data parallel rank has."""


def after_tp(whole: torch.Tensor, rows: tuple[int, int], *, stated: bool) -> DTensor:
    """Return Megatron-FSDP's DTensor of a parameter that two tensor parallel ranks share."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor

    dp, tp = divmod(dist.get_rank(), 2)
    ours = whole.chunk(2)[tp]
    parameter = nn.Parameter(ours.clone())
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1  # type: ignore[attr-defined]  # as they do
    index = FSDPDistributedIndex(mesh_of((2, 2), ("dp", "tp")), dp_shard_dim="dp", tp_dim="tp")
    local = ours.split(rows)[dp].clone()
    return make_fsdp_dtensor(local, parameter, index, update_uneven_dtensor_chunk_meta=stated)


def save_after_tp(path: Path) -> dict[str, Any]:
    """Save both, load each with the rows of the other, and return the errors of those that say nothing."""
    with cuda():
        whole = torch.arange(48.0).view(16, 3)
        bcp.save(path, {"model": {name: after_tp(whole, rows, stated=True) for name, rows in ROWS.items()}})
        swapped = {"uneven": ROWS["even"], "even": ROWS["uneven"]}
        targets = {name: after_tp(whole * 0, rows, stated=True) for name, rows in swapped.items()}
        bcp.load(path, {"model": targets})
        dp, tp = divmod(dist.get_rank(), 2)
        for name, rows in swapped.items():
            assert torch.equal(targets[name]._local_tensor, whole.chunk(2)[tp].split(rows)[dp]), name
        silent = {name: after_tp(whole, rows, stated=False) for name, rows in ROWS.items()}
        return {name: said(bcp.save, path, {"model": {"w": tensor}}) for name, tensor in silent.items()}
