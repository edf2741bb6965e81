"""Serve a host until its trainers have ended and their last snapshot is durable: ``python -m bcp.agent``.

The process that is started is a small parent. It starts the agent, and starts it again if it dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from bcp.runtime.imports import imported

ENDED = 0, 2, 3
"""Exit codes of an agent that is not started again: it has done its work, was called wrongly, or is not the first."""

LONGEST_PAUSE_SECONDS = 30.0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bcp.agent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the job's directory on this host's tmpfs")
    parser.add_argument("durable", help="directory or URL below which checkpoints lie, as gs://bucket/run-7")
    parser.add_argument("--node", default=socket.gethostname(), help="name of this host; another one on each host")
    parser.add_argument(
        "--listen", default="", metavar="HOST[:PORT]", help="let other hosts of the job read at this address"
    )
    parser.add_argument(
        "--storage-options", type=Path, metavar="FILE", help="options of the storage, as JSON; the file is private"
    )
    parser.add_argument("--pace", type=float, metavar="BYTES", help="most bytes a second to copy from other hosts")
    parser.add_argument("--poll", type=float, default=0.5, metavar="SECONDS", help="how often to look for snapshots")
    parser.add_argument("--patience", type=float, default=30.0, metavar="SECONDS", help="how long to wait for others")
    parser.add_argument("--linger", type=float, default=3600.0, metavar="SECONDS", help="how long to outlive trainers")
    parser.add_argument("--spawned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run the parent, or with ``--child`` the agent itself; return the exit code."""
    arguments = _arguments().parse_args()
    if arguments.child:
        code: int = imported("bcp.agent.host").serve(arguments)
        return code
    if arguments.spawned:  # files that the trainer has open for its children, as pipes: their readers wait for an end
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    safe = ["-P"] if sys.flags.safe_path else []
    return _guard([sys.executable, *safe, "-m", "bcp.agent", "--child", *sys.argv[1:]])


def _guard(command: list[str]) -> int:
    """Start the agent again whenever it dies, with longer pauses if it dies at once."""
    pause, ended, code = 1.0, False, 0
    while not ended:
        began = time.monotonic()
        child = subprocess.Popen(command)  # noqa: S603 -- this module

        def end(number: int, _: object, child: subprocess.Popen[bytes] = child) -> None:
            nonlocal ended
            ended = True
            child.send_signal(number)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        code = child.wait()
        if ended or code in ENDED:
            return code
        pause = 1.0 if time.monotonic() - began > LONGEST_PAUSE_SECONDS else min(2 * pause, LONGEST_PAUSE_SECONDS)
        sys.stderr.write(f"the agent ended with {code}; it starts again in {pause:.0f} s\n")
        time.sleep(pause)
    return code


if __name__ == "__main__":
    sys.exit(main())
