"""Recordings and failure records of one rank, and all that can go wrong with them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from fake_store import FakeStore
from logs import captured_logs

import bcp
from bcp import _record
from bcp.backends import LocalBackend
from bcp.backends.objects import ObjectBackend, RequestError
from bcp.state import placement as topology
from bcp.telemetry.recording import Recording
from bcp.telemetry.store import KEPT, decode
from bcp.testing.storage_fakes import FaultyBackend

MIB = 1 << 20
QUICK = bcp.RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((MIB // 2,), float(value)), "b": torch.full((3,), float(value))}}


def recordings(path: Path, kind: str = "") -> list[Recording]:
    files = sorted((path / "telemetry").glob(f"{kind}*")) if (path / "telemetry").exists() else []
    return [decode(file.read_bytes(), file.name) for file in files]


def names(recording: Recording, kind: str) -> list[str]:
    return [row["name"] for row in recording.events.to_pylist() if row["kind"] == kind]


# -- what is recorded ---------------------------------------------------------------------------------


def test_a_save_and_a_load_leave_one_recording_each(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-300"
    report = bcp.save(path, state(), options=bcp.SaveOptions(part_bytes=MIB))
    loaded = bcp.load(path, state(0))
    (save,), (load,) = recordings(path, "save"), recordings(path, "load")
    assert (save.kind, save.path, save.step, save.world_size) == ("save", str(path), 300, 1)
    assert save.operation == load.operation == report.operation
    assert not save.background
    assert set(names(save, "phase")) == {"plan", "snapshot", "write", "commit"}
    assert set(names(load, "phase")) == {"open", "plan", "read"}
    assert set(names(save, "stage")) == {"d2h", "serialize", "upload", "checksum"}
    assert names(save, "stage").count("upload") == 3
    assert "put_if" in names(save, "request")
    (rank,) = save.ranks
    assert rank.figures["nbytes"] == report.nbytes
    assert rank.figures["seconds"] == pytest.approx(report.seconds, abs=1e-6)
    assert load.ranks[0].figures["read_nbytes"] == loaded.read_nbytes
    starts = save.events.column("start").to_numpy()
    assert ((starts >= 0) & (starts <= report.seconds)).all()


def test_a_background_save_says_so(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(), async_checkpoint=True).wait()
    (save,) = recordings(tmp_path)
    assert save.background


def test_each_role_has_recordings_of_its_own(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        bcp.save(tmp_path, state(), role=role)
    assert [len(recordings(tmp_path / role)) for role in ("actor", "critic")] == [1, 1]
    assert not (tmp_path / "telemetry").exists()


def test_preparation_leaves_none() -> None:
    seen: list[bcp.extend.Event] = []
    bcp.prepare(state(), options=bcp.SaveOptions(observe=seen.append))
    assert not [event for event in seen if isinstance(event, bcp.extend.RequestEvent)]


def test_recordings_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save(tmp_path, state(), options=bcp.SaveOptions(record=False))
    bcp.load(tmp_path, state(), options=bcp.LoadOptions(record=False))
    monkeypatch.setenv("BCP_RECORD", "0")
    bcp.save(tmp_path, state(), overwrite=True)
    bcp.load(tmp_path, state())
    assert not (tmp_path / "telemetry").exists()
    monkeypatch.setenv("BCP_RECORD", "no")
    with pytest.raises(bcp.InputError, match=r"\$BCP_RECORD is 'no'"):
        bcp.SaveOptions()


def test_observers_hear_nothing_of_the_recording_itself(tmp_path: Path) -> None:
    seen: list[bcp.extend.Event] = []
    bcp.save(tmp_path, state(), options=bcp.SaveOptions(observe=seen.append))
    bcp.load(tmp_path, state(), options=bcp.LoadOptions(observe=seen.append))
    keys = [event.key for event in seen if isinstance(event, bcp.extend.RequestEvent)]
    assert len(keys) > 4
    assert not [key for key in keys if "telemetry" in key]


def test_the_oldest_recordings_make_room_for_new_ones(tmp_path: Path) -> None:
    bcp.save(tmp_path, state())
    first = {file.name for file in (tmp_path / "telemetry").iterdir()}
    for number in range(KEPT):
        (tmp_path / "telemetry" / f"load-20200101T0000{number:02d}000Z-0123456789abcdef.arrow").write_bytes(b"old")
    bcp.load(tmp_path, state())
    left = {file.name for file in (tmp_path / "telemetry").iterdir()}
    assert first < left
    assert len(left) == KEPT - 1
    for number in range(KEPT):
        (tmp_path / "telemetry" / f"load-20200101T0000{number:02d}000Z-0123456789abcdef.arrow").write_bytes(b"old")
    bcp.save(tmp_path, state(), overwrite=True)
    left = {file.name for file in (tmp_path / "telemetry").iterdir()}
    assert first < left
    assert len(left) == KEPT
    assert len(recordings(tmp_path, "save")) == 2


def test_a_place_in_the_topology_takes_a_look_at_few_tensors() -> None:
    taken = []

    class Many(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            taken.append(name)
            return torch.ones(1)

        def __iter__(self) -> Iterator[str]:
            return map(str, range(20_000))

        def __len__(self) -> int:
            return 20_000

    assert topology.coordinates({"model": Many()}) == {}
    assert 0 < len(taken) <= topology.LOOKED_AT


# -- what can go wrong with it ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("operation", ["put", "list"])
def test_storage_that_takes_no_recording_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, operation: str
) -> None:
    caplog.set_level("INFO", "bcp")
    bcp.save(tmp_path, state(), options=bcp.SaveOptions(record=False))
    backend = FaultyBackend(LocalBackend(tmp_path), operation, bcp.StorageError("read-only"), key="telemetry")
    with captured_logs() as lines:
        if call == "save":
            bcp.save(backend, state(2), overwrite=True)
        else:
            bcp.load(backend, state(0))
    told = [line["log_level"] for line in lines if "recording" in line["event"]]
    assert told == (["info"] if operation == "put" or call == "load" else [])
    found = state(0)
    bcp.load(tmp_path, found)
    assert found["model"]["w"].unique().tolist() == [2.0 if call == "save" else 1.0]


@pytest.mark.parametrize("broken", ["merged", "encode", "packed", "figures_of", "coordinates"])
def test_a_defect_of_telemetry_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError(broken)

    monkeypatch.setattr(_record, broken, fail)
    assert bcp.save(tmp_path, state()).nbytes > 0
    assert bcp.load(tmp_path, state(0)).nbytes > 0
    assert len(recordings(tmp_path)) == (2 if broken == "coordinates" else 0)


def test_storage_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bcp")
    monkeypatch.setattr(_record, "STORE_SECONDS", 0.05)
    backend = FaultyBackend(LocalBackend(tmp_path), "put", lambda _: anyio.sleep_forever(), key="telemetry")
    with captured_logs() as lines:
        report = bcp.save(backend, state())
    (line,) = (line["event"] for line in lines if line["log_level"] == "info")
    assert line.startswith(f"a recording took too long and is given up path={report.path!r} seconds=0.05")
    assert bcp.load(tmp_path, state(0)).nbytes > 0


def test_a_failure_whose_record_is_lost_leaves_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bcp")

    def said(fault: Any) -> str:
        broken = FaultyBackend(LocalBackend(tmp_path), "put", fault, key="telemetry")
        backend = FaultyBackend(broken, "write_part", bcp.StorageError("the disk is gone"))
        with captured_logs() as lines, pytest.raises(bcp.StorageError, match="the disk is gone"):
            bcp.save(backend, state())
        (line,) = (line["event"] for line in lines if " record" in line["event"])
        return str(line)

    assert "a failure was not recorded" in said(bcp.StorageError("still gone"))
    monkeypatch.setattr(_record, "STORE_SECONDS", 0.05)
    assert "the record of a failure took too long" in said(lambda _: anyio.sleep_forever())


@pytest.mark.anyio
async def test_a_save_that_is_cancelled_while_it_is_recorded_is_committed(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(_: str) -> None:
        begun.set()
        await anyio.sleep_forever()

    backend = FaultyBackend(LocalBackend(tmp_path), "put", hang, key="telemetry")
    task = asyncio.create_task(bcp.asave(backend, state()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await bcp.aload(tmp_path, state(0))).nbytes > 0
    assert not recordings(tmp_path, "failure")


# -- failures -----------------------------------------------------------------------------------------


def test_a_stage_that_fails_is_recorded(tmp_path: Path) -> None:
    async def fail(part: object) -> object:
        raise ValueError(f"no {part!r:.3}") from KeyError("deep")

    stage = bcp.extend.Stage("mine", fail)
    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", stage))
    with pytest.raises(bcp.StageError) as caught:
        bcp.save(tmp_path, state(), options=options)
    assert not hasattr(caught.value, "__notes__")
    (recording,) = recordings(tmp_path)
    (failure,) = recording.failures
    assert (failure.rank, failure.guilty, failure.phase, failure.stage) == (0, 0, "write", "mine")
    assert failure.item.startswith("model part 0")
    assert set(failure.tensors) == {"w", "b"}
    assert failure.file.startswith("model/00000-")
    assert [kind for kind, _ in failure.errors] == ["StageError", "ValueError", "KeyError"]
    assert recording.operation in failure.file
    failed = [row for row in recording.events.to_pylist() if row["status"] == "failed"]
    assert {row["name"] for row in failed} >= {"mine", "write"}


def test_storage_that_fails_is_recorded_with_file_and_attempt(tmp_path: Path) -> None:
    del tmp_path
    store = FakeStore()
    backend = ObjectBackend(store, bcp.RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3, allowance=4))

    def fail(what: str) -> None:
        if what.startswith("part"):
            raise RequestError("503 busy", transient=True)

    store.fail = fail
    with pytest.raises(bcp.BcpError):
        bcp.save(backend, {"model": {"w": torch.ones(3 * MIB)}}, options=bcp.SaveOptions(part_bytes=8 * MIB))
    (key,) = (key for key in store.objects if key.startswith("telemetry/failure-"))
    recording = decode(store.objects[key][0], key)
    (failure,) = recording.failures
    assert (failure.stage, failure.tensors) == ("upload", ("w",))
    assert failure.file.startswith("model/00000-")
    assert failure.attempt > 1
    assert any("503 busy" in text for _, text in failure.errors)
    assert "again" in recording.events.column("status").to_pylist()


def test_a_corrupt_file_is_recorded_by_the_load(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(), options=bcp.SaveOptions(record=False))
    (file,) = (tmp_path / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(bcp.CorruptError) as caught:
        bcp.load(tmp_path, state(0))
    (recording,) = recordings(tmp_path)
    (failure,) = recording.failures
    assert (recording.kind, failure.phase, failure.stage) == ("load", "read", "deserialize")
    assert failure.file == f"model/{file.name}"
    assert failure.errors[0] == ("CorruptError", str(caught.value))
    assert set(failure.notes) == set(caught.value.__notes__)


def test_a_refused_call_leaves_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(), options=bcp.SaveOptions(record=False))
    with pytest.raises(bcp.ExistsError):
        bcp.save(tmp_path, state())
    with pytest.raises(bcp.MismatchError):
        bcp.load(tmp_path, {"model": {"w": torch.ones(3)}})
    with pytest.raises(bcp.NotACheckpointError):
        bcp.load(tmp_path / "none", state())
    assert not (tmp_path / "telemetry").exists()
    assert not (tmp_path / "none").exists()


def test_a_broken_storage_does_not_change_the_error_of_a_save(tmp_path: Path) -> None:
    error = bcp.StorageError("the disk is gone")

    class Gone(LocalBackend):
        broken = False

        async def put(self, key: str, data: Any) -> None:
            if key.startswith(("receipts", "telemetry")):
                self.puts = [*getattr(self, "puts", []), key]
                raise error if key.startswith("receipts") else bcp.StorageError("still gone")
            await super().put(key, data)

    backend = Gone(tmp_path)
    with pytest.raises(bcp.StorageError) as caught:
        bcp.save(backend, state())
    assert caught.value is error
    assert not getattr(error, "__notes__", [])
    assert [key.partition("/")[0] for key in backend.puts] == ["receipts", "telemetry"]


@pytest.mark.anyio
async def test_a_cancelled_save_leaves_no_record(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(_: str) -> None:
        begun.set()
        await anyio.sleep_forever()

    task = asyncio.create_task(bcp.asave(FaultyBackend(LocalBackend(tmp_path), "write_part", hang), state()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (tmp_path / "telemetry").exists()


def test_a_record_makes_no_directory_anew_that_was_deleted_during_a_load(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    bcp.save(path, state())

    async def delete(_: str) -> None:
        shutil.rmtree(path)

    with pytest.raises(bcp.CorruptError):
        bcp.load(FaultyBackend(LocalBackend(path), "get", delete, key="receipts"), state())
    assert not path.exists()
