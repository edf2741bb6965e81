from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from disks import StrictDisk, memory, names, noise

from bcp.backends import LocalBackend, probe
from bcp.backends.file_io import WriteWay
from bcp.backends.probe import quickest

pytestmark = pytest.mark.anyio

IN_MEMORY = Path("/dev/shm")  # noqa: S108 -- a file system of its own
LARGE = 256 << 20
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe._probes, "ways", {})
    monkeypatch.setattr(probe, "_PROBE_BYTES", 8 * MIB)


class Rates:
    """Takes the place of the measurement, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, direct: float, early: float) -> None:
        self.rates: dict[WriteWay, float] = {"direct": direct, "early": early}
        self.seen: list[WriteWay] = []
        self.threads: set[threading.Thread] = set()
        monkeypatch.setattr(probe, "_rate", self.rate)

    def rate(self, _final: Path, way: WriteWay) -> float:
        self.seen.append(way)
        self.threads.add(threading.current_thread())
        return self.rates[way]


@pytest.mark.parametrize(
    ("direct", "early", "chosen"),
    [
        pytest.param(1.0, 1.2, "direct", id="not clearly slower"),
        pytest.param(1.0, 1.3, "early", id="clearly slower"),
        pytest.param(2.0, 1.0, "direct", id="quicker"),
        pytest.param(0.0, 0.1, "early", id="refused"),
    ],
)
def test_direct_unless_early_is_clearly_quicker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    direct: float,
    early: float,
    chosen: WriteWay,
) -> None:
    Rates(monkeypatch, direct, early)
    with caplog.at_level(logging.DEBUG, logger="bcp"):
        assert quickest(tmp_path / "object", LARGE) == chosen
    (line,) = caplog.records
    rates = {"direct_gbps": direct, "early_gbps": early}
    assert line.__dict__["bcp"] == {"folder": str(tmp_path), "way": chosen, **rates}


def test_a_round_that_was_disturbed_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([0.1, 2.0, 0.1, 2.0, 1.0, 1.1])
    monkeypatch.setattr(probe, "_rate", lambda _final, _way: next(rates))
    assert quickest(tmp_path / "object", LARGE) == "direct"


def test_one_probe_for_a_file_system_however_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(monkeypatch, 1.0, 2.0)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: quickest(tmp_path / "object", LARGE), range(8))) == {"early"}
    assert quickest(tmp_path / "another", None) == quickest(tmp_path / "smaller", MIB) == "early"
    assert rates.seen == ["direct", "early"] * 3
    if IN_MEMORY.is_dir() and IN_MEMORY.stat().st_dev != tmp_path.stat().st_dev:
        with TemporaryDirectory(dir=IN_MEMORY) as other:
            quickest(Path(other, "object"), LARGE)
        assert len(rates.seen) == 12


@pytest.mark.parametrize(
    ("nbytes", "way"),
    [(0, "buffered"), (MIB - 1, "buffered"), (MIB, "direct"), (LARGE - 1, "direct"), (None, "direct")],
)
def test_no_probe_for_a_file_that_is_not_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int | None, way: WriteWay
) -> None:
    rates = Rates(monkeypatch, 1.0, 2.0)
    assert quickest(tmp_path / "object", nbytes) == way
    assert rates.seen == []


async def test_the_probe_runs_in_a_worker_thread_and_before_the_first_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_PROBED_BYTES", 2 * MIB)
    rates = Rates(monkeypatch, 1.0, 1.0)
    part = memory(noise(MIB))
    async with LocalBackend(tmp_path).open_write("object", 2 * MIB) as writer:
        assert len(rates.seen) == 2
        await writer.write_part(0, 0, part)
        await writer.write_part(1, MIB, part)
    assert len(rates.seen) == 2
    assert threading.current_thread() not in rates.threads


@pytest.mark.parametrize("no_open", [0, errno.EINVAL])
def test_the_probe_writes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_open: int
) -> None:
    disk = StrictDisk(monkeypatch)
    disk.no_open = no_open
    monkeypatch.setattr(probe, "_CLEARLY", 1e9)
    with caplog.at_level(logging.DEBUG, logger="bcp"):
        quickest(tmp_path / "object", LARGE)
    assert names(tmp_path) == []
    assert sum(count for _, count in disk.direct) == (0 if no_open else 8 * MIB)
    rates = caplog.records[0].__dict__["bcp"]
    assert rates["early_gbps"] > 0
    assert (rates["direct_gbps"] > 0) is not bool(no_open)


def test_a_probe_that_fails_leaves_nothing_and_lets_the_save_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def broken(_fd: int, _data: memoryview, _offset: int) -> int:
        seen.extend(names(tmp_path))
        raise OSError("broken")

    monkeypatch.setattr(os, "pwrite", broken)
    with caplog.at_level(logging.DEBUG, logger="bcp"):
        assert quickest(tmp_path / "object", LARGE) == "direct"
    assert seen
    assert all(name.startswith(".object.") and name.endswith(".bcp-tmp") for name in seen)
    assert names(tmp_path) == []
    assert caplog.messages[0].startswith("the probe of local writes failed")
    assert caplog.messages[0].endswith("error='broken'")


def test_a_forked_child_does_not_wait_for_a_probe_of_its_parent() -> None:
    with probe._probes.lock:
        child = os.fork()
        if child == 0:
            os._exit(not probe._probes.lock.acquire(timeout=60))
    assert os.waitpid(child, 0)[1] == 0
