"""``bcp edit PATH``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, drawn, print_json
from bcp.cli.screen import role as with_role
from bcp.runtime.imports import imported

if TYPE_CHECKING:
    from bcp.tools import EditResult

__all__ = ["command"]

SHOWN = 10


@click.command("edit")
@click.argument("path", metavar="PATH")
@click.option("--rename", metavar="OLD=NEW", multiple=True, help="give a tensor of the model another name; repeatable")
@click.option("--replace", metavar="REGEX=TEXT", multiple=True, help="rename all tensors by a regular expression")
@click.option("--drop", metavar="GLOB", multiple=True, help="leave out what fits, as '*.bias' or 'optimizer:*'")
@click.option("--cast", metavar="GLOB=DTYPE", multiple=True, help="convert what fits, as '*=bfloat16'")
@click.option(
    "--add", metavar="FILE", help="add the tensors of a checkpoint, or of a file of safetensors or torch.save"
)
@click.option(
    "--note", metavar="NAME=VALUE", multiple=True, help="add a fact to the user metadata; JSON where it can be"
)
@click.option("-n", "--dry-run", is_flag=True, help="show what would change")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@with_role
@with_json
def command(path: str, *, dry_run: bool, yes: bool, as_json: bool, **words: Any) -> int:
    """Rename, drop, cast and add tensors of a checkpoint, in place.

    Renamed and dropped tensors need no byte of data. The metadata change in one step: a reader sees the checkpoint
    before the edit or after it. Names and patterns are those before the edit. Older versions of bcp do not read an
    edited checkpoint.
    """
    wishes = _wishes(**words)
    edit = imported("bcp.tools").edit
    if not (dry_run or yes):
        _show(edit(path, dry_run=True, **wishes), to_stderr=True)
        click.confirm(clean(f"Edit {path}?"), abort=True, err=True)
    with drawn("edit") as progress:
        result = edit(path, dry_run=dry_run, progress=progress, **wishes)
    print_json(asdict(result)) if as_json else _show(result)
    return 0


def _wishes(
    rename: Sequence[str],
    replace: Sequence[str],
    cast: Sequence[str],
    note: Sequence[str],
    storage_options: dict[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of :func:`bcp.tools.edit`."""
    if rename and replace:
        raise click.UsageError("--rename and --replace cannot be combined; write one as the other, or edit twice")
    if text := next((text for text in rename if text.endswith("=")), ""):
        raise click.BadParameter(f"{text!r} has no new name behind '='; --drop leaves a tensor out")
    renames: Any = _pairs("--rename", rename) or [_pair(text.partition("=")) for text in replace] or None
    dtypes = {pattern: _dtype(name) for pattern, name in _pairs("--cast", cast, last=True).items()}
    notes = {name: _value(text) for name, text in _pairs("--note", note).items()} or None
    return {"rename": renames, "cast": dtypes, "metadata": notes, "storage_options": storage_options or None, **others}


def _pairs(option: str, texts: Sequence[str], *, last: bool = False) -> dict[str, str]:
    """Return the pairs around the first, or the last, "=" of each text."""
    found: dict[str, str] = {}
    for name, value in (_pair(text.rpartition("=") if last else text.partition("=")) for text in texts):
        if found.setdefault(name, value) != value:
            raise click.BadParameter(f"{option} has {name!r} with {found[name]!r} and {value!r}; pass one of them")
    return found


def _pair(parts: tuple[str, str, str]) -> tuple[str, str]:
    name, equals, value = parts
    if not equals or not name:
        raise click.BadParameter(f"{''.join(parts)!r} has no '=' between two parts")
    return name, value


def _dtype(name: str) -> object:
    """Return torch's dtype of a name, as in ``bfloat16``."""
    found = getattr(imported("torch"), name.removeprefix("torch."), None)
    if type(found).__name__ != "dtype":
        raise click.BadParameter(f"{name!r} is no dtype of torch, as bfloat16 and float32 are")
    return found


def _value(text: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def _show(result: EditResult, *, to_stderr: bool = False) -> None:
    """Print what has changed, or would."""
    size = imported("bcp.telemetry.amounts").bytes_words
    parts = [f"{result.renamed:,} renamed", f"{len(result.dropped):,} dropped", f"{result.cast:,} cast"]
    words = f"{result.path}: tensors: {', '.join(parts)}, {result.added:,} added"
    words += f"; {result.others:,} values and objects dropped" if result.others else ""
    wrote, freed = ("wrote", "freed") if result.operation else ("would write", "would free")
    words += f"; {wrote} {size(result.nbytes)}, {freed} {size(result.freed_nbytes)}"
    lines = [f"  drops {name}" for name in result.dropped[:SHOWN]]
    lines += [f"  and {len(result.dropped) - SHOWN:,} more"] if len(result.dropped) > SHOWN else []
    click.echo(clean("\n".join([words, *lines])), err=to_stderr)
