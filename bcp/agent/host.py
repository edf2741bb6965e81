"""The agent's process: one for each host and folder, of low priority."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio

from bcp.agent.loop import Agent
from bcp.agent.serve import serving
from bcp.backends.local import fixed
from bcp.errors import BcpError, InputError, StorageError
from bcp.tiers.folder import NodeFolder
from bcp.tiers.starting import way_of

__all__ = ["ALREADY_SERVED", "serve"]

WRONG_CALL = 2
"""Exit code of an agent whose arguments cannot be used; it is not started again."""

ALREADY_SERVED = 3
"""Exit code of an agent whose host has one already."""

NICE = 10

LOOK_SECONDS, LEAVE_SECONDS = 1.0, 5.0
"""For an agent that makes way for another one: between two looks, and for the end of its uploads."""


def _options(path: Path | None) -> tuple[str, Mapping[str, Any] | None]:
    """Read the options of the storage, as a text and decoded. Raises InputError if the file is no JSON object."""
    if path is None:
        return "", None
    try:
        options = json.loads(text := path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--storage-options {path} cannot be read as JSON: {error}") from error
    if not isinstance(options, dict):
        raise InputError(f"--storage-options {path} has a {type(options).__name__}; write an object, as {{}}")
    return text, options


@contextmanager
def _listening(folder: NodeFolder, listen: str) -> Iterator[None]:
    """Serve other hosts. Raises InputError if the address cannot be used: a new start would find the same."""
    with ExitStack() as stack:
        try:
            stack.enter_context(serving(folder, listen))
        except StorageError as error:
            raise InputError(f"--listen {listen}: {error}") from error
        yield


def serve(arguments: argparse.Namespace) -> int:
    """Be the agent; return the exit code."""
    try:
        return _serve(arguments, NodeFolder(arguments.folder))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_CALL


def _serve(arguments: argparse.Namespace, folder: NodeFolder) -> int:
    """Serve until no rank lives here and nothing is left to do. A rank that comes meanwhile is served, too."""
    durable = fixed(arguments.durable)
    with folder.serving() as lock:
        if lock is None:
            sys.stderr.write(f"there is an agent for {arguments.folder} already\n")
            return ALREADY_SERVED
        folder.check_run(durable)
        text, options = _options(arguments.storage_options)
        way = way_of(arguments.durable, arguments.node, arguments.listen, arguments.pace, text)
        folder.put_way(way if arguments.spawned else "")
        agent = Agent(
            folder,
            durable,
            sha256(arguments.node.encode()).hexdigest()[:16],
            storage_options=options,
            pace=arguments.pace,
            poll_seconds=arguments.poll,
            patience_seconds=arguments.patience,
            linger_seconds=arguments.linger,
        )
        threading.Thread(target=_end_at_last, args=[folder], name="bcp agent's end", daemon=True).start()
        while True:
            with _listening(folder, arguments.listen):
                _let_others_go_first()
                anyio.run(agent.run)
            if folder.is_to_leave() or folder.leave_serving(lock):
                return 0


def _let_others_go_first() -> None:
    """Take low priority, for this thread and those that it starts from now on.

    Those that it has started let other hosts read: a job waits for them, and for the start of this process.
    """
    os.nice(max(NICE - os.nice(0), 0))


def _end_at_last(folder: NodeFolder) -> None:
    """End this process if it was asked to leave, and one of its threads hangs in storage. Blocks."""
    with suppress(BcpError):  # the folder has gone
        while not folder.is_to_leave():
            time.sleep(LOOK_SECONDS)
        time.sleep(LEAVE_SECONDS)
        os._exit(0)
