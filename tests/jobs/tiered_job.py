"""A job in a run with a memory tier: ``tiered_job.py ROOT STEPS [DIES]``, alone or as ranks of torchrun.

The rank's host is ``ROOT/node-N``, with two ranks on each. It saves at every step, and says ``resumed STEP HOSTS``. All
ranks are killed as soon as the save of the last step has returned on this rank, if there is a third word: by that
signal. Without one the run ends well.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import bcp


def main(root: Path, steps: int, dies: str) -> None:
    """Train."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(40, 40)
    states: dict[str, Any] = {"model": model, "extra_states": {"step": 0, "ranks": size}}
    node = rank // 2
    tiers = bcp.Tiers(folder=root / f"node-{node}", node=f"n{node}", listen="127.0.0.1")
    with bcp.Run(root / "run", states, save=1, durable=1000, keep=100, tiers=tiers) as run:
        first = run.resume()
        assert states["extra_states"]["step"] == first
        assert not first or {*model.weight.detach().flatten().tolist()} == {float(first)}
        sys.stdout.write(f"resumed {first} {run.resumed.hosts}\n")
        sys.stdout.flush()
        for step in range(first + 1, first + steps + 1):
            with torch.no_grad():
                model.weight.fill_(step)
            states["extra_states"]["step"] = step
            pending = run.maybe_save(step)
            if dies and step == first + steps:
                if size > 1:
                    assert pending is not None
                    pending.released()
                os.kill(0 if dies == "all" else os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
