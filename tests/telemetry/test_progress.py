from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked

import bcp
from bcp.telemetry import progress
from bcp.telemetry.progress import bar

STATE = {"model": {"w": torch.ones(1000)}}

TWO_AT_ONCE = """
import logging, threading, torch, bcp
from bcp.runtime.threads import in_thread
both = threading.Barrier(2)

async def meet(item):
    await in_thread(both.wait)
    return item

async def fail(item):
    raise OSError("the disk is full")

def options(stage):
    return bcp.SaveOptions(progress=True, edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", stage)))

state = {"model": {"w": torch.ones(1_000_000)}}
pending = [bcp.save(f"step-{step}", state, async_checkpoint=True, options=options(meet)) for step in (1, 2)]
print("on standard output")
for each in pending:
    each.wait()
bcp.telemetry.configure(logs="console")
bcp.load("step-1", state, progress=True)
try:
    bcp.save("step-3", state, options=options(fail))
except bcp.StageError:
    print("raised")
"""


def on_a_terminal(program: str, cwd: Path) -> tuple[str, str]:
    """Run a program whose standard error is a terminal; return what it prints there and on standard output."""
    ours, its = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with Forked([sys.executable, "-c", program], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=its) as job:
        os.close(its)
        shown = b"".join(chunks(ours))
        os.close(ours)
        assert job.stdout is not None
        out = job.stdout.read()
    assert job.returncode == 0, shown.decode()
    return shown.decode(), out.decode()


def chunks(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            return
        if not chunk:
            return
        yield chunk


def screen(shown: str) -> list[str]:
    """Return the lines that are left on a terminal, which understands what rich needs: up, erase, carriage return."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", shown):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece.endswith("A"):
            row -= int(piece[2:-1] or 1)
        elif piece[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


def test_two_saves_at_once_share_a_display_and_leave_their_figures(tmp_path: Path) -> None:
    shown, out = on_a_terminal(TWO_AT_ONCE, tmp_path)
    assert out == "on standard output\nraised\n"
    left = screen(shown)
    figures = r"4\.0 MB in [0-9.]+ s, [0-9.]+ [kMG]B/s"
    name = re.escape(tmp_path.name)
    assert len(left) == 6
    assert [bool(re.fullmatch(rf"save {name}/step-[12]: {figures}", line)) for line in left[:2]] == [True, True]
    assert {line.split(":")[0][-1] for line in left[:2]} == {"1", "2"}
    assert re.fullmatch(rf"load {name}/step-1: {figures}", left[2])
    assert "[info     ] loaded " in left[3]
    assert re.fullmatch(rf"save {name}/step-3: failed after 0 bytes of 4.0 MB in [0-9.]+ s", left[4])
    assert "[error    ] save failed " in left[5]
    both = [frame for frame in shown.split("\x1b[2K") if "step-1" in frame and "step-2" in frame]
    assert both


def test_a_job_log_gets_a_line_at_the_end_of_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bcp.save(tmp_path, STATE, progress=True)
    bcp.load(tmp_path, STATE, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    saved, loaded = err.splitlines()
    assert re.fullmatch(rf"save .*{tmp_path.name}: 8\.\d kB in [\d.]+ s, [\d.]+ [kM]B/s", saved)
    assert loaded.startswith("load ")


def test_a_job_log_gets_a_line_every_ten_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    lines = progress._Lines("save step-1", 400_000_000, lambda: now[0])
    for seconds in (1, 8, 1, 3, 8):
        now[0] += seconds
        lines.advance(50_000_000)
    now[0] += 9
    lines.advance(150_000_000)
    lines.close(failed=False)
    assert capfd.readouterr().err.splitlines() == [
        "save step-1: 150.0 MB of 400.0 MB (37 %), 15.0 MB/s, 16.7 s left",
        "save step-1: 250.0 MB of 400.0 MB (62 %), 11.9 MB/s, 12.6 s left",
        "save step-1: 400.0 MB in 30.0 s, 13.3 MB/s",
    ]


def test_a_failed_bar_in_a_job_log_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with bar("load step-1", 4_000) as shown:
            shown.advance(1_000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert re.fullmatch(r"load step-1: failed after 1\.0 kB of 4\.0 kB in [\d.]+ s\n", capfd.readouterr().err)


def test_nothing_is_shown_where_nothing_is_to_be_done(capfd: pytest.CaptureFixture[str]) -> None:
    with bar("save step-1", 0) as shown:
        shown.advance(0)
    assert capfd.readouterr().err.startswith("save step-1: 0 bytes in ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (3599.6, "1 h 0 min"), (7300, "2 h 1 min")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text


@contextmanager
def notebook(monkeypatch: pytest.MonkeyPatch, *, widgets: bool) -> Iterator[list[Any]]:
    """Pretend to be in a notebook; yields what it displays."""
    shown: list[Any] = []
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)

    class Output:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def clear_output(self, *, wait: bool) -> None: ...
        def close(self) -> None: ...

    display = types.ModuleType("IPython.display")
    display.__dict__.update(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    outputs = types.ModuleType("ipywidgets")
    outputs.__dict__.update(Output=Output, __spec__=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ipywidgets", outputs if widgets else None)
    yield shown


def test_a_notebook_with_widgets_shows_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with notebook(monkeypatch, widgets=True) as shown:
        bcp.save(tmp_path / "12", STATE, progress=True)
    widget, *printed = shown
    assert type(widget).__name__ == "Output"
    assert re.search(r"save .*/12: 8\.\d kB in ", "".join(each.text for each in printed))
    assert capfd.readouterr() == ("", "")


def test_a_notebook_without_widgets_gets_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with notebook(monkeypatch, widgets=False) as shown:
        bcp.save(tmp_path / "12", STATE, progress=True)
    assert not shown
    assert re.match(r"save .*/12: 8\.\d kB in ", capfd.readouterr().err)


FORK = """
import os, sys
from bcp.telemetry.progress import bar
with bar("save step-1", 100):
    if (child := os.fork()) == 0:
        print("a line of the child", file=sys.stderr)
        with bar("save step-2", 100) as shown:
            shown.advance(100)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_has_a_display_of_its_own(tmp_path: Path) -> None:
    shown, _ = on_a_terminal(FORK, tmp_path)
    assert "a line of the child" in shown
    assert re.search(r"save step-2: 100 bytes in ", shown)
    assert re.search(r"save step-1: 0 bytes in ", shown)
