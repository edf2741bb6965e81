"""``bcp diff A B``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, drawn, join, print_json, table
from bcp.cli.screen import role as with_role
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.tools.difference import Difference, TensorDifference

__all__ = ["command"]

FEW = 40


@click.command("diff")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--glob", metavar="GLOB", default="*", help="names of tensors and values, as 'layers.0.*'")
@click.option("--all", "show_all", is_flag=True, help=f"show more than {FEW} differences")
@with_role
@with_json
def command(
    first: str,
    second: str,
    glob: str,
    role: str | None,
    storage_options: dict[str, Any],
    *,
    show_all: bool,
    as_json: bool,
) -> int:
    """Compare two checkpoints: names, shapes, dtypes, values, and all elements bit by bit.

    The table has the number of elements that changed, of all elements, and the largest absolute difference. Blocks
    with equal checksums are not read, so damage in them goes unnoticed: bcp verify finds it. The exit status is 0 if
    the checkpoints are equal, and 1 if not. Under torchrun the ranks share the bytes.
    """
    with importing:
        from bcp.tools.difference import diff  # noqa: PLC0415 -- the help does not need it

    rank = join()
    with drawn("compare", rank) as progress:
        found = diff(first, second, role=role, glob=glob, storage_options=storage_options or None, progress=progress)
    if rank == 0 and as_json:
        print_json(asdict(found))
    elif rank == 0:
        _show(found, None if show_all else FEW)
    return 1 if found else 0


def _show(found: Difference, most: int | None) -> None:
    if not found:
        how = "" if found.read_nbytes else " by their checksums (no data was read: `bcp verify` finds damage)"
        click.echo(f"equal: {found.equal:,} tensors, and all values{how}")
        return
    lines = [
        *(("only in A", kind, name, "", "", "") for kind, name in found.removed),
        *(("only in B", kind, name, "", "", "") for kind, name in found.added),
        *map(_line, found.tensors),
        *(
            ("value", each.kind, f"{each.name}: {each.before or '-'} -> {each.after or '-'}", "", "", "")
            for each in found.values
        ),
        *(("object", "", name, "", "", "") for name in found.objects),
    ]
    click.echo(clean(f"A: {found.first}\nB: {found.second}\n"))
    table(["", "kind", "name", "changed", "of", "largest"], lines[:most], right=["changed", "of", "largest"])
    if most is not None and len(lines) > most:
        click.echo(f"and {len(lines) - most:,} more; --all shows them")
    click.echo(f"\n{len(lines):,} differences; {found.equal:,} tensors are equal")


def _line(each: TensorDifference) -> tuple[str, ...]:
    if each.before != each.after:
        return "tensor", each.kind, f"{each.name}: {each.before} -> {each.after}", "", "", ""
    largest = "" if each.largest is None else f"{each.largest:.3g}"
    return "tensor", each.kind, each.name, f"{each.elements:,}", f"{each.numel:,}", largest
