"""``bcp report PATH``."""

from __future__ import annotations

import click

from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("report")
@click.argument("path", metavar="PATH")
@click.option("-o", "--html", metavar="FILE", help="also write one HTML page, which needs no network")
@click.option("--perfetto", metavar="FILE", help="also write a trace of the newest one for ui.perfetto.dev")
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
@click.option("--last", metavar="N", type=int, default=100, help="read the newest N files, 100 by default")
def command(path: str, html: str | None, perfetto: str | None, last: int, *, as_json: bool) -> int:
    """Show what was recorded of saves and loads: failures first, then bottlenecks, stragglers, storage and trends.

    PATH is a checkpoint, or a folder or URL with checkpoints below it.

    \b
      bcp report /ckpt/run/step-300 -o report.html

    The exit status is 0, or 1 if there is no recording or storage failed, and 2 if the call is wrong.
    """  # noqa: D301 -- click's mark for lines that stay as they are
    with importing:
        from bcp._report import show  # noqa: PLC0415 -- the help does not need it

    return show(path, html, perfetto, last, as_json=as_json)
