"""Training under every framework, with a lazy snapshot under way or without: what is saved, and what comes out."""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import any_to_any
import deepspeed_job
import dtensor_layouts
import fsdp1
import megatron_gpt
import torch
import xxhash
from any_to_any import How
from exact import Exact, batch
from frameworks.cuda_as_cpu import cuda_as_cpu
from fsdp1 import Layout
from logical import differences, hyper, logical
from ranks import Ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bcp
from bcp._save.snapshot import OptimizerOwnedMemory
from bcp.planners import planner
from bcp.runtime.threads import in_thread
from bcp.state import guard as steps

FIRST = 2
"""How many steps are taken before the save."""

BUFFERS = {"steps", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
"""What may change before the next step."""


@dataclass(frozen=True)
class Megatron:
    """A model of Megatron's, and its layout; one stage."""

    net: megatron_gpt.Net
    layout: megatron_gpt.Layout

    def __str__(self) -> str:
        settings = [name for name in ("bf16", "distopt", "overlap") if getattr(self.net, name)]
        return "-".join([str(self.layout), *settings])


@dataclass(frozen=True)
class Case:
    """How to train, and when the copying may begin.

    Attributes:
        how: framework and layout.
        moment: "step": not before a step waits for it; "backward": when the backward before that begins.
        micro: of how many micro batches gradients are summed up in a step.
        model: which one of ``MODELS``, where it is not Megatron's.
    """

    how: How | Megatron
    moment: str = "step"
    micro: int = 1
    model: str = "exact"

    def __str__(self) -> str:
        parts = [str(self.how).replace("/", "-"), *([] if self.model == "exact" else [self.model]), self.moment]
        return "-".join(parts)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a training.

    Attributes:
        losses: of every forward pass.
        before: digest of the state at the save.
        after: digest of the state in the end.
        at_once: which tensors of the model are copied before training goes on.
        waited: how long a step waited for the snapshot, in seconds.
    """

    losses: list[float | None]
    before: str
    after: str
    at_once: set[str]
    waited: float


class Backward(Protocol):
    """Goes forward and backward with the micro batch of a number, the last one before a step or not."""

    def __call__(self, number: int, *, last: bool) -> float | None: ...


@dataclass(frozen=True)
class Training:
    """A model in training.

    Attributes:
        states: what is saved.
        module: the model, as it is called.
        backward: see there.
        update: takes the step.
        begin: what comes before the first of the micro batches.
    """

    states: dict[str, Any]
    module: nn.Module
    backward: Backward
    update: Callable[[], object]
    begin: Callable[[], object] = lambda: None

    def step(self, number: int, micro: int) -> list[float | None]:
        self.begin()
        losses = [self.backward(10 * number + at, last=at == micro - 1) for at in range(micro)]
        self.update()
        return losses


@dataclass
class Brake:
    """Keeps parts from being copied until a step waits for them, or until it is let go."""

    gates: Sequence[Any] = ()
    gone: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, item: Any) -> Any:
        await in_thread(self._wait)
        return item

    def go(self) -> None:
        self.gone.set()

    def _wait(self) -> None:
        while not (self.gone.wait(0.001) or any(gate.waiting for gate in self.gates)):
            pass

    @property
    def options(self) -> bcp.SaveOptions:
        return bcp.SaveOptions(edit=lambda graph: graph.before("d2h", bcp.extend.Stage("brake", self)))


def assert_lazy_is_eager(ranks: Ranks, path: Path, case: Case) -> list[float]:
    """Compare both checkpoints, and training with one without any; return how long the ranks' steps waited.

    Where Megatron shards fp32 weights, a rank may hold back the steps of whole weights only, and copies others at once.
    """
    seen, undisturbed = ranks.run(train, path, case), ranks.run(train, None, case)
    assert not differences(logical(path / "lazy"), logical(path / "eager"))
    assert hyper(path / "lazy") == hyper(path / "eager")
    assert [replace(each, waited=0.0) for each in seen] == undisturbed
    assert all(each.before != each.after for each in seen)
    if not (isinstance(case.how, Megatron) and case.how.net.distopt and not case.how.net.bf16):
        assert all(each.at_once <= BUFFERS for each in seen)
    return [each.waited for each in seen]


# -- on the ranks ------------------------------------------------------------------------------------


def train(path: Path | None, case: Case) -> Seen:
    """Take four steps; with a path, save before the third at once and lazily, to ``eager`` and ``lazy`` there."""
    if isinstance(case.how, Megatron):
        logging.disable(logging.WARNING)
        with cuda_as_cpu():
            return _train(path, case, _by_megatron(case.how))
    model = MODELS[case.model]()
    by_deepspeed = any_to_any.by_deepspeed(case.how)
    return _train(path, case, _by_deepspeed(str(case.how), model) if by_deepspeed else _by_torch(case, model))


def _train(path: Path | None, case: Case, job: Training) -> Seen:
    losses = [loss for number in range(FIRST) for loss in job.step(number, case.micro)]
    before, at_once = _digest(job.states), _at_once(job.states)
    pending = _save_twice(path, job, case.moment) if path else None
    losses += [loss for number in range(FIRST, FIRST + 2) for loss in job.step(number, case.micro)]
    waited = pending.wait().step_wait_seconds if pending else 0.0
    return Seen(losses, before, _digest(job.states), at_once, waited)


def _save_twice(path: Path, job: Training, moment: str) -> bcp.Pending[bcp.SaveResult]:
    bcp.save(path / "eager", job.states)
    if moment == "step":
        brake = Brake([steps._gate(one) for one in steps.torch_optimizers(job.states["optimizer"])[0]])
    else:
        brake = Brake()
        job.module.register_forward_hook(lambda *args: _when_backward_begins(args[-1], brake.go))
    return bcp.save(path / "lazy", job.states, async_checkpoint=True, snapshot="lazy", options=brake.options)


def _when_backward_begins(output: torch.Tensor, act: Callable[[], None]) -> None:
    output.register_hook(lambda _: act())


def _digest(states: dict[str, Any]) -> str:
    """Return a digest of all tensors that this rank holds."""
    found = xxhash.xxh3_64()
    for tensor in planner(None, states).local_shards(states).tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _at_once(states: dict[str, Any]) -> set[str]:
    """Return which tensors of the model are not left for later."""
    shards = planner(None, states).local_shards(states)
    optimizers, wrapped = steps.torch_optimizers(states["optimizer"])
    steady = OptimizerOwnedMemory(states["model"], optimizers, wrapped=wrapped)
    metas = map(shards.table.meta, range(len(shards.table)))
    named = [(meta.fqn, tensor) for meta, tensor in zip(metas, shards.tensors, strict=True) if meta.kind == "model"]
    return {fqn for fqn, tensor in named if tensor.numel() and tensor not in steady}


def rounds(path: Path, count: int) -> None:
    """Save lazily before every step under FSDP2, while each rank dawdles on its own before forward and step."""
    job = _by_torch(Case(Layout("fsdp2")), Exact())
    dawdle = random.Random(dist.get_rank())  # noqa: S311 -- no secret
    saves = []
    for number in range(count):
        saves.append(bcp.save(path / str(number), job.states, async_checkpoint=True, snapshot="lazy"))
        time.sleep(dawdle.choice((0, 0, 0.02)))
        job.backward(number, last=True)
        time.sleep(dawdle.choice((0, 0, 0.02)))
        job.update()
    for pending in saves:
        pending.wait()


# -- frameworks --------------------------------------------------------------------------------------


class Normed(Exact):
    """Has buffers that a forward pass changes, and that DDP sends from rank 0 to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + self.norm(self.inp(rows.unsqueeze(1).expand(-1, 7) * 0.25)).square().sum()


def recomputed() -> nn.Module:
    """Return a model whose blocks are computed a second time, in backward."""
    model = Exact()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"exact": Exact, "normed": Normed, "recomputed": recomputed}


def _by_torch(case: Case, model: nn.Module) -> Training:
    """Train under torch's own frameworks, with gradients that are unscaled and clipped."""
    how = case.how
    assert not isinstance(how, Megatron)
    fsdp1.prepare()
    job = any_to_any.trainer(how, model)
    model, optimizer = job.states["model"], job.states["optimizer"]
    rank = dist.get_rank() % how.size if isinstance(how, Layout) else dtensor_layouts.data_parallel(how)[0]

    def backward(number: int, *, last: bool) -> float:  # noqa: ARG001 -- as for the others
        loss = model(batch(number, rank))
        (2 * loss).backward()
        return float(loss.detach())

    def update() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        if isinstance(how, Layout) and how.kind == "fsdp1":
            model.clip_grad_norm_(100.0)
        elif how != "tp_fsdp2":  # where parameters are on two meshes, over which torch cannot sum
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(job.states, model, backward, update)


def _by_deepspeed(how: str, model: nn.Module) -> Training:
    """Train in a stage of DeepSpeed."""
    job = deepspeed_job.Job(how, model)
    engine = job.model

    def backward(number: int, *, last: bool) -> float:
        engine.set_gradient_accumulation_boundary(last)
        loss = engine(batch(number, dist.get_rank()))
        engine.backward(loss)
        return float(loss.detach())

    return Training(job.states, engine, backward, engine.step)


def _by_megatron(how: Megatron) -> Training:
    """Train a model of Megatron's."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads

    job = megatron_gpt.build(how.net, how.layout, 5)
    (chunk,) = job.chunks
    size, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()

    def begin() -> None:
        chunk.zero_grad_buffer()
        job.optimizer.zero_grad()

    def backward(number: int, *, last: bool) -> float | None:
        with nullcontext() if last else chunk.no_sync():
            return job._forward_backward(megatron_gpt.batch(how.net, number).chunk(size)[rank])

    def update() -> None:
        finalize_model_grads(job.chunks)
        job.optimizer.step()

    return Training(job.states, chunk, backward, update, begin)
