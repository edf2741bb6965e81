"""A forked program of ``tests/support/forked.py`` is as one that Popen starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import VARIABLE, Forked, run_forked
from samples import sample

SELF = """
import atexit, json, os, signal, sys
atexit.register(print, "at the end")
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[:2],
    "folder": os.getcwd(),
    "environ": sorted(os.environ.items()),
    "input": sys.stdin.read(),
    "leads a session": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "files": sorted(os.listdir("/proc/self/fd")),
    "is main": __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals(),
}), flush=True)
print("to standard error", file=sys.stderr)
sys.exit(7)
"""
ENDS = ["pass", "import sys; sys.exit('words')", "import os; os._exit(9)", "raise SystemExit", "import os; os.abort()"]
ENDS += ["raise ValueError(1)", "import threading, time; threading.Thread(target=time.sleep, args=(0.1,)).start()"]
# a fork has imported torch._dynamo: it calls tabulate at the end, if that is there, and Python forgets the interrupt
INTERRUPT = "import os, signal, torch._dynamo; os.kill(os.getpid(), signal.SIGINT); signal.pause()"


def both(command: list[str], **how: object) -> list[tuple[int, str, str]]:
    """Run a command in both ways."""
    found = []
    for start in (subprocess.Popen, Forked):
        pipe = subprocess.PIPE
        job = start(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **how)  # type: ignore[call-overload]  # as both take it
        out, errors = job.communicate("some input")
        found.append((job.returncode, out, errors))
    return found


@pytest.mark.parametrize("session", ["own", "shared"])
@pytest.mark.parametrize("kind", ["file", "text"])
def test_a_program_finds_what_popen_gives(tmp_path: Path, kind: str, session: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(SELF)
    words = [str(script)] if kind == "file" else ["-c", SELF]
    run_forked([sys.executable, "-c", ""])  # which sets the variable of the server
    assert VARIABLE in os.environ
    environ = {**os.environ, "ONE": "2", "PYTHONPATH": str(tmp_path / "more")}
    command = [sys.executable, "-u", *words, "a", "b c"]
    popen, forked = both(command, cwd=tmp_path, env=environ, start_new_session=session == "own")
    assert forked == popen
    assert forked[0] == 7
    assert forked[1].endswith("at the end\n")


@pytest.mark.parametrize("program", sample([*ENDS, INTERRUPT], *ENDS))
def test_a_program_ends_as_one_of_popen(program: str) -> None:
    popen, forked = both([sys.executable, "-c", program])
    assert forked[:2] == popen[:2]
    assert forked[2].splitlines()[-1:] == popen[2].splitlines()[-1:]


def test_a_program_gets_signals_and_is_waited_for() -> None:
    job = Forked(
        [sys.executable, "-u", "-c", "print(1); import time; time.sleep(60)"], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "1\n"
    assert job.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    job.stdout.close()


def test_a_module_is_run_by_its_name() -> None:
    command = [sys.executable, "-m", "bcp", "--help"]
    popen, forked = both(command)
    assert forked == popen
    assert forked[0] == 0


SENDS = """
import multiprocessing
class Value:
    pass
def send(pipe):
    pipe.send(Value())
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs,))
    process.start()
    print(type(ours.recv()).__name__, type(ours).__module__)
    process.join()
"""


def test_a_program_and_its_processes_send_each_other_its_classes(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SENDS)
    popen, forked = both([sys.executable, str(script)])
    assert forked == popen == (0, "Value multiprocessing.connection\n", "")
