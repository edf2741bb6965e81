"""Start the agent of a host, unless it runs already. It belongs to no process group of the trainers.

An agent that an earlier life of the job has started goes on for this one, if it would be started alike. Otherwise it
makes way: storage options with old credentials, say, would keep snapshots from storage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from bcp._log import log
from bcp._version import __version__
from bcp.errors import InputError, StorageError
from bcp.tiers.folder import NodeFolder
from bcp.tiers.wire import greets

__all__ = ["await_agent", "start_agent", "way_of"]

START_SECONDS = 180.0
"""For a process that imports no torch, on a host whose cores are all taken."""

NAP_SECONDS = 0.05
GREETING_SECONDS = 5.0
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

    An agent that was started otherwise, by an earlier life of the job, is replaced. One that nobody of the job has
    started stays.

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
    until, text = time.monotonic() + START_SECONDS, _as_json(options)
    words = [str(folder.root), durable, "--node", node, "--listen", listen]
    words += [] if pace is None else ["--pace", str(pace)]
    way = way_of(durable, node, listen, pace, text)
    while not _answers(folder) or folder.way() not in ("", way):
        with folder.starting() as is_first:
            if is_first and folder.is_served() and folder.way() not in ("", way):
                log.info("an agent that was started otherwise makes way for another one", folder=str(folder.root))
                _replace(folder, folder.way(), until)
            if is_first and not folder.is_served():
                folder.put_address("")  # that of an agent which was killed
                more = ["--storage-options", str(_stored(folder, text))] if text else []
                _await(folder, _Started(_spawned(["--spawned", *words, *more], folder.root / LOG)), until)
        if time.monotonic() > until:
            raise StorageError(f"the agent of {folder.root} does not serve after {START_SECONDS:.0f} s")
        time.sleep(NAP_SECONDS)


def way_of(durable: str, node: str, listen: str, pace: float | None, options: str) -> str:
    """Return a digest of the settings of an agent, and of the version of bcp.

    Args:
        durable: path or URL of the durable root.
        node: name of the host.
        listen: where other hosts read.
        pace: bytes a second that it copies from other hosts; None for no limit.
        options: of the storage, as JSON; empty for none.

    Example:
        >>> way_of("/ckpt", "n0", "", 1, "") == way_of("/ckpt", "n0", "", 1.0, "")
        True

    """
    words = (__version__, durable, node, listen, repr(None if pace is None else float(pace)), options)
    return sha256("\n".join(words).encode(errors="surrogateescape")).hexdigest()


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


def _answers(folder: NodeFolder) -> bool:
    """Whether the agent serves, and greets a reader. One that was killed a moment ago may still have its locks."""
    if not _serves(folder):
        return False
    return not folder.token() or greets(folder.address(), GREETING_SECONDS)  # without a token nobody is greeted


class _Started:
    """A process that this one has started. It leaves no zombie, whenever it ends.

    Attributes:
        pid: its id.
        ended: set when it has ended.
        what: how it has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.what, self.ended = pid, "has ended", threading.Event()
        threading.Thread(target=self._reap, name="bcp agent's end", daemon=True).start()

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # somebody else waits for all children of this process, or ignores them
            _, status = os.waitpid(self.pid, 0)
            self.what = f"has ended with {os.waitstatus_to_exitcode(status)}"
        self.ended.set()

    def kill(self) -> None:
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.ended.wait()


def _await(folder: NodeFolder, started: _Started, until: float) -> None:
    """Wait until the agent serves. Raises StorageError, with its own words, if it does not."""
    while not _serves(folder):
        has_ended = started.ended.wait(NAP_SECONDS)
        if has_ended or time.monotonic() > until:
            started.kill()
            words = (folder.root / LOG).read_text(errors="replace")[-SHOWN:].strip()
            what = started.what if has_ended else "does not serve"
            raise StorageError(f"the agent of {folder.root} {what}: {words or 'it has said nothing'}")


def _replace(folder: NodeFolder, way: str, until: float) -> None:
    """Ask an agent to leave, and wait until it has left. Raises StorageError if it does not."""
    while folder.is_served() and folder.way() == way:
        if not folder.is_to_leave():  # its parent may have started it again meanwhile
            folder.ask_to_leave(way)
        if time.monotonic() > until:
            raise StorageError(
                f"the agent of {folder.root} was started with other settings by an earlier life of this job, and does "
                "not end: kill it"
            )
        time.sleep(NAP_SECONDS)


def _spawned(words: Sequence[str], output: Path) -> int:
    """Start the process, in a session of its own; return its id."""
    command = [sys.executable, "-P", "-m", "bcp.agent", *words]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, command, _environment(), file_actions=actions, setsid=True)


def _environment() -> dict[str, str]:
    """Return the environment of this process, in which bcp is found where this process has found it."""
    place = str(Path(__file__).parents[2])
    paths = [place, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _as_json(options: Mapping[str, Any] | None) -> str:
    """Return options of storage as JSON; an empty text for none. Raises InputError if they are none."""
    if not options:
        return ""
    try:
        return json.dumps(dict(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"storage_options={sorted(options)} go to the agents of tiers as JSON, and are none: {error}. Pass texts "
            "and numbers, or run the agents yourself (agent='external')"
        ) from error


def _stored(folder: NodeFolder, text: str) -> Path:
    """Store options of storage, which may have secrets, for this user alone."""
    path = folder.root / OPTIONS
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:  # noqa: PTH123 -- a descriptor
        file.write(text)
    return path
