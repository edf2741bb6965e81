"""Checkpoints in an HDFS whose servers fail in the middle of a save: it succeeds, or the previous checkpoint stays."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from left_over import without_recordings
from patience import impatient_now
from samples import sample
from servers.hdfs import MiniHdfs
from servers.hdfs_clients import backend_of, names

import bcp
from bcp.backends.hdfs import conditional
from bcp.backends.hdfs.client import Hdfs, Stream
from bcp.backends.objects import ObjectBackend
from bcp.errors import BcpError
from bcp.events import RetryEvent
from bcp.format.metadata import METADATA_KEY
from bcp.protocols import RetryPolicy

pytest_plugins = ["servers.hdfs_fixtures"]
MIB = 1 << 20
OPTIONS = bcp.SaveOptions(part_bytes=9 * MIB, overwrite=True)


def state(seed: int) -> dict[str, Any]:
    """Return a state of three parts."""
    return {"model": {"w": torch.arange(27 * MIB // 4 - 1000, dtype=torch.int32) + seed, "b": torch.full((3,), seed)}}


def check_loads(backend: ObjectBackend, seed: int) -> None:
    target = state(99)
    bcp.load(backend, target)
    assert all(torch.equal(target["model"][name], tensor) for name, tensor in state(seed)["model"].items())


class Faults:
    """Makes calls in the middle of a save, and at the first request that is made again because of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._threads: list[threading.Thread] = []
        self._mends: tuple[Callable[[], Any], ...] = ()
        self._impatient: ObjectBackend | None = None
        self.made = 0

    def in_upload(self, call: Callable[[], Any]) -> None:
        """Make the call in the middle of the second part."""
        write, parts = Stream.write, [0]

        async def written(stream: Stream, data: Any) -> None:
            parts[0] += len(data) > MIB
            if parts[0] != 2 or len(data) <= MIB:
                await write(stream, data)
                return
            parts[0] += 1
            await write(stream, data[:MIB])
            await self._make(call)
            await write(stream, data[MIB:])

        self._patch.setattr(Stream, "write", written)

    def in_commit(self, call: Callable[[], Any]) -> None:
        """Make the call when the metadata is written and has not got its name."""
        place = Hdfs.place

        async def placed(client: Hdfs, temp: str, state: Any, final: str, *, overwrite: bool) -> None:
            if final.endswith(f"/{METADATA_KEY}") and not self.made:
                await self._make(call)
            await place(client, temp, state, final, overwrite=overwrite)

        self._patch.setattr(Hdfs, "place", placed)

    async def _make(self, call: Callable[[], Any]) -> None:
        self.made += 1
        await anyio.to_thread.run_sync(call)
        if self._impatient is not None:
            impatient_now(self._impatient, 1.5)

    def patient(self, *mends: Callable[[], Any]) -> RetryPolicy:
        """Return a policy with which a save outlives a fault, and that mends it at the first retry."""
        self._mends = mends
        return RetryPolicy(
            deadline_seconds=480,
            attempt_seconds=20,
            first_pause_seconds=0.05,
            longest_pause_seconds=0.5,
            on_retry=self._retry,
        )

    def impatient(self, url: str, attempt_seconds: float = 2) -> ObjectBackend:
        """Return a backend with which a save fails soon after a fault. Before the fault it waits for a slow machine."""
        self._impatient, _ = backend_of(url, replace(self.patient(), attempt_seconds=attempt_seconds))
        return self._impatient

    def _retry(self, _event: RetryEvent) -> None:
        if not self._threads:
            self._threads.append(threading.Thread(target=lambda: [mend() for mend in self._mends]))
            self._threads[0].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(conditional, "PATIENCE_SECONDS", 0.2)
    faults = Faults(monkeypatch)
    yield faults
    faults.join()


def save_through(url: str, policy: RetryPolicy, faults: Faults, **options: Any) -> None:
    """Save over a checkpoint while something fails; the new one loads then, and nothing else is left."""
    backend, _ = backend_of(url, policy, **options)
    bcp.save(backend, state(2), options=OPTIONS)
    assert faults.made == 1
    faults.join()
    check_loads(backend, 2)
    found = without_recordings(asyncio.run(names(backend)))
    assert len(found) == 3, found  # data, receipts, metadata


def refused(backend: ObjectBackend, faults: Faults, message: str) -> None:
    """Check that a save over a checkpoint fails, soon and with these words."""
    with pytest.raises(BcpError, match=message):
        bcp.save(backend, state(2), options=OPTIONS)
    assert faults.made == 1


def saves_again(url: str) -> None:
    """Check that the first checkpoint loads, and that the next save leaves nothing of the failed one."""
    backend, _ = backend_of(url)
    check_loads(backend, 1)
    bcp.save(backend, state(3), options=OPTIONS)
    check_loads(backend, 3)
    found = without_recordings(asyncio.run(names(backend)))
    assert len(found) == 3, found


@pytest.fixture
def saved(url: str) -> str:
    """Return the URL of a checkpoint."""
    bcp.save(backend_of(url)[0], state(1), options=OPTIONS)
    return url


@pytest.mark.parametrize("when", sample(["in_upload", "in_commit"], "in_commit"))
def test_a_namenode_that_restarts(saved: str, mended: MiniHdfs, faults: Faults, when: str) -> None:
    getattr(faults, when)(lambda: mended.command("stop-namenode 0"))
    save_through(saved, faults.patient(lambda: mended.command("start-namenode 0")), faults)


@pytest.mark.long
def test_a_namenode_that_stays_away(saved: str, mended: MiniHdfs, faults: Faults) -> None:
    faults.in_upload(lambda: mended.command("stop-namenode 0"))
    refused(faults.impatient(saved), faults, "no NameNode|is away|is stopping|no answer in time")
    mended.command("start-namenode 0")
    mended.command("await 0")
    saves_again(saved)


def test_a_datanode_that_dies_in_an_upload(saved: str, mended: MiniHdfs, faults: Faults) -> None:
    faults.in_upload(lambda: mended.command("stop-datanode 0"))
    policy = faults.patient(lambda: mended.command("forget-datanodes 0"))  # till then it gives out the dead one
    save_through(saved, policy, faults, seconds=3.0)  # hdfs-native may wait for the dead one for a minute


def test_all_datanodes_die_in_an_upload(saved: str, mended: MiniHdfs, faults: Faults) -> None:
    def stop() -> None:
        mended.command("stop-datanode 0")
        mended.command("stop-datanode 1")

    faults.in_upload(stop)
    refused(faults.impatient(saved), faults, "storing part|storing 'data|finishing")
    for command in ("start-datanode 0", "start-datanode 1", "await 0"):
        mended.command(command)
    saves_again(saved)


def test_safe_mode_in_a_commit(saved: str, mended: MiniHdfs, faults: Faults) -> None:
    faults.in_commit(lambda: mended.command("safemode-enter"))
    save_through(saved, faults.patient(lambda: mended.command("safemode-leave")), faults)


@pytest.mark.long
def test_safe_mode_that_stays(saved: str, mended: MiniHdfs, faults: Faults) -> None:
    faults.in_commit(lambda: mended.command("safemode-enter"))
    refused(faults.impatient(saved, 5), faults, r"SafeModeException.*in safe mode")
    check_loads(backend_of(saved)[0], 1)  # in safe mode too
    mended.command("safemode-leave")
    saves_again(saved)


# -- a pair of NameNodes


@pytest.fixture
def both(pair: MiniHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniHdfs]:
    """A pair whose first NameNode is active, and is again after the test; its settings are in a file."""
    write_settings(tmp_path, pair.settings)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    yield pair
    for command in ("start-namenode 0", "start-namenode 1", "standby 1", "active 0", "await 0"):
        pair.command(command)


def write_settings(folder: Path, settings: Mapping[str, str]) -> None:
    rows = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
    )
    (folder / "hdfs-site.xml").write_text(f"<?xml version='1.0'?><configuration>{rows}</configuration>")


FAULTS = sample(
    itertools.product(["in_upload", "in_commit"], ["standby 0", "stop-namenode 0"]),
    ("in_commit", "stop-namenode 0"),
)


@pytest.mark.parametrize(("when", "fault"), FAULTS)
def test_failover(both: MiniHdfs, faults: Faults, when: str, fault: str) -> None:
    url = f"hdfs://pair/{when}-{fault.split(maxsplit=1)[0]}"
    bcp.save(backend_of(url)[0], state(1), options=OPTIONS)
    getattr(faults, when)(lambda: both.command(fault))
    save_through(url, faults.patient(lambda: both.command("active 1")), faults)


@pytest.mark.long
def test_no_active_namenode(both: MiniHdfs, faults: Faults) -> None:
    url = "hdfs://pair/none"

    async def save() -> None:
        backend = faults.impatient(url)
        with pytest.raises(BcpError, match=r"no NameNode|none is active|no answer in time"):
            await bcp.asave(backend, state(2), options=OPTIONS)

    bcp.save(backend_of(url)[0], state(1), options=OPTIONS)
    faults.in_commit(lambda: both.command("standby 0"))
    asyncio.run(save())
    assert faults.made == 1
    both.command("active 1")
    saves_again(url)
