"""Four nodes train, one of them is lost, and three go on from the memory of those that are left.

Each node is a process here, with a directory as its memory and an agent of its own. The model is sharded over the
nodes. Nothing is in storage, so that every byte comes from memory: from a node's own files, and from the copies of the
lost one. The losses are those of a training that nobody has disturbed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
from local_ranks import LocalRanks
from torch import nn
from torch.distributed.fsdp import fully_shard

import bcp

NODES, LOST, COPIES_IT = (0, 1, 2, 3), 2, 3
LEAST, MORE = 20, 20
"""Steps before the loss, and behind the resumption."""


def make_model() -> nn.Module:
    """Return the same model on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train one step on the batch of this step; return its loss. All ranks have the same batch."""
    batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = (model(batch) - batch.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(rank: int, _: int, pipe: Connection, root: Path, nodes: Sequence[int], more: int | None) -> None:
    """Be one node: come back, train so many steps more, or until it is killed, and tell the parent each loss."""
    torch.set_num_threads(1)
    model = make_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    node = nodes[rank]
    tiers = bcp.Tiers(folder=root / f"memory-{node}", node=f"node-{node}", listen="127.0.0.1", copies=2)
    with bcp.Run(root / "run", {"model": model, "optimizer": optimizer}, save=1, durable=10**9, tiers=tiers) as run:
        first = run.resume()
        pipe.send((first, str(run.resumed)))
        for step in count(first + 1) if more is None else range(first + 1, first + more + 1):
            pipe.send((step, step_of(model, optimizer, step)))
            run.maybe_save(step)
            time.sleep(0.1)  # the agents copy meanwhile


def end_agents(root: Path, nodes: Sequence[int]) -> None:
    """Kill the agents of nodes, and wait for their ends: until then they write into the memory."""
    memories = {str(root / f"memory-{node}") for node in nodes}
    agents = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "bcp.agent" in words and not memories.isdisjoint(words):
            process.kill()
            agents.append(process)
    psutil.wait_procs(agents)


def lose(root: Path, node: int) -> None:
    """Let a node lose its memory and its agent, as by a loss of power."""
    end_agents(root, [node])
    shutil.rmtree(root / f"memory-{node}")


@contextmanager
def a_directory() -> Iterator[Path]:
    """Make a directory of this example. It is removed when no agent writes into it any more."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            end_agents(Path(folder), NODES)


def undisturbed(steps: int) -> dict[int, float]:
    """Return the losses of a training in one process, by step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return {step: step_of(model, optimizer, step) for step in range(1, steps + 1)}


def is_copied(root: Path) -> bool:
    """Whether the next node has a copy of a snapshot of the one that is to be lost."""
    words = [sys.executable, "-m", "bcp", "tiers", str(root / f"memory-{COPIES_IT}"), "--json"]
    memory = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)  # noqa: S603 -- our own
    return any(each["copied_from"] == f"node-{LOST}" for each in memory["snapshots"])


def main() -> None:
    """Lose a node, and compare the losses."""
    losses = dict[int, float]()
    with a_directory() as root:
        ranks = LocalRanks(train, len(NODES), root / "meeting-1", root, NODES, None)
        first, words = ranks.pipes[0].recv()
        print(f"4 nodes: {words}")
        while first < LEAST or not is_copied(root):
            while first < LEAST or ranks.pipes[0].poll():
                first, loss = ranks.pipes[0].recv()
                losses[first] = loss
        ranks.kill()
        lose(root, LOST)
        ranks.join()
        with suppress(EOFError):
            while ranks.pipes[0].poll():
                first, loss = ranks.pipes[0].recv()
                losses[first] = loss
        left = [node for node in NODES if node != LOST]
        print(f"killed at step {first}; the memory of node {LOST} is lost")
        ranks = LocalRanks(train, len(left), root / "meeting-2", root, left, MORE)
        resumed, words = ranks.pipes[0].recv()
        print(f"3 nodes: {words}")
        assert "memory of 3 hosts, 0 bytes from storage" in words
        assert resumed > 0
        last = resumed + MORE
        for _ in range(MORE):
            step, loss = ranks.pipes[0].recv()
            losses[step] = loss
        assert ranks.join() == [0] * len(left)
        assert bcp.latest(root / "run") == str(root / "run" / f"step-{last:08d}")
    expected = undisturbed(last)
    for step in range(1, last + 1):
        assert abs(losses[step] - expected[step]) < 1e-4 * expected[step], f"step {step}"
    print(f"losses of steps 1 to {last} are those of an undisturbed training; the last is {losses[last]:.4f}")


if __name__ == "__main__":
    main()
