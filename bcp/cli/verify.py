"""``bcp verify PATH...``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli import screen
from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import role as with_role
from bcp.errors import BcpError
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("verify")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--fast", is_flag=True, help="look at receipts, sizes and the table of contents only; read no data")
@with_role
@with_json
def command(
    paths: tuple[str, ...], role: str | None, storage_options: dict[str, Any], *, fast: bool, as_json: bool
) -> int:
    """Compare all stored bytes of checkpoints with their checksums.

    Every damaged or missing file is named. The exit status is 0 if all checkpoints are sound, 1 if one is damaged, and
    2 if a path has no checkpoint. The other paths are looked at in any case. Under torchrun the ranks share the bytes.
    """
    with importing:
        from bcp.backends.place import words_of  # noqa: PLC0415 -- the help does not need it
        from bcp.tools.verifying import verify  # noqa: PLC0415 -- same

    rank, results, worst = screen.join(), [], 0
    for path in paths:
        name = words_of(path) if role is None else f"{words_of(path)}/{role}"
        try:
            with screen.drawn("verify", rank) as progress:
                result = verify(path, fast=fast, role=role, storage_options=storage_options or None, progress=progress)
        except BcpError as error:
            worst = max(worst, screen.failed(error))
            continue
        results.append({"path": name, "sound": bool(result)} | asdict(result))
        worst = max(worst, 0 if result else 1)
        if rank == 0 and not as_json:
            click.echo(screen.clean(f"{name}: {result}"))
    if rank == 0 and as_json:
        screen.print_json(results)
    return worst
