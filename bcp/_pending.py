"""A save that goes on while training goes on."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from bcp._plain import plain
from bcp.errors import BcpError
from bcp.runtime.bridge import Background

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """What an asynchronous save returns: the snapshot is safe, storage is still being written.

    Wait for it with ``wait()`` from ordinary code, ``await`` from a coroutine, or a ``with`` block around the training
    steps meanwhile. One that nobody waits for is finished at exit all the same, and its failure is logged.
    """

    def __init__(self, background: Background[T]) -> None:
        self._background = background

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._background.failed() else "done"
        return f"<Pending {self._background.what}: {state}>"

    def wait(self, timeout: float | None = None) -> T:
        """Block until the checkpoint is committed and return the report, or raise what went wrong.

        ``TimeoutError`` after ``timeout`` seconds leaves the save running.
        """
        try:
            return self._background.wait(timeout)
        except BcpError as error:
            raise plain(error) from error.__cause__

    def done(self) -> bool:
        """Say whether it has ended, well or not; never blocks, never raises."""
        return self._background.done()

    def cancel(self) -> None:
        """Ask it to stop; ``wait`` then raises ``CancelledError``.

        What was written is removed. One that is cancelled while its commit is under way may be committed, whole, or
        not at all; then its files stay until the next save to the path, because they may belong to a checkpoint.
        """
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
