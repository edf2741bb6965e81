"""A training of Ray Train that bcp saves and resumes: ``with_ray.py FOLDER STEPS``.

The file may not be called ``ray.py``: the name would hide the package.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig

import bcp.integrations.ray


def train(config: dict[str, Any]) -> dict[str, int]:
    """Train on each worker, from the newest checkpoint on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + ray.train.get_context().get_world_rank())
    with bcp.integrations.ray.run({"model": model, "optimizer": optimizer}, save=5, keep=3) as run:
        step = begin = run.resume()
        while step < config["steps"]:
            batch = torch.rand(8, 16)
            loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            run.maybe_save(step, {"loss": loss.item()})
            if run.should_stop(step):
                break
    return {"resumed": begin, "step": step}


def main(folder: str, steps: int) -> None:
    """Run the training; a second call goes on in the same experiment."""
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": steps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run-7", storage_path=folder, failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    path = bcp.integrations.ray.path_of(result.checkpoint)
    print("RESULT", json.dumps({**result.return_value, "loads": bcp.Checkpoint(path).step}))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    main(sys.argv[1], int(sys.argv[2]))
