"""``bcp promote RUN STEP``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, cold, drawn, print_json, storage
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("promote")
@click.argument("run", metavar="RUN")
@click.argument("step", metavar="STEP", type=int)
@storage
@cold
@with_json
def command(
    run: str, step: int, storage_options: dict[str, Any], cold_options: dict[str, Any], *, as_json: bool
) -> int:
    """Bring the data files of a checkpoint back from a cold place.

    The cold copies stay until the checkpoint is deleted. `bcp cool` leaves the checkpoint alone for its number of days.
    """
    with importing:
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- the help does not need it
        from bcp.tools.cooling import promote  # noqa: PLC0415 -- same

    with drawn("promote", 0) as progress:
        result = promote(
            run, step, storage_options=storage_options or None, cold_options=cold_options or None, progress=progress
        )
    if as_json:
        print_json(asdict(result))
    else:
        click.echo(clean(f"{result.path}: {result.files:,} files came back, {bytes_words(result.nbytes)}"))
    return 0
