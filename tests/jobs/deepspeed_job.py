"""What every rank does with a model under DeepSpeed."""

from __future__ import annotations

import functools
import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from exact import ADAMW, Exact, batch
from ranks import kept
from torch import distributed as dist
from torch import nn, optim
from watch import watched

import bcp
from bcp.planners import planner

STAGES: dict[str, dict[str, Any]] = {
    "z0": {"stage": 0},
    "z1": {"stage": 1},
    "z2": {"stage": 2, "round_robin_gradients": True},
    "z3": {"stage": 3, "stage3_param_persistence_threshold": 20, "sub_group_size": 60},
    "z3-hpz": {"stage": 3, "stage3_param_persistence_threshold": 20, "zero_hpz_partition_size": 2},
    "z2-offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "z3-offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
"""ZeRO settings by name. In z3 the vectors are persistent, and there are several sub-groups in each group."""

PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16-all": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp16-anew": {"fp16": {"enabled": True, "initial_scale_power": 6}},
}
"""Precisions by name. bf16 is BF16_Optimizer in stage 1, bf16-all is not."""


class Job:
    """A model in training, and the states to save.

    Attributes:
        model: the engine, which is what is saved as the optimizer, too.
        size: how many data-parallel ranks share a model.
    """

    def __init__(self, kind: str, model: nn.Module | None = None) -> None:
        """Build it; ``kind`` is a stage, a precision, and perhaps "pairs" or "fused": "z3/bf16"."""
        self.model = engine_of(model or Exact(), kind)
        self.size = dist.get_world_size() // (2 if kind.endswith("pairs") else 1)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.model}

    def step(self, number: int) -> None:
        self.model.backward(self.model(batch(number, dist.get_rank() % self.size)))
        self.model.step()


@functools.cache
def _deepspeed() -> Any:
    """Import DeepSpeed on first use, for CPUs and without compiling anything; silent."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    logging.disable(logging.WARNING)
    import deepspeed  # noqa: PLC0415 -- not in the parent process, nor before the environment is set

    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed calls what torch 2.13 renames
    # DeepSpeed refuses fp16 on CPUs whose oneDNN lacks it; torch computes fp16 on any CPU, only slower
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None  # prints, and takes most of the time
    with kept():
        deepspeed.utils.groups._WORLD_GROUP = dist.new_group()  # else it makes one that is not kept
    gc.freeze()  # ZeRO-3 collects garbage in every engine: 0.3 s of a processor for all that was imported
    return deepspeed


@contextmanager
def page() -> Iterator[dict[str, Any]]:
    """Give the page of the documentation what the launcher of DeepSpeed sets."""
    _deepspeed()
    yield {}


class Pairs:
    """What DeepSpeed asks about groups of ranks: two neighbours share a model, all pairs train the same."""

    def __init__(self) -> None:
        with kept():
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            alone = [dist.new_group([rank]) for rank in range(4)]
        self.group, self.alone = groups[dist.get_rank() // 2], alone[dist.get_rank()]

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.alone

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group


pairs = functools.cache(Pairs)


def _initialize(**how: Any) -> Any:
    """Return an engine that knows nothing of those before it."""
    deepspeed = _deepspeed()
    deepspeed.utils.groups.mpu = None
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return deepspeed.initialize(**how)[0]


def engine_of(model: nn.Module, kind: str, groups: list[dict[str, Any]] | None = None) -> Any:
    """Return the engine of a model whose parameters are in two groups, or those given."""
    stage, precision, *more = kind.split("/")
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = groups or [{"params": part} for part in (parameters[:5], parameters[5:]) if part]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # it is 1 otherwise
        "zero_optimization": STAGES[stage],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISION[precision],
    }
    optimizer = optim.AdamW(groups, **ADAMW)
    fused = optim.AdamW if "fused" in more else type(None)  # what takes the place of the one that needs a GPU
    with patch.object(_deepspeed().runtime.engine, "FusedAdam", fused):
        return _initialize(model=model, optimizer=optimizer, config=config, mpu=pairs() if "pairs" in more else None)


def optimizers(kinds: list[str]) -> list[str]:
    """Return which of DeepSpeed's optimizers each kind has."""
    return [type(Job(kind).model.optimizer).__name__ for kind in kinds]


def reload_model(source: Path, path: Path, kind: str, part: str) -> None:
    """Load only the weights, into the engine or into the module in it; take step 2 and save everything."""
    job = Job(kind, Exact(1))
    bcp.load(source, {"model": job.model if part == "engine" else job.model.module}, options=bcp.LoadOptions(cast=True))
    job.step(2)
    bcp.save(path, job.states)


def parts(path: Path, kind: str) -> None:
    """Save the module and the optimizer in the engine instead of the engine."""
    job = Job(kind)
    for step in range(2):
        job.step(step)
    bcp.save(path, {"model": job.model.module, "optimizer": job.model.optimizer})


def learning_rates(source: Path | None, path: Path, kind: str) -> list[float]:
    """Save a learning rate of its own for each group, or load them, from ``source``, into groups in another order."""
    model = Exact()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.25}]
    if source:
        groups = [{"params": rest, "lr": 1.0}, {"params": [first], "lr": 2.0}]
    engine = engine_of(model, kind, groups)
    states = {"model": engine, "optimizer": engine}
    if source:
        bcp.load(source, states)
    bcp.save(path, states)
    return [group["lr"] for group in engine.optimizer.param_groups]


def sizes(path: Path, kind: str) -> tuple[int, int]:
    """Save and load a matrix of 4 MiB; return the bytes of the largest tensors that were made meanwhile."""
    engine = engine_of(nn.Linear(1024, 1024, bias=False), kind)
    with watched() as saving:
        bcp.save(path, {"model": engine, "optimizer": engine})
    with watched() as loading:
        bcp.load(path, {"model": engine, "optimizer": engine})
    return saving.largest, loading.largest


def second_copies(path: Path) -> tuple[int, int]:
    """Return how many second copies of weights there are after a forward pass, and after a load."""
    engine = engine_of(Exact(), "z3-hpz/fp32")
    bcp.save(path, {"model": engine})
    engine(batch(0, dist.get_rank()))
    count = [sum(p.ds_secondary_tensor is not None for p in engine.module.parameters())]
    bcp.load(path, {"model": engine})
    count.append(sum(p.ds_secondary_tensor is not None for p in engine.module.parameters()))
    return count[0], count[1]


def whole_copies(source: Path, kind: str) -> dict[str, torch.Tensor]:
    """Load after a step; return the parameters that ZeRO-3 has in one piece between steps."""
    job = Job(kind, Exact(1))
    job.step(7)
    bcp.load(source, job.states)
    named = job.model.module.named_parameters()
    return {fqn: p.data.clone() for fqn, p in named if p.ds_status.name == "AVAILABLE"}


def save_one_name(path: Path) -> None:
    """Save weights of which the tied one has only the name that sorts last, and its states the other one."""
    weights = Exact().state_dict()
    state = {"head.weight": {"exp_avg": torch.zeros_like(weights.pop("head.weight"))}}
    bcp.save(path, {"model": weights, "optimizer": {"state": state}})


def linked(source: Path, kind: str) -> bool:
    """Load before the first step; return whether DeepSpeed's own functions find the states then."""
    job = Job(kind, Exact(1))
    bcp.load(source, job.states)
    found = [p._hp_mapping.optim_fragment for p in job.model.module.parameters() if getattr(p, "_hp_mapping", None)]
    return bool(found) and all(set(each) == {"exp_avg", "exp_avg_sq"} for each in found)


def counted(source: Path, path: Path) -> tuple[type, int]:
    """Load into an optimizer of DeepSpeed's, which count steps as an int; return what it has then."""
    kernels = type("FusedAdam", (optim.AdamW,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    job = Job("z2/fp32", Exact(1))
    job.model.optimizer.optimizer.__class__ = kernels
    bcp.load(source, job.states)
    bcp.save(path, job.states)
    steps = {state["step"] for state in job.model.optimizer.optimizer.state.values()}
    (step,) = steps
    return type(step), step


class Scaled(nn.Linear):
    """A module whose state dict has an entry that nothing takes back."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 -- torch's
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.full((2,), 3.0)


class Looking(nn.Linear):
    """A module with a hook that looks at the weight after a load."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_load_state_dict_post_hook(lambda module, _: module.weight.detach().norm())


def refused_modules(path: Path) -> tuple[list[str], tuple[str, ...]]:
    """Load modules under ZeRO-3 that cannot take their state as it was saved.

    Returns the errors of strict loads, and the unexpected names of a load that is not strict.
    """
    said = []
    for module in (Scaled(), Looking()):
        engine, place = engine_of(module, "z3/fp32"), path / type(module).__name__
        bcp.save(place, {"model": engine})
        with torch.no_grad(), _deepspeed().zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
            for parameter in module.parameters():
                parameter.fill_(7.0)
        said.append(_said_of_load(place, engine))
        with _deepspeed().zero.GatheredParameters(list(module.parameters())):
            assert all(parameter.eq(7.0).all() for parameter in module.parameters()), "something was written"
    report = bcp.load(path / "Scaled", {"model": engine_of(Scaled(), "z3/fp32")}, strict=False)
    return said, report.unexpected


def _said_of_load(path: Path, engine: Any) -> str:
    try:
        bcp.load(path, {"model": engine})
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusal(path: Path, case: str) -> str:
    """Return what a save, or a load, says to a setting that cannot be read."""
    try:
        _REFUSED[case](path)
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _save_engine(kind: str, change: Callable[[Any], object] = lambda _: None) -> Callable[[Path], None]:
    """Return what saves an engine after a change to it."""

    def save_it(path: Path) -> None:
        job = Job(kind)
        change(job.model)
        bcp.save(path, job.states)

    return save_it


def _with(owner: str, **values: Any) -> Callable[[Any], None]:
    """Return what sets attributes of the engine's optimizer, or of its first parameter."""

    def change(engine: Any) -> None:
        target = engine.optimizer if owner == "optimizer" else next(engine.module.parameters())
        for name, value in values.items():
            setattr(target, name, value)

    return change


def _pipeline(path: Path) -> None:
    pipe = _deepspeed().pipe.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2, loss_fn=torch.sub)
    optimizer = optim.AdamW(pipe.parameters())
    config = {"train_micro_batch_size_per_gpu": 1}
    bcp.save(path, {"model": _initialize(model=pipe, optimizer=optimizer, config=config)})


def _without_optimizer(stage: int) -> Callable[[Path], None]:
    def save_it(path: Path) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine = _initialize(model=Exact(), config=config)
        bcp.save(path / "model", {"model": engine})  # this is fine
        bcp.save(path, {"model": engine, "optimizer": engine})

    return save_it


def _inner_optimizer(path: Path) -> None:
    engine = engine_of(Exact(), "z2/fp32")
    bcp.save(path, {"model": engine, "optimizer": engine.optimizer.optimizer})


def _state_dict(path: Path) -> None:
    engine = engine_of(Exact(), "z2/fp32")
    bcp.save(path, {"model": engine.module_state_dict(), "optimizer": engine})


def _module_alone(path: Path) -> None:
    states = {"model": engine_of(Exact(), "z2/fp32").module}
    bcp.save(path, states)  # this is fine
    bcp.load(path, states)


class _Split(Pairs):
    def get_model_parallel_world_size(self) -> int:
        return 2


_REFUSED: dict[str, Callable[[Path], None]] = {
    "nvme": _save_engine("z3/fp32", _with("optimizer", swap_optimizer=True)),
    "nvme weights": _save_engine("z3/fp32", _with("parameter", nvme_swapper=object())),
    "ratio": _save_engine("z3-offload/fp32", _with("optimizer", partial_offload=0.5)),
    "zenflow": _save_engine("z2/fp32", _with("optimizer", zenflow=True)),
    "offloaded": _save_engine("z1/bf16-all", lambda engine: engine.offload_states()),
    "experts": _save_engine("z1/fp32", _with("parameter", allreduce=False)),
    "autotp": _save_engine("z1/fp32", _with("parameter", tensor_model_parallel=True)),
    "mpu": _save_engine("z1/fp32", lambda engine: setattr(engine, "mpu", _Split())),
    "quantized": _save_engine("z3/fp32", _with("parameter", ds_quant_scale=1.0)),
    "gathering": _save_engine(
        "z3/fp32", lambda e: setattr(next(e.module.parameters()), "ds_status", SimpleNamespace(name="INFLIGHT"))
    ),
    "replaced": _save_engine("z2/fp32", _with("parameter", data=torch.zeros(3, 5, 2))),
    "pipeline": _pipeline,
    "no optimizer": _without_optimizer(0),
    "no optimizer, ZeRO-3": _without_optimizer(3),
    "inner optimizer": _inner_optimizer,
    "state dict": _state_dict,
    "module alone": _module_alone,
}
"""By name: what raises a StateError."""


def probe() -> str:
    """Return what the planner says about the installed version, with DeepSpeed imported."""
    _deepspeed()
    return planner("deepspeed", {}).probe()


def probe_changed() -> str:
    """Return what it says when a class lacks what is read."""
    kind = _deepspeed().runtime.bf16_optimizer.BF16_Optimizer
    with patch.object(kind, "_link_all_hp_params"):
        del kind._link_all_hp_params
        try:
            planner("deepspeed", {})
        except bcp.InputError as error:
            return str(error)
    return "accepted"


def save_own(path: Path, kind: str, make: Callable[[], nn.Module] = Exact, beside: Path | None = None) -> None:
    """Take two steps, and save with DeepSpeed's own function; with bcp, too, if ``beside`` is given."""
    job = Job(kind, make())
    for step in range(2):
        job.step(step)
    job.model.save_checkpoint(str(path), client_state={"epoch": 3, "odd": b"x"})
    if beside:
        bcp.save(beside, job.states)


def merged(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights that DeepSpeed's own converter makes of a folder."""
    _deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: PLC0415 -- as above

    return {name: tensor.clone() for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(path)).items()}


def universal(path: Path, target: Path) -> None:
    """Make a universal checkpoint of a step's folder, by DeepSpeed's own converter."""
    _deepspeed()
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415 -- as above

    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    how = {"strict": True, "inject_missing_state": True, **workers}
    if dist.get_rank() == 0:
        ds_to_universal.main(SimpleNamespace(input_folder=str(path), output_folder=str(target), **how))
    dist.barrier()
