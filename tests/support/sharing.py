"""Shares the tests of a run between the processes of xdist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

__all__ = ["ByFile", "are_long"]

FOLDERS = ("distributed", "frameworks")
"""Folders whose tests need many ranks: starting these takes seconds and gigabytes."""

BUSY = 2
"""Processes of ``make test`` that run tests with ranks and whole jobs: as many as there are cores."""

LEAST = 2
"""Tests that a process has before it: the one that it runs, and the next one."""


class ByFile(LoadScopeScheduling):
    """Shares the tests between the processes of ``make test``: by file, or by folder where all need many ranks.

    Each process starts ranks once at most. Tests with ranks wait for a part of their time, so a process more than cores
    runs the other tests. On two cores the whole takes longer with two processes, and with four. Those of
    ``make test-all`` wait for most of their time, and all have ranks.

    A test that ends its process fails, and runs once. A process in its place runs the rest of the file.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder = Path(path).parent.name
        return folder if folder in FOLDERS else path

    def _assign_work_unit(self, node: WorkerController) -> None:
        at_work = [each for each in self.nodes if not each.shutting_down]
        if at_work.index(node) >= BUSY and not are_long(self.config):
            quiet = next((scope for scope in self.workqueue if not self._has_ranks(scope)), None)
            if quiet is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(quiet, last=False)
        super()._assign_work_unit(node)

    def _has_ranks(self, scope: str) -> bool:
        """Whether tests of a folder or file start ranks, or jobs."""
        text = "" if scope in FOLDERS else (self.config.rootpath / scope).read_text()
        return scope in FOLDERS or re.search(r"mark\.dist|torchrun", text) is not None

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process out, and return the test in which it died. xdist would run that test in all the others."""
        units = self.assigned_work.pop(node).values()
        died_in, *left = [test for unit in units for test, has_run in unit.items() if not has_run] or [None]
        for test in left:
            self.workqueue.setdefault(self._split_scope(test), {})[test] = False
        for each in self.nodes:
            self._reschedule(each)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process two tests at least: it runs a test once it knows the next one, or that there is none."""
        if node not in self.registered_collections:
            return  # it collects its tests, and asks when it has them
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < LEAST:
            super()._reschedule(node)


def are_long(config: pytest.Config) -> bool:
    """Whether these are the tests of ``make test-all``."""
    return bool(config.option.markexpr.startswith("long"))
