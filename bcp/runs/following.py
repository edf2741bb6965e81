"""Wait for the next checkpoint of a run that another job trains: evaluation, export, a server that reloads weights."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from contextlib import aclosing
from numbers import Real
from typing import Any, SupportsIndex

import anyio

from bcp._plain import plain
from bcp._text import shown
from bcp.errors import BcpError, InputError
from bcp.runs.candidates import Trust, candidates
from bcp.runs.folder import Folder
from bcp.runs.latest import check_trust, folder_of
from bcp.runtime import bridge as _bridge

__all__ = ["await_for_next", "wait_for_next"]


def wait_for_next(
    path: str | os.PathLike[str],
    *,
    after: SupportsIndex = -1,
    trust: Trust = "any",
    poll_seconds: float = 10.0,
    timeout: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Wait until a run has a committed checkpoint of a later step, and return its path.

    Use it in a job that evaluates each checkpoint while another job trains. It returns the oldest checkpoint that is
    newer than ``after``, so a loop over it sees every checkpoint that stays for longer than ``poll_seconds``. Call
    :func:`bcp.latest` first to begin with the newest one. Nothing is written. As long as there is nothing new, a poll
    is one request: a listing of the run's folder. The folder may not exist yet.

    The training job may delete the checkpoint later, as its policy says: :meth:`Run.pin` prevents it.

    Args:
        path: the run's folder, as for :class:`~bcp.Run`.
        after: the step of the last checkpoint that the caller has seen; -1 waits for the first one.
        trust: as for :func:`bcp.latest`. Suspect checkpoints are passed over.
        poll_seconds: seconds between two listings.
        timeout: seconds to wait; None waits for ever, and 0 looks once.
        storage_options: for the file system of a URL, as in :class:`~bcp.LoadOptions`.

    Returns:
        The path of the checkpoint, or None after the timeout.

    Raises:
        InputError: an argument cannot be used.
        FormatVersionError: a newer bcp has written the run's ledger.
        StorageError: storage failed.

    Example:
        >>> with bcp.Run("ckpt/run-9", {"model": torch.nn.Linear(4, 4)}, save=10) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> path = bcp.wait_for_next("ckpt/run-9", after=0)
        >>> path, bcp.Checkpoint(path).step
        ('ckpt/run-9/step-00000010', 10)
        >>> bcp.wait_for_next("ckpt/run-9", after=10, timeout=0)

    """
    try:
        return _bridge.run(
            lambda: await_for_next(
                path,
                after=after,
                trust=trust,
                poll_seconds=poll_seconds,
                timeout=timeout,
                storage_options=storage_options,
            ),
            name=f"wait for a checkpoint in {shown(str(path))}",
        )
    except BcpError as error:
        raise plain(error) from error.__cause__


async def await_for_next(
    path: str | os.PathLike[str],
    *,
    after: SupportsIndex = -1,
    trust: Trust = "any",
    poll_seconds: float = 10.0,
    timeout: float | None = None,  # noqa: ASYNC109 -- the same as the synchronous twin; a timeout is no error here
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Do the same as :func:`wait_for_next` from a coroutine."""
    check_trust(trust)
    last = _step(after)
    _check_seconds("poll_seconds", poll_seconds)
    if timeout is not None:
        _check_seconds("timeout", timeout)
    folder, place = folder_of(path, storage_options)
    try:
        with anyio.move_on_after(timeout) if timeout else anyio.CancelScope():
            while True:
                name = await _next(folder, last, trust)
                if name is not None or timeout == 0:
                    return None if name is None else f"{place}/{name}"
                await anyio.sleep(poll_seconds)
        return None
    finally:
        with anyio.CancelScope(shield=True):
            await folder.aclose()


async def _next(folder: Folder, after: int, trust: Trust) -> str | None:
    """Return the name of the oldest committed checkpoint that is newer than a step; None for none."""
    if not any(step > after for step in await folder.steps()):
        return None
    newer = []
    async with aclosing(candidates(folder, await folder.peek(), trust)) as listing:
        async for candidate in listing:
            if candidate.step <= after:
                break  # newest first
            newer += [] if candidate.reason else [candidate]
    for candidate in sorted(newer, key=lambda each: each.step):  # of one step, the first of a resumption stays first
        if candidate.is_certain or await folder.commit_of(candidate.name):
            return candidate.name
    return None


def _step(after: SupportsIndex) -> int:
    """Return a step as an int; integers of numpy and torch are steps, too."""
    step = operator.index(after) if hasattr(after, "__index__") and not isinstance(after, bool) else -2
    if step < -1:
        raise InputError(f"after={after!r} has to be a step, or -1 for the first checkpoint")
    return step


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) >= 0:
        raise InputError(f"{name}={seconds!r} has to be a number of seconds, 0 or more")
