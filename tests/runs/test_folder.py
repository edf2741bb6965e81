"""The folder of a run: one writer, a ledger that follows storage, and deletions that may die anywhere."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from fake_store import FakeStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interleave import Dead, Turns, orders
from logs import captured_logs
from samples import sample

import bcp.runs.folder
from bcp.backends import LocalBackend, MemoryBackend, child
from bcp.backends.objects import ObjectBackend, RetryPolicy
from bcp.errors import FormatVersionError, InputError, RunTakenError, StorageError
from bcp.policies import Entry, LastDays, Latest
from bcp.protocols import Backend, Buffer, Unfinished, Version
from bcp.runs.folder import Folder, step_name, step_of
from bcp.runs.keeper import Keeper
from bcp.runs.ledger import LARGEST_STEP, Ledger, Life
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

pytestmark = pytest.mark.anyio
URL = "s3://bucket/pretrain"
QUICK = RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3)
OBJECTS = ("metadata.arrow", "receipts/00000-1.arrow", "model/00000-1.safetensors", "model/00001-1.safetensors")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcp.runs.folder, "_PAUSE_SECONDS", 0.0)


@pytest.fixture(params=["memory", "local", "child", "objects"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    name = request.node.name
    if request.param == "local":
        yield LocalBackend(tmp_path / "not" / "there yet")
    elif request.param == "child":
        yield child(LocalBackend(tmp_path), "runs/7")
    elif request.param == "objects":
        yield ObjectBackend(FakeStore(), QUICK)
    else:
        yield MemoryBackend(name)
    MemoryBackend.forget(name)


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[MemoryBackend]:
    yield MemoryBackend(request.node.name)
    MemoryBackend.forget(request.node.name)


async def save(backend: Backend, *steps: int, last: str = OBJECTS[0], tag: str = "") -> None:
    """Store checkpoints as a save does: the commit object comes last, and is unlike any other."""
    for step in steps:
        for name in (*OBJECTS[1:], last):
            await backend.put(f"{step_name(step)}/{name}", f"{step} {name} {tag}".encode())


async def objects(backend: Backend, step: int) -> list[str]:
    prefix = f"{step_name(step)}/"
    return sorted(info.key.removeprefix(prefix) for info in await backend.list(prefix))


def entries(ledger: Ledger | None) -> list[int]:
    assert ledger is not None
    return [entry.step for entry in ledger.entries]


def with_steps(*steps: int) -> Callable[[Ledger], Ledger]:
    return lambda ledger: ledger.with_entries(Entry(step=step, committed=1.0) for step in steps)


async def taken(backend: Backend, *steps: int) -> Folder:
    """Return the folder of a run with these checkpoints."""
    await save(backend, *steps)
    folder = Folder(backend, URL)
    await folder.take(None)
    return folder


async def stored(backend: Backend) -> Ledger:
    return Ledger.from_bytes(bytes(await backend.get("run.json")), "run.json")


# -- names


def test_names_of_steps() -> None:
    assert step_name(0) == "step-00000000"
    assert step_name(1000) == "step-00001000"
    assert step_name(1234567890) == "step-1234567890"
    for bad in (-1, 1.0, True, "1", None, LARGEST_STEP + 1):
        with pytest.raises(InputError, match="whole number"):
            step_name(bad)  # type: ignore[arg-type]  # the mistake that is tested


@pytest.mark.parametrize("name", ["step-1000", "step-00001000", "step-000001000"])
def test_names_of_steps_are_padded_or_not(name: str) -> None:
    assert step_of(name) == 1000


@given(st.integers(0, LARGEST_STEP))
def test_every_name_of_a_step_is_read(step: int) -> None:
    assert step_of(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        *("step-", "step-0000100a", "step-00001000/", "step-1000.0", f"step-{'0' * 64}1"),
        *(" step-00001000", "step-00001000\n", "Step-00001000", "step--0001000", "step-0000100\u0663", "run.json"),
        f"step-{LARGEST_STEP + 1}",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_of(name) is None


# -- taking a folder


async def test_a_new_folder_gets_a_ledger(backend: Backend) -> None:
    folder = Folder(backend, URL, clock=lambda: 1_700_000_000.0)
    assert folder.ledger is None
    assert await folder.steps() == []
    ledger = await folder.take("pretrain")
    assert ledger == folder.ledger == await stored(backend)
    assert ledger.run_id == "pretrain"
    assert ledger.entries == ()
    assert ledger.lives == (Life(1_700_000_000.0, socket.gethostname(), os.getpid()),)
    assert [info.key for info in await backend.list()] == ["run.json"]


async def test_a_run_without_a_name_keeps_the_one_it_is_given(backend: Backend) -> None:
    first = await Folder(backend, URL).take(None)
    assert len(first.run_id) == 12
    second = await Folder(backend, URL).take(None)
    assert second.run_id == first.run_id
    assert second.owner != first.owner
    assert second.total_lives == 2
    assert second.failures == 1, "the first life did not end"
    assert (await Folder(backend, URL).take(first.run_id)).failures == 2


async def test_a_folder_of_another_run_is_refused_and_left_alone(backend: Backend) -> None:
    first = await Folder(backend, URL).take("pretrain")
    folder = Folder(backend, URL)
    with pytest.raises(RunTakenError, match=rf"{URL} holds run 'pretrain', and this job is run 'tune'; .*folder"):
        await folder.take("tune")
    assert await stored(backend) == first
    assert folder.ledger is None


@pytest.mark.parametrize("run_id", ["", "a\nb", "x" * 257, 7])
async def test_a_run_id_is_a_name(memory: MemoryBackend, run_id: Any) -> None:
    with pytest.raises(InputError, match="run_id="):
        await Folder(memory, URL).take(run_id)
    assert await memory.list() == []


async def test_a_folder_that_was_not_taken_is_not_written_to(memory: MemoryBackend) -> None:
    await save(memory, 1)
    folder = Folder(memory, URL)
    for call in (folder.change(with_steps(1)), folder.remove(1), folder.leftovers(set())):
        with pytest.raises(InputError, match=r"take\(\) the folder"):
            await call
    assert await objects(memory, 1) == sorted(OBJECTS)


async def test_the_ledger_follows_storage(backend: Backend) -> None:
    folder = await taken(backend, 10, 20, 30)
    await folder.change(lambda ledger: ledger.marked(20, "verified").pinned(10))
    await save(backend, 40, 50)
    await save(backend, 60, last="half")  # died before its commit
    await backend.put("stepp-70/metadata.arrow", b"no name of a step")
    await backend.delete([f"{step_name(30)}/{name}" for name in OBJECTS])
    with captured_logs() as lines:
        folder = Folder(backend, URL, clock=lambda: 5000.0)
        ledger = await folder.take(None)
    assert entries(ledger) == [10, 20, 40, 50]
    assert ledger.entries[0].pinned
    assert ledger.entries[1].trust == "verified"
    assert ledger.entries[2] == Entry(step=40, committed=5000.0), "counted from now: its age is not known"
    assert folder.listed.folders == (60, 50, 40, 20, 10)
    assert await folder.steps() == [60, 50, 40, 20, 10]
    assert [line["steps"] for line in lines if line["log_level"] == "warning"] == [[30]]


async def test_checkpoints_that_were_copied_without_their_ledger_are_found(backend: Backend) -> None:
    await save(backend, 10, 20)
    assert entries(await Folder(backend, URL).take("copied")) == [10, 20]


# -- requests


@pytest.fixture
def counted() -> CountingBackend:
    MemoryBackend.forget("counted run")
    return CountingBackend(MemoryBackend("counted run"))


async def test_requests_are_few(counted: CountingBackend) -> None:
    folder = await taken(counted.inner, *range(200))
    counted.calls.clear()
    folder = Folder(counted, URL)
    await folder.take(None)
    assert counted.calls == {"version": 1, "get": 1, "folders": 1, "put_if": 1}, "no commit object is asked for"
    counted.calls.clear()
    await folder.steps()
    assert counted.calls == {"folders": 1}
    counted.calls.clear()
    for step in range(200, 220):
        await folder.change(with_steps(step))
    assert counted.calls == {"put_if": 20}
    counted.calls.clear()
    await folder.change(lambda ledger: ledger)
    assert counted.calls == {}, "nothing has changed"
    assert await folder.committed(7)
    assert not await folder.committed(300)
    assert counted.calls == {"version": 2}


async def test_the_commit_objects_of_unknown_folders_are_asked_for_at_once(counted: CountingBackend) -> None:
    await save(counted.inner, *range(40))
    waiting, most = 0, 0

    class Slow(CountingBackend):
        async def version(self, key: str) -> Version | None:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            waiting -= 1
            return await super().version(key)

    slow = Slow(counted.inner)
    assert entries(await Folder(slow, URL).take(None)) == list(range(40))
    assert slow.calls["version"] == 41
    assert most == 16


async def test_a_removal_takes_few_requests(counted: CountingBackend) -> None:
    folder = await taken(counted, 10, 20)
    counted.calls.clear()
    await folder.remove(10)
    # the commit twice, and one look for a record of cold places
    assert counted.calls == {"version": 3, "put_if": 2, "list": 1, "delete": 2, "folders": 1}


# -- changes


async def test_a_job_whose_folder_was_taken_stops_writing(backend: Backend) -> None:
    first = await taken(backend, 10, 20)
    second = Folder(backend, URL, clock=lambda: 1_700_000_000.0)
    ledger = await second.take(None)
    said = (
        rf"another job took the folder {URL} at 2023-11-14 22:13:20 UTC, host '{socket.gethostname()}', "
        rf"pid {os.getpid()}; this one stops writing"
    )
    for call in (lambda: first.change(with_steps(30)), lambda: first.remove(10)) * 2:
        with pytest.raises(RunTakenError, match=said):
            await call()
    assert await stored(backend) == ledger
    assert await objects(backend, 10) == sorted(OBJECTS), "nothing is deleted before the ledger says so"
    await second.change(with_steps(30))


async def test_strange_times_of_another_job_are_told(memory: MemoryBackend) -> None:
    first = await taken(memory)
    await Folder(memory, URL, clock=lambda: 1e300).take(None)
    with pytest.raises(RunTakenError, match=r"at 1e\+300, host"):
        await first.change(with_steps(1))


async def test_a_change_from_elsewhere_in_the_name_of_the_owner_is_kept(backend: Backend) -> None:
    folder = await taken(backend, 10, 20)
    found = await stored(backend)
    await backend.put("run.json", found.pinned(10).to_bytes())
    ledger = await folder.change(lambda ledger: ledger.marked(20, "verified"))
    assert ledger == folder.ledger == await stored(backend)
    assert ledger.entries[0].pinned
    assert ledger.entries[1].trust == "verified"


async def test_an_error_of_the_change_itself_changes_nothing(backend: Backend) -> None:
    folder = await taken(backend, 10)
    before = await stored(backend)
    with pytest.raises(InputError, match="no checkpoint of step 11"):
        await folder.change(lambda ledger: ledger.pinned(11))
    assert folder.ledger == before == await stored(backend)


class Forgetful(CountingBackend):
    """Carries ``put_if`` out and loses the answer: it raises, or makes the attempt again and finds a conflict."""

    def __init__(self, inner: Backend, *, raises: bool) -> None:
        super().__init__(inner)
        self.raises, self.loses = raises, False

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        version = await super().put_if(key, data, expected)
        if not self.loses:
            return version
        if self.raises:
            raise StorageError("the answer was lost")
        return None


async def test_a_write_whose_answer_was_lost_counts(memory: MemoryBackend) -> None:
    forgetful = Forgetful(memory, raises=False)
    forgetful.loses = True
    folder = Folder(forgetful, URL)
    assert (await folder.take(None)).total_lives == 1
    await folder.change(with_steps(1))
    await folder.change(with_steps(2))
    assert folder.ledger == await stored(memory)
    assert entries(folder.ledger) == [1, 2]


async def test_a_change_after_one_whose_answer_was_lost_goes_on(memory: MemoryBackend) -> None:
    forgetful = Forgetful(memory, raises=True)
    folder = Folder(forgetful, URL)
    await folder.take(None)
    forgetful.loses = True
    with pytest.raises(StorageError):
        await folder.change(with_steps(1))
    forgetful.loses = False
    assert entries(await folder.change(with_steps(2))) == [1, 2]


async def test_a_ledger_that_was_deleted_or_broken_meanwhile_is_written_again(backend: Backend) -> None:
    folder = await taken(backend, 10)
    await backend.delete(["run.json"])
    assert entries(await folder.change(with_steps(20))) == [10, 20]
    await backend.put("run.json", b"{")
    with captured_logs() as lines:
        assert entries(await folder.change(with_steps(30))) == [10, 20, 30]
    assert await stored(backend) == folder.ledger
    (line,) = [line for line in lines if line["log_level"] == "warning"]
    assert bytes(await backend.get(line["copy"])) == b"{"


async def test_endless_changes_by_others_end_in_an_error(memory: MemoryBackend) -> None:
    folder = await taken(memory, 10)

    async def harm(_: str) -> None:
        found = await stored(memory)
        await memory.put("run.json", found.observed(found.observed_hours + 1.0).to_bytes())

    folder._backend = Always(memory, harm)
    with pytest.raises(StorageError, match=r"run.json was changed by others in each of 30 attempts"):
        await folder.change(with_steps(20))


class Always(CountingBackend):
    def __init__(self, inner: Backend, harm: Callable[[str], Awaitable[object]]) -> None:
        super().__init__(inner)
        self._harm = harm

    async def before(self, operation: str, key: str) -> None:
        if operation == "put_if":
            await self._harm(key)


# -- ledgers that cannot be read


async def test_a_broken_ledger_is_kept_aside_and_made_anew(backend: Backend) -> None:
    await taken(backend, 10, 20)
    half = bytes(await backend.get("run.json"))[:-30]
    await backend.put("run.json", half)
    with captured_logs() as lines:
        ledger = await Folder(backend, URL, clock=lambda: 1_700_000_000.5).take("pretrain")
    assert entries(ledger) == [10, 20]
    assert ledger.run_id == "pretrain"
    assert bytes(await backend.get("run.json.broken-20231114T221320500000")) == half
    broken, pinned = [line for line in lines if line["log_level"] == "warning"]
    assert broken["copy"] == "run.json.broken-20231114T221320500000"
    assert broken["run"] == URL
    assert "is no ledger of a run" in broken["error"]
    assert pinned["steps"] == [10, 20]


@pytest.mark.parametrize("damage", [None, b"", b"{"])
async def test_checkpoints_whose_ledger_is_lost_are_pinned(backend: Backend, damage: bytes | None) -> None:
    await taken(backend, 10, 20)
    if damage is None:
        await backend.delete(["run.json"])
    else:
        await backend.put("run.json", damage)
    folder = Folder(backend, URL)
    ledger = await folder.take("pretrain")
    assert [(entry.step, entry.pinned) for entry in ledger.entries] == [(10, True), (20, True)]
    again = await Folder(backend, URL).take("pretrain")
    assert [entry.pinned for entry in again.entries] == [True, True], "the next job keeps them, too"


async def test_a_checkpoint_that_its_ledger_lacks_is_not_pinned(backend: Backend) -> None:
    folder = await taken(backend, 10, 20)
    await folder.change(lambda ledger: ledger.without(10).without(20))
    ledger = await Folder(backend, URL).take(None)
    assert [(entry.step, entry.pinned) for entry in ledger.entries] == [(10, False), (20, False)]


async def test_a_ledger_of_a_newer_version_is_left_alone(backend: Backend) -> None:
    folder = await taken(backend, 10)
    newer = b'{"version": 3, "entries": "elsewhere"}'
    await backend.put("run.json", newer)
    with pytest.raises(FormatVersionError, match=rf"{URL}/run.json has version 3"):
        await Folder(backend, URL).take(None)
    with pytest.raises(FormatVersionError):
        await folder.change(with_steps(20))
    assert bytes(await backend.get("run.json")) == newer


FULL = (
    Ledger(run_id="r", owner="o")
    .with_checkpoint(10, 1.0, {"loss": 2.0})
    .with_checkpoint(20, 2.0, {})
    .leaving(5, "77")
    .with_life(Life(1.0, "node", 1))
    .to_bytes()
)
SPOTS = st.tuples(st.integers(0, len(FULL) - 1), st.binary(max_size=3), st.integers(0, 4))


@given(st.one_of(st.binary(max_size=50), st.lists(SPOTS, min_size=1, max_size=4)))
def test_a_damaged_ledger_never_ends_a_resumption(damage: bytes | list[tuple[int, bytes, int]]) -> None:
    data = bytearray(FULL)
    for at, new, old in damage if isinstance(damage, list) else ():
        data[at : at + old] = new
    MemoryBackend.forget("damaged")
    backend = MemoryBackend("damaged")

    async def use() -> None:
        await save(backend, 10, 30)
        await backend.put("run.json", damage if isinstance(damage, bytes) else data)
        with suppress(FormatVersionError):
            folder = Folder(backend, URL)
            assert entries(await folder.take(None)) == [10, 30], "the steps are those of storage, whatever it says"
            assert entries(await folder.change(with_steps(40))) == [10, 30, 40]
            json.loads(bytes(await backend.get("run.json")))

    anyio.run(use)


# -- removal


async def test_a_removed_checkpoint_leaves_nothing(backend: Backend) -> None:
    folder = await taken(backend, 10, 20)
    await folder.remove(10)
    await folder.remove(10)
    assert await folder.steps() == [20]
    assert [info.key for info in await backend.list()] == [
        "run.json",
        *(f"{step_name(20)}/{name}" for name in sorted(OBJECTS)),
    ]
    ledger = await stored(backend)
    assert entries(ledger) == [20]
    assert ledger.removing == ()
    assert await folder.leftovers(set()) == []
    await folder.remove(99)


async def test_commit_objects_go_first_those_of_roles_too() -> None:
    MemoryBackend.forget("roles")
    deleted: list[str] = []

    class Noting(CountingBackend):
        async def before(self, operation: str, key: str) -> None:
            deleted.extend([key] if operation == "delete" else [])

    backend = Noting(MemoryBackend("roles"))
    await save(backend, 10)
    for role in ("actor", "critic/head"):
        for name in OBJECTS:
            await backend.put(f"{step_name(10)}/{role}/{name}", b"x")
    folder = await taken(backend)
    await folder.remove(10)
    assert deleted[0] == "step-00000010/metadata.arrow"
    assert deleted[1] == "step-00000010/actor/metadata.arrow step-00000010/critic/head/metadata.arrow"
    assert len(deleted[2].split()) == 9
    assert await objects(backend, 10) == []


async def test_a_checkpoint_of_many_objects_goes_in_batches(counted: CountingBackend) -> None:
    for number in range(2500):
        await counted.inner.put(f"{step_name(10)}/model/{number:05d}", b"x")
    folder = await taken(counted, 10)
    counted.calls.clear()
    await folder.remove(10)
    assert counted.calls["delete"] == 1 + 3
    assert await objects(counted, 10) == []


async def test_empty_directories_and_unfinished_files_go_with_a_checkpoint(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    folder = await taken(backend, 10, 20)
    left = tmp_path / step_name(10)
    (left / "model" / "deep" / "deeper").mkdir(parents=True)
    (left / ".metadata.arrow.none-0.bcp-tmp").symlink_to("nowhere")
    (left / "model" / f".x.{'0' * 24}.bcp-tmp").write_bytes(b"half")
    await folder.remove(10)
    assert sorted(path.name for path in left.parent.iterdir()) == ["run.json", "step-00000020"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_remains_of_killed_writers_of_the_ledger_go_with_the_first_commit_of_a_life(tmp_path: Path) -> None:
    await taken(LocalBackend(tmp_path), 10)
    version = await LocalBackend(tmp_path).version("run.json")
    remains = [f".run.json.{'0' * 24}.bcp-tmp", f".run.json.new.{'1' * 24}.bcp-tmp", "run.json.new"]
    for name in remains:
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".run.json.{version}-0.bcp-tmp").symlink_to(remains[0])
    other = tmp_path / step_name(30) / f".metadata.arrow.{'2' * 24}.bcp-tmp"
    other.parent.mkdir()
    other.write_bytes(b"of a save that is in flight")
    keeper = Keeper(Folder(LocalBackend(tmp_path), URL), Latest(3))
    await keeper.candidates(None)
    await save(LocalBackend(tmp_path), 20)
    await keeper.committed(20, {}, {20})
    assert names_in(tmp_path) == ["run.json", *map(step_name, (10, 20, 30))]
    assert other.exists()
    (tmp_path / remains[0]).write_bytes(b"of a live writer")
    await save(LocalBackend(tmp_path), 40)
    await keeper.committed(40, {}, {40})
    assert (tmp_path / remains[0]).exists(), "once in a life"


class Unlisted(CountingBackend):
    """Cannot list unfinished writes, once."""

    failed = False

    async def unfinished(self) -> Sequence[Unfinished]:
        if not self.failed:
            self.failed = True
            raise StorageError("not now")
        return await LocalBackend.unfinished(self.inner)  # type: ignore[arg-type]  # it is one


async def test_remains_that_cannot_be_listed_cost_no_retention(tmp_path: Path) -> None:
    backend = Unlisted(LocalBackend(tmp_path))
    keeper = Keeper(Folder(backend, URL), Latest(1))
    await keeper.candidates(None)
    for step in (10, 20, 30):  # the first list fails, and the next one is the last
        (tmp_path / f".run.json.{step:024}.bcp-tmp").write_bytes(b"half")
        await save(backend, step)
        await keeper.committed(step, {}, {step})
    assert backend.failed
    assert names_in(tmp_path) == [f".run.json.{30:024}.bcp-tmp", "run.json", step_name(30)]


@pytest.mark.parametrize("days", [30.0, -30.0])
async def test_a_clock_that_is_set_during_a_run_deletes_nothing_and_is_told(
    memory: MemoryBackend, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    keeper = Keeper(Folder(memory, URL), LastDays(7))
    await keeper.candidates(None)
    hosts_time = time.time
    with captured_logs() as lines:
        for step in (10, 20, 30):
            await save(memory, step)
            await keeper.committed(step, {}, {step})
            monkeypatch.setattr(time, "time", lambda: hosts_time() + days * 86_400)
    ledger = await stored(memory)
    assert entries(ledger) == [10, 20, 30]
    assert max(entry.committed for entry in ledger.entries) < hosts_time() + 60
    assert min(entry.committed for entry in ledger.entries) > hosts_time() - 60
    (line,) = [line for line in lines if line["log_level"] == "warning"]
    assert f"set {'forward' if days > 0 else 'back'} by 2592000 s" in line["event"]


async def test_a_checkpoint_of_the_future_is_told(memory: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    await taken(memory, 10)
    hosts_time = time.time
    monkeypatch.setattr(time, "time", lambda: hosts_time() - 86_400)
    with captured_logs() as lines:
        await Keeper(Folder(memory, URL), LastDays(7)).candidates(None)
    assert any("committed 86" in line["event"] and "later than this host's time" in line["event"] for line in lines)


async def test_a_folder_that_stays_is_not_tried_for_ever(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    folder = await taken(backend, 10, 20)
    (tmp_path / step_name(10) / "a\\b").write_bytes(b"of somebody else")
    (tmp_path / step_name(10) / "link").symlink_to(tmp_path)
    await folder.remove(10)
    assert sorted(path.name for path in (tmp_path / step_name(10)).iterdir()) == ["a\\b", "link"]
    assert await folder.steps() == [20, 10]
    assert await folder.leftovers(set()) == []
    assert entries(await Folder(backend, URL).take(None)) == [20]


async def test_leftovers_are_older_than_the_newest_checkpoint(backend: Backend) -> None:
    folder = await taken(backend, 30, 50)
    for step in (10, 20, 40, 60):
        await save(backend, step, last="half")
    await save(backend, 25, last="actor/metadata.arrow")  # committed for a role
    await save(backend, 28)  # committed, and not yet in the ledger
    assert await folder.leftovers({20}) == [40, 10]
    for step in await folder.leftovers({20}):
        await folder.remove(step)
    assert await folder.steps() == [60, 50, 30, 28, 25, 20]
    assert await folder.leftovers(set()) == [20]


async def test_without_a_committed_checkpoint_nothing_is_left_over(memory: MemoryBackend) -> None:
    folder = await taken(memory)
    await save(memory, 10, last="half")
    assert await folder.leftovers(set()) == []


async def test_a_step_that_is_saved_again_after_its_deletion_began_is_a_checkpoint(backend: Backend) -> None:
    folder = await taken(backend, 10, 20)
    faulty = FaultyBackend(backend, "delete", StorageError("no more"))
    folder._backend = faulty
    with pytest.raises(StorageError):
        await folder.remove(20)
    assert await folder.leftovers(set()) == [20], "its deletion goes on, newest or not"
    again = Folder(backend, URL)
    assert entries(await again.take(None)) == [10]
    assert await again.leftovers(set()) == [20]
    await save(backend, 20, tag="again")
    assert await again.leftovers(set()) == []
    assert entries(await Folder(backend, URL).take(None)) == [10, 20]


# -- crashes


class Killed(Exception):  # noqa: N818 -- no error, but the end
    """The job was killed."""


class Mortal(CountingBackend):
    """Dies before or after its n-th step, and does nothing afterwards. A deletion is a step for each key."""

    def __init__(self, inner: Backend, nth: int, *, after: bool) -> None:
        super().__init__(inner)
        self.left, self._after = nth, after

    async def before(self, operation: str, key: str) -> None:
        del operation, key
        if self.left <= (0 if self._after else 1):
            self.left = 0
            raise Killed
        self.left -= 1

    async def _step(self) -> None:
        if self._after and not self.left:
            raise Killed

    async def put(self, key: str, data: Buffer) -> None:
        await super().put(key, data)
        await self._step()

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        version = await super().put_if(key, data, expected)
        await self._step()
        return version

    async def delete(self, keys: Sequence[str]) -> None:
        for key in sorted(keys, reverse=bool(self.left % 2)):
            await super().delete([key])
            await self._step()


async def first_life(backend: Backend) -> None:
    """Do everything that a job does with its folder."""
    folder = Folder(backend, URL)
    await folder.take("pretrain")
    for step in (30, 40):
        await save(backend, step)
        await folder.change(with_steps(step))
        await folder.remove(step - 20)
        await folder.change(lambda ledger, step=step: ledger.marked(step, "verified"))  # type: ignore[misc]  # mypy knows no default here
        for old in await folder.leftovers({step}):
            await folder.remove(old)
    await folder.change(lambda ledger: ledger.ended("finished"))


JOBS = sample(
    itertools.product(["memory", "local", "objects"], [False, True], [False, True]),
    *itertools.product(["memory"], [False, True], [False, True]),
    ("objects", False, True),
)


@pytest.mark.parametrize(("kind", "after", "ledger"), JOBS)
async def test_a_job_that_is_killed_anywhere_loses_nothing(
    tmp_path: Path, kind: str, *, after: bool, ledger: bool
) -> None:
    deaths = 0
    for nth in range(1, 500):
        MemoryBackend.forget("killed")
        backends: dict[str, Callable[[int], Backend]] = {
            "memory": lambda _: MemoryBackend("killed"),
            "local": lambda nth: LocalBackend(tmp_path / str(nth)),
            "objects": lambda _: ObjectBackend(FakeStore(), QUICK),
        }
        backend = backends[kind](nth)
        await save(backend, 10, 20)
        await save(backend, 5, last="actor/metadata.arrow")
        await save(backend, 7, last="half")
        if ledger:
            await Folder(backend, URL).take("pretrain")
        try:
            await first_life(Mortal(backend, nth, after=after))
        except Killed:
            deaths += 1
        else:
            assert deaths > 40
            return
        await check_recovery(backend)
    pytest.fail("it never came to its end")


async def check_recovery(backend: Backend) -> None:
    """Take the folder after a death: nothing is lost, half-deleted or left for ever."""
    whole = {step for step in (10, 20, 30, 40) if "metadata.arrow" in await objects(backend, step)}
    for step in whole:
        assert await objects(backend, step) == sorted(OBJECTS), "a checkpoint with a commit object is whole"
    folder = Folder(backend, URL)
    ledger = await folder.take("pretrain")
    begun = {removal.step for removal in ledger.removing}
    assert set(entries(ledger)) == whole - begun
    assert max(entries(ledger)) == max(whole), "the newest one is there"
    assert begun <= {10, 20}, "nothing is deleted but by order"
    assert ledger == await stored(backend)
    await save(backend, 100)
    await folder.change(with_steps(100))
    for step in await folder.leftovers({100}):
        await folder.remove(step)
    assert await folder.steps() == [100, *sorted(entries(ledger), reverse=True), 5]
    left = {info.key.partition("/")[0] for info in await backend.list()} - {"run.json", "run.json.new"}
    assert left == {step_name(step) for step in (5, 100, *entries(ledger))}
    assert (await stored(backend)).removing == ()


# -- races


class InTurns(CountingBackend):
    """Waits for its job's turn before each request that changes or reads the ledger."""

    def __init__(self, inner: Backend, turns: Turns, me: int) -> None:
        super().__init__(inner)
        self._turns, self._me = turns, me

    async def before(self, operation: str, key: str) -> None:
        await self._turns.step(self._me, f"{operation} {key}")


@pytest.mark.parametrize(("changes", "deaths"), sample([(3, 0), (2, 1), (1, 1)], (3, 0), (1, 1)))
async def test_two_jobs_that_take_one_folder_write_one_after_the_other(changes: int, deaths: int) -> None:
    """In every order: what a job was told to be written stays written, and one of them is told to stop."""
    count, told = 0, 0
    for turns in orders(changes=changes, deaths=deaths):
        MemoryBackend.forget("raced")
        backend = MemoryBackend("raced")
        await save(backend, 1, 2, 3, 4, 5)
        await taken(backend)
        done: dict[int, list[int]] = {0: [], 1: []}

        async def job(turns: Turns, me: int, backend: Backend = backend, done: dict[int, list[int]] = done) -> Folder:
            folder = Folder(InTurns(backend, turns, me), URL)
            await folder.take(None)
            for step in (2 * me + 2, 2 * me + 3):
                await folder.change(lambda ledger: ledger.marked(step, "verified", f"by {me}"))  # noqa: B023 -- called at once
                done[me].append(step)
            return folder

        results = await turns.run([job, job], lambda: None)
        ledger = await stored(backend)
        marked = {entry.step for entry in ledger.entries if entry.trust == "verified"}
        assert {*done[0], *done[1]} <= marked, turns.taken
        assert entries(ledger) == [1, 2, 3, 4, 5], turns.taken
        assert all(isinstance(result, (Folder, RunTakenError, Dead)) for result in results), (results, turns.taken)
        ended = [result for result in results if isinstance(result, Folder)]
        assert len(ended) > 0 or deaths, turns.taken
        if all(not isinstance(result, Dead) for result in results):
            assert ledger.total_lives == 3
            assert any(folder.ledger == ledger for folder in ended), turns.taken
        told += any(isinstance(result, RunTakenError) for result in results)
        count += 1
    assert count > 100
    assert told > 10


class Story:
    """A folder to which anything happens. ``ordered``: steps whose deletion was ordered since they were saved."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.folder = backend, Folder(backend, URL)
        self.ordered: set[int] = set()
        self.saves = 0

    async def take(self, _step: int, _nth: int) -> None:
        self.folder = Folder(self.backend, URL)
        await self.folder.take(None)

    async def save(self, step: int, nth: int) -> None:
        """Save, and die before the ledger has it."""
        self.saves += 1
        await save(self.backend, step, tag=f"{self.saves} {nth}")
        self.ordered.discard(step)

    async def half(self, step: int, _nth: int) -> None:
        if not await objects(self.backend, step):
            await save(self.backend, step, last="half")

    async def enter(self, step: int, _nth: int) -> None:
        if await self.folder.committed(step):
            await self.folder.change(with_steps(step))
            self.ordered.discard(step)

    async def remove(self, step: int, _nth: int) -> None:
        self.ordered.add(step)
        await self.folder.remove(step)

    async def clean(self, _step: int, _nth: int) -> None:
        for old in await self.folder.leftovers(set()):
            await self.folder.remove(old)

    async def kill(self, step: int, nth: int) -> None:
        self.ordered.add(step)
        self.folder._backend = Mortal(self.backend, nth // 2 + 1, after=bool(nth % 2))
        with suppress(Killed):
            await self.folder.remove(step)
        await self.take(step, nth)

    async def harm(self, _step: int, nth: int) -> None:
        if nth == 1:
            await self.backend.put("run.json", b"{")

    async def committed(self) -> set[int]:
        return {step for step in range(1, 7) if "metadata.arrow" in await objects(self.backend, step)}


EVENTS = st.sampled_from(["take", "save", "half", "enter", "remove", "clean", "kill", "harm"])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(EVENTS, st.integers(1, 6), st.integers(1, 16)), max_size=15), st.booleans())
def test_any_story_of_a_folder(story: list[tuple[str, int, int]], in_memory: bool) -> None:  # noqa: FBT001 -- a parameter
    """After any saves, deletions and deaths the ledger has what storage has."""
    MemoryBackend.forget("story")
    with TemporaryDirectory() as root:
        backend: Backend = MemoryBackend("story") if in_memory else LocalBackend(root)
        anyio.run(tell, backend, story)


async def tell(backend: Backend, events: list[tuple[str, int, int]]) -> None:
    story = Story(backend)
    await story.take(0, 0)
    for what, step, nth in events:
        before = await story.committed()
        await getattr(story, what)(step, nth)
        there = await story.committed()
        assert before - there <= story.ordered, "only ordered deletions take a checkpoint away"
        for at in there:
            assert set(OBJECTS) <= set(await objects(backend, at)), "one that has its commit object is whole"
    there = await story.committed()
    found = set(entries(await Folder(backend, URL).take(None)))
    assert found <= there
    assert there - found <= story.ordered


async def test_a_save_that_is_overtaken_by_the_standby_snapshot_stays(tmp_path: Path) -> None:
    keeper = Keeper(Folder(LocalBackend(tmp_path), URL), Latest(3))
    await keeper.candidates(None)
    (tmp_path / step_name(10)).mkdir()
    (tmp_path / step_name(10) / "half").write_bytes(b"of a save that is in flight")
    await save(LocalBackend(tmp_path), 20)
    await keeper.committed(20, {}, {20, 10})
    assert names_in(tmp_path) == ["run.json", step_name(10), step_name(20)]
    await save(LocalBackend(tmp_path), 30)
    await keeper.committed(30, {}, {30})
    assert names_in(tmp_path) == ["run.json", step_name(20), step_name(30)]


async def test_time_in_which_the_machine_was_suspended_counts(
    memory: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(Folder(memory, URL), LastDays(7))
    await keeper.candidates(None)
    hosts_time, boot_time, days = time.time, time.clock_gettime, 3 * 86_400
    monkeypatch.setattr(time, "time", lambda: hosts_time() + days)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: boot_time(clock) + days)
    with captured_logs() as lines:
        await save(memory, 10)
        await keeper.committed(10, {}, {10})
    (entry,) = (await stored(memory)).entries
    assert entry.committed == pytest.approx(hosts_time() + days, abs=60)
    assert [line for line in lines if line["log_level"] == "warning"] == []
