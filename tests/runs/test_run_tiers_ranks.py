"""Jobs with a memory tier on several hosts: killed, and back from the memories in another layout."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import tiered_job
import torch
from agents import count_sent, until
from by_torchrun import torchrun
from forked import Forked
from ranks import Ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bcp
from bcp.agent import serve
from bcp.agent.loop import Agent
from bcp.errors import PeerError, StorageError
from bcp.format.metadata import METADATA_KEY
from bcp.tiers.digests import digested
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import FullError

WIDTH = 24
SECONDS = 240.0
KILLS = 20
pytestmark = pytest.mark.dist


def make_states(kind: str) -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    if kind == "sharded":
        fully_shard(model)
    elif kind == "hybrid":
        half = dist.get_world_size() // 2
        fully_shard(model, mesh=init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard")))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra_states": {"step": 0}}


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return all parameters, whole: torch's own gather."""
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in model.parameters()]


def set_to(model: nn.Module, step: int) -> None:
    """Give each element a value that tells step and place."""
    for number, each in enumerate(model.parameters()):
        whole = torch.arange(each.numel(), dtype=torch.float32).reshape(each.shape) + 1000 * step + number
        local: torch.Tensor = each
        if isinstance(each, DTensor):
            local = each.to_local()
            chunk = -(-each.shape[0] // each.device_mesh.shape[-1])
            offset = min(chunk * each.device_mesh.get_local_rank(each.device_mesh.ndim - 1), each.shape[0])
            whole = whole[offset : offset + local.shape[0]]
        with torch.no_grad():
            local.copy_(whole)


def trained(
    root: Path, steps: int, nodes: Sequence[int], kind: str = "sharded", copies: Any = 1, parity: int | None = None
) -> tuple[int, int]:
    """Train so many steps further, and die; return the step that was resumed, and of how many memories.

    With copies or parity, each step waits until other hosts have those of the last snapshot that is to be copied.
    """
    node = nodes[dist.get_rank()]
    states, folder = make_states(kind), root / f"node-{node}"
    tiers = bcp.Tiers(folder=folder, node=f"n{node}", listen="127.0.0.1", copies=copies, parity=parity)
    run = bcp.Run(root / "run", states, save=1, durable=1000, tiers=tiers)
    first = run.resume()
    if first:
        expected = make_states(kind)["model"]
        set_to(expected, first)
        assert all(map(torch.equal, values(states["model"]), values(expected)))
        assert states["extra_states"]["step"] == first
    for step in range(first + 1, first + steps + 1):
        set_to(states["model"], step)
        states["extra_states"]["step"] = step
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
        if copies != 1 or parity is not None:
            memory = run._tiered._memory  # type: ignore[union-attr]  # a run with tiers
            until(memory.is_copied, "the next host has copies")  # type: ignore[union-attr]  # same
    hosts = run.resumed.hosts
    assert not hosts or "0 bytes from storage" in str(run.resumed)
    dist.barrier()
    if nodes.index(node) == dist.get_rank():
        kill_agents(folder)
    dist.barrier()
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    return first, hosts


def agents_of(root: Path) -> list[psutil.Process]:
    """Return the processes of agents below a directory, parents first."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "bcp.agent" in words and any(word.startswith(str(root)) for word in words):
            found.append(process)
    return sorted(found, key=lambda process: "--child" in process.info["cmdline"])


def kill_agents(root: Path) -> None:
    """Kill agents; nobody may wait for those that are dead, for nobody reaps the children of a killed one."""
    for process in agents_of(root):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: not agents_of(root), "they are dead")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_agents(tmp_path)


def committed(root: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob(f"run/step-*/{METADATA_KEY}"))


def test_back_in_other_layouts_without_a_byte_of_storage(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """Four ranks and three, sharded and replicated, on two hosts; one life after the other. Nothing is in storage."""
    assert ranks4.run(trained, root, 3, (0, 0, 1, 1)) == [(0, 0)] * 4
    assert committed(root) == []
    assert ranks3.run(trained, root, 2, (1, 0, 1)) == [(3, 2)] * 3
    empty(root)
    assert ranks3.run(trained, root, 1, (0, 1, 1), "plain") == [(5, 2)] * 3
    empty(root)
    assert ranks4.run(trained, root, 1, (0, 1, 0, 1)) == [(6, 2)] * 4


def flip(folder: NodeFolder, step: int) -> None:
    """Flip a bit of the model of one rank in a step, behind the digests."""
    chosen = []
    for mark in folder.marks():
        with folder.holding(mark) as held:
            assert held is not None
            asyncio.run(digested(folder.files, held.blank))
            if held.intent.step == step:
                chosen += [path for path in folder.data_files()[mark] if path.parent.name == "model"]
    data = bytearray(chosen[0].read_bytes())
    data[-1] ^= 1
    chosen[0].write_bytes(data)


def test_all_ranks_pass_a_damaged_snapshot_over(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """The block that one rank cannot read costs all of them this snapshot, and no more than this one."""
    assert ranks4.run(trained, root, 3, (0, 0, 1, 1)) == [(0, 0)] * 4
    flip(NodeFolder(root / "node-1"), 3)
    assert ranks3.run(trained, root, 1, (1, 0, 1)) == [(2, 2)] * 3
    empty(root)
    assert ranks3.run(trained, root, 1, (0, 1, 1)) == [(3, 2)] * 3


def refused(root: Path, nodes: Sequence[int]) -> str:
    """Resume without agents; return the error."""
    node = nodes[dist.get_rank()]
    tiers = bcp.Tiers(folder=root / f"node-{node}", node=f"n{node}", agent="external")
    with pytest.raises((StorageError, PeerError)) as error:
        bcp.Run(root / "run", make_states("sharded"), tiers=tiers).resume()
    return str(error.value)


def test_a_snapshot_on_a_host_without_an_agent_is_not_given_up(ranks4: Ranks, root: Path) -> None:
    """Older checkpoints are in storage. The next life, with agents, goes on from memory."""
    assert ranks4.run(trained, root, 3, (0, 0, 1, 1)) == [(0, 0)] * 4
    bcp.save(root / "run" / "step-00000001", {"extra_states": {"step": 1}})
    for folder in root.glob("node-*"):
        NodeFolder(folder).put_address("")
    for words in ranks4.run(refused, root, (0, 1, 0, 1)):
        assert "its agent serves no other host: start it with --listen" in words
        assert "The snapshot may be whole, and stays" in words
    assert ranks4.run(trained, root, 1, (0, 0, 1, 1)) == [(3, 2)] * 4


def trained_without_room(root: Path, steps: int) -> str:
    """Train on a host of which one rank gets no room in the last step; return the place of this step."""
    tiers = bcp.Tiers(folder=root / "node-0", node="n0", on_full="durable")
    states = make_states("sharded")
    run = bcp.Run(root / "run", states, save=1, durable=1000, tiers=tiers)
    assert run.resume() == 0
    for step in range(1, steps + 1):
        set_to(states["model"], step)
        states["extra_states"]["step"] = step
        with pytest.MonkeyPatch.context() as patch:
            if step == steps and dist.get_rank() == 2:
                patch.setattr("bcp.tiers.memory.TierMemory.begin", no_room)
            pending = run.maybe_save(step)
            assert pending is not None
            pending.released()
    dist.barrier()
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    return pending.wait().path


def no_room(*_: object) -> None:
    raise FullError("7 of 9 bytes left, and the snapshot of rank 2 needs 8 more")


def test_all_ranks_save_to_storage_if_one_has_no_room(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """They go on from there in another layout."""
    assert ranks4.run(trained_without_room, root, 3) == [f"{root}/run/step-00000003"] * 4
    assert committed(root)[-1] == 3
    kill_agents(root / "node-0")
    assert ranks3.run(trained, root, 1, (0, 0, 1)) == [(3, 0)] * 3


def empty(root: Path) -> None:
    """Take away what the agents of a life have stored: the snapshot that it came back from."""
    for path in [*root.glob("run/step-*")]:
        shutil.rmtree(path)


def job(root: Path, steps: int, dies: str = "") -> tuple[int, int]:
    """Run a job of one rank to its end, in a group of its own; return the step that it has resumed, and the hosts."""
    command = [sys.executable, tiered_job.__file__, str(root), str(steps), dies]
    done = Forked(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    out, _ = done.communicate(timeout=SECONDS)
    assert done.returncode == (-signal.SIGKILL if dies else 0)
    [words] = [line.split() for line in out.splitlines() if line.startswith("resumed")]
    return int(words[1]), int(words[2])


def test_a_job_that_is_killed_as_soon_as_the_save_returns(root: Path) -> None:
    """Its agent lives in a session of its own, makes the last snapshot durable, and ends. Each life finds it."""
    for life in range(KILLS):
        assert job(root, 2, "itself" if life % 2 else "all")[0] == 2 * life
    until(lambda: committed(root)[-1:] == [2 * KILLS], "the agent makes the last step durable")
    until(lambda: not agents_of(root), "it ends by itself")
    assert bcp.Checkpoint(root / "run" / f"step-{2 * KILLS:08d}").verify()
    assert len([*root.glob("node-0/model/*")]) <= 5, "the folder grows"


def test_a_job_whose_agent_dies_with_it_comes_back(root: Path) -> None:
    assert job(root, 3, "all") == (0, 0)
    kill_agents(root)
    assert job(root, 2, "all")[0] == 3
    kill_agents(root)
    step, _ = job(root, 1)
    assert step == 5
    assert committed(root)[-1] == 6
    until(lambda: not agents_of(root), "the run has ended")
    assert not list(root.glob("node-0/model/*"))


def test_ranks_of_torchrun_are_killed_one_after_the_other(root: Path) -> None:
    """Four ranks on two hosts; torchrun ends those that are left. Then three ranks go on."""
    done = torchrun(4, tiered_job.__file__, str(root), "3", "itself")
    assert done.returncode != 0
    assert done.stdout.count("resumed 0 0") == 4
    until(lambda: committed(root) == [3], "the agents make it durable")
    done = torchrun(3, tiered_job.__file__, str(root), "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed 3 ") == 3
    assert committed(root)[-1] == 5


@pytest.mark.long
@pytest.mark.kills
def test_a_lost_host_is_replaced_by_copies(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """Each of four hosts has the files of the one before it. The next lives are on those that are left."""
    assert ranks4.run(trained, root, 4, (0, 1, 2, 3), "sharded", 2) == [(0, 0)] * 4
    shutil.rmtree(root / "node-2")
    empty(root)
    assert ranks3.run(trained, root, 3, (0, 1, 3), "sharded", 2) == [(4, 3)] * 3
    shutil.rmtree(root / "node-0")
    empty(root)
    assert ranks3.run(trained, root, 2, (3, 1, 1), "plain", 2)[0][0] == 7
    for node in (1, 3):
        assert len([*root.glob(f"node-{node}/model/*")]) <= 10, "the folder grows"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that the agents of this process have sent, by the directory of the file."""
    return count_sent(monkeypatch)


@contextmanager
def agents_here(root: Path, nodes: int) -> Iterator[None]:
    """Serve these hosts by threads of this process."""
    folders = [NodeFolder(root / f"node-{node}") for node in range(nodes)]

    def run(folder: NodeFolder) -> None:
        with folder.serving(), serve.serving(folder, "127.0.0.1"):
            anyio.run(Agent(folder, str(root / "run"), folder.root.name, poll_seconds=0.05).run)

    threads = [threading.Thread(target=run, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(folder.address() for folder in folders), "the agents serve")
        yield
    finally:
        for folder in folders:
            folder.ask_to_leave(folder.way())
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("kind", ["hybrid", "plain"])
def test_a_lost_host_is_replaced_by_twins(
    ranks4: Ranks, ranks3: Ranks, root: Path, sent: Counter[str], kind: str
) -> None:
    """No tensor goes over the network. The other host has all values, for three ranks of another layout."""
    with agents_here(root, 2):
        assert ranks4.run(trained, root, 3, (0, 0, 1, 1), kind, "auto") == [(0, 0)] * 4
    assert (sent["model"], sent["optimizer"]) == (0, 0)
    assert sent["extra_states"] > 0
    shutil.rmtree(root / "node-1")
    empty(root)
    assert ranks3.run(trained, root, 1, (0, 2, 2), "sharded", 1) == [(3, 1)] * 3


@pytest.mark.long
@pytest.mark.kills
def test_twins_and_network_one_life_after_the_other(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """Replicas on two hosts each, then on three hosts, then none; each life is left by one host."""
    assert ranks4.run(trained, root, 4, (0, 1, 2, 3), "hybrid", "auto") == [(0, 0)] * 4
    shutil.rmtree(root / "node-2")
    empty(root)
    assert ranks3.run(trained, root, 3, (0, 1, 3), "plain", "auto") == [(4, 3)] * 3
    shutil.rmtree(root / "node-0")
    empty(root)
    assert ranks3.run(trained, root, 3, (3, 1, 1), "sharded", "auto") == [(7, 2)] * 3
    shutil.rmtree(root / "node-1")
    empty(root)
    assert ranks3.run(trained, root, 1, (3, 3, 4), "plain", "auto") == [(10, 1)] * 3
    for folder in map(NodeFolder, (root / "node-3", root / "node-4")):
        assert len(folder.data_files()) <= 5 * 3, "the folder grows"
        assert not folder.drifts()


def left_at_once(root: Path, nodes: Sequence[int]) -> list[str]:
    """Save once, and kill the agents before they look; return the operations of files that nobody has compared."""
    node, states = nodes[dist.get_rank()], make_states("plain")
    folder = root / f"node-{node}"
    tiers = bcp.Tiers(folder=folder, node=f"n{node}", listen="127.0.0.1", copies="auto")
    run = bcp.Run(root / "run", states, save=1, durable=1000, tiers=tiers)
    first = run.resume()
    dist.barrier()
    if nodes.index(node) == dist.get_rank():
        kill_agents(folder)
    dist.barrier()
    set_to(states["model"], first + 1)
    states["extra_states"]["step"] = first + 1
    pending = run.maybe_save(first + 1)
    assert pending is not None
    pending.released()
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    return [mark.operation for mark in NodeFolder(folder).twins()]


@pytest.mark.long
@pytest.mark.kills
def test_killed_agents_and_trainers_leave_no_files_of_twins(ranks4: Ranks, root: Path) -> None:
    """Each life leaves files that no agent has compared; they do not add up."""
    nodes = (0, 0, 1, 1)
    for life in range(3):
        operations = {each for one in ranks4.run(left_at_once, root, nodes) for each in one}
        assert 1 <= len(operations) <= 2, "its own, and those that it has come back from"
        empty(root)
        for node in (0, 1):
            assert len([*root.glob(f"node-{node}/model/*")]) <= 2 * 2 + 2 * 3, f"the folder grows in life {life}"
    assert ranks4.run(trained, root, 2, nodes, "plain", "auto") == [(3, 2)] * 4
    assert not any(NodeFolder(root / f"node-{node}").twins() for node in (0, 1))


@pytest.mark.long
@pytest.mark.kills
def test_a_lost_host_is_rebuilt_from_parity(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """Four hosts of a group, and then three, which lose one again. Nothing is in storage."""
    assert ranks4.run(trained, root, 4, (0, 1, 2, 3), "sharded", 1, 4) == [(0, 0)] * 4
    shutil.rmtree(root / "node-2")
    empty(root)
    assert ranks3.run(trained, root, 3, (0, 1, 3), "sharded", 1, 4) == [(4, 3)] * 3
    for node in (0, 1, 3):
        assert len([*root.glob(f"node-{node}/parity/*.xor")]) in (2, 3), "two, and that of step 4 until storage has it"
    shutil.rmtree(root / "node-0")
    empty(root)
    assert ranks3.run(trained, root, 2, (3, 1, 1), "plain", 1, 4)[0][0] == 7
    for node in (1, 3):
        assert len([*root.glob(f"node-{node}/model/*")]) <= 5, "the folder grows"
        assert len([*root.glob(f"node-{node}/parity/*.xor")]) <= 3, "the folder grows"


@pytest.mark.long
@pytest.mark.kills
def test_a_flipped_bit_in_parity_leads_to_the_snapshot_in_storage(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """The agents have stored the one that the second life came back from; the third one goes on from there."""
    assert ranks4.run(trained, root, 3, (0, 1, 2, 3), "sharded", 1, 4) == [(0, 0)] * 4
    assert ranks4.run(trained, root, 2, (0, 1, 2, 3), "sharded", 1, 4) == [(3, 4)] * 4
    until(lambda: committed(root) == [3], "the agents make it durable")
    shutil.rmtree(root / "node-2")
    for stripe in root.glob("node-*/parity/*.xor"):
        data = bytearray(stripe.read_bytes())
        stripe.write_bytes(bytes(each ^ 1 for each in data))
    assert ranks3.run(resumed, root, (0, 1, 3)) == [3] * 3


def resumed(root: Path, nodes: Sequence[int]) -> int:
    """Resume with parity, and end; return the step that was resumed."""
    node, states = nodes[dist.get_rank()], make_states("sharded")
    tiers = bcp.Tiers(folder=root / f"node-{node}", node=f"n{node}", listen="127.0.0.1", parity=4)
    with bcp.Run(root / "run", states, save=1, durable=1000, tiers=tiers) as run:
        first = run.resume()
        expected = make_states("sharded")["model"]
        set_to(expected, first)
        assert all(map(torch.equal, values(states["model"]), values(expected)))
        assert run.resumed.hosts == 0
    return first


def followed(root: Path) -> list[tuple[str, int | None, str]]:
    """Save two steps on hosts that copy each other, the second one into storage; return what has happened to them."""
    name = f"n{dist.get_rank()}"
    tiers = bcp.Tiers(folder=root / name, node=name, listen="127.0.0.1", copies=2)
    events: list[bcp.extend.Event] = []
    options = bcp.SaveOptions(observe=events.append)
    states = make_states("sharded")
    with bcp.Run(root / "run", states, save=1, durable=2, tiers=tiers, save_options=options) as run:
        run.resume()
        for step in (1, 2):
            pending = run.maybe_save(step)
            assert pending is not None
            pending.released()
            memory = run._tiered._memory  # type: ignore[union-attr]  # a run with tiers
            until(memory.is_copied, "the next host has copies")  # type: ignore[union-attr]  # same
    return [(each.what, each.step, each.operation) for each in events if isinstance(each, bcp.extend.TierEvent)]


@pytest.mark.long
@pytest.mark.kills
def test_all_ranks_tell_the_same_and_one_report_has_them(ranks3: Ranks, root: Path) -> None:
    told = ranks3.run(followed, root)
    assert told[0] == told[1] == told[2]
    first, second = (next(operation for _, step, operation in told[0] if step == number) for number in (1, 2))
    happened = [("released", 1, first), ("copied", 1, first), ("released", 2, second)]
    assert told[0] == [*happened, ("draining", 2, second), ("durable", 2, second)]
    [recording] = bcp.report(root / "run").recordings
    assert (recording.operation, recording.step) == (second, 2)
    assert [record.rank for record in recording.ranks] == [0, 1, 2]
    drains = [row for row in recording.events.to_pylist() if row["name"] == "drain"]
    assert [row["rank"] for row in drains] == [0]
    [summary] = bcp.report(root / "run").summaries
    assert summary.nbytes == sum(path.stat().st_size for path in (root / "run").rglob("*.safetensors"))
    assert 0 < summary.released < summary.seconds
