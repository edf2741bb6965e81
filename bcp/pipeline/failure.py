"""Work that goes on while something is being opened for it.

How concurrent stages fail: the first failure is told, it ends the rest, and later ones become notes of it.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from bcp.errors import BcpError, StageError

__all__ = [
    "BranchError",
    "FirstFailure",
    "is_cancellation",
    "let_go",
    "run_while_opening",
    "running_task",
    "unwrap_stage_errors",
]


class BranchError(StageError):
    """A stage inside a branch failed. The pipeline around it replaces this by a StageError for its own item."""


def is_cancellation(error: BaseException, task: asyncio.Task[object] | None) -> bool:
    """Return whether a task has to let an error pass, because the task is being cancelled or its coroutine closed.

    A CancelledError may also be an ordinary failure: code that awaits a future which somebody else cancelled
    (a gRPC call, say) raises it too. A task group takes that for the end of the task and forgets it. A GeneratorExit is
    an ordinary failure if the task itself runs: whoever closes a coroutine is another task, or none.

    ``task`` is the one that runs the code, as :func:`running_task` has returned it before.
    """
    if isinstance(error, asyncio.CancelledError):
        return anyio.current_effective_deadline() == -math.inf
    return isinstance(error, GeneratorExit) and (task is None or running_task() is not task)


def running_task() -> asyncio.Task[object] | None:
    """Return the task that runs now; None outside of tasks."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None


class FirstFailure:
    """The first failure among the tasks of one cancel scope.

    Tasks report here instead of raising, so that no exception group is ever made.
    """

    __slots__ = ("_error", "_kind", "_scope")

    def __init__(self, scope: anyio.CancelScope, kind: type[StageError]) -> None:
        self._scope = scope
        self._kind = kind
        self._error: BaseException | None = None

    def add(self, stage: str, item: str, error: BaseException) -> None:
        """Keep the first error and cancel the scope; note a later one on the first.

        An interrupt (KeyboardInterrupt, SystemExit) is kept as it is, and goes before a failure.
        """
        new = self._named(stage, item, error)
        self._scope.cancel()
        if self._error is None:
            self._error = new
        elif isinstance(self._error, Exception) and not isinstance(new, Exception):
            new.add_note(f"before that, {self._error}")
            self._error = new
        else:
            self._error.add_note(f"after that, {new if isinstance(new, StageError) else repr(new)}")

    def reraise(self) -> None:
        """Raise the first failure, if there was one."""
        error, self._error = self._error, None
        if error is None:
            return
        try:
            raise error
        finally:
            del error  # it would hold this frame and the frame it: a cycle that keeps the stages' buffers alive

    def _named(self, stage: str, item: str, error: BaseException) -> BaseException:
        """Return the error to raise for the error of a stage."""
        notes: list[str] = []
        if isinstance(error, BranchError) and error.__cause__ is not None:
            stage, error, notes = error.stage, error.__cause__, getattr(error, "__notes__", [])
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]  # a task group inside the stage; one error needs no group around it
        if not isinstance(error, (Exception, asyncio.CancelledError, GeneratorExit, BaseExceptionGroup)):
            return error
        named = self._kind(stage, item, error)
        named.__cause__ = error
        for note in notes:
            named.add_note(note)
        return named


C = TypeVar("C")
T = TypeVar("T")


async def run_while_opening(
    context: AbstractAsyncContextManager[C], opened: Callable[[C], None], work: Callable[[], Awaitable[T]]
) -> T:
    """Do the work while the context is being entered; leave the context when the work has ended.

    ``opened`` is called with the value of the context. Nothing uses it any more when the context is left. The
    context is entered and left by the calling task, with the work's error where it failed. Whichever of the two fails
    first is raised, as it is, and a second error becomes a note; never an exception group.
    """
    done, task = anyio.Event(), running_task()
    results: list[T] = []
    errors: list[BaseException] = []

    async def run() -> None:
        own_task = running_task()
        try:
            results.append(await work())
        except BaseException as error:
            if is_cancellation(error, own_task):
                raise
            errors.append(error)
        finally:
            done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run, name="bcp work beside an opening")
        try:
            async with context as value:
                opened(value)
                try:
                    await done.wait()
                finally:
                    await _over(done, group)
                if errors:
                    raise errors[0]  # noqa: TRY301 -- it has to pass through the context
        except BaseException as error:
            if is_cancellation(error, task):
                raise
            group.cancel_scope.cancel()
            if not errors:
                errors.append(error)
            elif error is not errors[0]:
                errors[0].add_note(f"after that, {error!r}")
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback leads here: a cycle, which would keep the state's tensors alive
    return results[0]


async def _over(done: anyio.Event, group: TaskGroup) -> None:
    """Cancel unfinished work if this is being cancelled, and wait until the work has ended.

    Before the context is left: that closes files, and a thread that still writes would write to whatever file the
    process opens next, under the same number.
    """
    if not done.is_set():
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            while not done.is_set():
                with suppress(asyncio.CancelledError):  # a second cancellation must not cut the waiting short
                    await done.wait()


@contextmanager
def unwrap_stage_errors() -> Iterator[None]:
    """Raise an error of bcp's own, which names everything already, as itself; the stage becomes a note."""
    try:
        yield
    except StageError as error:
        cause = error.__cause__
        if not isinstance(cause, BcpError):
            raise
        for note in (f"In stage {error.stage!r}, on {error.item}.", *getattr(error, "__notes__", ())):
            cause.add_note(note)
        error.__cause__ = error.__context__ = None
        let_go(error)
        try:
            raise cause from cause.__cause__
        finally:
            del cause


def let_go(error: BaseException) -> None:
    """Forget the way of an error that goes no further: another one is raised instead, and is known along that way.

    An error in a reference cycle, by its traceback and a frame's variables, keeps the target's tensors alive until
    Python collects garbage. This is too late for a job that now loads an older checkpoint into new tensors.
    """
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
