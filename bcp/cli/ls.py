"""``bcp ls RUN``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import print_json, said, storage, table, when
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.runs.listing import StepInfo

__all__ = ["command"]


@click.command("ls")
@click.argument("run", metavar="RUN")
@storage
@with_json
def command(run: str, storage_options: dict[str, Any], *, as_json: bool) -> int:
    """List the checkpoints of a run, the oldest first.

    RUN is the folder or URL with the folders step-00000100, step-00000200 and so on. A folder without a commit
    belongs to a save that died or is still running.
    """
    with importing:
        from bcp.read.checkpoint import Checkpoint  # noqa: PLC0415 -- the help does not need it
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- same
        from bcp.tools.steps import list_steps  # noqa: PLC0415 -- same

    steps = list_steps(run, storage_options=storage_options or None)
    if as_json:
        print_json([_data(step) for step in steps])
        return 0
    if not steps:
        with Checkpoint(run, storage_options=storage_options or None) as ckpt:  # raises, and says what is there instead
            said(f"{ckpt.path} is one checkpoint, of operation {ckpt.operation}, and not a run: see bcp show {run}")
        return 2
    columns = ["step", "committed", "size", "state", "metrics", "path"]
    rows = [
        [step.step, when(step.committed), bytes_words(step.nbytes), _state(step), _metrics(step), step.path]
        for step in steps
    ]
    table(columns, rows, right=["step", "size"])
    return 0


def _state(step: StepInfo) -> str:
    """Return the marks of a checkpoint in few words."""
    words = [] if step.is_committed else ["not committed"]
    words += ["cold"] if step.cold_nbytes else []
    words += [step.trust] if step.trust != "unknown" else []
    words += ["pinned"] if step.pinned else []
    words += [f"refers to {', '.join(map(str, step.refers))}"] if step.refers else []
    words += [step.reason] if step.reason else []
    return ", ".join(words)


def _metrics(step: StepInfo) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in step.metrics.items())


def _data(step: StepInfo) -> dict[str, Any]:
    return asdict(step) | {"committed": None if step.committed is None else step.committed.isoformat()}
