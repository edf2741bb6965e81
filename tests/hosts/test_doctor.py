"""`python -m bcp doctor` as a user runs it: a process for each rank, on hosts that are well or sick."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from jobs import PORT, Store
from on_host import Ended, ended, start
from patience import patiently
from samples import sample

from benchmarks.network import Network

pytestmark = pytest.mark.timeout(2400)

START = 600.0
"""Seconds in which a process imports bcp, on a machine with other work."""

PATIENT = 200.0
"""Timeout of doctors that all come: one may start much later than another one."""


class Doctors:
    """The doctor's processes of one job."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        self._processes: list[subprocess.Popen[str]] = []

    def __call__(
        self,
        placement: Sequence[int],
        *arguments: object,
        timeout: float = PATIENT,
        absent: Sequence[int] = (),
        environment: Mapping[int, Mapping[str, str]] = {},
        first: Mapping[int, str] = {},
    ) -> dict[int, Ended]:
        """Run a rank for each entry of ``placement``, a host's number, and return how it ended, in time.

        ``environment`` and ``first`` are given by host, ``absent`` are ranks that are not started.
        """
        command = [sys.executable, "-m", "bcp", "doctor", f"--timeout={timeout}", *map(str, arguments)]
        running: dict[int, subprocess.Popen[str]] = {}
        for rank, host in enumerate(placement):
            if rank not in absent:
                job = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(placement)),
                    "MASTER_ADDR": "h1",
                    "MASTER_PORT": str(PORT),
                }
                variables = {**job, **environment.get(host, {})}
                before = first.get(host, "")
                running[rank] = start(self._network, host, self._folder, command, variables, first=before)
        self._processes += running.values()
        return dict(zip(running, ended(list(running.values()), timeout + START), strict=True))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def doctors(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctors]:
    made = Doctors(network, tmp_path_factory.mktemp("doctors"))
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with a checkpoint of somebody."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "metadata.arrow").write_text("precious")
    return tmp_path


@contextmanager
def nothing_left(path: Path) -> Iterator[None]:
    """Check that a folder is as it was."""
    before = sorted(path.rglob("*"))
    yield
    assert sorted(path.rglob("*")) == before


def sick(found: Mapping[int, Ended], *checks: str) -> str:
    """Check that all ranks say that the job is sick, for these checks alone; return rank 0's screen."""
    assert {rank: each.status for rank, each in found.items()} == dict.fromkeys(found, 1), found
    assert [each.out for rank, each in found.items() if rank] == [""] * (len(found) - 1), found
    screen = found[0].out
    assert [line.split()[1] for line in screen.splitlines() if line.startswith("FAIL")] == list(checks), found
    assert f"not healthy: {', '.join(checks)}" in screen
    return screen


def test_a_healthy_job(doctors: Doctors, path: Path) -> None:
    with nothing_left(path):
        found = doctors([1, 2, 3, 3], path / "new" / "run")
    assert {(each.status, each.err) for each in found.values()} == {(0, "")}, found
    screen = found[0].out
    assert screen.isascii()
    assert len(screen.splitlines()) <= 12
    assert screen.splitlines()[-1] == "healthy"
    for text in (
        "4 ranks on 3 hosts (h1 .. h3)",
        "all 4 ranks came",
        "10.77.0.1 to 10.77.0.3 (eth0)",
        "all 6 ways between hosts",
        "writable from all ranks, shared by all hosts",
    ):
        assert text in screen
    assert "FAIL" not in screen
    assert "warn" not in screen


def test_two_hosts_that_do_not_reach_each_other(doctors: Doctors, network: Network, path: Path) -> None:
    network.part(2, 3)
    with nothing_left(path):
        screen = sick(doctors([1, 2, 3], path), "reach")
    assert "host h2 cannot reach host h3 at 10.77.0.3 port " in screen
    assert "host h3 cannot reach host h2 at 10.77.0.2 port " in screen
    assert "BCP_ADDRESS=10.0.0.0/16" in screen
    assert "shared by all hosts" in screen


@pytest.mark.long
def test_addresses_that_are_wrong(doctors: Doctors) -> None:
    wrong = {2: {"BCP_ADDRESS": "10.9.0.0/16"}, 3: {"BCP_ADDRESS": "127.0.0.1"}}
    screen = sick(doctors([1, 2, 3, 3], environment=wrong), "addresses")
    assert "BCP_ADDRESS='10.9.0.0/16' is no address, network or interface of host h2" in screen
    assert "host h3 cannot listen: host h3 (127.0.0.1) has no address that the job's other hosts reach" in screen
    assert "4 of 6 ways between hosts" in screen


@pytest.mark.long
def test_storage_that_is_not_shared_and_storage_that_is_read_only(doctors: Doctors, path: Path) -> None:
    mounts = {2: f"mount -t tmpfs none {path}", 3: f"mount --bind {path} {path} && mount -o remount,ro,bind {path}"}
    with nothing_left(path):
        screen = sick(doctors([1, 2, 3, 3], path, first=mounts), "storage")
    assert f"ranks 2-3 (host h3) cannot write to {path}: Read-only file system" in screen
    assert f"host h2 cannot see the files of h1: {path} is not shared" in screen
    assert "hosts h1, h3 cannot see the files of h2" in screen
    assert "is the same file system on all hosts" in screen


@pytest.mark.long
def test_a_rank_that_does_not_come(doctors: Doctors) -> None:
    def misses(timeout: float) -> None:
        found = doctors([1, 2, 3, 3], timeout=timeout, absent=[2])
        screen = sick(found, "store")
        assert "rank 0 misses rank 2: 3 of 4 ranks came" in screen
        assert "hosts h1, h2, h3" in screen
        assert found[1].err == "", "rank 0 has said it"

    patiently(misses, 20.0, PATIENT)


@pytest.mark.parametrize("fault", sample(["nobody listens", "no rank 0", "stopped"], "stopped"))
def test_a_store_that_does_not_answer(doctors: Doctors, network: Network, fault: str) -> None:
    agent = {2: {"TORCHELASTIC_USE_AGENT_STORE": "True"}}
    said = {
        "nobody listens": "cannot reach the store at h1:29500: Connection refused",
        "no rank 0": "rank 0 has not answered",
        "stopped": "connected to h1:29500, where no store answers",
    }

    def unanswered(timeout: float) -> None:
        with running(network, fault):
            found = doctors([1, 2], timeout=timeout, absent=[0], environment=agent)
        assert (found[1].status, found[1].out) == (1, "")
        assert "rank 1 (host h2)" in found[1].err
        assert said[fault] in found[1].err

    patiently(unanswered, 5.0, 60.0)


@contextmanager
def running(network: Network, fault: str) -> Iterator[None]:
    """Run a store that the fault has stopped, if there is one."""
    if fault == "nobody listens":
        yield
        return
    with closing(Store(network, 1)) as store:
        if fault == "stopped":
            store.signal(signal.SIGSTOP)
        yield


def test_rank_0_that_cannot_serve_the_store(doctors: Doctors, network: Network) -> None:
    with closing(Store(network, 1)):
        screen = sick(doctors([1, 2], timeout=5.0, absent=[1]), "store")
    assert "cannot serve the store at h1:29500" in screen
    assert "MASTER_PORT" in screen


def test_one_process_without_a_launcher(path: Path) -> None:
    with nothing_left(path):
        command = [sys.executable, "-m", "bcp", "doctor", str(path)]
        found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START)  # noqa: S603 -- ours
    assert (found.returncode, found.stderr) == (0, "")
    assert "1 rank on 1 host" in found.stdout
    assert found.stdout.endswith("healthy\n")
