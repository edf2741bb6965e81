"""The checkpoints of a run as its user marks and lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from bcp.backends import shown
from bcp.runs.calls import drive, once
from bcp.runs.ledger import Ledger
from bcp.runs.life import RunLife
from bcp.runs.listing import StepInfo, list_steps
from bcp.runs.names import whole_step

__all__ = ["MarkedRun"]


class MarkedRun(RunLife):
    """The part of :class:`bcp.Run` that needs no training: marks of trust, pins, the list of checkpoints."""

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
