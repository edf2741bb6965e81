"""Which DeepSpeed settings put state where a planner cannot read or write it; each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from bcp.errors import StateError

__all__ = ["check_readable"]

_PARALLEL_SIZES = (
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_model_parallel_world_size",
)
"""What the versions of Megatron call the number of tensor-parallel ranks."""


def check_readable(engine: Any, optimizer: Any, module: nn.Module | None) -> None:
    """Refuse what cannot be read.

    Args:
        engine: the engine, or None where only its parts were passed.
        optimizer: DeepSpeed's optimizer, or None.
        module: the model inside the engine, or None.

    Raises:
        StateError: a setting is not supported; the message names it and says what to do.

    """
    for reason in (*_engine(engine), *_optimizer(optimizer), *_parameters(module)):
        raise StateError(f"DeepSpeed: {reason}")


def _engine(engine: Any) -> Iterator[str]:
    """Yield what is wrong with the engine."""
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        yield (
            "a PipelineEngine numbers its layers by pipeline stage; only engines without pipeline parallelism can be "
            "saved and loaded: use its own save_checkpoint, or train without PipelineModule"
        )
    for name in _PARALLEL_SIZES:
        size = getattr(getattr(engine, "mpu", None), name, None)
        if size is not None and size() > 1:
            yield (
                f"the engine's mpu splits tensors over {size()} ranks, and does not say how; use framework='megatron' "
                "with Megatron's own optimizer, or train with ZeRO alone"
            )
            return


def _optimizer(optimizer: Any) -> Iterator[str]:
    """Yield what is wrong with the optimizer."""
    if getattr(optimizer, "swap_optimizer", False):
        yield "offload_optimizer.device is 'nvme', so that states are in swap files; use 'cpu' or 'none'"
    if getattr(optimizer, "offload_optimizer", False) and getattr(optimizer, "partial_offload", 1.0) != 1.0:
        yield (
            f"offload_optimizer.ratio is {optimizer.partial_offload}, so that two optimizers share the states; use 1.0"
        )
    if getattr(optimizer, "zenflow", False):
        yield "zenflow keeps part of the states in buffers of its own; leave it out of zero_optimization"
    if any(base.__name__.startswith("SuperOffload") for base in type(optimizer).__mro__):
        yield "super_offload keeps the states in another process; use offload_optimizer without it"
    if getattr(optimizer, "offloaded_states", None):
        yield "engine.offload_states() took states away; call engine.reload_states() first"


def _parameters(module: nn.Module | None) -> Iterator[str]:
    """Yield what is wrong with a parameter."""
    named: Iterator[tuple[str, Any]] = iter(()) if module is None else module.named_parameters()
    for name, parameter in named:
        run = getattr(parameter, "ds_tensor", None)
        if not getattr(parameter, "allreduce", True):
            yield f"{name!r} belongs to MoE experts, whose names are the same on all ranks; train without MoE layers"
        if getattr(parameter, "tensor_model_parallel", False):
            yield f"{name!r} is split by AutoTP (tensor_parallel.autotp_size), which does not say how; use ZeRO alone"
        if getattr(parameter, "nvme_swapper", None) is not None:
            yield "offload_param.device is 'nvme', so that weights are in swap files; use 'cpu' or 'none'"
        if hasattr(run, "ds_quant_scale") or hasattr(parameter, "ds_quant_scale"):
            yield (
                f"{name!r} is kept quantized (zero_quantized_nontrainable_weights or quantized_initialization), so "
                "that its values are not there; turn that off"
            )
