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
from hashlib import sha256
from pathlib import Path

ALREADY_SERVED = 3
"""Exit code of an agent whose host has one already."""

LONGEST_PAUSE_SECONDS = 30.0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bcp.agent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the job's directory on this host's tmpfs")
    parser.add_argument("durable", help="directory or URL below which checkpoints lie, as gs://bucket/run-7")
    parser.add_argument("--node", default=socket.gethostname(), help="name of this host; another one on each host")
    parser.add_argument(
        "--listen", default="", metavar="HOST[:PORT]", help="let other hosts of the job read at this address"
    )
    parser.add_argument("--poll", type=float, default=0.5, metavar="SECONDS", help="how often to look for snapshots")
    parser.add_argument("--patience", type=float, default=30.0, metavar="SECONDS", help="how long to wait for others")
    parser.add_argument("--linger", type=float, default=3600.0, metavar="SECONDS", help="how long to outlive trainers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run the parent, or with ``--child`` the agent itself; return the exit code."""
    arguments = _arguments().parse_args()
    return (
        _serve(arguments) if arguments.child else _guard([sys.executable, "-m", "bcp.agent", "--child", *sys.argv[1:]])
    )


def _guard(command: list[str]) -> int:
    """Start the agent again whenever it dies, with longer pauses if it dies at once."""
    pause, ended = 1.0, False
    while True:
        began = time.monotonic()
        child = subprocess.Popen(command)  # noqa: S603 -- this module

        def end(number: int, _: object, child: subprocess.Popen[bytes] = child) -> None:
            nonlocal ended
            ended = True
            child.send_signal(number)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        code = child.wait()
        if ended or code in (0, 2, ALREADY_SERVED):
            return code
        pause = 1.0 if time.monotonic() - began > LONGEST_PAUSE_SECONDS else min(2 * pause, LONGEST_PAUSE_SECONDS)
        _say(f"the agent ended with {code}; it starts again in {pause:.0f} s")
        time.sleep(pause)


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def _serve(arguments: argparse.Namespace) -> int:
    """Be the agent."""
    import anyio  # noqa: PLC0415 -- the parent has no need of it

    from bcp.agent.loop import Agent  # noqa: PLC0415 -- as above
    from bcp.agent.serve import serving  # noqa: PLC0415 -- as above
    from bcp.tiers.folder import NodeFolder  # noqa: PLC0415 -- as above

    os.nice(10)
    folder = NodeFolder(arguments.folder)
    with folder.serving() as is_first:
        if not is_first:
            _say(f"there is an agent for {arguments.folder} already")
            return ALREADY_SERVED
        node = sha256(arguments.node.encode()).hexdigest()[:16]
        agent = Agent(
            folder,
            arguments.durable,
            node,
            poll_seconds=arguments.poll,
            patience_seconds=arguments.patience,
            linger_seconds=arguments.linger,
        )
        with serving(folder, arguments.listen):
            anyio.run(agent.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
