"""Progress bars on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bcp.errors import MissingExtraError
from bcp.events import Event, Observer, StageEvent, ignore

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(title: str, *, stage: str, nbytes: int, show: bool) -> Iterator[Observer]:
    """Draw a bar on standard error that advances as items leave ``stage``; yields the observer that feeds it.

    Raises :class:`~bcp.errors.MissingExtraError` where a bar is wanted and ``rich`` is not installed.
    """
    if not show:
        yield ignore
        return
    try:
        from rich.console import Console  # noqa: PLC0415 -- optional: bcp-checkpoint[cli]
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "progress=True draws with rich, which is not installed: pip install 'bcp-checkpoint[cli]'"
        ) from error
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=nbytes)

        def observe(event: Event) -> None:
            if isinstance(event, StageEvent) and event.stage == stage:
                progress.advance(task, event.nbytes)

        yield observe
