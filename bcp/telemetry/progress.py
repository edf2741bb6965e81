"""Progress bars of saves, loads and tools: on a terminal, in a notebook, or as lines in a job's log.

All bars of the process share one display of rich, because two displays would draw over each other. A bar that has
ended becomes a line above it, with its final figures, and stays there. If standard error is neither a terminal nor a
notebook's, a bar is a line every ten seconds. Nothing is ever written to standard output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from bcp._text import printable
from bcp.errors import MissingExtraError
from bcp.events import Event, Observer, StageEvent, ignore
from bcp.runtime.imports import importing
from bcp.runtime.process import in_forked_child, process_lock, process_rlock
from bcp.telemetry.amounts import bytes_words as _bytes
from bcp.telemetry.amounts import duration_words as _duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Bar", "bar", "progress_bar"]

LINE_SECONDS = 10.0
NAME_CHARACTERS = 40


class Bar(Protocol):
    """Something that shows how much of some bytes is done."""

    def advance(self, nbytes: int) -> None:
        """Add bytes that are done. Any thread may call it."""

    def close(self, *, failed: bool) -> None:
        """Show the final figure, and leave the display."""


@contextmanager
def progress_bar(title: str, path: str, *, stage: str, nbytes: int, show: bool) -> Iterator[Observer]:
    """Draw a bar that advances as items leave ``stage``; yields the observer that feeds it.

    Args:
        title: ``save`` or ``load``.
        path: where the checkpoint is; the bar shows its last names.
        stage: the stage that the bar is about.
        nbytes: bytes of all items.
        show: whether a bar is wanted at all.

    Raises:
        MissingExtraError: a bar is wanted and ``rich`` is not installed.

    """
    if not show:
        yield ignore
        return
    with bar(f"{title} {_shortened(path)}", nbytes) as shown:
        is_open = True

        def observe(event: Event) -> None:
            if is_open and isinstance(event, StageEvent) and event.stage == stage and not event.error:
                shown.advance(event.nbytes)

        try:
            yield observe
        finally:
            is_open = False  # a load that begins again has another bar


@contextmanager
def bar(title: str, nbytes: int) -> Iterator[Bar]:
    """Draw a bar for work on so many bytes while the block runs. An error that ends the block marks it as failed.

    Raises :class:`~bcp.errors.MissingExtraError` if ``rich`` is not installed.
    """
    shown = _open(title, nbytes)
    try:
        yield shown
    except BaseException:
        shown.close(failed=True)
        raise
    shown.close(failed=False)


def _open(title: str, nbytes: int) -> Bar:
    """Return a bar of the kind that standard error can show. Control characters of the title are escaped."""
    title = printable(title)
    try:
        with importing:
            from rich.console import Console  # noqa: PLC0415 -- optional: bcp-checkpoint[cli]
    except ImportError as error:
        raise MissingExtraError(
            "progress=True draws with rich, which is not installed: pip install 'bcp-checkpoint[cli]'"
        ) from error
    console = Console(stderr=True)
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    if notebook or (console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter):
        return _display.open(console, title, nbytes)
    return _Lines(title, nbytes)


def _shortened(path: str) -> str:
    """Return the last names of a path: two, if they are short."""
    text = "/".join(path.rstrip("/").split("/")[-2:])
    return text if len(text) <= NAME_CHARACTERS else f"...{text[-NAME_CHARACTERS:]}"


class _Lines:
    """A bar in a job's log: a line every ten seconds while bytes move, and one at the end."""

    def __init__(self, title: str, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._total = nbytes
        self._clock = clock
        self._done = 0
        self._lock = process_lock()
        self._started = self._told = clock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = self._clock()
            if now - self._told < LINE_SECONDS or self._done >= self._total:
                return
            self._told = now
            rate = self._done / (now - self._started)
            left = f", {_duration((self._total - self._done) / rate)} left" if rate > 0 else ""
            share = f"{_bytes(self._done)} of {_bytes(self._total)} ({100 * self._done // self._total} %)"
            self._say(f"{share}, {_bytes(rate)}/s{left}")

    def close(self, *, failed: bool) -> None:
        self._say(_final(self._done, self._total, self._clock() - self._started, failed=failed))

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):  # standard error is closed, or there is none
            sys.stderr.write(f"{self._title}: {text}\n")
            sys.stderr.flush()


class _Display:
    """The one display of this process, which is on the screen while there are bars."""

    def __init__(self) -> None:
        self._lock = process_rlock()  # re-entrant: a signal handler may save
        self._progress: Progress | None = None
        self._open = 0

    def open(self, console: Console, title: str, nbytes: int) -> Bar:
        """Add a bar."""
        with self._lock:
            if self._progress is None:
                self._progress = _progress(console)
                self._progress.start()
            self._open += 1
            return _Drawn(self, self._progress, title, nbytes)

    def leave(self, progress: Progress) -> None:
        """Take the display from the screen after the last bar."""
        with self._lock:
            if progress is not self._progress:
                return  # of the process that this one was forked from
            self._open -= 1
            if self._open == 0:
                progress.stop()
                self._progress = None


class _Drawn:
    """A bar on the display."""

    def __init__(self, display: _Display, progress: Progress, title: str, nbytes: int) -> None:
        self._display = display
        self._progress = progress
        self._title = title
        self._started = time.monotonic()
        self._task = progress.add_task(title, total=nbytes)

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def close(self, *, failed: bool) -> None:
        progress, task = self._progress, next(task for task in self._progress.tasks if task.id == self._task)
        text = _final(task.completed, task.total or 0, time.monotonic() - self._started, failed=failed)
        progress.remove_task(self._task)
        progress.refresh()
        progress.print(f"{self._title}: {text}", style="red" if failed else None, markup=False, highlight=False)
        self._display.leave(progress)


def _progress(console: Console) -> Progress:
    """Make the display."""
    with importing:
        from rich.progress import (  # noqa: PLC0415 -- optional: bcp-checkpoint[cli]
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,  # ended bars are printed above
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # rich would print it on standard error
    )


def _final(done: float, total: float, seconds: float, *, failed: bool) -> str:
    """Return the figures of a bar that has ended."""
    if failed:
        return f"failed after {_bytes(done)} of {_bytes(total)} in {_duration(seconds)}"
    return f"{_bytes(done)} in {_duration(seconds)}" + (f", {_bytes(done / seconds)}/s" if seconds > 0 else "")


def _start_afresh() -> None:
    """Give a forked child a display of its own, and the standard streams without its parent's."""
    global _display  # noqa: PLW0603 -- of the process
    _display = _Display()
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


_display = _Display()
in_forked_child(_start_afresh)
