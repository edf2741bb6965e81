"""Start the agent of a host, unless it runs already. It belongs to no process group of the trainers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bcp._log import log
from bcp.errors import InputError, StorageError
from bcp.tiers.folder import NodeFolder

__all__ = ["await_agent", "start_agent"]

START_SECONDS = 60.0
"""For a process that imports no torch, on a host whose cores are all taken."""

NAP_SECONDS = 0.05
LOG, OPTIONS = "agent.log", "storage-options.json"
SHOWN = 2_000


def start_agent(
    folder: NodeFolder,
    durable: str,
    node: str,
    listen: str,
    options: Mapping[str, Any] | None,
    pace: float | None = None,
) -> None:
    """Start the agent of this host; return when it serves. Of several processes that call this, one starts it. Blocks.

    Args:
        folder: the memory of this host.
        durable: path or URL of the durable root.
        node: name of the host.
        listen: where other hosts read.
        options: of the storage; they lie in a private file, for the agent's next life.
        pace: bytes a second that it copies from other hosts; None for no limit.

    Raises:
        InputError: the options are no JSON.
        StorageError: the agent has not come up.

    """
    until = time.monotonic() + START_SECONDS
    while not _serves(folder):
        with folder.starting() as is_first:
            if is_first and not folder.is_served():
                folder.put_address("")  # that of an agent which was killed
                words = ["--node", node, "--listen", listen]
                words += [] if pace is None else ["--pace", str(pace)]
                words += ["--storage-options", str(_stored(folder, options))] if options else []
                _await(folder, _spawned(folder, durable, words), until)
        if time.monotonic() > until:
            raise StorageError(f"the agent of {folder.root} does not serve after {START_SECONDS:.0f} s")
        time.sleep(NAP_SECONDS)


def await_agent(folder: NodeFolder, seconds: float) -> None:
    """Wait for an agent that somebody else starts, and that other hosts can read from. Blocks.

    After so many seconds without one a warning says so. Other hosts cannot read the snapshots here then.
    """
    until = time.monotonic() + seconds
    while not _serves(folder):
        if time.monotonic() > until:
            log.warning(
                "no agent lets other hosts read the snapshots of this one: start it with --listen",
                folder=str(folder.root),
                seconds=seconds,
            )
            return
        time.sleep(NAP_SECONDS)


def _serves(folder: NodeFolder) -> bool:
    return folder.is_served() and bool(folder.address())


def _await(folder: NodeFolder, pid: int, until: float) -> None:
    """Wait until the agent serves. Raises StorageError, with its own words, if it does not."""
    while not _serves(folder):
        try:
            has_ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # this process ignores the ends of its children
            has_ended, status = 0, 0
        if has_ended or time.monotonic() > until:
            what = f"has ended with {os.waitstatus_to_exitcode(status)}" if has_ended else "does not serve"
            if not has_ended:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            words = (folder.root / LOG).read_text(errors="replace")[-SHOWN:].strip()
            raise StorageError(f"the agent of {folder.root} {what}: {words or 'it has said nothing'}")
        time.sleep(NAP_SECONDS)


def _spawned(folder: NodeFolder, durable: str, words: Sequence[str]) -> int:
    """Start the process, in a session of its own; return its id."""
    command = [sys.executable, "-P", "-m", "bcp.agent", "--spawned", str(folder.root), durable, *words]
    log = str(folder.root / LOG)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, command, _environment(), file_actions=actions, setsid=True)


def _environment() -> dict[str, str]:
    """Return the environment of this process, in which bcp is found where this process has found it."""
    place = str(Path(__file__).parents[2])
    paths = [place, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _stored(folder: NodeFolder, options: Mapping[str, Any]) -> Path:
    """Store options of storage, which may have secrets, for this user alone."""
    path = folder.root / OPTIONS
    try:
        text = json.dumps(dict(options))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"storage_options={sorted(options)} go to the agents of tiers as JSON, and are none: {error}. Pass texts "
            "and numbers, or run the agents yourself (agent='external')"
        ) from error
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:  # noqa: PTH123 -- a descriptor
        file.write(text)
    return path
