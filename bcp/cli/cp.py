"""``bcp cp A B``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, drawn, join, print_json, target
from bcp.cli.screen import role as with_role
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("cp")
@click.argument("source", metavar="A")
@click.argument("goal", metavar="B")
@click.option("--overwrite", is_flag=True, help="replace a committed checkpoint at B, atomically")
@target
@with_role
@with_json
def command(
    source: str,
    goal: str,
    role: str | None,
    storage_options: dict[str, Any],
    target_options: dict[str, Any],
    *,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Copy a checkpoint, byte for byte, between any two places.

    Every block is compared with its checksum while it is copied. The metadata come last, so a copy that is killed
    leaves no partial checkpoint. Recordings are not copied. Under torchrun the ranks share the files.
    """
    with importing:
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- the help does not need it
        from bcp.tools.copying import copy  # noqa: PLC0415 -- same

    rank = join()
    with drawn("copy", rank) as progress:
        result = copy(
            source,
            goal,
            role=role,
            overwrite=overwrite,
            storage_options=storage_options or None,
            target_options=target_options or None,
            progress=progress,
        )
    if rank == 0 and as_json:
        print_json(asdict(result))
    elif rank == 0:
        click.echo(
            clean(f"{result.path}: {result.files:,} files, {bytes_words(result.nbytes)} in {result.seconds:.1f} s")
        )
    return 0
