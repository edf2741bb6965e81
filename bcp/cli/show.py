"""``bcp show PATH``."""

from __future__ import annotations

import json
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, facts, print_json, table
from bcp.cli.screen import role as with_role
from bcp.errors import FqnMismatchError
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.read.checkpoint import Checkpoint
    from bcp.read.contents import TensorInfo

__all__ = ["command"]

FEW = 40
"""Tensors that are shown without a pattern."""

MOST_SHOWN = 200
"""Characters of a value."""


@click.command("show")
@click.argument("path", metavar="PATH")
@click.argument("glob", metavar="[GLOB]", required=False)
@click.option("--kind", metavar="KIND", help="tensors and values of this kind only: model or optimizer")
@click.option("--values", "with_values", is_flag=True, help="list values, as learning rates, in place of tensors")
@with_role
@with_json
def command(
    path: str,
    glob: str | None,
    kind: str | None,
    role: str | None,
    storage_options: dict[str, Any],
    *,
    with_values: bool,
    as_json: bool,
) -> int:
    """Show what is in a checkpoint: facts of its save, and its tensors.

    GLOB is a pattern of the shell for names, as in 'layers.0.*'. No data of tensors is read.
    """
    with importing:
        from bcp.read.checkpoint import Checkpoint  # noqa: PLC0415 -- the help does not need it
        from bcp.read.facts import check_kind  # noqa: PLC0415 -- same

    if kind is not None:
        check_kind(kind)
    with Checkpoint(path, role=role, storage_options=storage_options or None) as ckpt:
        if with_values:
            _show_values(ckpt, glob or "*", kind, as_json=as_json)
            return 0
        tensors = ckpt.tensors
        infos = [tensors.info(row) for row in tensors.rows(kind, glob or "*")]
        if glob is not None and not infos:
            few_names = ", ".join(ckpt.names(kind or "model")[:3])
            raise FqnMismatchError(f"{ckpt.path} has no tensor that matches {glob!r}; names are as {few_names}")
        if as_json:
            print_json(_facts(ckpt) | {"tensors": [asdict(info) for info in infos]})
            return 0
        plain = {"bytes": f"{ckpt.nbytes:,}", "codecs": ", ".join(ckpt.codecs), "kinds": ", ".join(ckpt.kinds)}
        plain |= {"refers": ", ".join(map(str, ckpt.refers))}
        facts(_facts(ckpt) | plain | {"metrics": _plain(ckpt.metrics), "metadata": _plain(ckpt.user_metadata)})
        few = infos if glob is not None or len(infos) <= FEW else infos[:FEW]
        click.echo()
        table(["kind", "name", "dtype", "shape", "bytes", "pieces"], list(map(_row, few)), right=["bytes", "pieces"])
        if len(few) < len(infos):
            more = f"and {len(infos) - len(few):,} more tensors: bcp show {path} '*' shows all of them"
            click.echo(f"\n{clean(more)}")
    return 0


def _show_values(ckpt: Checkpoint, glob: str, kind: str | None, *, as_json: bool) -> None:
    found = [
        (own, name, value)
        for (own, name), value in sorted(ckpt.values.items())
        if kind in (None, own) and fnmatchcase(name, glob)
    ]
    if as_json:
        print_json([{"kind": own, "name": name, "value": value} for own, name, value in found])
    else:
        table(["kind", "name", "value"], [(own, name, repr(value)[:MOST_SHOWN]) for own, name, value in found])


def _facts(ckpt: Checkpoint) -> dict[str, Any]:
    return {
        "path": ckpt.path,
        "step": ckpt.step,
        "created": ckpt.metadata.commit.created,
        "operation": ckpt.operation,
        "bytes": ckpt.nbytes,
        "ranks": ckpt.world_size,
        "framework": ckpt.framework,
        "version": ckpt.version,
        "codecs": ckpt.codecs,
        "kinds": ckpt.kinds,
        "refers": ckpt.refers,
        "metrics": dict(ckpt.metrics),
        "metadata": dict(ckpt.user_metadata),
    }


def _plain(values: Any) -> str:
    return json.dumps(dict(values), ensure_ascii=False) if values else ""


def _row(info: TensorInfo) -> list[object]:
    name = f"{info.name} = {info.tied_to}" if info.tied_to else info.name
    return [info.kind, name, info.dtype, list(info.shape), f"{info.nbytes:,}", info.pieces]
