"""``bcp pin RUN STEP``."""

from __future__ import annotations

from typing import Any

import click

from bcp.cli.screen import clean, storage
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("pin")
@click.argument("run", metavar="RUN")
@click.argument("step", metavar="STEP", type=int)
@click.option("--off", is_flag=True, help="unpin the checkpoint: the run's policy may delete it")
@storage
def command(run: str, step: int, storage_options: dict[str, Any], *, off: bool) -> int:
    """Keep a checkpoint of a run, whatever the run's policy says.

    A job may train in the run meanwhile. `bcp rm` refuses a pinned checkpoint.
    """
    with importing:
        from bcp.tools.steps import pin  # noqa: PLC0415 -- the help does not need it

    pin(run, step, pinned=not off, storage_options=storage_options or None)
    click.echo(clean(f"{run}: step {step} is {'not pinned' if off else 'pinned'}"))
    return 0
