"""What commands print: tables and JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bcp._text import hidden, printable
from bcp.errors import BcpError, InputError, NotACheckpointError, PeerError
from bcp.runtime.imports import imported, importing

if TYPE_CHECKING:
    from collections.abc import Callable

    from bcp.tools.calls import Progress

__all__ = [
    "as_json",
    "clean",
    "cold",
    "drawn",
    "facts",
    "failed",
    "join",
    "print_json",
    "role",
    "said",
    "status_of",
    "storage",
    "table",
    "target",
    "when",
]


def _parsed(_context: click.Context, _parameter: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` texts as the options of a file system; a value is JSON where it can be."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} has to be NAME=VALUE, as in endpoint_url=http://127.0.0.1:9000")
        options[name] = value
        with suppress(ValueError):
            options[name] = json.loads(value)
    return options


def storage(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--storage-option``."""
    return _options("--storage-option", "storage_options", "an option for the file system of a URL; may be repeated")(
        function
    )


def target(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--target-option``."""
    return _options("--target-option", "target_options", "an option for the file system of the target's URL")(function)


def cold(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--cold-option``."""
    return _options("--cold-option", "cold_options", "an option for the file system of the cold place's URL")(function)


def _options(name: str, argument: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(name, argument, metavar="NAME=VALUE", multiple=True, callback=_parsed, help=words)


def role(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--role`` and ``--storage-option``."""
    named = click.option("--role", metavar="NAME", help="the role below the path, as actor or critic")
    return named(storage(function))


def as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="print JSON for programs")(function)


def print_json(data: object) -> None:
    """Print a value as JSON, in ASCII: any terminal and any encoding takes it."""
    click.echo(json.dumps(_jsonable(data), indent=2, allow_nan=False))


def _jsonable(value: object) -> object:
    """Return a value as JSON has it: texts for nan, infinities and what JSON lacks, pairs for complex numbers."""
    if value is None or isinstance(value, str | int):  # bool is an int
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [_jsonable(value.real), _jsonable(value.imag)]
    if isinstance(value, Mapping):
        return {str(key): _jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    return str(value)


def clean(text: str) -> str:
    """Return a text without secrets of URLs, and without characters that command a terminal."""
    return printable(hidden(text), "\n")


def said(text: str) -> None:
    """Print an error for the user."""
    click.echo(clean(f"bcp: {text}"), err=True)


def failed(error: BcpError) -> int:
    """Print an error with its notes, and return its exit status.

    Of several ranks rank 0 prints. Rank 1 prints an error of rank 0, too: rank 0 may have died.
    """
    distributed = sys.modules.get("torch.distributed")
    rank = 0
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
    if rank == int(isinstance(error, PeerError) and error.rank == 0):
        said("\n".join([str(error), *getattr(error, "__notes__", ())]))
    return status_of(error)


def status_of(error: BcpError) -> int:
    """Return the exit status for an error: 2 for a wrong call, else 1."""
    return 2 if isinstance(error, InputError | NotACheckpointError) else 1


def facts(pairs: Mapping[str, object]) -> None:
    """Print names and values below each other; empty values are left out."""
    shown = {name: printable(str(value)) for name, value in pairs.items() if value not in ("", None)}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        click.echo(f"{name:<{width}}  {value}")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> None:
    """Print rows below the names of columns. Columns in ``right`` are aligned to the right.

    A terminal with rich gets colours, and long cells are folded into its width. Everything else gets plain lines.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout is not None and sys.stdout.isatty() and _drawn_by_rich(columns, cells, right):
        return
    widths = [max(len(line[at]) for line in [columns, *cells]) for at in range(len(columns))]
    for line in [columns, *cells]:
        parts = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        click.echo("  ".join(parts).rstrip())


def _drawn_by_rich(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[str]) -> bool:
    """Draw a table by rich; False if it is not installed."""
    try:
        with importing:
            from rich.console import Console  # noqa: PLC0415 -- optional: bcp-checkpoint[cli]
            from rich.table import Table  # noqa: PLC0415 -- same
            from rich.text import Text  # noqa: PLC0415 -- same
    except ImportError:
        return False
    drawn_table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        drawn_table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in cells:
        drawn_table.add_row(*map(Text, row))
    Console().print(drawn_table)
    return True


@contextmanager
def drawn(words: str, rank: int = 0) -> Iterator[Progress]:
    """Draw progress on standard error, if that is a terminal. Of several ranks, rank 0 draws its own part."""
    if rank or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    with click.progressbar(length=1, label=words, file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        yield progress


def when(moment: datetime | None) -> str:
    """Return a time for a table; "" for none."""
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def join() -> int:
    """Join the ranks of torchrun, if there are several; return this process's rank."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return 0
    distributed = imported("torch.distributed")
    try:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
    except ValueError as error:
        raise InputError(f"the ranks cannot be joined: {error} Start them by torchrun, or unset WORLD_SIZE") from error
    return int(distributed.get_rank())
