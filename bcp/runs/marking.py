"""The checkpoints of a run as its user marks, finds and lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from bcp.backends import shown
from bcp.policies.keep import KeepPolicy, best_of
from bcp.runs.calls import Body, adrive, drive, once
from bcp.runs.ledger import Ledger
from bcp.runs.life import RunLife
from bcp.runs.listing import StepInfo, list_steps
from bcp.runs.names import whole_step
from bcp.runs.plans import told

__all__ = ["MarkedRun"]


class MarkedRun(RunLife):
    """The part of :class:`bcp.Run` that marks, finds and lists its checkpoints."""

    _keep: KeepPolicy

    def mark(self, step: int, trust: Literal["verified", "suspect"], reason: str = "") -> None:
        """Record that a checkpoint can be trusted, or cannot. Rank 0 writes; other ranks do nothing.

        A resumption passes over suspect checkpoints, and retention never deletes the newest verified one. A run that
        was not resumed may mark, too: the job that trains in the folder goes on.

        Raises:
            InputError: the run has no committed checkpoint of that step.

        """
        step = whole_step(step)
        self._change(step, f"mark step {step}", lambda ledger: ledger.marked(step, trust, reason))

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Keep a checkpoint under any policy, until it is unpinned. Rank 0 writes; other ranks do nothing.

        A run that was not resumed may pin, too: the job that trains in the folder goes on.

        Raises:
            InputError: the run has no committed checkpoint of that step.

        """
        step = whole_step(step)
        self._change(step, f"pin step {step}", lambda ledger: ledger.pinned(step, pinned))

    def best(self, metric: str | None = None) -> str | None:
        """Return the path of the best checkpoint, for :func:`bcp.load`, on all ranks alike; None if there is none.

        It is the best one by the :class:`~bcp.policies.Best` among the policies of ``keep``, which keeps it. A running
        save is waited for, because it may be the best. Suspect checkpoints do not count. All ranks call it.

        Args:
            metric: of the policy, if several keep the best.

        Raises:
            InputError: no policy keeps the best, or several do; or :meth:`~bcp.Run.resume` was not called.
            StorageError: storage failed.

        Example::

            keep = bcp.policies.AnyKept(3, bcp.policies.Best("eval_loss"))
            with bcp.Run("ckpt/run-7", states, keep=keep) as run:
                train(run)
                bcp.load(run.best(), {"model": model})

        """
        return drive(self._best(metric), f"find the best checkpoint at {shown(self._url)}")

    async def abest(self, metric: str | None = None) -> str | None:
        """Do the same from a coroutine."""
        return await adrive(self._best(metric), f"find the best checkpoint at {shown(self._url)}")

    def _best(self, metric: str | None) -> Body[str | None]:
        self._refuse_in_callback("best")
        policy, _, keeper = best_of(self._keep, metric), self._started, self._keeper
        yield self._saves.ended
        yield self._saves.kept

        async def answer() -> bytes:
            return b"" if keeper is None else (await keeper.best(policy)).encode()

        find = partial(told, self._ranks, f"find the best {policy.metric}", self._patience, answer)
        name = yield partial(self._saves.between_keepings, find)
        return f"{self._url}/{name.decode()}" if name else None

    def list(self) -> Sequence[StepInfo]:
        """List the checkpoints of the run, the oldest first, and folders of steps without a commit.

        Any rank may call it, and so may a run that was not resumed: ``bcp.Run("ckpt/run-7", {}).list()``. Storage is
        asked about each folder, and nothing is written.

        Raises:
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        return drive(once(self._list), f"list {shown(self._url)}")

    async def _list(self) -> Sequence[StepInfo]:
        folder = self._folder()
        try:
            return await list_steps(folder, self._url)
        finally:
            await folder.aclose()

    def _change(self, step: int, name: str, change: Callable[[Ledger], Ledger]) -> None:
        """Change an entry of the ledger. A run that has not been resumed leaves the folder to the job that has it."""
        if self._is_over:
            self._refuse_if_closed()
        self._refuse_in_child()
        if self._meetings is None:
            if self._ranks.rank == 0:
                drive(once(partial(self._amend, step, change)), name)
        elif self._keeper is not None:
            drive(once(self._saves.kept), name)
            drive(once(partial(self._saves.between_keepings, partial(self._keeper.change, change))), name)

    async def _amend(self, step: int, change: Callable[[Ledger], Ledger]) -> None:
        folder = self._folder()
        try:
            await folder.amend(step, change)
        finally:
            await folder.aclose()
