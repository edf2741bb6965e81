"""Run a command beside two busy loops for each core: ``python busy.py COMMAND ...``.

The loops have the priority of the command. They end with it, and with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

LOOPS = 2
PR_SET_PDEATHSIG = 1


def be_busy(parent: int) -> None:
    """Keep a core busy until the parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        sum(range(1_000_000))


def main(command: list[str]) -> int:
    """Run the command; return its exit code."""
    with ExitStack() as stack:
        for _ in range(LOOPS * len(os.sched_getaffinity(0))):
            loop = subprocess.Popen([sys.executable, __file__, "--loop", str(os.getpid())])  # noqa: S603 -- this file
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        running = subprocess.Popen(command)  # noqa: S603 -- of who calls
        signal.signal(signal.SIGTERM, lambda number, _: running.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command, too
        return running.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--loop":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        be_busy(int(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
