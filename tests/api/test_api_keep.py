"""Snapshots in the memory of the hosts: they outlive the process, and agents make of them what a direct save makes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import on_ranks

import bcp
from bcp._calls import keep_call
from bcp.agent.commit import Outcome
from bcp.agent.generation import advance
from bcp.backends import LocalBackend
from bcp.errors import InputError, PeerError, StateChangedError, StorageError
from bcp.format.metadata import decode_metadata
from bcp.format.receipt import decode_receipt
from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.saving import Aim

WORLD, NODES = 4, 2
OPTIONS = bcp.SaveOptions(record=False)


class Job:
    """Four ranks on two hosts."""

    def __init__(self, root: Path) -> None:
        self.folders = [NodeFolder(root / f"node-{node}") for node in range(NODES)]
        self.memories = [TierMemory(self.folders[rank * NODES // WORLD], rank) for rank in range(WORLD)]
        self.went_on: list[int] = []

    def keep(self, states: Any, step: int = 1, options: dict[int, bcp.SaveOptions] | None = None) -> list[Any]:
        """Let all ranks keep a snapshot; return their results or errors. Options may be those of some ranks."""

        async def call(rank: int, ranks: Any) -> Any:
            chosen = (options or {}).get(rank, OPTIONS)
            own = states[rank] if isinstance(states, list) else states
            made = keep_call(self.memories[rank], Aim(step, ""), own, None, chosen, ranks)
            return await made.run(lambda: self.went_on.append(rank))

        return on_ranks(WORLD, call)

    def kept(self, states: Any, step: int = 1) -> str:
        """Let all ranks keep a snapshot; return its operation."""
        results = self.keep(states, step)
        assert not [result for result in results if isinstance(result, BaseException)], results
        [operation] = {result.operation for result in results}
        return str(operation)

    def die(self) -> None:
        """Let the processes of all ranks end."""
        for memory in self.memories:
            memory.close()

    def drain(self, store: Path, operation: str) -> list[Outcome]:
        """Let the agents of both hosts go on with one snapshot."""
        return [
            asyncio.run(
                advance(
                    folder,
                    [mark for mark in folder.marks() if mark.operation == operation],
                    LocalBackend(store),
                    str(store),
                    f"n{node}",
                )
            )
            for node, folder in enumerate(self.folders)
        ]

    def files(self) -> dict[str, int]:
        """Return the data files of all hosts, by name, with their inodes."""
        return {
            f"{folder.root.name}/{path.parent.name}/{path.name}": path.stat().st_ino
            for folder in self.folders
            for paths in folder.data_files().values()
            for path in paths
        }

    def operations(self) -> set[str]:
        """Return the operations that have files."""
        return {mark.operation for folder in self.folders for mark in folder.data_files()}


def large(files: dict[str, int]) -> set[int]:
    return {inode for name, inode in files.items() if "model/" in name}


def states(fill: float = 0.0) -> dict[str, Any]:
    model = {f"w{n}": torch.arange(n * 900, (n + 1) * 900, dtype=torch.float32) + fill for n in range(6)}
    return {"model": model, "extra_states": {"epoch": int(fill), "blob": torch.Generator().manual_seed(3).get_state()}}


def check_loads(path: Path, fill: float) -> None:
    wanted, target = states(fill), states(-1.0)
    bcp.load(path, target)
    assert all(torch.equal(target["model"][name], tensor) for name, tensor in wanted["model"].items())
    assert target["extra_states"]["epoch"] == int(fill)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def contents_of(path: Path) -> list[Any]:
    """Return everything that a checkpoint has, without the id of the save and its time."""
    metadata = decode_metadata((path / "metadata.arrow").read_bytes(), "")
    found: list[Any] = [metadata.commit.framework, metadata.commit.part_bytes, metadata.commit.user]
    for rank in range(metadata.world_size):
        receipt = decode_receipt((path / metadata.commit.receipt_key(rank)).read_bytes(), "")
        found.append(dict(receipt.objects))
        for file in receipt.files:
            found += [file.kind, file.data_start, file.nbytes, file.blocks.checksum, file.blocks.stored_length.tolist()]
            found.append((path / metadata.commit.data_key(file.kind, rank)).read_bytes())
    return found


def test_a_drained_snapshot_is_what_a_direct_save_makes(job: Job, tmp_path: Path) -> None:
    operation = job.kept(states())
    assert sorted(job.went_on) == [*range(WORLD)]
    job.die()
    assert job.drain(tmp_path / "store", operation) == [Outcome.WAITING, Outcome.COMMITTED]

    async def save(_: int, ranks: Any) -> None:
        await bcp.asave(tmp_path / "direct", states(), options=OPTIONS, coordinator=ranks)

    assert on_ranks(WORLD, save) == [None] * WORLD
    assert contents_of(tmp_path / "store") == contents_of(tmp_path / "direct")
    assert bcp.Checkpoint(tmp_path / "store").verify()
    check_loads(tmp_path / "store", 0.0)


def test_a_snapshot_is_that_of_its_moment(job: Job, tmp_path: Path) -> None:
    """Training goes on in the memory that was saved, before anything is digested."""
    live = states(1.0)
    operation = job.kept(live)
    for tensor in live["model"].values():
        tensor.zero_()
    job.drain(tmp_path / "store", operation)
    check_loads(tmp_path / "store", 1.0)


def test_the_files_of_the_snapshot_before_the_last_are_used_again(job: Job, tmp_path: Path) -> None:
    seen = []
    for step in range(1, 6):
        operation = job.kept(states(float(step)), step)
        seen.append(job.files())
        assert operation in job.operations()
    assert len(seen[0]) * 2 == len(seen[1]) == len(seen[-1])
    assert large(seen[1]) == large(seen[2]) == large(seen[4]), "the same files, under new names"
    job.drain(tmp_path / "store", operation)
    check_loads(tmp_path / "store", 5.0)


def test_what_an_agent_reads_is_not_used_again(job: Job, tmp_path: Path) -> None:
    first = job.kept(states(1.0), 1)
    with ExitStack() as stack:
        held = [stack.enter_context(folder.holding(mark)) for folder in job.folders for mark in folder.marks()]
        assert None not in held
        for step in (2, 3, 4):
            job.kept(states(float(step)), step)
    job.drain(tmp_path / "store", first)
    check_loads(tmp_path / "store", 1.0)
    job.kept(states(5.0), 5)
    assert first not in job.operations()
    assert len(job.operations()) == 2


def test_another_layout_gets_files_of_its_own_sizes(job: Job, tmp_path: Path) -> None:
    job.kept(states(1.0), 1)
    larger = {"model": {"w": torch.arange(50_000.0)}}
    for step in (2, 3):
        operation = job.kept(larger, step)
    assert len(job.operations()) == 2
    job.drain(tmp_path / "store", operation)
    target = {"w": torch.zeros(50_000)}
    bcp.load(tmp_path / "store", {"model": target})
    assert torch.equal(target["w"], torch.arange(50_000.0))


# -- lives of a job ----------------------------------------------------------------------------------


def test_a_new_life_uses_the_files_of_the_last_one(job: Job, tmp_path: Path) -> None:
    for step in (1, 2):
        job.kept(states(float(step)), step)
    before = job.files()
    for _ in range(3):
        job.die()
        job = Job(tmp_path)
        for step in (1, 2):
            job.kept(states(float(step)), step)
        assert len(job.files()) == len(before)
        assert large(job.files()) == large(before)


def test_a_new_life_keeps_what_it_may_need(job: Job, tmp_path: Path) -> None:
    operation = job.kept(states(1.0), 1)
    job.die()
    job = Job(tmp_path)
    for memory in job.memories:
        memory.live = frozenset({operation})
    job.kept(states(2.0), 2)
    job.drain(tmp_path / "store", operation)
    check_loads(tmp_path / "store", 1.0)


def test_fewer_ranks_take_the_files_of_those_that_are_gone(job: Job, tmp_path: Path) -> None:
    job.kept(states(1.0), 1)
    job.die()
    memory = TierMemory(NodeFolder(tmp_path / "node-1"), 0)

    async def call(_: int, ranks: Any) -> Any:
        return await keep_call(memory, Aim(2, ""), states(2.0), None, OPTIONS, ranks).run(lambda: None)

    [result] = on_ranks(1, call)
    assert {mark.operation for mark in memory.folder.data_files()} == {result.operation}
    memory.close()


def test_two_processes_are_not_one_rank(job: Job) -> None:
    with pytest.raises(InputError, match="another process is rank 0 in"):
        TierMemory(job.folders[0], 0)
    job.die()
    TierMemory(job.folders[0], 0).close()


# -- failures ----------------------------------------------------------------------------------------


def test_a_rank_that_fails_before_its_mark_leaves_the_last_snapshot(job: Job, tmp_path: Path) -> None:
    operation = job.kept(states(1.0), 1)

    def spoilt(graph: Any) -> Any:
        async def fail(_: Any) -> Any:
            raise StorageError("no")

        return graph.before("d2h", bcp.extend.Stage("fail", fail))

    errors = job.keep(states(2.0), 2, {2: bcp.SaveOptions(record=False, edit=spoilt)})
    assert [type(error) for error in errors] == [PeerError, PeerError, StorageError, PeerError]
    assert not list((job.folders[1].root / "intents").glob(".*"))
    assert {mark.operation for mark in job.folders[1].marks() if mark.rank == 2} == {operation}
    assert job.drain(tmp_path / "store", operation) == [Outcome.WAITING, Outcome.COMMITTED]
    check_loads(tmp_path / "store", 1.0)
    job.kept(states(3.0), 3)
    assert len(job.operations()) == 2, "the failed one makes room"


def test_a_state_that_changes_meanwhile_is_not_marked(job: Job) -> None:
    own = [states() for _ in range(WORLD)]

    def write(graph: Any) -> Any:
        async def change(part: Any) -> Any:
            own[1]["model"]["w3"].add_(1)
            return part

        return graph.before("d2h", bcp.extend.Stage("change", change))

    errors = job.keep(own, options={1: bcp.SaveOptions(record=False, edit=write)})
    assert isinstance(errors[1], StateChangedError)
    assert 1 not in {mark.rank for mark in job.folders[0].marks()}
    assert 1 not in job.went_on


def test_codecs_are_refused(job: Job) -> None:
    options = bcp.SaveOptions(record=False, codecs=[bcp.extend.Codec("zlib", bytes, bytes)])
    errors = job.keep(states(), options=dict.fromkeys(range(WORLD), options))
    assert all(isinstance(error, InputError) and "codecs=zlib" in str(error) for error in errors)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    root = tmp_path / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "bcp-test", root], check=True)  # noqa: S603, S607 -- a test
    yield root
    subprocess.run(["umount", "-l", root], check=True)  # noqa: S603, S607 -- as above


def test_a_full_memory_is_an_error_with_numbers_before_anything_is_copied(small_tmpfs: Path) -> None:
    memory = TierMemory(NodeFolder(small_tmpfs / "job"), 0)

    def keep(count: int) -> Any:
        async def call(_: int, ranks: Any) -> Any:
            own = {"model": {"w": torch.zeros(count)}}
            return await keep_call(memory, Aim(1, ""), own, None, OPTIONS, ranks).run(lambda: None)

        return on_ranks(1, call)[0]

    error = keep(1 << 20)
    assert isinstance(error, StorageError)
    assert "of 1048576 bytes left" in str(error)
    assert memory.folder.marks() == []
    assert memory.folder.data_files() == {}
    assert not isinstance(keep(1 << 10), BaseException)
    memory.close()
