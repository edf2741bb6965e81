"""``bcp pull URL FOLDER``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, print_json, storage
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("pull")
@click.argument("url", metavar="URL")
@click.argument("folder", metavar="FOLDER")
@click.option("--version", type=int, help="the version; the newest by default")
@storage
@with_json
def command(url: str, folder: str, version: int | None, storage_options: dict[str, Any], *, as_json: bool) -> int:
    """Bring a local folder to a version of published weights.

    The folder is a Hugging Face folder. Every tensor is compared with its digest before it is written. A call that is
    killed leaves a folder that the next call repairs.
    """
    with importing:
        from bcp.publication.subscriber import Subscriber  # noqa: PLC0415 -- the help does not need it
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- same

    result = Subscriber(url, folder, storage_options=storage_options or None).pull(version=version)
    if as_json:
        print_json(asdict(result))
        return 0
    way = [f"anchor {result.anchor}"] if result.anchor else []
    way += [f"{result.deltas} deltas"] if result.deltas else []
    way += [f"{len(result.repaired)} tensors repaired"] if result.repaired else []
    words = f"{', '.join(way)}, {bytes_words(result.nbytes)}" if way else "nothing to do"
    click.echo(clean(f"{folder}: version {result.version}; {words}"))
    return 0
