"""A loop with Accelerate that bcp saves and resumes: ``with_accelerate.py FOLDER STEPS``.

The file may not be called ``accelerate.py``: the name would hide the package.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import bcp.integrations.accelerate


def main(folder: str, steps: int) -> None:
    """Train, from the newest checkpoint on."""
    settings = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples: Any = torch.rand(64, 16)
    loader: Any = DataLoader(samples, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with bcp.integrations.accelerate.run(accelerator, folder, save=5, keep=3) as run:
        step = run.resume()
        is_within = step % len(loader) > 0  # an epoch goes on
        while step < steps and not run.stopping(step):
            for batch in loader:
                if is_within:
                    run.reapply_random_states()  # the loader has drawn random numbers to go on
                    is_within = False
                loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                run.maybe_save(step)
                if step == steps or run.should_stop(step):
                    break
    if accelerator.is_main_process:
        print("RESULT", json.dumps({"resumed": run.resumed.step, "step": step}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
