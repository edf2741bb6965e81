"""A stage: one item in, one item out; and a branch that every item passes on its way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio

from bcp.errors import InputError
from bcp.pipeline.failure import BranchError, FirstFailure, is_cancellation, running_task

__all__ = ["Stage", "tee"]

I = TypeVar("I")  # noqa: E741 -- I for in, O for out
O = TypeVar("O")  # noqa: E741 -- same
X = TypeVar("X")


@dataclass(frozen=True)  # no slots: with them Stage[A, B](...) is a TypeError before Python 3.14
class Stage(Generic[I, O]):
    """A named async function, and how many items it may work on at once.

    Raises :class:`~bcp.errors.InputError` for arguments that cannot work.

    Attributes:
        name: names the stage in errors, events and edits of the pipeline.
        run: one item in, one item out. A blocking call belongs into :func:`~bcp.runtime.threads.in_thread`.
        workers: how many items may be in ``run`` at once.
        ordered: items come in plan order, one at a time; collectives need that. Implies ``workers == 1``.
    """

    name: str
    run: Callable[[I], Awaitable[O]]
    workers: int = 1
    ordered: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("a stage needs a name; pass Stage('my-stage', function)")
        if self.workers < 1:
            raise InputError(f"stage {self.name!r} has workers={self.workers}; it needs at least 1")
        if self.ordered and self.workers > 1:
            raise InputError(
                f"stage {self.name!r} is ordered and has workers={self.workers}; "
                "an ordered stage sees one item at a time: leave workers at 1"
            )


def tee(*stages: Stage[X, Any]) -> Stage[X, X]:
    """Make a branch: every one of the stages sees the item, all at once, and the item goes on unchanged.

    The item goes on when all are through with it. If one fails, the error names that one and the others are
    cancelled. The promises of the stages hold inside too: the branch takes as many items at once as the stage with the
    fewest workers, and is ordered if one of them is.
    """
    if not stages:
        raise InputError("tee() needs at least one stage")

    async def see(item: X) -> X:
        async with anyio.create_task_group() as group:
            failure = FirstFailure(group.cancel_scope, BranchError)
            for stage in stages:
                group.start_soon(_show, stage, item, failure, name=f"bcp stage {stage.name}")
        failure.reraise()
        return item

    return Stage(
        f"tee({', '.join(stage.name for stage in stages)})",
        see,
        workers=min(stage.workers for stage in stages),
        ordered=any(stage.ordered for stage in stages),
    )


async def _show(stage: Stage[X, Any], item: X, failure: FirstFailure) -> None:
    """Let one stage of a branch see the item."""
    task = running_task()
    try:
        await stage.run(item)
    except BaseException as error:
        if is_cancellation(error, task):
            raise
        failure.add(stage.name, getattr(item, "name", type(item).__name__), error)
