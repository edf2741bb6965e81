"""``bcp rm PATH...``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, print_json
from bcp.cli.screen import role as with_role
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("rm")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--force", is_flag=True, help="also a pinned one, one with damaged metadata, and one beside files of other saves"
)
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@with_role
@with_json
def command(
    paths: tuple[str, ...],
    role: str | None,
    storage_options: dict[str, Any],
    *,
    force: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete committed checkpoints: the metadata first, then the files.

    Only files named in the metadata are deleted. Files of other saves stay: one of them may be running. `bcp gc`
    deletes the remains of saves without a commit. Files of another library stay, too: of a folder that was imported
    with --no-copy, only metadata.arrow is deleted.
    """
    with importing:
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- the help does not need it
        from bcp.tools.removal import remove  # noqa: PLC0415 -- same

    if not yes:
        click.confirm(clean(f"Delete {', '.join(paths)}?"), abort=True, err=True)
    results = []
    try:
        for path in paths:
            result = remove(path, role=role, force=force, storage_options=storage_options or None)
            results.append(asdict(result))
            if not as_json:
                kept = f"; {len(result.kept):,} files of others stay" if result.kept else ""
                click.echo(clean(f"{result.path}: deleted {result.files:,} files, {bytes_words(result.nbytes)}{kept}"))
    finally:  # a program learns what has gone, although a later path cannot be deleted
        if as_json:
            print_json(results)
    return 0
