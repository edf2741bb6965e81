"""The server of the job's store dies or is stopped: every call ends after its own timeout, and says who it was."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import silent_store
from by_torchrun import torchrun
from patience import patiently
from ranks import ended, started
from samples import sample

pytestmark = [pytest.mark.dist]

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


CALLS = [
    (2, "first", "save", KILL),
    (4, "first", "asave", STOP),
    (3, "second", "save", STOP),
    (2, "second", "asave", KILL),
]


@pytest.mark.parametrize(
    ("size", "moment", "call", "number"),
    sample(CALLS, CALLS[2]),
)
def test_every_call_ends_when_the_server_of_the_store_is_silent(
    tmp_path: Path, size: int, moment: str, call: str, number: signal.Signals
) -> None:
    def check(timeout: float) -> None:
        folder = tmp_path / str(timeout)
        folder.mkdir()
        processes = started(size, silent_store.main, size, folder, moment, call, number, timeout)
        codes = ended(processes[1:], 120)
        ended(processes[:1], 0.0)
        assert codes == [0] * (size - 1)
        for rank in range(1, size):
            outcomes, threads = json.loads((folder / str(rank)).read_text())
            for error, blamed, text in outcomes:
                assert (error, blamed) == ("PeerError", 0), text
                if moment == "first":
                    port = (folder / "port").read_text()
                    assert f"the store at 127.0.0.1:{port} (served as a rule by the process of rank 0)" in text
                    assert " s: " in text
                    assert "restart the job" in text
            assert threads <= 1

    patiently(check, *silent_store.TIMEOUTS)


def test_torchruns_agent_is_stopped(tmp_path: Path) -> None:
    patiently(lambda timeout: stop_the_agent(tmp_path / str(timeout), timeout), *silent_store.TIMEOUTS)


def stop_the_agent(folder: Path, timeout: float) -> None:
    folder.mkdir()
    program = folder / "rank.py"
    program.write_text(silent_store.TORCHRUN)
    job = torchrun(2, str(program), str(folder), "save", str(timeout))
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        (error, blamed, text), later = json.loads((folder / str(rank)).read_text())
        assert (error, blamed) == ("PeerError", 0), text
        assert "served by torchrun's agent on that host) has not answered for" in text
        assert later[0] == "saved", later
