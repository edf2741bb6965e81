"""Agents that a trainer has started: a later life of the job replaces one that it would start otherwise."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from agents import until

from bcp.agent.host import NICE
from bcp.tiers.folder import NodeFolder
from bcp.tiers.starting import start_agent
from bcp.tiers.wire import greets

STORE = "s3://bucket/run"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    made = NodeFolder(tmp_path / "memory")
    yield made
    for process in agents(made):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: not agents(made), "they are dead")


def agents(folder: NodeFolder) -> list[psutil.Process]:
    """Return the processes of agents of a host, parents first."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "bcp.agent" in words and str(folder.root) in words:
            found.append(process)
    return sorted(found, key=lambda process: "--child" in process.info["cmdline"])


def start(folder: NodeFolder, secret: str, listen: str = "127.0.0.1", pace: float | None = None) -> set[int]:
    """Start an agent, unless it runs; return the ids of its processes. Nobody answers as its storage."""
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "job", "secret": secret}
    start_agent(folder, STORE, "n0", listen, options, pace)
    until(lambda: len(agents(folder)) == 2, "one agent, and its parent")  # the one before may be ending
    return {process.pid for process in agents(folder)}


def test_an_agent_that_would_be_started_alike_stays(folder: NodeFolder) -> None:
    first = start(folder, "old")
    assert len(first) == 2
    assert start(folder, "old") == first


@pytest.mark.parametrize("change", ["credentials", "address", "pace"])
def test_an_agent_that_would_be_started_otherwise_makes_way(change: str, folder: NodeFolder) -> None:
    """It ends by itself, with its parent. The last one can be had again."""
    first, address = start(folder, "old"), folder.address()
    changes = {"credentials": {"secret": "new"}, "address": {"listen": "127.0.0.2"}, "pace": {"pace": 1e6}}
    second = start(folder, **{"secret": "old", **changes[change]})
    assert len(second) == 2
    assert not first & second
    stored = json.loads((folder.root / "storage-options.json").read_text())
    assert stored["secret"] == ("new" if change == "credentials" else "old")
    assert (folder.address().partition(":")[0] == address.partition(":")[0]) == (change != "address")
    third = start(folder, "old")
    assert not third & (first | second)
    assert start(folder, "old") == third


def test_an_agent_that_somebody_else_has_started_stays(folder: NodeFolder) -> None:
    first = start(folder, "old")
    folder.put_way("")  # as an agent does that is started by hand
    assert start(folder, "new") == first


def test_an_agent_that_is_dying_is_not_taken_for_one_that_serves(folder: NodeFolder) -> None:
    """It has its locks and its listening socket for a moment, and greets nobody any more."""
    folder.put_token(b"a token of this job")
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        assert stack.enter_context(folder.serving()) is not None
        folder.put_address(f"127.0.0.1:{listener.getsockname()[1]}")
        dead = threading.Timer(0.5, stack.close)
        dead.start()
        started = start(folder, "old")
        dead.join()
    assert len(started) == 2
    assert greets(folder.address(), 60.0)


def test_an_agent_works_behind_others_and_answers_beside_them(folder: NodeFolder) -> None:
    """The thread that lets readers in has the priority of the job, whose next start may wait for it."""
    _, child = agents_in_order(folder, start(folder, "old"))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    until(lambda: os.getpriority(os.PRIO_PROCESS, child) == max(NICE, own), "the agent lets others go first")
    threads = [int(path.name) for path in Path(f"/proc/{child}/task").iterdir()]
    beside = [each for each in threads if os.getpriority(os.PRIO_PROCESS, each) == own]
    assert len(beside) >= 2, "the one that lets readers in, and the one that ends the agent at last"


def test_an_agent_leaves_no_zombie(folder: NodeFolder) -> None:
    """Its parent is a child of the trainer."""
    parent, child = agents_in_order(folder, start(folder, "old"))
    os.kill(child, 9)
    os.kill(parent, 9)
    until(lambda: parent not in {each.pid for each in psutil.Process().children()}, "the trainer has reaped it")
    until(lambda: not folder.is_served(), "the child is dead, too")
    assert len(start(folder, "old") - {parent, child}) == 2


def agents_in_order(folder: NodeFolder, pids: set[int]) -> list[int]:
    found = [process.pid for process in agents(folder)]
    assert {*found} == pids
    return found
