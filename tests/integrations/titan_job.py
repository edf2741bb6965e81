"""A job of torchtitan's debug Llama on CPU and gloo: python titan_job.py MODE FOLDER ASKED.

ASKED is a JSON object with fields of the checkpoint's config, and with ``steps``, ``stop``, ``any_readers``,
``tensor_parallel`` and ``finished``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_side import report, save_options

from benchmarks.chaos_hosts.titan_on_cpu import HostLoader, on_cpu, sample  # isort: skip -- replaces parts
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

import bcp
from bcp.integrations.torchtitan import BcpCheckpointManager

torch.set_num_threads(1)


class GlobalLoader(BaseDataLoader):
    """A loader whose state is the position in one order of all readers, so their number may change."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **__: Any) -> None:
        self.reader, self.readers, self.batch, self.position = dp_rank, dp_world_size, local_batch_size, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            first = self.position + self.reader * self.batch
            self.position += self.batch * self.readers
            inputs, labels = zip(*(sample(number) for number in range(first, first + self.batch)), strict=True)
            yield {"input": torch.stack([one["input"] for one in inputs])}, torch.stack(labels)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def shared_state(self) -> dict[str, int]:
        return self.state_dict()

    def unit_states(self) -> dict[str, Any]:
        return {}

    def wanted_units(self, _: Any, ids: Any) -> list[str]:
        return list(ids)

    def load_units(self, shared: dict[str, int], _: Any) -> None:
        self.load_state_dict(shared)

    def prepare(self, step: int) -> None:
        pass


def job(folder: str, asked: dict[str, Any]) -> Any:
    """Return the config of a job. A step has two batches of 2: of two ranks, or of one rank after the other.

    Both sum two gradients in float32, so losses do not depend on the number of ranks. A norm would: clipping is off.
    """
    any_readers = asked.pop("any_readers", False)
    config = on_cpu(llama3_debugmodel(), dropout=0.0 if any_readers else 0.1)
    config.dataloader = (GlobalLoader if any_readers else HostLoader).Config()
    config.parallelism.tensor_parallel_degree = asked.pop("tensor_parallel", 1)
    config.training.global_batch_size, config.training.max_norm = 4, 1e9
    config.training.steps = asked.pop("steps", 6)
    fields = {"enable": True, "interval": 2, "last_save_model_only": False, "save_options": save_options, **asked}
    config.dump_folder, config.checkpoint = folder, BcpCheckpointManager.Config(**fields)
    return config


def train(trainer: Any, stop: int) -> dict[str, Any]:
    """Train to the end. Step ``stop`` sends SIGTERM to rank 0, as a scheduler does."""
    losses: dict[int, float] = {}
    log = trainer.metrics_processor.log

    def logged(step: int, loss: Any, *rest: Any, **more: Any) -> None:
        losses[step] = float(loss)
        if step == stop and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        log(step, loss, *rest, **more)

    trainer.metrics_processor.log = logged
    trainer.train()
    trainer.close()
    return {"losses": losses, "step": trainer.step}


class Managers:
    """Makes checkpoint managers over the objects of one trainer, because the start of a process takes long."""

    def __init__(self, trainer: Any, folder: str) -> None:
        self.trainer, self.folder = trainer, folder

    def make(self, folder: str, *, kind: Any = BcpCheckpointManager, sd_adapter: Any = True, **fields: Any) -> Any:
        trainer = self.trainer
        spec = trainer.config.model_spec
        adapter = spec.state_dict_adapter(trainer.model_config, None) if sd_adapter else None
        config = kind.Config(**{"enable": True, "folder": folder, **fields})
        return config.build(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            sd_adapter=adapter,
            base_folder=self.folder,
        )

    def refusals(self) -> dict[str, str]:
        """Return the error of each field that cannot be obeyed."""
        asked: dict[str, dict[str, Any]] = {
            "initial_load_in_hf_quantized": {"initial_load_in_hf": True, "initial_load_path": "/hf"},
            "initial_load_in_hf": {"sd_adapter": False},
            "last_save_in_hf": {"sd_adapter": False},
            "create_seed_checkpoint": {"load_only": True},
        }
        values = {"load_step": -2, "exclude_from_loading": ["optimiser"], "tolerate": 1}
        asked["tolerate"] = {"async_mode": "disabled"}
        names = [*asked, "load_step", "exclude_from_loading"]
        found = {name: self.refusal(**{name: values.get(name, True), **asked.get(name, {})}) for name in names}
        return found | {"path": self.refusal(initial_load_in_hf=True)}

    def refusal(self, **fields: Any) -> str:
        try:
            self.make("refused", **fields)
        except bcp.InputError as error:
            return str(error)
        return "nothing was refused"

    def seams(self) -> dict[str, str]:
        """Return the errors for torchtitans that differ from the tested one."""
        base, found = BaseCheckpointManager, {}
        hook, trainer, config = base._save, type(self.trainer), base.Config
        finish = trainer.should_continue_training

        @dataclass(kw_only=True, slots=True)
        class Newer(config):
            replicas: int = 1

        del base._save
        found["hook"] = self.refusal()
        base._save = BaseCheckpointManager._close
        found["parameters"] = self.refusal()
        base._save = hook
        del trainer.should_continue_training
        found["trainer"] = self.refusal()
        trainer.should_continue_training = finish
        base.Config = Newer
        BcpCheckpointManager.Config.replicas = 2
        found["field"] = self.refusal()
        base.Config = config
        return found

    def zero(self) -> None:
        with torch.no_grad():
            for parameter in self.trainer.model_parts[0].parameters():
                parameter.zero_()

    def norm(self) -> float:
        return sum(float(p.full_tensor().double().square().sum()) for p in self.trainer.model_parts[0].parameters())

    def load(self, folder: str, step: int = -1, **fields: Any) -> list[Any]:
        """Load into zeros. Return the answer, a sum over the weights, the trainer's step, and the optimizer's."""
        self.zero()
        self.trainer.step = 0
        for optimizer in self.trainer.optimizers.optimizers:
            optimizer.state.clear()
        manager = self.make(folder, **fields)
        loaded = manager.load(step)
        counts = {float(state["step"]) for state in self.trainer.optimizers.optimizers[0].state.values()}
        manager.close()
        return [loaded, self.norm(), self.trainer.step, sorted(counts)]

    def report(self, finished: str) -> dict[str, Any]:
        """Load what a finished run has left in ``finished`` in all ways that the config has."""
        hf, last = f"{finished}/model-00000006-hf", f"{finished}/step-00000006"
        began = {"initial_load_path": last, "initial_load_model_only": False}
        results = {
            "load_only": self.load(finished, load_only=True),
            "load_step": self.load(finished, 5, load_only=True),
            "hf": self.load("hf", initial_load_path=hf, initial_load_in_hf=True),
            "model": self.load("model", initial_load_path=last),
            "everything": self.load("everything", **began),
            "excluded": self.load("excluded", exclude_from_loading=["optimizer", "train_state"], **began),
        }
        self.load("hf", initial_load_path=hf, initial_load_in_hf=True)
        theirs = self.make("theirs", kind=CheckpointManager, last_save_model_only=False)
        theirs.save(1, last_step=True)
        results["theirs"] = self.load("ours", initial_load_path=f"{self.folder}/theirs/step-1")
        manager = self.make("seeded", create_seed_checkpoint=True, export_dtype="bfloat16")
        manager.save(0, last_step=True)
        manager.close()
        results["seed"] = self.load("seeded")
        results["new"] = self.load("new")
        url = self.make("s3://bucket/run").folder
        return {"loads": results, "refusals": self.refusals(), "seams": self.seams(), "url": url}


def example(folder: str, steps: int) -> dict[str, Any]:
    """Run the example of the docs."""
    sys.path.append(str(Path(__file__).parents[2] / "examples/integrations"))
    program = importlib.import_module("train_torchtitan")
    trainer = program.main(on_cpu(program.make_config(folder, steps)))
    return {"step": trainer.step, "tokens": trainer.ntokens_seen, "windows": trainer.dataloader.consumed}


def main(mode: str, folder: str, asked: dict[str, Any]) -> None:
    init_logger()
    stop, finished = asked.pop("stop", 0), asked.pop("finished", "")
    if mode == "example":
        results = example(folder, **asked)
    elif mode == "train":
        results = train(job(folder, asked).build(), stop)
    else:
        results = Managers(job(folder, asked).build(), folder).report(finished)
    if dist.get_rank() == 0:
        report(**results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
