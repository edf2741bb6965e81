"""The agent's process: one for each host and folder, of low priority."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio

from bcp.agent.loop import Agent
from bcp.agent.serve import serving
from bcp.errors import InputError
from bcp.tiers.folder import NodeFolder

__all__ = ["ALREADY_SERVED", "serve"]

ALREADY_SERVED = 3
"""Exit code of an agent whose host has one already."""

NICE = 10


def _options(path: Path | None) -> Mapping[str, Any] | None:
    """Read the options of the storage. Raises InputError if the file is no JSON object."""
    if path is None:
        return None
    try:
        options = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--storage-options {path} cannot be read as JSON: {error}") from error
    if not isinstance(options, dict):
        raise InputError(f"--storage-options {path} has a {type(options).__name__}; write an object, as {{}}")
    return options


def serve(arguments: argparse.Namespace) -> int:
    """Be the agent; return the exit code."""
    os.nice(NICE)
    folder = NodeFolder(arguments.folder)
    with folder.serving() as is_first:
        if not is_first:
            sys.stderr.write(f"there is an agent for {arguments.folder} already\n")
            return ALREADY_SERVED
        agent = Agent(
            folder,
            arguments.durable,
            sha256(arguments.node.encode()).hexdigest()[:16],
            storage_options=_options(arguments.storage_options),
            pace=arguments.pace,
            poll_seconds=arguments.poll,
            patience_seconds=arguments.patience,
            linger_seconds=arguments.linger,
        )
        with serving(folder, arguments.listen):
            anyio.run(agent.run)
    return 0
