"""Tiny trainings with Ray Train in one session: ``ray_job.py FOLDER NAME ...``, where ``LIVES`` has the names."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from host_side import report
from ray.train import CheckpointConfig, FailureConfig, PreemptionInfo, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution import context as ray_internals
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bcp
import bcp.integrations.ray


@dataclass(frozen=True)
class Life:
    """What is asked of a trainer.

    Attributes:
        experiment: name of its folder.
        path: of the run, outside of the experiment; "" for the default.
        kills: number of the save in which rank 1 dies, once.
        drains: the step behind which Ray says that it drains the node, once.
        damages: the checkpoint that is damaged before.
    """

    experiment: str
    steps: int = 12
    workers: int = 2
    path: str = ""
    kills: int = 0
    drains: int = 0
    damages: int = 0


LIVES = {
    "killed": Life("killed", kills=2),
    "one": Life("killed", workers=1, damages=12),
    "drained": Life("drained", drains=5, path="elsewhere"),
}


class Training:
    """A model in shards of all workers, and its data, which all workers draw alike."""

    def __init__(self) -> None:
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra_states": {"schedule": self.schedule}}

    def step(self) -> torch.Tensor:
        part = torch.rand(8, 16).chunk(self.size)[self.rank]
        loss = (self.model(part) - part.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        return total / self.size


def train(asked: tuple[str, Life]) -> dict[str, Any]:
    folder, life = asked
    torch.set_num_threads(1)
    mark, rank = Path(folder, life.experiment, "died"), torch.distributed.get_rank()
    losses: dict[int, float]
    if life.kills and not mark.exists():
        losses = whole(life.steps)  # in the same workers: others would take another 15 seconds
        if rank == 0:
            Path(folder, "whole.json").write_text(json.dumps(losses))
    training = Training()
    options: dict[str, Any] = {
        "save_options": bcp.SaveOptions(edit=partial(killed_in, life.kills if rank == 1 else 0, mark, count(1))),
        "on_commit": partial(take_the_node, life.drains),
    }
    losses = {}
    path = Path(folder, life.path) if life.path else None
    with bcp.integrations.ray.run(training.states, path, save=4, keep=2, **options) as run:
        begin = run.resume()
        for step in range(begin + 1, life.steps + 1):
            loss = training.step()
            losses[step] = loss.item()
            if step == life.drains and not begin:
                drain()
            run.maybe_save(step, {"loss": loss})
            if run.should_stop(step):
                break
    latest = bcp.integrations.ray.path_of(ray.train.get_checkpoint())
    return {"resumed": begin, "passed_over": len(run.resumed.passed_over), "losses": losses, "latest": latest}


def whole(steps: int) -> dict[int, float]:
    """Train without bcp and without a failure; return the losses."""
    training = Training()
    return {step: training.step().item() for step in range(1, steps + 1)}


def killed_in(number: int, mark: Path, saves: Any, graph: bcp.extend.Graph) -> bcp.extend.Graph:
    """Kill this worker before the upload of a save, in its first life."""
    if next(saves) != number or mark.exists():
        return graph

    def kill(part: Any) -> Any:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return part

    async def stage(part: Any) -> Any:
        return await bcp.extend.in_thread(kill, part)

    return graph.before("upload", bcp.extend.Stage("kill", stage))


def drain() -> None:
    """Tell this worker what Ray tells the workers of a node that it drains, and wait until the run has heard it."""
    ray_internals.get_train_context().preemption_context.preemption_info = PreemptionInfo(None, {"node": [0, 1]})
    for thread in threading.enumerate():
        if thread.name == "bcp-notice":
            thread.join()


def take_the_node(drains: int, step: int, _: object) -> None:
    """Let the time of the notice end with the commit of the last step: Ray restarts the workers then."""
    told = ray_internals.get_train_context().preemption_context
    if told.preemption_info is not None and step >= drains:
        told.preemption_info = replace(told.preemption_info, deadline_ms=0)


def refused() -> list[str]:
    """Return what is refused in workers without a process group, whose trainer deletes checkpoints."""
    run, states = bcp.integrations.ray.run, {"model": torch.nn.Linear(2, 2)}
    words = [error_of(lambda: run(states))]
    config = ray_internals.get_train_context().train_run_context.run_config
    config.checkpoint_config.num_to_keep = None
    words.append(error_of(lambda: run(states)))
    solo = partial(run, states, coordinator=object())
    words.append(error_of(lambda: solo("folder")))
    words.append(error_of(lambda: solo().aresume()))
    config.storage_path = "s3://bucket?region=eu"
    words.append(error_of(solo))
    del ray_internals.get_train_context
    words.append(error_of(solo))
    return words


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except bcp.InputError as error:
        return str(error)
    return "nothing"


def fitted(folder: str, name: str) -> dict[str, Any]:
    life = LIVES[name]
    if life.damages:
        for file in Path(folder, life.experiment, "bcp", f"step-{life.damages:08d}", "model").iterdir():
            file.write_bytes(b"x" * file.stat().st_size)
    trainer = TorchTrainer(
        lambda asked: train(asked["life"]),
        train_loop_config={"life": (folder, life)},
        scaling_config=ScalingConfig(num_workers=life.workers),
        run_config=RunConfig(
            name=life.experiment, storage_path=folder, failure_config=FailureConfig(max_failures=int(life.kills > 0))
        ),
    )
    result = trainer.fit()
    return {
        **result.return_value,
        "checkpoint": bcp.integrations.ray.path_of(result.checkpoint),
        "metrics": result.metrics,
        "reported": [metrics["step"] for _, metrics in result.best_checkpoints],
    }


def refusals(folder: str) -> list[str]:
    trainer = DataParallelTrainer(
        refused,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="refused", storage_path=folder, checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    words: list[str] = trainer.fit().return_value
    words.append(error_of(lambda: bcp.integrations.ray.run({"model": torch.nn.Linear(2, 2)}, folder)))
    return [*words, error_of(lambda: bcp.integrations.ray.path_of(ray.train.Checkpoint.from_directory(folder)))]


def main(folder: str, *names: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:
        ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False, _temp_dir=place
        )
        report(**{name: refusals(folder) if name == "refused" else fitted(folder, name) for name in names})
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
