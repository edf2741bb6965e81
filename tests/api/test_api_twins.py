"""Twins: ranks on two hosts write each other's tensors, so that each host's files have a second holder without network.

Values are those of plain tensors; bytes of the network are counted where agents send them.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import count_sent
from click.testing import CliRunner
from safetensors.torch import load_file
from tasks import on_ranks
from test_api_recover import SHAPES, Flat, values

import bcp
from bcp._calls import keep_call
from bcp.agent import serve
from bcp.agent.copying import Copier
from bcp.agent.pace import Pace
from bcp.backends import LocalBackend
from bcp.cli.tiers import command
from bcp.errors import InputError, PeerError
from bcp.extend import TierEvent
from bcp.tiers.copies import TwinState, leave_twins, twin_state
from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import FullError, Mark
from bcp.tiers.recovery import Hosts, find_whole
from bcp.tiers.saving import Aim, NoRoomError
from bcp.tiers.status import look
from bcp.tiers.twins import Spread

WORLD = 4
TOKEN = b"the token of this job"
LOADING = bcp.LoadOptions(record=False)

Spoil = Callable[[int, Flat], None]


class Job:
    """Four ranks on hosts with an agent each. Ranks with equal numbers modulo ``shards`` are replicas."""

    def __init__(self, root: Path, hosts: Sequence[int], shards: int, stack: ExitStack) -> None:
        self.root, self.hosts, self.shards = root, hosts, shards
        names = [f"node-{node}" for node in range(max(hosts) + 1)]
        self.folders = [NodeFolder(root / name) for name in names]
        self.events: list[TierEvent] = []
        for folder in self.folders:
            folder.put_token(TOKEN)
            stack.enter_context(serve.serving(folder, "127.0.0.1"))
        self.all = Hosts(tuple(names), tuple(folder.address() for folder in self.folders))
        self.agents = [Copier(folder, 0.01, Pace(None)) for folder in self.folders]
        self.memories: list[TierMemory] = []
        self.begin()
        stack.callback(lambda: [memory.close() for memory in self.memories])

    def begin(self) -> None:
        """Let the processes of all ranks begin a life."""
        for memory in self.memories:
            memory.close()
        self.memories = [TierMemory(self.folders[host], rank) for rank, host in enumerate(self.hosts)]
        for memory in self.memories:
            memory.copies, memory.spread = 1, Spread(self.all, self.hosts, 1)

    def observe(self, event: object) -> None:
        if isinstance(event, TierEvent):
            self.events.append(event)

    def keep_all(
        self, states: Callable[[int], Any], options: bcp.SaveOptions, names: Sequence[int] | None = None
    ) -> str:
        """Let ranks keep what they have; return the operation."""
        chosen, aim = names or range(WORLD), Aim(options.step or 0, f"step-{options.step}")

        async def call(number: int, ranks: Any) -> Any:
            rank = chosen[number]
            made = keep_call(self.memories[rank], aim, states(rank), None, options, ranks, names=names)
            return await made.run(lambda: None)

        [operation] = {result.operation for result in on_ranks(len(chosen), call)}
        return str(operation)

    def keep(self, step: int, spoil: Spoil | None = None, **more: Any) -> list[Any]:
        """Let all ranks keep a snapshot; return results or errors."""

        async def call(rank: int, ranks: Any) -> Any:
            planner = Flat(rank % self.shards, self.shards, step)
            if spoil is not None:
                spoil(rank, planner)
            options = bcp.SaveOptions(record=False, observe=self.observe, replicas="ignore", step=step)
            states = {"model": {}, "extra_states": {"step": step, "rank": rank}}
            aim = Aim(step, f"step-{step}", **more)
            return await keep_call(self.memories[rank], aim, states, planner, options, ranks).run(lambda: None)

        return on_ranks(WORLD, call)

    def kept(self, step: int, spoil: Spoil | None = None) -> str:
        results = self.keep(step, spoil)
        assert not [each for each in results if isinstance(each, BaseException)], results
        [operation] = {result.operation for result in results}
        return str(operation)

    def fetch(self) -> list[bool]:
        """Let each agent ask once, and compare and fetch what it is offered."""
        return [asyncio.run(agent.round(agent.folder.sources())) for agent in self.agents]

    def are_copied(self) -> bool:
        return all(memory.is_copied() for memory in self.memories)

    def wipe(self, node: int) -> None:
        shutil.rmtree(self.folders[node].root)
        self.folders[node] = NodeFolder(self.folders[node].root)

    def check_loads(self, nodes: Sequence[int], step: int) -> None:
        """Let as many ranks as nodes load the newest snapshot, in another layout, and compare all values."""

        def reach(name: str, *_: object) -> Any:
            return LocalBackend(self.root / name)

        async def call(rank: int, ranks: Any) -> int:
            node = f"node-{nodes[rank]}"
            memories = await find_whole(ranks, lambda: self.folders[nodes[rank]], node, 60.0)
            found = await memories.open(
                memories.snapshots[0].operation, lambda _: LocalBackend(self.root / "no"), reach
            )
            planner, states = Flat(rank, len(nodes)), {"model": {}, "extra_states": {"step": 0, "rank": -1}}
            await bcp.aload(found.storage, states, framework=planner, options=LOADING, coordinator=ranks)
            for fqn, (rows, columns) in SHAPES.items():
                start, stop = (rows * columns * each // len(nodes) for each in (rank, rank + 1))
                assert torch.equal(planner.memory[fqn], values(fqn, step)[start:stop]), fqn
            assert states["extra_states"]["step"] == step
            assert found.storage.read_nbytes["storage"] == 0
            return found.step

        assert on_ranks(len(nodes), call) == [step] * len(nodes)

    def files(self, node: int) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in (self.folders[node].root / "model").iterdir()}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that agents have sent, by the directory of the file."""
    return count_sent(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:
        yield lambda hosts=(0, 0, 1, 1), shards=1: Job(tmp_path, hosts, shards, stack)


@pytest.mark.parametrize(
    ("hosts", "shards"),
    [((0, 0, 1, 1), 1), ((0, 0, 1, 1), 2), ((0, 1, 2, 3), 2), ((0, 1, 2, 2), 1), ((0, 1, 0, 1), 1)],
)
def test_no_tensor_goes_over_the_network(
    make: Callable[..., Job], sent: Counter[str], hosts: tuple[int, ...], shards: int
) -> None:
    """Any host may be wiped: the others have all values, and load them in another layout."""
    job = make(hosts, shards)
    for step in (1, 2, 3):
        job.kept(step)
        assert all(job.fetch())
        assert job.are_copied()
    assert sent["model"] == 0
    assert sent["extra_states"] > 0
    for folder in job.folders:
        assert len({mark.operation for mark in folder.copies()}) == 2
        assert not folder.twins()
    lost = max(hosts)
    job.wipe(lost)
    job.check_loads([*range(lost)] * (1 if lost > 1 else 3), 3)
    assert not [event for event in job.events if event.what == "drifted"]


def test_shards_without_a_replica_go_over_the_network(make: Callable[..., Job], sent: Counter[str]) -> None:
    job = make((0, 0, 1, 1), 4)
    job.kept(1)
    assert all(job.fetch())
    assert job.are_copied()
    assert sent["model"] == sum(path.stat().st_size for path in job.root.glob("node-0/model/*"))
    job.wipe(1)
    job.check_loads([0, 0, 0], 1)


def flip_of(rank: int, fqn: str = "w3") -> Spoil:
    """Return what flips a bit of a tensor on one rank."""

    def spoil(each: int, planner: Flat) -> None:
        if each == rank:
            planner.memory[fqn].view(torch.int32)[-1] ^= 1

    return spoil


def test_a_replica_with_a_flipped_bit_is_told_and_the_copy_is_the_owners(
    make: Callable[..., Job], sent: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks 1 and 3 write half of each tensor as their own, and the other half as twins. One block is fetched."""
    job = make(shards=2)
    operation = job.kept(1, flip_of(3))
    assert all(job.fetch())
    assert job.are_copied()
    for path in [*job.root.glob(f"node-0/model/*-{operation}*")]:
        assert path.read_bytes() == (job.folders[1].root / "model" / path.name).read_bytes()
    own = job.folders[1].root / "model" / f"00003-{operation}.safetensors"
    assert sent["model"] == own.stat().st_size, "it has one block"
    memory = look(job.folders[0].root)
    equal = job.folders[1].root / "model" / f"00002-{operation}.safetensors"
    assert (memory.by_twins, len(memory.drifts)) == (equal.stat().st_size, 1)
    said = CliRunner().invoke(command, [str(job.folders[0].root)]).output
    assert f"drift   model/00003-{operation}.safetensors, block 0: 1 bytes of" in said
    assert "copies  node-1\ntwins   " in said
    job.kept(2)
    [event] = [event for event in job.events if event.what == "drifted"]
    assert (event.step, event.operation, event.place, event.nbytes) == (1, operation, "node-1", 1)
    assert f"model/00003-{operation}.safetensors, block 0: 1 bytes of 'w3[" in event.said
    assert "between rank 3 on host node-1 and its replica on rank 1; the copy is that of rank 3" in event.said
    assert caplog.text.count("replicas have drifted") == 2, "the agent tells it, and a trainer of its host"
    assert all(job.fetch())
    job.kept(3)
    assert len([event for event in job.events if event.what == "drifted"]) == 1, "it is told once"


def test_a_rank_that_is_still_writing_is_waited_for(make: Callable[..., Job], sent: Counter[str]) -> None:
    job = make()
    operation = job.kept(1)
    marks = [Mark(operation, rank) for rank in (2, 3)]
    own = [job.folders[1].root / "intents" / mark.name for mark in marks]
    for path in own:
        path.rename(path.with_suffix(".away"))
    assert all(job.fetch())
    assert not job.memories[0].is_copied()
    assert {twin_state(job.folders[1], mark) for mark in job.folders[1].twins()} == {TwinState.WRITING}
    for path in own:
        path.with_suffix(".away").rename(path)
    assert all(job.fetch())
    assert job.are_copied()
    assert sent["model"] == 0


def test_files_of_a_rank_that_died_before_its_mark_come_over_the_network(
    make: Callable[..., Job], sent: Counter[str]
) -> None:
    """They are torn, and nobody tells that replicas differ."""
    job = make()
    operation = job.kept(1)
    for rank in (2, 3):
        job.memories[rank].close()
        (job.folders[1].root / "intents" / Mark(operation, rank).name).unlink()
        torn = job.folders[1].root / "model" / f"{rank - 2:05d}-{operation}.safetensors"
        torn.write_bytes(bytes(torn.stat().st_size))
    assert all(job.fetch())
    assert job.memories[0].is_copied()
    assert sent["model"] == sum(
        (job.root / f"node-0/model/0000{n}-{operation}.safetensors").stat().st_size for n in (0, 1)
    )
    assert not job.folders[1].drifts()
    for rank in (0, 1):
        there, here = (job.root / f"node-{node}/model/{rank:05d}-{operation}.safetensors" for node in (0, 1))
        assert here.read_bytes() == there.read_bytes()


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_job_that_is_killed_before_agents_have_looked_leaves_nothing_behind(
    make: Callable[..., Job], *, is_marked: bool
) -> None:
    job = make()
    operation = job.kept(1)
    assert len(job.files(1)) == 4
    if not is_marked:
        for folder in job.folders:
            for mark in folder.marks():
                assert folder.take(mark)
    for node, folder in enumerate(job.folders):
        folder.leave_behind("")
        leave_twins(folder, "")
        assert not folder.twins()
        assert not folder.copies()
        assert len(job.files(node)) == 2, "files of this host's own ranks, whose memory the next save takes"
    job.begin()
    inodes = {inode for node in (0, 1) for inode in job.files(node).values()}
    job.kept(2)
    assert all(job.fetch())
    assert inodes < {inode for node in (0, 1) for inode in job.files(node).values()}
    assert not [*job.root.glob(f"node-*/model/*{operation}*")]
    assert [len(job.files(node)) for node in (0, 1)] == [4, 4]


def test_whole_files_of_the_snapshot_that_a_job_goes_on_from_stay(make: Callable[..., Job], sent: Counter[str]) -> None:
    job = make()
    operation = job.kept(1)
    for folder in job.folders:
        folder.want(operation)
        folder.leave_behind(operation)
        leave_twins(folder, operation)
        assert len(folder.twins()) == 2
    job.begin()
    for memory in job.memories:
        memory.live = frozenset({operation})
    assert all(job.fetch())
    assert all(folder.is_copied(operation, 1) for folder in job.folders)
    assert sent["model"] == 0
    job.wipe(0)
    job.check_loads([1, 1], 1)


def test_memory_is_used_again(make: Callable[..., Job]) -> None:
    """Two copies of each file stay, and are written in turns, by the ranks that have them mapped."""
    job = make()
    inodes: list[set[int]] = []
    for step in range(1, 8):
        job.kept(step)
        assert all(job.fetch())
        inodes.append({*job.files(0).values()})
    assert inodes[3] == inodes[4] == inodes[5] == inodes[6]
    assert len(inodes[6]) == 2 * 3 + 2 * 2, "three snapshots of two ranks, and two copies of two others"


def test_saves_that_no_agent_copies_write_nothing_for_others(make: Callable[..., Job]) -> None:
    job = make()
    first = job.kept(1)
    for step in (2, 3):
        operation = job.kept(step)
        assert {mark.operation for folder in job.folders for mark in folder.copies()} == {first}
        assert len([*job.root.glob(f"node-*/model/*{operation}*")]) == WORLD
    assert all(job.fetch())
    operation = job.kept(4)
    assert len([*job.root.glob(f"node-*/model/*{operation}*")]) == 2 * WORLD


@pytest.mark.parametrize("on_full", ["raise", "durable"])
def test_no_room_for_the_files_of_a_twin(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, on_full: Any
) -> None:
    """The error has numbers and the remedy; nothing of the save stays, and the next one goes well."""
    job = make()
    make_file = NodeFolder.make

    def full(folder: NodeFolder, path: Path, nbytes: int, what: str) -> None:
        if path.name.startswith("00001") and folder is job.folders[1]:
            raise FullError(f"7 of 9 bytes left, and {what} needs {nbytes} more for {path.name}")
        make_file(folder, path, nbytes, what)

    with monkeypatch.context() as patch:
        patch.setattr(NodeFolder, "make", full)
        results = job.keep(1, on_full=on_full)
    if on_full == "raise":
        assert isinstance(results[3], FullError)
        assert all(isinstance(result, PeerError) for result in results[:3])
    else:
        assert all(isinstance(result, NoRoomError) for result in results)
    full_event = next(event for event in job.events if event.what == "full")
    assert "the twin of another host's file, by rank 3, needs" in full_event.said
    assert 3 not in {each.writer for each in job.folders[1].twins().values()}
    assert 1 not in {mark.rank for folder in job.folders for mark in folder.data_files() if folder is job.folders[1]}
    if on_full == "durable":
        assert not any(folder.twins() or folder.copies() or folder.marks() for folder in job.folders)
    operation = job.kept(2)
    assert all(job.fetch())
    assert job.are_copied()
    assert {mark.operation for folder in job.folders for mark in folder.copies()} == {operation}
    job.wipe(1)
    job.check_loads([0, 0, 0], 2)


def test_a_save_that_fails_on_one_rank_is_forgotten(make: Callable[..., Job], sent: Counter[str]) -> None:
    job = make()

    def spoil(rank: int, planner: Flat) -> None:
        if rank == 2:
            planner.memory["w1"] = planner.memory["w1"].to("meta")

    assert all(isinstance(each, BaseException) for each in job.keep(1, spoil))
    for step in (2, 3, 4):
        job.kept(step)
        assert all(job.fetch())
        assert job.are_copied()
    assert sent["model"] == 0
    assert [len(job.files(node)) for node in (0, 1)] == [10, 10]


def test_trainers_that_take_files_back_are_noticed(make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is marked whose files have gone."""
    job = make()
    operation = job.kept(1)
    prepare = NodeFolder.prepare

    def taken(folder: NodeFolder, intent: Any) -> None:
        prepare(folder, intent)
        leave_twins(folder, "")

    with monkeypatch.context() as patch:
        patch.setattr(NodeFolder, "prepare", taken)
        assert not any(job.fetch())
    assert not any(folder.is_marked(Mark(operation, rank)) for folder, rank in zip(job.folders, (2, 0), strict=True))
    assert all(job.fetch()), "over the network"
    assert job.are_copied()


def test_another_layout_has_other_twins(make: Callable[..., Job], sent: Counter[str]) -> None:
    job = make((0, 1, 2, 3), 2)
    job.kept(1)
    assert all(job.fetch())
    assert [folder.sources().nodes for folder in job.folders] == [("node-2",), ("node-3",), ("node-0",), ("node-1",)]
    job.shards = 1
    job.kept(2)
    assert all(job.fetch())
    assert [folder.sources().nodes for folder in job.folders] == [("node-3",), ("node-0",), ("node-1",), ("node-2",)]
    assert sent["model"] == 0
    job.wipe(2)
    job.check_loads([0, 1, 3], 2)


def test_buffers_that_differ_are_the_owners_and_no_drift(
    make: Callable[..., Job], sent: Counter[str], tmp_path: Path
) -> None:
    """Rank 0 has the buffers of the checkpoint. Their block is fetched, and the others are not."""
    job, modules = make(), list[torch.nn.Module]()
    for rank in range(WORLD):
        torch.manual_seed(3)
        modules.append(torch.nn.Sequential(torch.nn.Linear(1200, 1200), torch.nn.BatchNorm1d(1200)))
        modules[-1][1].running_mean.fill_(float(rank))
    for step in (1, 2):
        options = bcp.SaveOptions(record=False, observe=job.observe, step=step, replicas="warn")
        operation = job.keep_all(lambda rank: {"model": modules[rank]}, options)
        assert all(job.fetch())
    assert not [folder.drifts() for folder in job.folders if folder.drifts()]
    files = [*job.root.glob(f"node-*/model/*{operation}*")]
    assert len({path.read_bytes() for path in files}) == WORLD < len(files) == 2 * WORLD
    assert 0 < sent["model"] <= 2 * 2 * (1 << 20), "a block for the buffers in each save, with the header"
    job.wipe(0)
    target = torch.nn.Sequential(torch.nn.Linear(1200, 1200), torch.nn.BatchNorm1d(1200))

    async def call(_: int, ranks: Any) -> None:
        memories = await find_whole(ranks, lambda: job.folders[1], "node-1", 60.0)
        found = await memories.open(operation, lambda _: LocalBackend(tmp_path / "no"))
        await bcp.aload(found.storage, {"model": target}, options=LOADING, coordinator=ranks)

    assert on_ranks(1, call) == [None]
    wanted = modules[0].state_dict()
    assert all(torch.equal(wanted[name], value) for name, value in target.state_dict().items())


def test_a_lazy_snapshot_holds_steps_until_twins_are_written(make: Callable[..., Job], sent: Counter[str]) -> None:
    """A step in another thread waits; both holders have the values before it."""
    job, trained = make(), list[tuple[torch.nn.Module, torch.optim.Optimizer]]()
    for _ in range(WORLD):
        torch.manual_seed(4)
        module = torch.nn.Linear(400, 400)
        trained.append((module, torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)))
    before = trained[0][0].weight.detach().clone()
    options = bcp.SaveOptions(record=False, observe=job.observe, step=1, snapshot="lazy")

    async def call(rank: int, ranks: Any) -> Any:
        module, optimizer = trained[rank]
        states = {"model": module, "optimizer": optimizer}
        made = keep_call(job.memories[rank], Aim(1, "step-1"), states, None, options, ranks)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        step = threading.Thread(target=optimizer.step)
        result = await made.run(step.start)
        await asyncio.to_thread(step.join)
        return result.operation

    [operation] = {*on_ranks(WORLD, call)}
    assert all(torch.equal(module.weight, before - 1) for module, _ in trained)
    assert all(job.fetch())
    assert (sent["model"], sent["optimizer"]) == (0, 0)
    assert not [folder.drifts() for folder in job.folders if folder.drifts()]
    parts = [safetensors(path, "weight") for path in sorted(job.root.glob(f"node-1/model/*{operation}*"))]
    assert torch.equal(torch.cat(parts), before.flatten())


def safetensors(path: Path, name: str) -> torch.Tensor:
    """Return the elements of a tensor in a file, flat; bcp has no part in it."""
    tensors = load_file(path)
    return torch.cat([torch.empty(0), *(each.flatten() for key, each in tensors.items() if key.startswith(name))])


def test_ranks_that_are_left_write_no_twins(make: Callable[..., Job], sent: Counter[str]) -> None:
    job = make()
    job.kept(1)
    assert all(job.fetch())
    before = sent["model"]
    model = {"w": torch.arange(5000.0)}
    operation = job.keep_all(lambda _: {"model": model}, bcp.SaveOptions(record=False, step=2), names=(0, 1, 2))
    assert len([*job.root.glob(f"node-*/model/*{operation}*")]) == 3
    job.memories.pop(3).close()
    assert all(job.fetch())
    assert job.are_copied()
    assert sent["model"] > before
    assert len([*job.root.glob(f"node-*/model/*{operation}*")]) == 6


def test_ranks_with_other_tiers_are_refused(make: Callable[..., Job]) -> None:
    job = make()
    job.memories[2].spread = None
    results = job.keep(1)
    assert isinstance(results[0], InputError)
    assert "rank 2 has another Tiers(copies=...) than rank 0, which has 'auto'" in str(results[0])
    assert all(isinstance(result, BaseException) for result in results)


@pytest.mark.parametrize("more", [{"copies": "all"}, {"copies": True}, {"copies": "auto", "parity": 4}])
def test_what_does_not_go_together(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"'auto'"):
        bcp.Tiers(**more)
