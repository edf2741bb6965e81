"""A stage of your own in the save: any async function that takes a part and returns it.

This one looks at every part that is saved, after the copy to host memory: it keeps norms, and stops the save where a
weight is not finite. Training is not blocked by it, and what it refuses never becomes a checkpoint.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bcp
from bcp.stages.items import HostPart

Graph = bcp.extend.Pipeline[Any, Any]


async def log_norm(part: HostPart) -> HostPart:
    """Print the norm of each tensor of a part; a tensor that is only partly in it shows its flat range."""
    for name, tensor in part.tensors.items():
        print(f"{name:<20} norm {tensor.float().norm():8.4f}")
    return part


async def refuse_nan(part: HostPart) -> HostPart:
    """Fail on numbers that no training comes back from."""
    for name, tensor in part.tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite")
    return part


def watched(graph: Graph) -> Graph:
    """Put both behind the copy to the host; this is what ``SaveOptions(edit=...)`` wants."""
    return graph.after("d2h", bcp.extend.Stage("norm", log_norm)).after("norm", bcp.extend.Stage("finite", refuse_nan))


def main(root: Path) -> None:
    """Save a healthy model; then break it, and see that the save is refused and the first checkpoint stays."""
    torch.manual_seed(0)
    last = nn.Linear(64, 8)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), last)
    options = bcp.SaveOptions(edit=watched)
    bcp.save(root / "healthy", {"model": model}, options=options)

    with torch.no_grad():
        last.bias[3] = float("nan")
    try:
        bcp.save(root / "broken", {"model": model}, options=options)
    except bcp.StageError as error:
        print(f"refused: {error}")
    try:
        bcp.load(root / "broken", {"model": model})
    except (bcp.NotACheckpointError, bcp.UncommittedError) as error:
        print(f"and nothing was committed: {error}")
    bcp.load(root / "healthy", {"model": model})
    assert last.bias.isfinite().all()
    print("the healthy checkpoint is as it was")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
