"""Two jobs save to one path, and a third one loads, in any order of their requests and with any answers to them.

After every step the store holds what was committed last, whole, and every save has told its caller the truth.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from commit_jobs import OPTIONS, Answer, Job, World, check_told, loaded, states_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.format.metadata import METADATA_KEY
from bcp.protocols import Backend

WRITES: tuple[Answer, ...] = ("true", "lost", "failed")
READS: tuple[Answer, ...] = ("true", "failed", "absent", "stale")
ANSWERS: dict[str, tuple[Answer, ...]] = {
    "put": WRITES,
    "commit": WRITES,
    "delete": WRITES,
    "put_if": (*WRITES, "refused"),
    "version": READS,
    "get": READS,
    "read": ("true", "failed", "absent"),
    "list": ("true", "failed", "stale"),
}
_names = count()


class Commits(RuleBasedStateMachine):
    """Saves of two jobs, and loads of a third one, on a store in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(self.make_store())
        self.jobs: dict[str, Job] = {}
        self.numbers = count(1)
        self.checked: Any = None

    def make_store(self) -> Backend:
        self.name = f"commits-{next(_names)}"
        return MemoryBackend(self.name)

    def drop_store(self) -> None:
        MemoryBackend.forget(self.name)

    def teardown(self) -> None:
        for name in list(self.jobs):
            self._run(self.jobs[name].die("failed"))
        self._run(self.loop.shutdown_default_executor())
        self.loop.close()
        self.drop_store()

    # -- what may happen --

    @rule(name=st.sampled_from("AB"), overwrite=st.booleans())
    def begin_save(self, name: str, overwrite: bool) -> None:  # noqa: FBT001 -- hypothesis passes it by name
        if name not in self.jobs:
            value = next(self.numbers)
            options = bcp.SaveOptions(overwrite=overwrite, **OPTIONS)
            self._begin(name, value, lambda job: bcp.asave(job, states_of(value), options=options))

    @precondition(lambda self: self.world.current is not None)
    @rule()
    def begin_load(self) -> None:
        if "reader" not in self.jobs:
            self._begin("reader", 0, loaded)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Answer some requests of a job truly."""
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        for _ in range(steps):
            if name in self.jobs:
                self._answer(name, "true")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Answer a request in any way; those of a load are answered truly."""
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        answers = ANSWERS[self.jobs[name].request] if name != "reader" else ("true",)
        self._answer(name, data.draw(st.sampled_from(answers)))

    @precondition(lambda self: any(name != "reader" for name in self.jobs))
    @rule(data=st.data())
    def reach_the_commit(self, data: st.DataObject) -> None:
        """Answer truly until a save is about to commit, and then in any way."""
        name = data.draw(st.sampled_from(sorted({*self.jobs} - {"reader"})))
        while name in self.jobs and self.jobs[name].request != "put_if":
            self._answer(name, "true")
        if name in self.jobs:
            self._answer(name, data.draw(st.sampled_from(ANSWERS["put_if"])))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), answer=st.sampled_from(("true", "failed")))
    def kill(self, data: st.DataObject, answer: Answer) -> None:
        """Let a request of a job be its last one, carried out or not."""
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self._run(self.jobs.pop(name).die(answer))

    @precondition(lambda self: not self.jobs and self.world.current is not None)
    @rule()
    def remove(self) -> None:
        """Remove the checkpoint as a retention does: the metadata first."""
        self._run(self.world.store.delete([METADATA_KEY]))
        self.world.commits.append(None)

    # -- what must hold --

    @invariant()
    def the_last_commit_loads(self) -> None:
        store = self.world.store
        state = self._run(store.list()), self._run(store.version(METADATA_KEY))
        if state != self.checked:
            found = self._run(loaded(store)) if state[1] is not None else None
            assert found == self.world.current
        self.checked = state

    # -- steps --

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def _begin(self, name: str, value: int, run: Any) -> None:
        job = Job(self.world, value)
        self.jobs[name] = job
        self._run(job.begin(lambda: run(job)))
        self._settle(name)

    def _answer(self, name: str, answer: Answer) -> None:
        self._run(self.jobs[name].go_on(answer))
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Look at a job that has ended."""
        job = self.jobs[name]
        if not job.task.done():
            return
        del self.jobs[name]
        error = job.task.exception()
        if name != "reader":
            check_told(self.world, job, error)
        elif error is None:
            operations = [operation for operation in self.world.commits[job.began :] if operation is not None]
            assert job.task.result() in {self.world.values[operation] for operation in operations}
        else:
            assert isinstance(error, bcp.BcpError), repr(error)
            assert len(self.world.commits) - 1 > job.began, f"a load of a sound checkpoint: {error!r}"


class LocalCommits(Commits):
    """The same on local files."""

    def make_store(self) -> Backend:
        self.folder = Path(tempfile.mkdtemp(prefix="bcp-commits-"))
        return LocalBackend(self.folder)

    def drop_store(self) -> None:
        shutil.rmtree(self.folder)


# A failure is shown as it was found: to make it shorter takes minutes.
HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestCommits = Commits.TestCase
TestCommits.settings = settings(
    derandomize=True, max_examples=25, stateful_step_count=25, suppress_health_check=HEALTH, phases=[Phase.generate]
)
TestLocalCommits = LocalCommits.TestCase
TestLocalCommits.settings = settings(
    derandomize=True, max_examples=8, stateful_step_count=25, suppress_health_check=HEALTH, phases=[Phase.generate]
)
