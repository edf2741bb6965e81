"""The handle of a save in the background."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from bcp._plain import plain
from bcp.errors import BcpError
from bcp.runtime.bridge import Background

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """A save in the background: its snapshot is safe, and storage is still being written.

    Wait for it with ``wait()`` from ordinary code, with ``await`` from a coroutine, or by a ``with`` block around the
    training steps meanwhile. A save without a waiter is finished before the process exits. Its failure is then told on
    standard error, and the exit status stays that of the program: at that time Python takes no other one. A job whose
    exit status counts calls ``wait()`` for its last save.

    Example::

        with bcp.save_async("ckpt/step-200", states):
            optimizer.step()  # leaving the block waits for the save

        pending = bcp.save_async("ckpt/step-300", states)
        result = pending.wait(timeout=600)
        assert pending.done()

    """

    def __init__(self, background: Background[T]) -> None:
        self._background = background

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._background.failed() else "done"
        return f"<Pending {self._background.name}: {state}>"

    def wait(self, timeout: float | None = None) -> T:
        """Block until the checkpoint is committed, and return the result.

        A save into memory that is to stay there ends when it is :meth:`released`; its path is that of the memory.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: the save has not ended by then; it goes on.
            CancelledError: the save was cancelled.
            BcpError: the save failed; its errors are those of :func:`bcp.asave`.

        """
        try:
            return self._background.wait(timeout)
        except BcpError as error:
            raise plain(error) from error.__cause__

    def released(self, timeout: float | None = None) -> None:
        """Block until the save needs this process no more: whatever dies now, it becomes durable.

        With ``bcp.Run(tiers=...)`` that is when all ranks have their snapshots in the memory of their hosts, where
        agents take over. Any other save needs its process until it is committed, so this is :meth:`wait`.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: it is not so far by then; the save goes on.
            BcpError: the save failed before.

        Example:
            >>> import torch
            >>> pending = bcp.save_async("ckpt/safe", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
            >>> pending.released()

        """
        try:
            self._background.wait_handed_over(timeout)
        except BcpError as error:
            raise plain(error) from error.__cause__

    def done(self) -> bool:
        """Return whether the save has ended, well or not. It never blocks and never raises."""
        return self._background.done()

    def add_done_callback(self, function: Callable[[Pending[T]], object]) -> None:
        """Call a function with this object once the save has ended, well or not, in a thread of its own.

        An error of the function is logged. A process that ends waits for its saves, and for these calls.

        Example:
            >>> import torch
            >>> pending = bcp.save_async("ckpt/told", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
            >>> paths = []
            >>> pending.add_done_callback(lambda ended: paths.append(ended.wait().path))

        """
        self._background.add_done_callback(lambda: function(self))

    def cancel(self) -> None:
        """Ask the save to stop; :meth:`wait` then raises ``CancelledError``.

        Written files are removed. A save that is cancelled during its commit is committed as a whole or not at all. Its
        files then stay until the next save to the path, because they may belong to a checkpoint. A save that was
        :meth:`released` goes on in the hands of agents.
        """
        if not self._background.handed_over:
            self._background.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return self._result().__await__()

    async def _result(self) -> T:
        try:
            return await self._background.result()
        except BcpError as error:
            raise plain(error) from error.__cause__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception as failure:  # noqa: BLE001 -- the block's own error is on its way out
            error.add_note(f"The save that ran meanwhile failed as well: {failure!r}")
