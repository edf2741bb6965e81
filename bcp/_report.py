"""Reports of saves and loads, made of the recordings that lie beside checkpoints."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bcp._plain import plain as without_traceback
from bcp._text import hidden, printable
from bcp.backends import LocalBackend, resolve, shown
from bcp.backends.small import get_small
from bcp.errors import BcpError, CorruptError, FormatVersionError, InputError, NotACheckpointError
from bcp.format.metadata import METADATA_KEY, operation_of
from bcp.pipeline import Budget, Pipeline, Stage
from bcp.protocols import Backend, ObjectInfo, RetryPolicy
from bcp.runtime import bridge as _bridge
from bcp.runtime.imports import importing
from bcp.runtime.process import cached_property
from bcp.runtime.threads import in_thread_gc_paused
from bcp.telemetry.encode import joined
from bcp.telemetry.findings import Summary, Trend
from bcp.telemetry.recording import Recording
from bcp.telemetry.store import FOLDER, MOST_BYTES, decode
from bcp.telemetry.summary import summary_of, trends_of
from bcp.telemetry.words import Block, clean, highlights, plain, sections, sentences

__all__ = ["Report", "report", "show"]

KEY = re.compile(rf"(?:.*/)?{FOLDER}(?:save|load|failure)-(\d{{8}}T\d{{9}}Z)-[0-9a-f]{{16}}(?:-\d{{5,}})?\.arrow")
READ_AT_ONCE = 16
MEMORY_BYTES = 4 * MOST_BYTES


@dataclass(frozen=True)
class Report:
    """Recordings of saves and loads, and the findings in them.

    Attributes:
        path: where they were looked for.
        recordings: the newest last. Ranks that tell of the same failure have one together.
        unreadable: keys of recordings that could not be read, with the reason.
    """

    path: str
    recordings: Sequence[Recording]
    unreadable: Mapping[str, str]

    @property
    def summaries(self) -> Sequence[Summary]:
        """The findings in each recording."""
        return self._summaries

    @property
    def trends(self) -> Sequence[Trend]:
        """How figures change from save to save, and from load to load."""
        return self._trends

    @cached_property
    def _summaries(self) -> Sequence[Summary]:
        return [summary_of(recording) for recording in self.recordings]

    @cached_property
    def _trends(self) -> Sequence[Trend]:
        return trends_of(self.summaries)

    @property
    def blocks(self) -> Sequence[Block]:
        """The text of the report, in parts."""
        sound = [recording.kind for recording in self.recordings if not recording.failures]
        saves, loads, failed = sound.count("save"), sound.count("load"), len(self.recordings) - len(sound)
        head = Block(f"{clean(self.path)}: recordings of saves: {saves}, of loads: {loads}, of failures: {failed}")
        lost = [clean(f"{key}: {reason}") for key, reason in self.unreadable.items()]
        tail = [Block("Recordings that cannot be read", is_bad=True, lines=lost)] if lost else []
        return [head, *sections(self.summaries, self.trends), *tail]

    def text(self) -> str:
        """Return the findings as text: failures first, then the newest save and load, trends, and all others."""
        return plain(self.blocks)

    def data(self) -> dict[str, Any]:
        """Return the findings for :func:`json.dumps`."""
        return {
            "path": self.path,
            "summaries": [asdict(summary) for summary in self.summaries],
            "trends": [asdict(trend) for trend in self.trends],
            "unreadable": dict(self.unreadable),
        }

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page that needs no network. It needs ``bcp-checkpoint[report]``."""
        recordings = self._some()
        with importing:
            from bcp.telemetry.page import page  # noqa: PLC0415 -- optional, and slow to import

        findings = [sentences(summary) for summary in self.summaries]
        text = page(recordings, findings=findings, highlights=highlights(self.summaries, self.trends))
        Path(path).expanduser().write_text(text, encoding="utf-8")

    def perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the newest recording, for https://ui.perfetto.dev and chrome://tracing."""
        newest = self._some()[-1]
        with importing:
            from bcp.telemetry.page import trace_json  # noqa: PLC0415 -- slow to import

        Path(path).expanduser().write_text(json.dumps(trace_json(newest)), encoding="utf-8")

    def _some(self) -> Sequence[Recording]:
        if not self.recordings:
            raise InputError(
                f"there are no recordings below {self.path}: saves leave them unless record=False or $BCP_RECORD=0"
            )
        return self.recordings


def report(
    path: str | os.PathLike[str] | Backend,
    *,
    last: int = 100,
    storage_options: Mapping[str, Any] | None = None,
    retries: RetryPolicy | None = None,
) -> Report:
    """Read the recordings of a checkpoint, or of all checkpoints of a run.

    Args:
        path: of a checkpoint, or of a folder with checkpoints below it. A folder is listed as a whole.
        last: most files to be read, the newest ones.
        storage_options: for the file system of a URL, as in :class:`~bcp.SaveOptions`.
        retries: how failed requests to an object store are made again.

    Raises:
        NotACheckpointError: nothing is at the path.
        StorageError: storage failed.

    Example::

        print(bcp.report("ckpt/step-100").text())

    """
    if not isinstance(last, int) or isinstance(last, bool) or last < 1:
        raise InputError(f"last={last!r} is no number of recordings; pass 1 or more")
    backend = resolve(path, storage_options, retries)
    where = type(path).__name__ if isinstance(path, Backend) else _words(os.fsdecode(path))

    async def read() -> Report:
        async with _closing(backend, is_own=not isinstance(path, Backend)):
            return await _read(backend, where, last)

    try:
        return _bridge.run(read, name=f"a report of {where}")
    except BcpError as error:
        raise without_traceback(error) from error.__cause__


def _words(path: str) -> str:
    """Return a URL without secrets, or a path with the home in the place of ``~``."""
    return shown(path) if "://" in path else os.path.expanduser(path)  # noqa: PTH111 -- a relative path stays one


@asynccontextmanager
async def _closing(backend: Backend, *, is_own: bool) -> AsyncIterator[None]:
    """Close storage that was opened here."""
    try:
        yield
    finally:
        if is_own:
            await backend.aclose()


@dataclass(frozen=True, slots=True)
class _RecordingFile:
    """A file to read, as an item of a graph."""

    name: str
    nbytes: int


async def _read(backend: Backend, where: str, last: int) -> Report:
    """Find the files and read them."""
    objects = await backend.list(FOLDER) or await backend.list()
    if not (_is_of_bcp(objects) if objects else await _is_folder(backend)):
        raise NotACheckpointError(
            f"there is nothing of bcp at {where}: neither a checkpoint nor a run with checkpoints below it; check the "
            "path"
        )
    files = sorted((info for info in objects if KEY.fullmatch(info.key)), key=_moment)[-last:]
    unreadable: dict[str, str] = {}
    start: Pipeline[_RecordingFile, _RecordingFile] = Pipeline()
    graph = start.then(Stage("recordings", partial(_fetched, backend, unreadable), workers=READ_AT_ONCE))
    items = [_RecordingFile(info.key, min(info.nbytes, MOST_BYTES)) for info in files]
    results = await graph.run(items, budget=Budget(MEMORY_BYTES))
    recordings = await in_thread_gc_paused(joined, [recording for recording in results if recording is not None])
    return Report(where, recordings, unreadable)


def _is_of_bcp(objects: Sequence[ObjectInfo]) -> bool:
    """Whether a checkpoint, a run, or the remains of a save are among these objects."""
    names = (info.key.rpartition("/")[2] for info in objects)
    return any(name in (METADATA_KEY, "run.json") for name in names) or any(
        KEY.fullmatch(info.key) or operation_of(info.key) or f"/{FOLDER}" in f"/{info.key}" for info in objects
    )


async def _is_folder(backend: Backend) -> bool:
    """Whether there is an empty folder: a run that has not saved yet. Object stores have no empty folders."""
    return isinstance(backend, LocalBackend) and await in_thread_gc_paused(backend.root.is_dir)


async def _fetched(backend: Backend, unreadable: dict[str, str], file: _RecordingFile) -> Recording | None:
    """Read a recording; None for one that is gone by now, or that cannot be read."""
    try:
        if file.nbytes >= MOST_BYTES:
            raise CorruptError(f"{file.name} is too large for a recording; delete it")  # noqa: TRY301 -- noted below
        return await in_thread_gc_paused(decode, await get_small(backend, file.name, MOST_BYTES), file.name)
    except FileNotFoundError:
        return None
    except (CorruptError, FormatVersionError) as error:
        unreadable[file.name] = str(error)
        return None


def _moment(info: ObjectInfo) -> str:
    match = KEY.fullmatch(info.key)
    return match[1] if match else ""


# -- the command ----------------------------------------------------------------------------------


def show(path: str, html: str | None, perfetto: str | None, last: int, *, as_json: bool) -> int:
    """Print a report, and write its files; return the exit status."""
    try:
        path_report = report(path, last=last)
        if html is not None:
            path_report.html(html)
        if perfetto is not None:
            path_report.perfetto(perfetto)
    except (BcpError, OSError) as error:
        print(f"bcp report: {printable(hidden(str(error)))}", file=sys.stderr)  # noqa: T201 -- for the user
        return 2 if isinstance(error, InputError | NotACheckpointError) else 1
    if as_json:
        print(json.dumps(path_report.data()))  # noqa: T201 -- same
    elif sys.stdout.isatty():
        _draw(path_report)
    else:
        print(path_report.text(), end="")  # noqa: T201 -- same
    return 0 if path_report.recordings else 1


def _draw(path_report: Report) -> None:
    """Print with colours, if rich is installed."""
    try:
        with importing:
            from rich.console import Console  # noqa: PLC0415 -- optional: bcp-checkpoint[cli]
            from rich.table import Table  # noqa: PLC0415 -- same
            from rich.text import Text  # noqa: PLC0415 -- same
    except ImportError:
        print(path_report.text(), end="")  # noqa: T201 -- for the user
        return
    console = Console()
    for block in path_report.blocks:
        console.print(Text(f"\n{block.head}", style="bold red" if block.is_bad else "bold"))
        for line in block.lines:
            console.print(Text(f"  {line}"))
        if block.rows:
            table = Table(box=None, pad_edge=True)
            for number, name in enumerate(block.columns):
                table.add_column(name, justify="right" if number else "left", style="" if number else "cyan")
            for row in block.rows:
                table.add_row(*map(Text, row))
            console.print(table)
