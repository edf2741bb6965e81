"""``bcp publish SOURCE TO --version N``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, print_json, storage, target
from bcp.runtime.imports import importing

__all__ = ["command"]


@click.command("publish")
@click.argument("source", metavar="SOURCE")
@click.argument("to", metavar="TO")
@click.option("--version", type=int, required=True, help="number of the version, larger than any before")
@click.option("--anchor-every", type=int, default=50, show_default=True, help="versions from one anchor to the next")
@click.option("--keep", type=int, help="how many of the newest versions stay readable; all by default")
@click.option("--dtype", metavar="DTYPE", help="dtype of floating tensors, as bfloat16")
@click.option("--like", metavar="FOLDER", help="a folder with config.json and tokenizer, which are published too")
@click.option("--encoding", type=click.Choice(["xor", "overwrite"]), default="xor", show_default=True)
@click.option("--cache", metavar="FOLDER", help="a local folder that keeps the base of the next delta")
@click.option("--claim-seconds", type=float, default=600.0, show_default=True, help="take over older claims")
@storage
@target
@with_json
def command(source: str, to: str, *, as_json: bool, **given: Any) -> int:
    """Publish the weights of a checkpoint as a version that inference engines pull.

    Most versions are deltas of the version before, and some are anchors with all tensors. SGLang's /pull_weights reads
    both, and so does bcp pull.
    """
    with importing:
        from bcp.publication.publishing import publish  # noqa: PLC0415 -- the help does not need it
        from bcp.telemetry.amounts import bytes_words  # noqa: PLC0415 -- same

    options: dict[str, Any] = {name: given.pop(name) or None for name in ("storage_options", "target_options")}
    result = publish(source, to, given.pop("version"), **given, **options)
    if as_json:
        print_json(asdict(result))
        return 0
    kind = f"an anchor of {bytes_words(result.nbytes)}" if result.is_anchor else "a delta"
    words = "all tensors to download"
    if result.has_delta:
        words = (
            f"{result.changed:,} of {result.tensors:,} tensors changed, {bytes_words(result.delta_nbytes)} to download"
        )
    click.echo(clean(f"{result.path}: {kind}; {words}"))
    return 0
