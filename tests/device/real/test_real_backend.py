"""bcp on torch's own accelerator API, unpatched: an accelerator in C++ whose copies run late.

The emulation in ``tests/device/late.py`` replaces torch's names, so it cannot show that bcp uses them correctly.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from real_backend import build
from real_scenarios import SCENARIOS
from samples import sample

import bcp

HERE = Path(__file__).parent
SECONDS = 240.0  # for a scenario: more than it takes on a busy machine, less than what pytest allows


class Device:
    """A process with the accelerator; it is started again after a failure."""

    def __init__(self, library: Path, log: Path) -> None:
        self._library, self._log = library, log
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str, folder: Path) -> None:
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, str(folder)]) + "\n")
        self._process.stdin.flush()
        answer = self._answer(self._process)
        if not answer:
            self._process.send_signal(signal.SIGABRT)  # a process that hangs writes its stacks to the log
            self._process.wait()
        if error := json.loads(answer) if answer else f"no answer: a crash or a hang\n{self._log.read_text()[-8000:]}":
            self.close()
            pytest.fail(error, pytrace=False)

    def _started(self) -> subprocess.Popen[str]:
        paths = [str(Path(bcp.__file__).parents[1]), str(HERE)]
        command = [sys.executable, str(HERE / "real_scenarios.py"), str(self._library)]
        with self._log.open("w") as log:
            return subprocess.Popen(  # noqa: S603 -- our own
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(SECONDS) else ""

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """Compile the accelerator once for this source and this torch; 7 s on an idle machine."""
    return build(pytestconfig.cache.mkdir("late-accelerator"))


@pytest.fixture(scope="module")
def device(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    with closing(Device(library, tmp_path_factory.mktemp("device") / "log")) as device:
        yield device


@pytest.mark.parametrize("name", sample(SCENARIOS, *list(SCENARIOS)[::3]))
def test_on_a_real_accelerator(device: Device, tmp_path: Path, name: str) -> None:
    device.run(name, tmp_path)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        build(tmp_path)
