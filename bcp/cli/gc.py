"""``bcp gc PATH``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import print_json, storage, table
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.tools.collection import Remains

__all__ = ["command"]


@click.command("gc")
@click.argument("path", metavar="PATH")
@click.option("--now", is_flag=True, help="also remains younger than a day: only if no job saves there")
@click.option("-n", "--dry-run", is_flag=True, help="delete nothing")
@storage
@with_json
def command(path: str, storage_options: dict[str, Any], *, now: bool, dry_run: bool, as_json: bool) -> int:
    """Delete the remains of saves that never committed, of a run or of one checkpoint.

    Remains younger than a day stay, because a save that runs looks like them. Files of committed checkpoints always
    stay.
    """
    with importing:
        from bcp.tools.collection import DAY_SECONDS, collect  # noqa: PLC0415 -- the help does not need it

    found = collect(
        path, min_age_seconds=0 if now else DAY_SECONDS, dry_run=dry_run, storage_options=storage_options or None
    )
    if as_json:
        print_json([asdict(each) for each in found])
    elif found:
        columns = ["folder", "operation", "files", "size", "age", ""]
        rows = [_row(each, dry_run=dry_run) for each in found]
        table(columns, rows, right=["files", "size", "age"])
    else:
        click.echo("no remains")
    return 0


def _row(each: Remains, *, dry_run: bool) -> list[object]:
    with importing:
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- as above

    age = "unknown" if each.age_seconds is None else f"{each.age_seconds / 3600:,.1f} h"
    words = (
        ("would be deleted" if dry_run else "kept: committed meanwhile") if each.is_old else "stays: younger than a day"
    )
    deleted = "deleted" if each.deleted else words
    return [each.place or ".", each.operation, f"{each.files:,}", bytes_words(each.nbytes), age, deleted]
