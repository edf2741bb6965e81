"""``bcp cat PATH NAME``."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, print_json
from bcp.cli.screen import role as with_role
from bcp.errors import FqnMismatchError, InputError
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.read.checkpoint import Checkpoint

__all__ = ["command"]

MOST_NUMBERS = 1 << 20
"""Elements that are printed as JSON."""


@click.command("cat")
@click.argument("path", metavar="PATH")
@click.argument("name", metavar="NAME")
@click.option("--kind", metavar="KIND", default="model", show_default=True, help="kind of the tensor or value")
@click.option("--index", metavar="INDEX", help="a part of the tensor, as numpy writes it: '0, 5:9'")
@click.option(
    "--rank", metavar="RANK", type=int, default=0, help="whose object: with the names extra_states, dataloader"
)
@with_role
@with_json
def command(
    path: str,
    name: str,
    kind: str,
    index: str | None,
    rank: int,
    role: str | None,
    storage_options: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    """Print a tensor, a value or an object of a checkpoint.

    NAME is the name of a tensor, the path of a value as param_groups.w.lr with --kind optimizer, or extra_states or
    dataloader for the object of a rank. Only the wanted bytes are read, and every block is checked.
    """
    with importing:
        from bcp.plan.shards import OPAQUE_KINDS  # noqa: PLC0415 -- the help does not need it
        from bcp.read.checkpoint import Checkpoint  # noqa: PLC0415 -- same
        from bcp.read.facts import check_kind  # noqa: PLC0415 -- same

    check_kind(kind)
    with Checkpoint(path, role=role, storage_options=storage_options or None) as ckpt:
        if name in OPAQUE_KINDS:
            _print(ckpt.object(name, rank), as_json=as_json)
        elif (kind, name) in ckpt:
            _print_tensor(ckpt, name, kind, index, as_json=as_json)
        elif (kind, name) in ckpt.values:
            _print(ckpt.values[kind, name], as_json=as_json)
        else:
            raise FqnMismatchError(_lacks(ckpt, path, name, kind))
    return 0


def _lacks(ckpt: Checkpoint, path: str, name: str, kind: str) -> str:
    """Say that nothing has a name, and which names are near."""
    known = [*ckpt.tensors, *ckpt.values]
    others = [other for other, each in known if each == name]
    if others:
        return f"{ckpt.path} has {name!r} of kind {others[0]}: pass --kind {others[0]}"
    near = get_close_matches(name, [each for other, each in known if other == kind], n=3)
    hint = f"; near are {', '.join(near)}" if near else ""
    return f"{ckpt.path} has no tensor and no value {name!r} of kind {kind}{hint}: see bcp show {path} --values"


def _print(value: object, *, as_json: bool) -> None:
    print_json(value) if as_json else click.echo(clean(repr(value)))


def _print_tensor(ckpt: Checkpoint, name: str, kind: str, index: str | None, *, as_json: bool) -> None:
    tensor = ckpt.read(name, _index(index), kind=kind)
    if not as_json:
        click.echo(f"{ckpt[kind, name]!r}\n{tensor}")
        return
    if tensor.numel() > MOST_NUMBERS:
        raise InputError(
            f"{name} has {tensor.numel():,} elements, and JSON takes {MOST_NUMBERS:,}: choose with --index"
        )
    print_json(tensor.tolist())


def _index(text: str | None) -> Any:
    """Return an index as numpy writes it: integers, slices and an ellipsis, with commas between them."""
    if text is None:
        return ...
    return tuple(_part(part.strip(), text) for part in text.strip("[] ").split(","))


def _part(part: str, text: str) -> Any:
    try:
        if part == "...":
            return ...
        if ":" in part:
            return slice(*(int(number) if number.strip() else None for number in part.split(":")))
        return int(part)
    except (TypeError, ValueError) as error:  # a slice has three numbers at most
        raise InputError(
            f"--index {text!r}: {part!r} is no integer, slice or ellipsis; write it as '0, 5:9'"
        ) from error
