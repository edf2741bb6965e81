"""A job comes back from the memories of its hosts: on other ranks, in another layout, without a byte from storage."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import on_ranks

import bcp
from bcp._calls import keep_call
from bcp.agent.copying import Copier
from bcp.agent.pace import Pace
from bcp.agent.serve import serving
from bcp.backends import LocalBackend
from bcp.errors import CorruptError, StorageError
from bcp.extend import LoadTargets, LocalShards, ShardRow, ShardTable, TensorMeta
from bcp.protocols import States
from bcp.testing.storage_fakes import CountingBackend
from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import Mark
from bcp.tiers.recovery import Found, find_whole
from bcp.tiers.recovery import Hosts as JobHosts
from bcp.tiers.saving import Aim

WORLD = 4
SHAPES = {f"w{n}": (n + 5, 301) for n in range(6)}
OPTIONS = bcp.SaveOptions(record=False)
LOADING = bcp.LoadOptions(record=False)


class Flat:
    """A planner whose ranks hold equal flat intervals of each tensor."""

    name = "flat"

    def __init__(self, rank: int, count: int, step: int | None = None) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self.rows: list[ShardRow] = []
        for fqn, shape in SHAPES.items():
            box, meta = bcp.Box.whole(shape), TensorMeta("model", fqn, "float32", 4, shape)
            start, stop = (box.numel * each // count for each in (rank, rank + 1))
            self.rows.append(ShardRow(meta, box, start, stop))
            whole = torch.full((box.numel,), -1.0) if step is None else values(fqn, step)
            self.memory[fqn] = whole[start:stop].clone()

    def _shards(self) -> LocalShards:
        return LocalShards(ShardTable.build(self.rows), list(self.memory.values()))

    def local_shards(self, _: States) -> LocalShards:
        return self._shards()

    def load_targets(self, _: States, __: Any) -> LoadTargets:
        return LoadTargets(self._shards(), lambda _: None, lambda _: None)


def values(fqn: str, step: int) -> torch.Tensor:
    """Return a tensor after a step, flat."""
    rows, columns = SHAPES[fqn]
    return torch.arange(rows * columns, dtype=torch.float32) * (1 + int(fqn[1:])) + step


class Hosts:
    """Hosts with a memory each, and the jobs that run on them."""

    def __init__(self, root: Path, nodes: int = 2, each: int = 2) -> None:
        self.root, self.each = root, each
        self.folders = [NodeFolder(root / f"node-{node}") for node in range(nodes)]
        self.reasons: tuple[str, ...] = ()
        self.told: list[bcp.extend.TierEvent] = []

    def train(self, *steps: int) -> dict[int, str]:
        """Let four ranks, on the first hosts, keep a snapshot of each step, and die; return their operations."""
        memories = [TierMemory(self.folders[rank // self.each], rank) for rank in range(WORLD)]
        kept = {}
        for step in steps:

            async def call(rank: int, ranks: Any, step: int = step) -> Any:
                planner = Flat(rank, WORLD, step)
                states = {"model": {}, "extra_states": {"step": step}}
                made = keep_call(memories[rank], Aim(step, f"step-{step}"), states, planner, OPTIONS, ranks)
                return await made.run(lambda: None)

            [kept[step]] = {result.operation for result in on_ranks(WORLD, call)}
        for memory in memories:
            memory.close()
        return kept

    def copy(self, source: int, target: int, operation: str) -> None:
        """Copy marked files from one host to another, as agents do."""
        here, there = self.folders[source], self.folders[target]
        for mark, paths in here.data_files().items():
            if mark.operation == operation:
                for path in paths:
                    shutil.copy(path, _made(there.root / path.relative_to(here.root)))
        for path in (here.root / "layouts").iterdir():
            shutil.copy(path, there.root / "layouts")
        for path in (*here.root.glob(f"receipts/*-{operation}.arrow"), *here.root.glob(f"intents/*-{operation}")):
            shutil.copy(path, _made(there.root / path.relative_to(here.root)))

    def wipe(self, node: int) -> None:
        shutil.rmtree(self.folders[node].root)
        self.folders[node] = NodeFolder(self.folders[node].root)

    def durable(self, place: str) -> Any:
        """Return storage at the place of a checkpoint."""
        return LocalBackend(self.root / "run" / place)

    def find(self, nodes: Sequence[int], spoilt: Mapping[str, Any] | None = None) -> list[Found | None]:
        """Let ranks on these hosts open the newest snapshot; ``spoilt`` memories are reached in the place of others."""

        def reach(name: str, _: str, __: bytes) -> Any:
            return (spoilt or {}).get(name) or LocalBackend(self.root / name)

        async def call(rank: int, ranks: Any) -> Any:
            here = self.folders[nodes[rank]]
            memories = await find_whole(ranks, lambda: here, f"node-{nodes[rank]}", 60.0)
            self.reasons = memories.hosts.reasons
            for snapshot in memories.snapshots:
                try:
                    return await memories.open(snapshot.operation, self.durable, reach)
                except CorruptError as error:
                    self.reasons = (str(error), *self.reasons)
            return None

        found = on_ranks(len(nodes), call)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def observe(self, event: bcp.extend.Event) -> None:
        if isinstance(event, bcp.extend.TierEvent):
            self.told.append(event)

    def load(self, found: Sequence[Found | None]) -> int:
        """Load a snapshot on so many ranks as have found it; check every element, and return the step."""
        planners = [Flat(rank, len(found)) for rank in range(len(found))]
        extras = [{"step": 0} for _ in found]

        async def call(rank: int, ranks: Any) -> Any:
            own = found[rank]
            assert own is not None
            states = {"model": {}, "extra_states": extras[rank]}
            options = replace(LOADING, observe=self.observe)
            return await bcp.aload(own.storage, states, framework=planners[rank], options=options, coordinator=ranks)

        for result in on_ranks(len(found), call):
            if isinstance(result, BaseException):
                raise result
        [step] = {extra["step"] for extra in extras}
        for fqn in SHAPES:
            assert torch.equal(torch.cat([planner.memory[fqn] for planner in planners]), values(fqn, step)), fqn
        return step


def _made(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    return path


def read_from(found: Sequence[Found | None], name: str) -> int:
    return sum(each.storage.read_nbytes[name] for each in found if each is not None)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1), (0, 1, 1), (1, 0, 1, 0, 1, 0), (1, 1, 1, 1, 1, 0, 0)])
def test_any_number_of_ranks_on_the_same_hosts(nodes: tuple[int, ...], hosts: Hosts) -> None:
    hosts.train(3, 4)
    found = hosts.find(nodes)
    assert {each.step for each in found if each} == {4}
    assert hosts.load(found) == 4
    assert read_from(found, "this host") > 0


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0,), (0, 1, 0), (1, 0, 1, 0, 0)])
def test_a_host_is_wiped_whose_files_another_one_has(nodes: tuple[int, ...], hosts: Hosts) -> None:
    """Its replacement, an empty host, takes part in the recovery, too."""
    kept = hosts.train(4)
    hosts.copy(1, 0, kept[4])
    hosts.wipe(1)
    found = hosts.find(nodes)
    assert hosts.load(found) == 4


def test_a_host_is_wiped_whose_files_nobody_has(hosts: Hosts) -> None:
    """The snapshot before it is whole, and is taken; the reason is told."""
    kept = hosts.train(3, 4)
    hosts.copy(1, 0, kept[3])
    hosts.wipe(1)
    found = hosts.find((0, 0, 0))
    assert hosts.load(found) == 3
    assert hosts.reasons == ("step 4: no host has the files of rank 2 and 1 more",)


def test_nothing_is_whole(hosts: Hosts) -> None:
    hosts.train(4)
    hosts.wipe(0)
    assert hosts.find((0, 1)) == [None, None]
    hosts.wipe(1)
    assert hosts.find((0, 1, 1)) == [None] * 3


def test_a_mark_that_is_missing_makes_the_snapshot_before_the_newest(hosts: Hosts) -> None:
    kept = hosts.train(3, 4)
    assert hosts.folders[1].take(Mark(kept[4], 3))
    assert hosts.load(hosts.find((0, 1))) == 3


def flip(folder: NodeFolder, operation: str, rank: int) -> Path:
    """Change a bit in the middle of a rank's largest file."""
    paths = folder.data_files()[Mark(operation, rank)]
    path = max(paths, key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)
    return path


def test_a_flipped_bit_in_one_copy_leads_to_the_next_one(hosts: Hosts) -> None:
    kept = hosts.train(4)
    hosts.find((0, 1))  # all is digested, as agents do soon after the mark
    hosts.copy(1, 0, kept[4])
    for rank in (2, 3):
        flip(hosts.folders[0], kept[4], rank)
    found = hosts.find((0, 0, 1))
    assert hosts.load(found) == 4
    count = sum(each.storage.passed_over["this host"] for each in found if each)
    assert count > 0
    told = [(event.what, event.place, event.operation) for event in hosts.told]
    assert told == [("passed_over", "this host", kept[4])] * count
    assert all("have checksum" in event.said for event in hosts.told)


def test_a_flipped_bit_in_the_only_copy_is_named(hosts: Hosts) -> None:
    kept = hosts.train(4)
    hosts.find((0, 1))  # all is digested
    path = flip(hosts.folders[0], kept[4], 1)
    with pytest.raises(bcp.BcpError, match=rf"{path.name} .* cannot be read from memory \((this host|node-0): bytes"):
        hosts.load(hosts.find((0, 1)))


def test_storage_that_fails_is_no_damage(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the block: somebody has to look again."""
    kept = hosts.train(4)
    hosts.find((0, 1))  # all is digested
    hosts.copy(1, 0, kept[4])
    flip(hosts.folders[0], kept[4], 1)
    silent = CountingBackend(LocalBackend(hosts.root / "run"))
    silent.before = _refuse  # type: ignore[method-assign]  # each call
    monkeypatch.setattr(hosts, "durable", lambda _: silent)
    with pytest.raises(StorageError, match=r"this host: bytes .*; storage: no route to host"):
        hosts.load(hosts.find((0,)))


def test_a_file_that_is_missing_before_its_digest_makes_the_host_useless(hosts: Hosts) -> None:
    kept = hosts.train(3, 4)
    for path in hosts.folders[1].data_files()[Mark(kept[4], 2)]:
        path.unlink()
    found = hosts.find((0, 1))
    assert hosts.load(found) == 3
    assert "has gone from" in hosts.reasons[0]


def test_a_host_that_does_not_answer_leads_to_the_next_copy(hosts: Hosts, tmp_path: Path) -> None:
    kept = hosts.train(4)
    third = Hosts(tmp_path, nodes=3)
    third.copy(1, 2, kept[4])
    dead = CountingBackend(LocalBackend(tmp_path / "node-1"))
    dead.before = _refuse  # type: ignore[method-assign]  # each call
    found = third.find((0, 0, 2, 1), {"node-1": dead})
    assert third.load(found) == 4


async def _refuse(operation: str, key: str) -> None:
    raise StorageError(f"no route to host for {operation} {key}")


def test_damaged_intents_and_strangers_count_for_nothing(hosts: Hosts) -> None:
    kept = hosts.train(3, 4)
    (hosts.folders[0].root / "intents" / f"00000-{kept[4]}").write_bytes(b"torn")
    (hosts.folders[0].root / "intents" / f"00007-{kept[3]}").write_bytes(b"torn")
    assert hosts.load(hosts.find((0, 1))) == 3


def test_the_storage_of_a_snapshot_is_read_only(hosts: Hosts) -> None:
    hosts.train(4)
    found = hosts.find((0, 1))[0]
    assert found is not None
    with pytest.raises(bcp.InputError, match="is for reads of files alone"):
        bcp.save(found.storage, {"model": {"w": torch.ones(2)}}, overwrite=True)
    with pytest.raises(CorruptError, match="cannot be read from memory"):
        asyncio.run(found.storage.get(f"receipts/00009-{found.operation}.arrow"))


def test_other_hosts_are_read_through_their_agents(hosts: Hosts) -> None:
    """The first meeting of the ranks gives all hosts one secret, and agents serve those who know it."""
    kept = hosts.train(4)
    assert [folder.token() for folder in hosts.folders] == [b"", b""]
    with serving(hosts.folders[0], "127.0.0.1"), serving(hosts.folders[1], "127.0.0.1:0"):

        async def call(rank: int, ranks: Any) -> Any:
            memories = await find_whole(ranks, lambda: hosts.folders[rank % 2], f"node-{rank % 2}", 60.0)
            return await memories.open(kept[4], hosts.durable)

        found = on_ranks(3, call)
        assert hosts.load(found) == 4
        [token] = {folder.token() for folder in hosts.folders}
        assert len(token) == 32
        assert read_from(found, "node-0") + read_from(found, "node-1") > 0
        for each in found:
            asyncio.run(each.storage.aclose())
    assert kept


def test_a_host_without_an_agent_leads_to_the_next_copy(hosts: Hosts) -> None:
    kept = hosts.train(4)
    hosts.copy(1, 0, kept[4])

    async def call(rank: int, ranks: Any) -> Any:
        memories = await find_whole(ranks, lambda: hosts.folders[rank], f"node-{rank}", 60.0)
        return await memories.open(kept[4], hosts.durable)

    found = on_ranks(2, call)
    with pytest.raises(bcp.BcpError, match=r"its agent serves no other host.* The snapshot may be whole, and stays"):
        hosts.load(found)


# -- parity ----------------------------------------------------------------------------------------


def make_parity(hosts: Hosts, most: int = 3) -> None:
    """Let agents of all hosts make the stripes of the newest snapshot, in groups of at most so many hosts."""
    nodes = [folder.root.name for folder in hosts.folders]
    with ExitStack() as stack:
        for folder in hosts.folders:
            folder.put_token(b"the token of this job")
            stack.enter_context(serving(folder, "127.0.0.1"))
        told = JobHosts(tuple(nodes), tuple(folder.address() for folder in hosts.folders))
        for folder in hosts.folders:
            sources = told.in_parity_with(folder.root.name, most, 1)
            assert asyncio.run(Copier(folder, 0.01, Pace(None)).round(sources))


@pytest.fixture
def four(tmp_path: Path) -> Hosts:
    """Four hosts of a rank each; two of them make a group."""
    return Hosts(tmp_path, nodes=4, each=1)


@pytest.mark.parametrize(("most", "lost"), [(3, (0,)), (3, (0, 2)), (3, (1, 3)), (4, (0,)), (4, (3,))])
def test_lost_hosts_follow_from_parity(most: int, lost: tuple[int, ...], four: Hosts) -> None:
    """The layout is another one, and a rank of an empty host takes part."""
    four.train(3, 4)
    make_parity(four, most)
    for node in lost:
        four.wipe(node)
    found = four.find((*(node for node in range(4) if node not in lost), lost[0]))
    assert four.load(found) == 4
    assert read_from(found, "parity") > 0
    assert {each.hosts for each in found if each} == {4 - len(lost)}


def test_two_lost_hosts_of_a_group_lead_to_nothing(four: Hosts) -> None:
    four.train(4)
    make_parity(four)
    for node in (2, 3):
        four.wipe(node)
    assert four.find((0, 1)) == [None, None]
    assert four.reasons == ("step 4: no host has the files of rank 2 and 1 more",)


def test_a_flipped_bit_leads_to_parity(hosts: Hosts) -> None:
    """No host is lost, and a file is damaged behind its digest."""
    kept = hosts.train(4)
    make_parity(hosts)
    flip(hosts.folders[0], kept[4], 1)
    found = hosts.find((0, 1, 1))
    assert hosts.load(found) == 4
    assert read_from(found, "parity") > 0


def test_a_flipped_bit_in_parity_is_not_believed(hosts: Hosts) -> None:
    """It leads to an error that names the file, and so to storage; a copy that is there would be read."""
    kept = hosts.train(4)
    make_parity(hosts)
    stripe = hosts.folders[0].parity.stripe(kept[4])
    data = bytearray(stripe.read_bytes())
    data[len(data) // 2] ^= 4
    stripe.write_bytes(data)
    hosts.wipe(1)
    with pytest.raises(bcp.BcpError, match=r"cannot be read from memory \(parity: bytes"):
        hosts.load(hosts.find((0, 0)))


def test_files_that_are_gone_before_their_digest_follow_from_parity(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """The intents of the host are there, and its stripe counts no more."""
    kept = hosts.train(4)
    make_parity(hosts)
    for path in hosts.folders[1].data_files()[Mark(kept[4], 2)]:
        path.unlink()
    (hosts.folders[1].root / f"receipts/00002-{kept[4]}.arrow").unlink()
    found = hosts.find((0, 1))
    assert hosts.load(found) == 4
    assert "the files of a host are passed over" in caplog.text


def test_parity_that_has_lost_a_file_is_damage_and_no_silence(four: Hosts) -> None:
    """Nobody can bring the file back, so an older snapshot is taken, and nobody is told to start agents."""
    kept = four.train(4)
    make_parity(four, 4)
    four.wipe(3)
    found = four.find((0, 1, 2))
    for path in four.root.glob(f"node-*/parity/00001-{kept[4]}"):
        path.unlink()
    with pytest.raises(bcp.BcpError, match=r"CorruptError: .* from parity\) needs parity/00001") as error:
        four.load(found)
    assert "agents" not in str(error.value)


def test_stripes_are_read_through_agents(four: Hosts) -> None:
    kept = four.train(4)
    make_parity(four)
    four.wipe(1)
    with ExitStack() as stack:
        for folder in four.folders:
            stack.enter_context(serving(folder, "127.0.0.1"))

        async def call(rank: int, ranks: Any) -> Any:
            node = (0, 2, 3)[rank]
            memories = await find_whole(ranks, lambda: four.folders[node], f"node-{node}", 60.0)
            return await memories.open(kept[4], four.durable)

        found = on_ranks(3, call)
        assert four.load(found) == 4
        assert read_from(found, "parity") > 0
        for each in found:
            asyncio.run(each.storage.aclose())


def test_hosts_of_one_name_are_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of one of them would be looked for on the other."""
    hosts.train(4)
    identities = iter(["boot-1/1", "boot-2/1"])
    monkeypatch.setattr("bcp.tiers.recovery.identity", lambda: next(identities))

    async def call(rank: int, ranks: Any) -> Any:
        return await find_whole(ranks, lambda: hosts.folders[rank], "node", 60.0)

    for error in on_ranks(2, call):
        assert isinstance(error, bcp.BcpError)
        assert "several hosts have the name 'node'" in str(error)


def test_folders_of_one_host_are_refused(hosts: Hosts) -> None:
    """Agents would wait for files that are in the other folder."""
    hosts.train(4)

    async def call(rank: int, ranks: Any) -> Any:
        return await find_whole(ranks, lambda: hosts.folders[rank], "node", 60.0)

    for error in on_ranks(2, call):
        assert isinstance(error, bcp.BcpError)
        assert "the ranks of host 'node' have several folders in the memory tier: /" in str(error)
        assert "node-0 and /" in str(error)


def test_an_agent_that_starts_again_is_waited_for(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read without another copy asks the host again."""
    monkeypatch.setattr("bcp.tiers.near.NAP_SECONDS", 0.01)
    hosts.train(4)
    memory, refusals = CountingBackend(LocalBackend(hosts.root / "node-1")), dict[str, int]()

    async def refuse_twice(operation: str, key: str) -> None:
        refusals[key] = refusals.get(key, 0) + 1
        if refusals[key] <= 2:
            await _refuse(operation, key)

    memory.before = refuse_twice  # type: ignore[method-assign]  # each call
    found = hosts.find((0, 1, 0), {"node-1": memory})
    assert hosts.load(found) == 4
    assert refusals
    assert min(refusals.values()) > 2
    count = sum(each.storage.passed_over["host node-1"] for each in found if each)
    assert count <= 3 * len(refusals), "a reason is told once in a read, and not at each try"


def test_an_agent_that_stays_away_ends_the_load(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcp.tiers.near.RESTART_SECONDS", 0.0)
    hosts.train(4)
    dead = CountingBackend(LocalBackend(hosts.root / "node-1"))
    dead.before = _refuse  # type: ignore[method-assign]  # each call
    found = hosts.find((0, 1, 0), {"node-1": dead})
    with pytest.raises(bcp.BcpError, match="see that the agents of these hosts run, and resume again"):
        hosts.load(found)
