"""A run with a memory tier: its snapshots outlive it, agents make them durable, and the next life finds them."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import agent, until
from torch import nn

import bcp
from bcp import policies
from bcp._messages.tiers import Sources
from bcp.errors import CorruptError, InputError, StorageError
from bcp.format.metadata import METADATA_KEY, decode_metadata
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import digested
from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import LEFT, Mark
from bcp.tiers.starting import await_agent


class Training:
    """A small training whose weights tell the step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.set(0)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def set(self, step: int) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(step)

    @property
    def step(self) -> int:
        [value] = {*torch.cat([weight.detach().flatten() for weight in self.model.parameters()]).tolist()}
        return int(value)


class Place:
    """The folder of a run, and the memory of its host."""

    def __init__(self, root: Path) -> None:
        self.store, self.memory = root / "run", root / "memory"
        self.failures: list[tuple[int, str]] = []
        self.commits: list[int] = []

    def run(self, training: Training, **options: Any) -> bcp.Run:
        given: dict[str, Any] = {"save": 1, "tiers": bcp.Tiers(folder=self.memory, agent="external")} | options
        return bcp.Run(
            self.store,
            training.states,
            on_commit=lambda step, _: self.commits.append(step),
            on_failure=lambda step, error: self.failures.append((step, str(error))),
            **given,
        )

    def train(self, first: int, last: int, **options: Any) -> bcp.Run:
        """Train from a step to a step, which come all from the one before; then die as by an exception."""
        training = Training()
        run = self.run(training, **options)
        assert run.resume() == first - 1
        assert training.step == first - 1
        for step in range(first, last + 1):
            training.set(step)
            pending = run.maybe_save(step)
            if pending is not None:
                pending.released()
        return run

    def die(self, run: bcp.Run) -> None:
        with pytest.raises(ZeroDivisionError), run:
            raise ZeroDivisionError

    def train_to_4(self) -> None:
        """Train until step 2 is durable and steps 3 and 4 are in memory; die."""
        with agent(self.memory, self.store):
            run = self.train(1, 2, durable=2)
            until(lambda: self.commits == [2], "it is durable")
        for step in (3, 4):
            run.maybe_save(step)
        self.die(run)

    def resumed(self, **options: Any) -> tuple[int, bcp.Run]:
        """Come back; return the step that the weights tell, and the run."""
        training = self.training = Training()
        run = self.run(training, **options)
        step = run.resume()
        assert training.step == step
        return step, run

    def digest(self) -> None:
        """Digest all files in memory, as an agent does soon after a mark."""
        folder = NodeFolder(self.memory)
        for mark in folder.marks():
            with folder.holding(mark) as held:
                assert held is not None
                asyncio.run(digested(folder.files, held.blank))

    def newest(self) -> list[Mark]:
        """Return the marks in memory, the newest first."""
        ages = NodeFolder(self.memory).ages()
        return sorted(ages, key=lambda mark: -ages[mark])

    def flip(self, *marks: Mark) -> list[Path]:
        """Flip a bit in the middle of each file of some marks; return the files."""
        files = NodeFolder(self.memory).data_files()
        paths = [path for mark in marks for path in files[mark]]
        for path in paths:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        return paths

    def committed(self) -> list[int]:
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self.store.glob(f"step-*/{METADATA_KEY}"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Witness:
    """A state that notes whose snapshots its host is to copy while it is loaded."""

    def __init__(self, memory: Path) -> None:
        self.memory, self.seen = memory, list[Sources]()

    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        self.seen.append(NodeFolder(self.memory).sources())


def test_a_host_copies_others_than_before_once_the_snapshot_is_loaded(place: Place) -> None:
    """Copies of a host that is lost are needed no more then: until then they are what the ranks load."""
    witness, before = Witness(place.memory), Sources(("lost",), ("127.0.0.1:1",))
    states: dict[str, Any] = {"extra_states": {"witness": witness}}
    tiers = bcp.Tiers(folder=place.memory, agent="external")
    run = bcp.Run(place.store, states, save=1, durable=100, tiers=tiers)
    assert run.resume() == 0
    pending = run.maybe_save(1)
    assert pending is not None
    pending.released()
    place.die(run)
    NodeFolder(place.memory).put_sources(before)
    run = bcp.Run(place.store, states, save=1, durable=100, tiers=tiers)
    assert run.resume() == 1
    assert run.resumed.hosts == 1
    assert witness.seen == [before]
    assert NodeFolder(place.memory).sources() == Sources((), ())
    place.die(run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tiers": True}, r"tiers=True: pass bcp.Tiers\(\)"),
        ({"tiers": None, "durable": 10}, r"durable=10 is for runs with tiers.* save=10"),
        ({"durable": policies.EverySeconds(60)}, r"durable=EverySeconds.* reads a clock"),
        ({"durable": 0}, "EverySteps"),
        ({"standby_steps": 5}, "standby_steps=5 with tiers: each save is a snapshot"),
        ({"role": bcp.Role("actor", of=["actor"], launch="1")}, "tiers do not go with roles"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], words: str, place: Place) -> None:
    with pytest.raises(InputError, match=words):
        place.run(Training(), **arguments)
    assert not place.memory.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"agent": "none"}, "agent='none'"),
        ({"node": ""}, "node=''"),
        ({"node": "storage"}, "node='storage'.*give the host a name"),
        ({"folder": 7}, "folder=7"),
        ({"folder": "gs://bucket/run-7"}, r"folder='gs://bucket/run-7'\) is a URL: pass a directory"),
        ({"listen": 80}, "listen=80"),
        ({"listen": "127.0.0.1:abc"}, r"'127.0.0.1:abc' is no address: write HOST or HOST:PORT"),
        ({"listen": ":7000"}, "':7000' is no address"),
        ({"listen": "h:70000"}, "'h:70000' is no address"),
        ({"listen": "[::1:7"}, "is no address"),
        ({"copies": 0}, "copies=0"),
        ({"parity": 2}, "parity=2.*pass copies=2"),
        ({"parity": True}, "parity=True"),
        ({"parity": 8, "copies": 2}, r"copies=2, parity=8.*pass one of them"),
        ({"on_full": "wait"}, "on_full='wait'"),
        ({"agent": "external", "listen": "10.0.0.1"}, r"say it to the agent.*--listen 10.0.0.1"),
    ],
)
def test_arguments_of_tiers(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        bcp.Tiers(**arguments)


@pytest.mark.parametrize(("kind", "is_told"), [(0x01021994, False), (0x858458F6, False), (0, False), (0xEF53, True)])
def test_a_folder_on_a_disk_is_told(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: int,
    is_told: bool,  # noqa: FBT001 -- a parameter
) -> None:
    monkeypatch.setattr("bcp.backends.files.file_system_type", lambda _: kind)
    place.die(place.train(1, 0))
    assert (f"{place.memory} is on a disk: saves wait for it" in caplog.text) == is_told


def test_a_run_that_ends_well_is_durable_and_gives_the_memory_back(place: Place) -> None:
    """Saves that the policy does not choose stay in memory, but for the last one."""
    with agent(place.memory, place.store):
        run = place.train(1, 7, durable=3, keep=policies.Everything())
        run.close()
    assert place.committed() == [3, 6, 7]
    assert sorted(place.commits) == [3, 6, 7]
    assert not place.failures
    assert not NodeFolder(place.memory).data_files()
    assert not NodeFolder(place.memory).marks()
    assert not list(place.store.rglob("drain/*"))
    assert [info.step for info in place.run(Training()).list()] == [3, 6, 7]
    assert place.resumed()[0] == 7


def test_what_is_asked_for_is_durable(place: Place) -> None:
    training = Training()
    with agent(place.memory, place.store), place.run(training, save=1000, durable=1000) as run:
        run.resume()
        pending = run.save(4, {"loss": 0.5})
        assert pending is not None
        result = pending.wait()
        assert result.path == f"{place.store}/step-00000004"
        assert run.committed() == (4,)
        [key] = [key for key in result.files if key.startswith("model/")]
        assert (place.store / "step-00000004" / key).exists()
    commit = decode_metadata((place.store / "step-00000004" / METADATA_KEY).read_bytes(), "metadata").commit
    assert commit.metrics == {"loss": 0.5}
    assert commit.operation == result.operation


def test_a_trainer_that_decides_by_itself_follows_the_policy_of_what_is_durable(place: Place) -> None:
    training = Training()
    with agent(place.memory, place.store), place.run(training, save=None, durable=4, keep=policies.Everything()) as run:
        run.resume()
        for step in range(1, 8):
            training.set(step)
            run.save(step)
    assert place.committed() == [4, 7]


def test_a_durable_save_that_has_failed_is_caught_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(place.memory, place.store):
        run = place.train(1, 2, durable=3, tolerate=1, keep=policies.Everything())
        with monkeypatch.context() as patch:
            patch.setattr("bcp.tiers.folder.fallocate", full)
            shutil.rmtree(place.memory / "model")
            pending = run.maybe_save(3)
            assert pending is not None
            with pytest.raises(StorageError):
                pending.released()
        for step in (4, 5):
            run.maybe_save(step)
        until(lambda: place.committed() == [4], "step 4 takes the place of step 3")
        run.close()
    assert place.committed() == [4, 5]


def test_training_goes_on_while_nobody_serves(place: Place) -> None:
    """Storage may be away as long as it likes. The newest snapshot that was promised to it stays in memory."""
    run = place.train(1, 9, durable=4)
    folder = NodeFolder(place.memory)
    assert len({mark.operation for mark in folder.marks()}) <= 3
    until(lambda: place.failures, "step 4 has made way")
    assert [step for step, _ in place.failures] == [4]
    assert "newer ones came before storage had it" in place.failures[0][1]
    assert place.committed() == []
    with agent(place.memory, place.store):
        run.close()
    assert place.committed() == [8, 9]


def test_a_pending_save_tells_that_it_was_superseded(place: Place) -> None:
    training = Training()
    run = place.run(training)
    run.resume()
    first = run.maybe_save(1)
    for step in (2, 3, 4):
        run.maybe_save(step)
    assert first is not None
    first.released()
    with pytest.raises(StorageError, match="the snapshot of step 1 has not become durable"):
        first.wait()
    with agent(place.memory, place.store):
        run.close()
    assert place.committed()[-1] == 4


def test_the_next_life_comes_back_from_memory(place: Place) -> None:
    """Nothing is in storage. It goes on from the last step, and so does the life behind it."""
    place.die(place.train(1, 5, durable=1000))
    assert place.committed() == []
    step, run = place.resumed()
    assert (step, run.resumed.hosts, run.resumed.name) == (5, 1, "step-00000005")
    assert str(run.resumed) == "resumed from step 5: memory of 1 host, 0 bytes from storage"
    place.die(run)
    step, run = place.resumed()
    assert (step, run.resumed.hosts) == (5, 1), "a second recovery"
    with agent(place.memory, place.store):
        until(lambda: place.committed() == [5], "storage gets what the run has come back from")
        until(lambda: [info.step for info in run.list() if info.committed] == [5], "and so does the ledger")
    place.die(run)


def test_a_life_that_dies_in_a_snapshot_leaves_the_one_before(place: Place) -> None:
    run = place.train(1, 3, durable=1000)
    place.die(run)
    for path in NodeFolder(place.memory).root.glob("intents/*"):
        if path.stat().st_mtime_ns == max(each.stat().st_mtime_ns for each in path.parent.iterdir()):
            path.rename(path.with_name(f".{path.name}.new"))
            break
    step, run = place.resumed()
    assert step == 2
    place.die(run)


def test_storage_that_is_newer_comes_first(place: Place) -> None:
    place.die(place.train(1, 3, durable=1000))
    bcp.save(place.store / "step-00000004", trained(4).states)
    step, run = place.resumed()
    assert (step, run.resumed.hosts) == (4, 0)
    assert not NodeFolder(place.memory).marks(), "the run does not go on from these"
    place.die(run)


def test_memory_that_is_damaged_leads_to_storage(place: Place) -> None:
    with agent(place.memory, place.store):
        run = place.train(1, 4, durable=2)
        until(lambda: sorted(place.commits) == [2, 4], "they are durable")
    place.die(run)
    place.flip(*NodeFolder(place.memory).data_files())
    step, run = place.resumed()
    stored = sum(path.stat().st_size for path in place.store.glob("step-00000004/*/*.safetensors"))
    assert (step, run.resumed.hosts, run.resumed.from_storage) == (4, 1, stored)
    assert str(run.resumed) == f"resumed from step 4: memory of 1 host, {stored} bytes from storage"
    place.die(run)


def test_one_damaged_block_is_read_from_storage(place: Place) -> None:
    with agent(place.memory, place.store):
        run = place.train(1, 2)
        until(lambda: sorted(place.commits) == [1, 2], "they are durable")
    place.die(run)
    newest = place.newest()[0]
    [path] = [path for path in place.flip(newest) if path.parent.name == "model"]
    for other in NodeFolder(place.memory).data_files()[newest]:
        if other != path:
            shutil.copy(place.store / "step-00000002" / other.relative_to(place.memory), other)
    step, run = place.resumed()
    assert (step, run.resumed.hosts, run.resumed.from_storage) == (2, 1, path.stat().st_size)
    place.die(run)


def test_storage_of_another_save_is_no_copy(place: Place) -> None:
    """Another job has saved the step. Names and digests tell the files apart."""
    place.die(place.train(1, 3, durable=1000))
    bcp.save(place.store / "step-00000003", trained(77).states)
    place.digest()
    place.flip(place.newest()[0])
    training = Training()
    run = place.run(training)
    assert run.resume() == 3
    assert (training.step, run.resumed.hosts) == (77, 0)
    assert "cannot be read from memory" in run.resumed.passed_over[0].reason
    place.die(run)


def test_a_damaged_snapshot_leads_to_the_one_before_it_in_memory(place: Place) -> None:
    place.die(place.train(1, 5, durable=1000))
    place.digest()
    newest, before = place.newest()[:2]
    place.flip(newest)
    step, run = place.resumed()
    assert (step, run.resumed.hosts, run.resumed.from_storage) == (4, 1, 0)
    [passed] = run.resumed.passed_over
    assert (passed.step, passed.name) == (5, f"memory/{newest.operation}")
    assert "cannot be read from memory (this host: bytes " in passed.reason
    assert NodeFolder(place.memory).marks() == [before], "the damaged one is given up"
    place.training.set(5)
    with agent(place.memory, place.store):
        run.maybe_save(5)
        run.close()
    assert place.committed()[-1] == 5


def test_a_damaged_snapshot_leads_to_storage_that_is_newer_than_the_one_before(place: Place) -> None:
    place.die(place.train(1, 5, durable=1000))
    bcp.save(place.store / "step-4", trained(4).states)
    place.digest()
    newest, before = place.newest()[:2]
    place.flip(newest, before)
    step, run = place.resumed()
    assert (step, run.resumed.hosts, run.resumed.name) == (4, 0, "step-4")
    assert [choice.step for choice in run.resumed.passed_over] == [5, 4]
    place.die(run)


def test_a_run_whose_snapshots_are_all_damaged_does_not_begin_anew(place: Place) -> None:
    """As for checkpoints: somebody has to say that their work is given up."""
    place.die(place.train(1, 5, durable=1000))
    place.digest()
    place.flip(*NodeFolder(place.memory).data_files())
    with pytest.raises(CorruptError, match=r"none of 2 checkpoints can be loaded.*step 5: .*step 4: "):
        place.resumed()
    assert NodeFolder(place.memory).marks()
    run = place.run(Training())
    assert run.resume(fresh=True) == 0
    place.die(run)


def test_a_chosen_snapshot_that_is_damaged_is_passed_over_by_the_next_choice(place: Place) -> None:
    place.die(place.train(1, 3, durable=1000))
    place.digest()
    training = Training()
    run = place.run(training)
    assert run.choose({}) == 3
    place.flip(place.newest()[0])
    with pytest.raises(CorruptError, match="cannot be read from memory"):
        run.resume()
    assert run.choose({}) == 2
    assert run.resume() == training.step == 2
    assert [choice.step for choice in run.resumed.passed_over] == [3]
    place.die(run)


def test_an_agent_that_does_not_come_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    await_agent(NodeFolder(place.store.parent / "memory"), 0.01)
    assert "no agent lets other hosts read the snapshots of this one: start it with --listen" in caplog.text


def trained(step: int) -> Training:
    training = Training()
    training.set(step)
    return training


def test_a_run_that_goes_back_leaves_the_memory_behind(place: Place) -> None:
    """What it has left is never committed by an agent, and no later life takes it."""
    place.train_to_4()
    training = Training()
    run = place.run(training, durable=1000)
    assert run.resume(step=2) == 2
    assert not NodeFolder(place.memory).marks()
    training.set(33)
    pending = run.maybe_save(3)
    assert pending is not None
    pending.released()
    place.die(run)
    with agent(place.memory, place.store):
        until(lambda: 3 in place.committed(), "the new step 3, whose trainers have died")
    assert place.committed() == [2, 3]
    target = Training()
    bcp.load(place.store / "step-00000003", {"model": target.model})
    assert target.step == 33


@pytest.mark.parametrize("part", ["model", "metadata"])
def test_a_damaged_checkpoint_is_saved_again(part: str, place: Place) -> None:
    """Agents replace only what they can read."""
    with agent(place.memory, place.store):
        run = place.train(1, 2)
        until(lambda: sorted(place.commits) == [1, 2], "they are durable")
        place.die(run)
    shutil.rmtree(place.memory)
    [path] = place.store.glob("step-00000002/metadata.arrow" if part == "metadata" else "step-00000002/model/*")
    path.write_bytes(path.read_bytes()[:-9])
    with agent(place.memory, place.store):
        step, run = place.resumed()
        assert step == 1
        place.training.set(2)
        run.maybe_save(2)
        run.close()
    assert place.resumed()[0] == 2


def test_a_full_memory_is_an_error_that_may_be_tolerated(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot before stays, and a later one may have room."""
    with agent(place.memory, place.store):
        run = place.train(1, 1, tolerate=1)
        with monkeypatch.context() as patch:
            patch.setattr("bcp.tiers.folder.fallocate", full)
            pending = run.maybe_save(2)
            assert pending is not None
            with pytest.raises(StorageError, match=r"^/.*bytes left, and .* rank 0 needs .* more .*'durable'\)$"):
                pending.released()
        run.maybe_save(3)
        run.close()
    assert [step for step, _ in place.failures] == [2]
    assert place.committed() == [1, 3]


def full(_: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes")


def test_a_full_memory_may_lead_to_storage(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank saves the step itself, whatever was planned for it. Later snapshots have room again."""
    tiers = bcp.Tiers(folder=place.memory, agent="external", on_full="durable")
    run = place.train(1, 2, tiers=tiers, durable=1000, keep=policies.Everything())
    with monkeypatch.context() as patch:
        patch.setattr("bcp.tiers.folder.fallocate", full)
        shutil.rmtree(place.memory / "model")
        pending = run.maybe_save(3, {"loss": 0.25})
        assert pending is not None
        assert pending.wait().path == f"{place.store}/step-00000003"
        assert run.save(3) is None, "it is there"
    assert "step 3 is saved to storage, for the memory of a host is full: /" in caplog.text
    assert "bytes left, and the snapshot of rank 0 needs " in caplog.text
    assert run.committed() == (3,)
    assert (place.failures, place.committed()) == ([], [3])
    assert bcp.Checkpoint(place.store / "step-00000003").verify()
    commit = decode_metadata((place.store / "step-00000003" / METADATA_KEY).read_bytes(), "metadata").commit
    assert commit.metrics == {"loss": 0.25}
    pending = run.maybe_save(4)
    assert pending is not None
    pending.released()
    assert place.committed() == [3]
    assert [mark.operation for mark in place.newest()] != []
    with agent(place.memory, place.store):
        run.close()
    assert place.committed() == [3, 4]
    assert not NodeFolder(place.memory).data_files()


def test_a_run_without_any_room_is_one_without_tiers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent is needed for it. The next life finds its checkpoints, and older snapshots do not count."""
    tiers = bcp.Tiers(folder=place.memory, agent="external", on_full="durable")
    place.die(place.train(1, 2, durable=1000))
    with monkeypatch.context() as patch:
        patch.setattr("bcp.tiers.folder.fallocate", full)
        step, run = place.resumed(tiers=tiers)
        assert step == 2
        NodeFolder(place.memory).leave_behind("")
        for path in place.memory.glob("*/*.safetensors"):
            path.unlink()
        for step in (3, 4, 5):
            place.training.set(step)
            run.maybe_save(step)
        run.close()
    assert place.committed() == [3, 4, 5]
    assert not NodeFolder(place.memory).data_files()
    step, run = place.resumed()
    assert (step, run.resumed.hosts) == (5, 0)
    place.die(run)


def test_a_save_to_storage_in_the_place_of_a_snapshot_is_caught_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage has failed, too. The next save is durable in its place."""
    tiers = bcp.Tiers(folder=place.memory, agent="external", on_full="durable")
    with agent(place.memory, place.store):
        run = place.train(1, 2, tiers=tiers, durable=3, tolerate=1, keep=policies.Everything())

        async def down(*_: object, **__: object) -> None:
            raise StorageError("storage is down")

        with monkeypatch.context() as patch:
            patch.setattr("bcp.tiers.folder.fallocate", full)
            patch.setattr("bcp.runs.keeper.Keeper.begin", down)
            shutil.rmtree(place.memory / "model")
            pending = run.maybe_save(3)
            assert pending is not None
            with pytest.raises(StorageError, match="storage is down"):
                pending.wait()
        for step in (4, 5):
            run.maybe_save(step)
        until(lambda: place.committed() == [4], "step 4 takes the place of step 3")
        run.close()
    assert place.committed() == [4, 5]
    assert [step for step, _ in place.failures] == [3]


def test_a_folder_of_another_run_is_refused_until_all_of_it_has_ended(place: Place, tmp_path: Path) -> None:
    """Its snapshots would be resumed from otherwise, or lost."""
    place.die(place.train(1, 2, durable=1000))
    other = Place(tmp_path / "other")
    other.memory = place.memory
    with pytest.raises(InputError, match=r"is the memory of the run at .*/run, which has 2 snapshots here"):
        other.resumed()
    with agent(place.memory, place.store):
        until(lambda: place.committed() == [2], "its agent makes the newest one durable")
        until(lambda: [*NodeFolder(place.memory).ended().values()].count("COMMITTED"), "and notes it")
    NodeFolder(place.memory).end(min(mark.operation for mark in NodeFolder(place.memory).marks()), "COMMITTED")
    for mark in NodeFolder(place.memory).marks():
        NodeFolder(place.memory).end(mark.operation, "COMMITTED")
    step, run = other.resumed()
    assert step == 0
    assert not NodeFolder(place.memory).data_files()
    other.die(run)
    with pytest.raises(InputError, match="pass its agent that place"):
        NodeFolder(place.memory).check_run(str(place.store))


def test_a_run_whose_agent_is_missing_does_not_end_well(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcp.runs.drains.TELL_SECONDS", 0.05)
    monkeypatch.setattr("bcp.runs.drains.ALONE_SECONDS", 0.1)
    run = place.train(1, 2)
    with pytest.raises(StorageError, match=r"steps 1, 2 are not durable.*start one, as in python -m bcp.agent"):
        run.close()
    assert place.resumed()[0] == 2


@pytest.mark.parametrize("durable", [1, 1000])
def test_an_agent_that_is_gone_is_missed_whatever_becomes_durable(
    durable: int, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot may make way for the next one before it has missed its agent, or stay in memory."""
    run = place.train(1, 1, durable=durable)
    monkeypatch.setattr("bcp.runs.tiered.ALONE_SECONDS", -1.0)
    for step in (2, 3, 4, 5):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    until(lambda: "start one, as in python -m bcp.agent" in caplog.text, "it is told")
    place.die(run)
    assert caplog.text.count("start one, as in python -m bcp.agent") == 1


def test_an_agent_that_is_gone_is_started_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("bcp.runs.tiered.start_agent", lambda folder, *_: started.append(str(folder.root)))
    run = place.train(1, 1, durable=1000, tiers=bcp.Tiers(folder=place.memory))
    assert len(started) == 1, "by resume()"
    monkeypatch.setattr("bcp.runs.tiered.ALONE_SECONDS", -1.0)
    pending = run.maybe_save(2)
    assert pending is not None
    pending.released()
    until(lambda: len(started) > 1, "it is missed")
    place.die(run)
    assert {*started} == {str(place.memory)}


def test_a_run_that_waits_too_long_leaves_the_rest_to_its_agent(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bcp.runs.drains.TELL_SECONDS", 0.05)
    run = place.train(1, 2, save_options=bcp.SaveOptions(timeout=0.1))
    with NodeFolder(place.memory).serving() as lock:  # an agent that does nothing
        assert lock is not None
        run.close()
    assert "steps 1, 2 are not durable yet, and are in the memory of their hosts: agents go on" in caplog.text
    assert place.resumed()[0] == 2


def test_a_rank_that_joins_at_the_end_of_an_agent_keeps_it(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "memory")
    with folder.serving() as lock:
        assert lock is not None
        memory = TierMemory(folder, 0)
        assert not folder.leave_serving(lock)
        assert folder.is_served()
        memory.close()
        assert folder.leave_serving(lock)
        assert not folder.is_served()
        with folder.serving() as other:
            assert other is not None


def test_a_life_that_makes_no_step_waits_for_what_it_came_back_from(place: Place) -> None:
    """Its memory would be the only place that has the step."""
    place.die(place.train(1, 3, durable=1000))
    with agent(place.memory, place.store):
        step, run = place.resumed()
        assert step == 3
        run.close()
    assert place.committed() == [3]


def test_a_life_that_makes_no_step_leaves_the_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcp.runs.drains.TELL_SECONDS", 0.05)
    monkeypatch.setattr("bcp.runs.drains.ALONE_SECONDS", 0.1)
    place.die(place.train(1, 3, durable=1000))
    step, run = place.resumed()
    with pytest.raises(StorageError, match="steps 3 are not durable"):
        run.close()
    assert place.resumed()[0] == step == 3


@pytest.mark.parametrize("durable", [None, 1000])
def test_a_last_snapshot_that_is_refused_is_an_error_and_stays(durable: int | None, place: Place) -> None:
    """Another job has a checkpoint at its place."""
    run = place.train(1, 2, durable=durable)
    bcp.save(place.store / "step-00000002", trained(77).states)
    with agent(place.memory, place.store), pytest.raises(StorageError, match="step 2 does not become durable: REFUSED"):
        run.close()
    assert NodeFolder(place.memory).marks(), "the other keeps its memory"
    assert [step for step, _ in place.failures][-1:] == [2]


def test_another_run_at_the_same_place_does_not_take_the_snapshots(place: Place) -> None:
    place.die(place.train(1, 3, durable=1000, run_id="first"))
    shutil.rmtree(place.store)
    training = Training()
    run = place.run(training, run_id="second")
    assert run.resume() == 0
    assert not NodeFolder(place.memory).marks()
    place.die(run)


@pytest.mark.parametrize("goal", [{"step": 2}, {"fresh": True}])
def test_a_host_that_took_no_part_in_going_back_is_not_resumed_from(goal: dict[str, Any], place: Place) -> None:
    """Its snapshots are of a branch that the run has left."""
    place.train_to_4()
    other = Place(place.store.parent)
    other.memory = place.store.parent / "other"
    training = Training()
    run = other.run(training)
    assert run.resume(**goal) == goal.get("step", 0)
    training.set(3)
    with agent(other.memory, place.store):
        run.maybe_save(3)
        run.close()
    step, run = place.resumed()
    assert (step, run.resumed.hosts) == (3, 0)
    place.die(run)


def train_durably(place: Place, last: int) -> bcp.Run:
    """Train to a step, each of which is durable before the next."""
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=1)
    assert run.resume() == 0
    for step in range(1, last + 1):
        training.set(step)
        pending = run.maybe_save(step)
        assert pending is not None
        pending.wait()
    until(lambda: place.commits == [*range(1, last + 1)], "the run knows of all")
    return run


def gone_back(place: Place, *, agent_commits: bool) -> None:
    """Make steps 2 to 4 durable; go back to step 2, make step 3 durable, and die behind the snapshot of step 4."""
    with agent(place.memory, place.store):
        run = train_durably(place, 4)
    place.die(run)
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=policies.AtSteps([3]))
    assert run.resume(step=2) == 2
    with agent(place.memory, place.store):
        training.set(30)
        run.maybe_save(3)
        until(lambda: place.commits[4:] == [3], "the new step 3 is durable, so that the old step 4 is suspect")
    training.set(40)
    pending = run.maybe_save(4)
    assert pending is not None
    pending.released()
    place.die(run)
    if agent_commits:
        before = (place.store / "step-00000004" / METADATA_KEY).read_bytes()
        with agent(place.memory, place.store):
            until(lambda: (place.store / "step-00000004" / METADATA_KEY).read_bytes() != before, "an agent commits")


@pytest.mark.parametrize("left", ["memory", "memory and storage", "storage"])
def test_a_new_snapshot_of_a_suspect_step_is_resumed_from(left: str, place: Place) -> None:
    """The mark is about the checkpoint that was there before."""
    gone_back(place, agent_commits="storage" in left)
    if left == "storage":
        shutil.rmtree(place.memory)
        assert bcp.latest(place.store) == str(place.store / "step-00000004")
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=1000)
    assert run.resume() == 4
    assert training.step == 40
    assert bool(run.resumed.hosts) == ("memory" in left)
    place.die(run)


def test_a_snapshot_is_no_more_suspect_than_its_checkpoint_in_storage(place: Place) -> None:
    """A mark of the very save in memory counts."""
    with agent(place.memory, place.store):
        run = train_durably(place, 3)
        run.mark(3, "suspect", "the loss rose")
    place.die(run)
    step, run = place.resumed(keep=policies.Everything())
    assert step == 2
    place.die(run)


def test_a_mark_behind_the_snapshot_of_its_step_is_about_the_old_checkpoint(place: Place) -> None:
    """The first commit of a run that went back marks newer steps, of which one is in memory by then."""
    with agent(place.memory, place.store):
        run = train_durably(place, 4)
    place.die(run)
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=policies.AtSteps([3]))
    assert run.resume(step=2) == 2
    for step in (3, 4):
        training.set(10 * step)
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    with agent(place.memory, place.store):
        until(lambda: place.commits[4:] == [3], "the new step 3 is durable")
    place.die(run)
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=1000)
    assert run.resume() == 4
    assert training.step == 40
    place.die(run)


def trust_of(place: Place) -> dict[int, str]:
    return {info.step: info.trust for info in bcp.tools.list_steps(place.store)}


@pytest.mark.parametrize("left", ["memory", "storage"])
def test_a_run_that_went_back_is_resumed_from_its_snapshot_before_any_commit(left: str, place: Place) -> None:
    """The checkpoints that it has left behind are newer, and are suspect once a snapshot is in memory."""
    with agent(place.memory, place.store):
        run = train_durably(place, 4)
    place.die(run)
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=1000)
    assert run.resume(step=2) == 2
    assert trust_of(place) == dict.fromkeys(range(1, 5), "unknown")
    training.set(30)
    pending = run.maybe_save(3)
    assert pending is not None
    pending.released()
    until(lambda: trust_of(place)[4] == "suspect", "they are left behind")
    place.die(run)
    if left == "storage":
        before = (place.store / "step-00000003" / METADATA_KEY).read_bytes()
        with agent(place.memory, place.store):
            until(lambda: (place.store / "step-00000003" / METADATA_KEY).read_bytes() != before, "an agent commits")
        shutil.rmtree(place.memory)
    training = Training()
    run = place.run(training, keep=policies.Everything(), durable=1000)
    assert run.resume() == 3
    assert training.step == 30
    place.die(run)


def test_a_step_that_an_agent_commits_while_the_run_goes_back_is_suspect(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of the resumption did not have it."""
    place.train_to_4()
    load = bcp.Run._load

    def commit() -> None:
        with agent(place.memory, place.store):
            until(lambda: 4 in place.committed(), "an agent commits meanwhile")

    async def slow(self: bcp.Run, step: int, name: str) -> Any:
        await in_thread(commit)
        return await load(self, step, name)

    monkeypatch.setattr(bcp.Run, "_load", slow)
    training = Training()
    run = place.run(training, keep=policies.Everything())
    assert run.resume(step=2) == 2
    monkeypatch.undo()
    for step in (3, 4):
        training.set(10 * step)
        run.maybe_save(step)
    with agent(place.memory, place.store):
        run.close()
    training = Training()
    run = place.run(training)
    assert run.resume() == 4
    assert training.step == 40
    place.die(run)


def test_a_snapshot_that_was_to_stay_becomes_durable_when_it_is_asked_for(place: Place) -> None:
    with agent(place.memory, place.store):
        run = place.train(1, 3, durable=1000)
        pending = run.save(3)
        assert pending is not None
        assert pending.wait().path == f"{place.store}/step-00000003"
        assert run.committed() == (3,)
        assert run.save(3) is None
        run.close()
    assert place.committed() == [3]


def test_an_interrupt_at_the_end_leaves_the_rest_to_the_agents(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.train(1, 2)

    async def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(run._saves.drains, "ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert place.resumed()[0] == 2


def test_a_run_that_is_dropped_gives_its_place_free(place: Place) -> None:
    model = nn.Linear(5, 5)
    place.die(place.train(1, 2, durable=1000))
    with pytest.raises(bcp.BcpError):
        bcp.Run(place.store, {"model": model}, tiers=bcp.Tiers(folder=place.memory, agent="external")).resume()
    assert place.resumed()[0] == 2


def test_a_memory_that_has_gone_is_an_error_of_storage(place: Place) -> None:
    run = place.train(1, 1)
    shutil.rmtree(place.memory)
    with pytest.raises(StorageError, match=r"has gone|lost files|was deleted"):
        run.maybe_save(2)
    place.die(run)


def test_a_job_whose_folder_was_taken_ends(place: Place) -> None:
    """Its agents may have committed a step by then; it learns of the other job behind its next snapshot."""
    run = place.train(1, 1, durable=1000)
    other = Place(place.store.parent)
    other.memory = place.store.parent / "other"
    taker = other.run(Training())
    assert taker.resume() == 0
    pending = run.maybe_save(2)
    assert pending is not None
    pending.released()
    until(lambda: run._saves._taken, "it looks at the ledger")
    with pytest.raises(bcp.RunTakenError):
        run.maybe_save(3)
    place.die(run)
    place.die(taker)


def test_an_agent_starts_while_many_ask_whether_there_is_one(tmp_path: Path) -> None:
    folder, is_over = NodeFolder(tmp_path / "memory"), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            folder.is_served()

    askers = [threading.Thread(target=ask) for _ in range(8)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(50):
            with folder.serving() as lock:
                assert lock is not None
                with folder.serving() as second:
                    assert second is None
    finally:
        is_over.set()
        for asker in askers:
            asker.join()


def test_a_newer_snapshot_that_is_not_whole_is_told(place: Place) -> None:
    place.die(place.train(1, 3, durable=1000))
    folder = NodeFolder(place.memory)
    newest = max(folder.ages().items(), key=lambda each: each[1])[0]
    for path in folder.data_files()[newest]:
        path.unlink()
    step, run = place.resumed()
    assert step == 2
    [passed] = run.resumed.passed_over
    assert passed.step == 3
    assert "has gone from" in passed.reason
    place.die(run)


def test_a_host_that_was_left_out_commits_nothing_of_the_branch_that_the_run_has_left(place: Place) -> None:
    """The run goes back on another host, and its agent comes late."""
    place.train_to_4()
    training, memory = Training(), place.memory.with_name("another-host")
    with agent(memory, place.store):
        run = place.run(training, tiers=bcp.Tiers(folder=memory, agent="external"))
        assert run.resume(step=2) == 2
        training.set(3)
        run.save(3)
        run.close()
    assert place.committed() == [2, 3]
    left = {mark.operation for mark in place.newest()}
    with agent(place.memory, place.store):
        until(lambda: LEFT in {NodeFolder(place.memory).ended().get(each) for each in left}, "the agent has looked")
    assert place.committed() == [2, 3]
    _, run = place.resumed()
    assert run.resumed.step == 3
    place.die(run)
