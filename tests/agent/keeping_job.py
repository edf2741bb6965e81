"""A job of four ranks on two hosts, as tasks of one process: ``python keeping_job.py ROOT STEPS [PHASE]``.

It keeps a snapshot of every step, prints its number when it may go on, and dies by SIGKILL: at once behind the last
step, or in that step's PHASE: ``copy`` is before a part is copied on rank 2, ``mark`` between the marks of two ranks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import bcp
from bcp._calls import keep_call
from bcp.coordinators import memory_coordinators
from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import Mark
from bcp.tiers.saving import Aim

WORLD, NODES = 4, 2


def states(step: int) -> dict[str, Any]:
    """Return the state after a step."""
    model = {f"w{n}": torch.arange(n * 90_000, (n + 1) * 90_000, dtype=torch.float32) + step for n in range(6)}
    return {"model": model, "extra_states": {"step": step}}


def die(*_: object) -> None:
    """End as by the out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(graph: Any) -> Any:
    """Die before a part is copied."""

    async def run(item: Any) -> Any:
        die()
        return item

    return graph.before("d2h", bcp.extend.Stage("die", run))


def main(root: Path, steps: int, phase: str) -> None:
    """Train."""
    folders = [NodeFolder(root / f"node-{node}") for node in range(NODES)]
    memories = [TierMemory(folders[rank * NODES // WORLD], rank) for rank in range(WORLD)]
    if phase == "mark":
        mark, marked = NodeFolder.mark, []

        def half(self: NodeFolder, each: Mark) -> None:
            if len(marked) == WORLD * (steps - 1) + 2:
                die()
            marked.append(each)
            mark(self, each)

        NodeFolder.mark = half  # type: ignore[method-assign]  # to die there

    async def train() -> None:
        ranks = memory_coordinators(WORLD)
        for step in range(1, steps + 1):
            now = states(step)
            is_last = step == steps
            edit = {"edit": dying} if phase == "copy" and is_last else {}

            async def call(rank: int, step: int = step, now: Any = now, edit: Any = edit) -> None:
                options = bcp.SaveOptions(record=False, **(edit if rank == 2 else {}))
                aim = Aim(step, f"step-{step}", durable=step % 2 == 0)
                await keep_call(memories[rank], aim, now, None, options, ranks[rank]).run(lambda: None)

            await asyncio.gather(*map(call, range(WORLD)))
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()

    asyncio.run(train())
    die()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
