"""The agent's process: one for each host and folder, of low priority."""

from __future__ import annotations

import argparse
import os
import sys
from hashlib import sha256

import anyio

from bcp.agent.loop import Agent
from bcp.agent.serve import serving
from bcp.tiers.folder import NodeFolder

__all__ = ["ALREADY_SERVED", "serve"]

ALREADY_SERVED = 3
"""Exit code of an agent whose host has one already."""

NICE = 10


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
            poll_seconds=arguments.poll,
            patience_seconds=arguments.patience,
            linger_seconds=arguments.linger,
        )
        with serving(folder, arguments.listen):
            anyio.run(agent.run)
    return 0
