"""``bcp import A B``, and ``bcp import A --no-copy``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, drawn, join, print_json, storage, target
from bcp.runtime.imports import imported

__all__ = ["command"]


@click.command("import")
@click.argument("source", metavar="A")
@click.argument("goal", metavar="[B]", required=False)
@click.option("--no-copy", is_flag=True, help="make A itself a checkpoint: write metadata.arrow into its folder")
@click.option("--values/--no-values", default=True, help="take over the values that are no tensors, or leave them out")
@click.option("--overwrite", is_flag=True, help="replace a committed checkpoint at B, or an older import of A")
@target
@storage
@with_json
def command(
    source: str,
    goal: str | None,
    storage_options: dict[str, Any],
    target_options: dict[str, Any],
    *,
    no_copy: bool,
    values: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Make a checkpoint of files of another library.

    A is a Hugging Face folder, a folder of torch.distributed.checkpoint, a safetensors file, or a file of torch.save. B
    is the new checkpoint. The bytes are streamed. Under torchrun the ranks share the work.

    With --no-copy there is no B. The folder A becomes a checkpoint over its own files, which stay as they are.
    """
    rank = join()
    with drawn("import", rank) as progress:
        result = imported("bcp.tools").import_files(
            source,
            goal,
            copy=not no_copy,
            values=values,
            overwrite=overwrite,
            storage_options=storage_options or None,
            target_options=target_options or None,
            progress=progress,
        )
    if rank == 0:
        words = f"{result.path}: {result.tensors:,} tensors and {result.values:,} values in {result.seconds:.1f} s"
        print_json(asdict(result)) if as_json else click.echo(clean(words))
    return 0
