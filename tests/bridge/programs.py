"""Runs small programs that use the bridge, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# An empty package in the place of bcp's own __init__, which imports torch: seconds that these programs can do without.
# Ctrl-C works as in a terminal, also where the tests were started in the background, with SIGINT ignored.
HEAD = f"""
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)
package = types.ModuleType("bcp")
package.__path__ = [{str(ROOT / "bcp")!r}]
sys.modules["bcp"] = package
import asyncio, os, threading, time
from pathlib import Path
{{before}}
from bcp.runtime import bridge as _bridge, event_loop as _loop
from bcp.runtime.threads import in_thread
folder = Path(sys.argv[1])

def say(text):
    print(text, flush=True)

async def say_when_main_waits(text):
    def waits(frame):
        return (frame.f_code.co_filename, frame.f_code.co_name) == (threading.__file__, "wait")
    while not waits(sys._current_frames()[threading.main_thread().ident]):
        await asyncio.sleep(0.001)
    say(text)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def program(
    folder: Path, body: str, *, before: str = "", interrupt: int | None = None, on: str = "now", times: int = 1
) -> Ended:
    """Run a program to its end; send it a signal each of the first ``times`` times that it says ``on``."""
    source = HEAD.format(before=textwrap.dedent(before)) + textwrap.dedent(body)
    process = subprocess.Popen(  # noqa: S603 -- a program of this test
        [sys.executable, "-c", source, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out = ""
    with process:
        assert process.stdout is not None
        while interrupt is not None and times:
            line = process.stdout.readline()
            if not line:
                break
            out += line
            if line.strip() == on:
                process.send_signal(interrupt)
                times -= 1
        try:
            rest, err = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"the program hangs; it said {out!r}") from None
    return Ended(process.returncode, out + rest, err)


KILLED_BY_CTRL_C = -signal.SIGINT
