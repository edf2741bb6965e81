"""The checkpoints of a run, without the run's job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bcp._text import shown
from bcp.runs.latest import folder_of
from bcp.runs.listing import StepInfo
from bcp.runs.listing import list_steps as _list_steps
from bcp.runs.names import whole_step
from bcp.tools.calls import called

__all__ = ["alist_steps", "apin", "list_steps", "pin"]


def list_steps(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> list[StepInfo]:
    """List the checkpoints of a run, the oldest first, without a :class:`bcp.Run`. Nothing is written.

    Another job may train in the run meanwhile. :meth:`bcp.Run.list` returns the same on the run's own job.

    Args:
        path: the run's folder, as for :class:`bcp.Run`.
        storage_options: for the file system of a URL.

    Returns:
        One record a folder of a step: step, time, size, metrics, marks, and whether it is committed.

    Raises:
        InputError: the path cannot be any.
        FormatVersionError: a newer bcp has written the run's ledger.
        StorageError: storage failed.

    Example:
        >>> with bcp.Run("ckpt/run-8", {"model": torch.nn.Linear(4, 4)}, save=10) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> bcp.tools.list_steps("ckpt/run-8")[-1].step
        10

    """
    return called(lambda: alist_steps(path, storage_options=storage_options), f"list {shown(str(path))}")


async def alist_steps(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[StepInfo]:
    """Do the same as :func:`list_steps` from a coroutine."""
    folder, place = folder_of(path, storage_options)
    try:
        return await _list_steps(folder, place)
    finally:
        await folder.aclose()


def pin(
    path: str | os.PathLike[str],
    step: int,
    *,
    pinned: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Keep a checkpoint of a run under any policy, until it is unpinned; without a :class:`bcp.Run`.

    Another job may train in the run meanwhile: it goes on, and spares the checkpoint. :meth:`bcp.Run.pin` does the same
    on the run's own job. One process calls the function; ranks do not share it.

    Args:
        path: the run's folder, as for :class:`bcp.Run`.
        step: of a committed checkpoint.
        pinned: False gives the checkpoint back to the policy.
        storage_options: for the file system of a URL.

    Raises:
        InputError: the run has no committed checkpoint of that step, or the path cannot be any.
        FormatVersionError: a newer bcp has written the run's ledger.
        StorageError: storage failed.

    Example:
        >>> with bcp.Run("ckpt/run-8", {"model": torch.nn.Linear(4, 4)}, save=10) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> bcp.tools.pin("ckpt/run-8", 10)
        >>> bcp.tools.list_steps("ckpt/run-8")[-1].pinned
        True

    """
    name = f"pin step {step} of {shown(str(path))}"
    return called(lambda: apin(path, step, pinned=pinned, storage_options=storage_options), name)


async def apin(
    path: str | os.PathLike[str],
    step: int,
    *,
    pinned: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Do the same as :func:`pin` from a coroutine."""
    step = whole_step(step)
    folder, _ = folder_of(path, storage_options)
    try:
        await folder.amend(step, lambda ledger: ledger.pinned(step, pinned))
    finally:
        await folder.aclose()
