"""A tiny loop with Accelerate: ``accelerate_job.py FOLDER [word ...]``; two models in two epochs of 8 batches."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from host_side import report, save_options
from torch.utils.data import DataLoader, TensorDataset

import bcp
import bcp.integrations.accelerate

torch.set_num_threads(1)
FOLDER, ASKED = os.environ.get("RUN_URL", sys.argv[1]), sys.argv[2:]


class Seen:
    """An object that the user registers."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def main() -> None:
    asked = {"term": 0, "every": 4, "plain": 0} | {word.split("=")[0]: int(word.split("=")[1]) for word in ASKED}
    settings = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=settings,
        gradient_accumulation_steps=2,
        step_scheduler_with_optimizer=not asked["plain"],  # else it counts the steps of all ranks
    )
    torch.manual_seed(0)
    body = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Dropout(0.0 if asked["plain"] else 0.2), torch.nn.Linear(32, 8)
    )
    head = torch.nn.Linear(8, 1)
    data = TensorDataset(torch.rand(32, 16), torch.rand(32))
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes, shuffle=True)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (body, head)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
    body, head, *optimizers, loader, schedule = accelerator.prepare(body, head, *optimizers, loader, schedule)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    torch.manual_seed(10 + accelerator.process_index)
    run = bcp.integrations.accelerate.run(accelerator, FOLDER, save=asked["every"], keep=3, save_options=save_options())
    losses: dict[int, float] = {}
    with run:
        step = run.resume()
        is_within = step % len(loader) > 0
        while step < 16:
            for x, y in loader:
                if is_within:  # the loader has drawn random numbers to go on
                    is_within = False
                    run.reapply_random_states()
                step += 1
                if step == asked["term"]:
                    os.kill(os.getpid(), signal.SIGTERM)
                with accelerator.accumulate(body, head):
                    loss = (head(body(x)).squeeze(-1) - y).square().mean()
                    accelerator.backward(loss)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    schedule.step()
                seen.samples += len(x)
                losses[step] = accelerator.gather(loss.detach()).mean().item()
                if step % 2 == 0:  # gradients that are accumulated are no state
                    run.maybe_save(step)
                if run.stopping(step) and step % 2 == 0:
                    break
            if run.stopping(step):
                break
    if accelerator.is_main_process:
        report(
            losses=losses,
            resumed=run.resumed.step,
            passed_over=len(run.resumed.passed_over),
            samples=seen.samples,
            rate=optimizers[0].param_groups[0]["lr"],
            folders=sorted(path.name for path in Path(FOLDER).glob("step-*")),
        )


main()
