"""``bcp cool RUN --to PLACE``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, cold, drawn, print_json, storage, table
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.tools.cooling import CoolResult

__all__ = ["command"]


@click.command("cool")
@click.argument("run", metavar="RUN")
@click.option("--to", metavar="PLACE", required=True, help="the cold place, for this run alone")
@click.option("--days", type=float, default=7.0, show_default=True, help="move checkpoints that are older")
@click.option("-n", "--dry-run", is_flag=True, help="move nothing")
@storage
@cold
@with_json
def command(
    run: str,
    to: str,
    days: float,
    storage_options: dict[str, Any],
    cold_options: dict[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Move the data files of a run's old checkpoints to a cheaper place. Their paths stay valid.

    A job may train in the run meanwhile. The newest checkpoint and the newest verified one stay. A file is deleted in
    the run's folder once its copy was read back and compared with its checksums. A call that is killed loses nothing:
    call again.
    """
    with importing:
        from bcp.tools.cooling import cool  # noqa: PLC0415 -- the help does not need it

    with drawn("cool", 0) as progress:
        results = cool(
            run,
            to=to,
            days=days,
            dry_run=dry_run,
            storage_options=storage_options or None,
            cold_options=cold_options or None,
            progress=progress,
        )
    if as_json:
        print_json([asdict(each) for each in results])
    elif results:
        rows = [_row(each, dry_run=dry_run) for each in results]
        table(["step", "files", "size", "", "path"], rows, right=["step", "files", "size"])
    else:
        click.echo(clean(f"{run}: nothing to move"))
    return int(any(each.is_damaged for each in results))


def _row(each: CoolResult, *, dry_run: bool) -> list[object]:
    with importing:
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- as above

    done = "would be moved" if dry_run else "moved"
    words = f"stays: {each.reason}" if each.reason else done
    return [each.step, f"{each.files:,}", bytes_words(each.nbytes), words, each.path]
