"""Commands on a host of a :class:`~network.Network`, each a process of its own, with output and exit status.

Run as a script, this file is what becomes the command: ``python on_host.py SPACE NAME HOSTS_FILE COMMAND ...``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.network import Network, enter

__all__ = ["Ended", "ended", "start"]

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """The end of a command.

    Attributes:
        status: its exit status; None if it had to be killed.
        out: on standard output.
        err: on standard error, without torch's own warnings of names and connections.
    """

    status: int | None
    out: str
    err: str


def start(
    network: Network,
    host: int,
    folder: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    first: str = "",
) -> subprocess.Popen[str]:
    """Start a command; ``first`` is done by a shell before, and may mount what this command alone is to see."""
    file = folder / f"hosts.{host}"
    file.write_text(network.hosts_file(host))
    if first:
        command = ["sh", "-c", f'{first} && exec "$@"', "sh", *command]
    plain = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "CI")}
    return subprocess.Popen(  # noqa: S603 -- ours
        [sys.executable, __file__, network.space(host), network.name(host), str(file), *command],
        env={**plain, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[Ended]:
    """Wait for commands, all of them for so many seconds at most."""
    deadline, all_ended = time.monotonic() + seconds, list[Ended]()
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            all_ended.append(Ended(None, out, _without_torch(err)))
        else:
            all_ended.append(Ended(process.returncode, out, _without_torch(err)))
    return all_ended


def _without_torch(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"\[W.*\[c10d\]", line))


if __name__ == "__main__":
    enter(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    os.execvp(sys.argv[4], sys.argv[4:])  # noqa: S606 -- ours
