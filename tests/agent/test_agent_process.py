"""Agents as processes, beside trainers that are killed: what training went on from becomes durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from agents import until
from keeping_job import NODES, states

import bcp

JOB = Path(__file__).with_name("keeping_job.py")
SECONDS = 240.0  # the end of a hang


class Hosts:
    """Two hosts: their agents, and the job that runs on them."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, root / "store"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, *more: str) -> subprocess.Popen[bytes]:
        """Start an agent, with its parent."""
        arguments = ["--node", f"n{node}", "--poll", "0.05", "--patience", "1", *more]
        command = [sys.executable, "-m", "bcp.agent", self.folder(node), self.store, *arguments]
        self.agents[node] = subprocess.Popen(command)  # noqa: S603 -- our own
        return self.agents[node]

    def folder(self, node: int) -> Path:
        return self.root / f"node-{node}"

    def train(self, steps: int, phase: str = "") -> list[int]:
        """Run the job until it is killed; return the steps behind which training went on."""
        command = [sys.executable, JOB, self.root, str(steps), phase]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 -- our own
        assert done.returncode == -signal.SIGKILL
        return [*map(int, done.stdout.split())]

    def ended(self) -> None:
        """Wait until the agents have ended by themselves."""
        assert [agent.wait(SECONDS) for agent in self.agents.values()] == [0] * len(self.agents)

    def durable(self) -> list[int]:
        """Return the steps in storage, each of which is whole and has the state of its step."""
        steps = []
        for path in sorted(self.store.glob("step-*")):
            if (path / "metadata.arrow").exists():
                step = int(path.name.removeprefix("step-"))
                assert bcp.Checkpoint(path).verify()
                target = states(0)
                bcp.load(path, target)
                assert target["extra_states"]["step"] == step
                assert all(torch.equal(target["model"][name], each) for name, each in states(step)["model"].items())
                steps.append(step)
        return steps


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        yield made
    finally:
        for agent in made.agents.values():
            for process in [*psutil.Process(agent.pid).children(), agent] if agent.poll() is None else []:
                process.kill()
            agent.wait()


def test_the_last_snapshot_of_a_killed_job_becomes_durable(hosts: Hosts) -> None:
    """Step 3 was to stay in memory; its trainers have died, so it is worth most."""
    assert hosts.train(3) == [1, 2, 3]
    for node in range(NODES):
        hosts.start(node)
    hosts.ended()
    assert hosts.durable() == [2, 3]
    assert not list(hosts.store.rglob("drain/*")), "records stay"


def test_agents_beside_the_trainers(hosts: Hosts) -> None:
    """They wait for the trainers at first, and newer snapshots may take the place of one that is not durable yet."""
    for node in range(NODES):
        hosts.start(node)
    until(lambda: all((hosts.folder(node) / "served").exists() for node in range(NODES)), "the agents serve")
    assert hosts.train(9) == [*range(1, 10)]
    hosts.ended()
    assert {*hosts.durable()} <= {2, 4, 6, 8, 9}
    assert hosts.durable()[-1] == 9


@pytest.mark.parametrize("phase", ["copy", "mark"])
def test_a_job_that_is_killed_in_a_snapshot_leaves_the_one_before(phase: str, hosts: Hosts) -> None:
    assert hosts.train(3, phase) == [1, 2]
    for node in range(NODES):
        hosts.start(node)
    until(lambda: hosts.durable() == [2], "step 2 is durable; an agent with a mark of step 3 waits on")
    for agent in hosts.agents.values():
        agent.terminate()
        agent.wait(SECONDS)
    assert hosts.durable() == [2]


def test_an_agent_that_is_killed_starts_again(hosts: Hosts) -> None:
    hosts.train(2)
    first = hosts.start(0)
    until(lambda: list(hosts.store.rglob("drain/*")), "its share is in storage")
    [child] = psutil.Process(first.pid).children()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(SECONDS)
    until(lambda: [each for each in psutil.Process(first.pid).children() if each.pid != child.pid], "it starts again")
    hosts.start(1)
    hosts.ended()
    assert hosts.durable() == [2]


def test_one_agent_serves_a_host(hosts: Hosts) -> None:
    hosts.train(2)
    hosts.start(0)
    until(lambda: list(hosts.store.rglob("drain/*")), "it serves")
    command = [sys.executable, "-m", "bcp.agent", hosts.folder(0), hosts.store]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 -- our own
    assert done.returncode == 3
    assert b"there is an agent" in done.stderr


def test_an_agent_imports_no_torch(hosts: Hosts) -> None:
    hosts.train(2)
    agent = hosts.start(0)
    until(lambda: list(hosts.store.rglob("drain/*")), "it has worked")
    [child] = psutil.Process(agent.pid).children()
    assert not [each.path for each in child.memory_maps() if "torch" in each.path]
