"""``bcp doctor [PATH]``."""

from __future__ import annotations

import math

import click

from bcp.runtime.imports import importing

__all__ = ["command"]


def _seconds(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is no number of seconds above 0")
    return value


@click.command("doctor")
@click.argument("path", metavar="[PATH]", required=False)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=float,
    default=30.0,
    callback=_seconds,
    help="how long all of it may take, 30 by default; more for ranks that start far apart",
)
def command(path: str | None, timeout: float) -> int:
    """Check the job's store, network, clocks, storage and versions, and say on rank 0 how they are.

    PATH is a folder or URL for checkpoints, which is tried out. Run it on every rank, the way the job is run, as in

    \b
      torchrun --nnodes=4 --nproc-per-node=8 ... -m bcp doctor /shared/run

    The exit status is 0 if all is well, 1 if not, and 2 if the call or the environment is wrong.
    """  # noqa: D301 -- click's mark for lines that stay as they are
    with importing:
        from bcp._doctor import doctor  # noqa: PLC0415 -- imports torch

    return doctor(path, timeout)
