"""An agent's life: it looks for snapshots that shall be durable, and goes on until they are."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import anyio

from bcp._log import log
from bcp._messages.tiers import Intent
from bcp._text import shown
from bcp.agent.commit import Outcome
from bcp.agent.copying import Copier
from bcp.agent.generation import advance
from bcp.agent.pace import Pace
from bcp.backends import resolve
from bcp.errors import BcpError, CorruptError
from bcp.protocols import Backend
from bcp.runtime.threads import in_thread
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COMMITTED, LEFT, REFUSED, STORING, SUPERSEDED, Mark

__all__ = ["Agent"]

LONGEST_PAUSE_SECONDS = 30.0

ENDS = {Outcome.COMMITTED: COMMITTED, Outcome.REFUSED: REFUSED, Outcome.LEFT: LEFT}
"""Outcomes that are noted, for the trainers and for later lives of the agent."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The marks of one save on this host.

    Attributes:
        intent: that of one of its ranks.
        marks: of all of its ranks on this host.
        copies: marks of ranks on other hosts, whose files this one has, too.
        age: when the last one was prepared, in seconds since the epoch.
    """

    intent: Intent
    marks: Sequence[Mark]
    copies: Sequence[Mark]
    age: float


@dataclass(slots=True)
class Agent:
    """The agent of one host.

    Attributes:
        folder: the host's memory.
        durable: path or URL of durable storage, below which each snapshot has its place.
        node: name of the host, as part of a key.
        storage_options: of the storage.
        poll_seconds: how often it looks for new snapshots.
        patience_seconds: without trainers, how long it waits for other hosts before it takes an older snapshot, too.
        linger_seconds: how long it goes on after the last trainer of the host has ended.
        pace: bytes per second that it fetches from other hosts; None for no limit.
    """

    folder: NodeFolder
    durable: str
    node: str
    storage_options: Mapping[str, Any] | None = None
    poll_seconds: float = 0.5
    linger_seconds: float = 3600.0
    patience_seconds: float = 30.0
    pace: float | None = None
    _tries: dict[str, int] = field(default_factory=dict)
    _next_try: dict[str, float] = field(default_factory=dict)
    _committed_age: float = 0.0
    _waits_since: dict[str, float] = field(default_factory=dict)
    _troubles: dict[str, str] = field(default_factory=dict)
    _copier: Copier = field(init=False)

    def __post_init__(self) -> None:
        self._copier = Copier(self.folder, self.poll_seconds, Pace(self.pace))

    async def run(self) -> None:
        """Serve until the trainers have ended and their newest snapshot is durable, or for ``linger_seconds`` longer.

        It waits as long for the first trainer. An agent that is to make way for another one gives up what it is doing,
        as by a kill: the other one repeats it.
        """
        store = await in_thread(resolve, self.durable, self.storage_options)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._copier.run)
                group.start_soon(self._leave, group.cancel_scope)
                await self._drain_all(store)
                group.cancel_scope.cancel()
            if await in_thread(self.folder.is_finished):
                await in_thread(self.folder.clear)
        finally:
            with anyio.CancelScope(shield=True):
                await store.aclose()

    async def _leave(self, scope: anyio.CancelScope) -> None:
        """End the agent's work once it was asked to leave."""
        while not await in_thread(self.folder.is_to_leave):  # noqa: ASYNC110 -- trainers write a file
            await anyio.sleep(self.poll_seconds)
        scope.cancel()

    async def _drain_all(self, store: Backend) -> None:
        alone_since, has_seen = time.monotonic(), False
        while True:
            is_alone = not await in_thread(self.folder.members)
            has_seen = has_seen or not is_alone or bool(await in_thread(self.folder.marks))
            alone_since = alone_since if is_alone else time.monotonic()
            is_idle = has_seen and await self.round(store, is_alone=is_alone)
            if is_alone and (is_idle or time.monotonic() - alone_since > self.linger_seconds):
                return
            await anyio.sleep(self.poll_seconds)

    async def round(self, store: Backend, *, is_alone: bool) -> bool:
        """Go on with each snapshot that shall be durable, the newest first; return whether there is nothing to do.

        Args:
            store: the durable root.
            is_alone: no trainer lives here, so that the newest snapshot shall be durable whatever was planned.

        """
        waiting, is_next, wanted = False, is_alone, await in_thread(self.folder.wanted)
        generations = await in_thread(self._generations)
        self._forget_others({each.intent.operation for each in generations})
        for generation in generations:
            intent = generation.intent
            if not (intent.durable or intent.operation in wanted or is_next):
                continue
            is_next = is_next and self._is_stuck(intent.operation)
            if intent.operation in self._waits_since and generation.age < self._committed_age:
                await in_thread(self.folder.end, intent.operation, SUPERSEDED)
                log.info("a snapshot waits for other hosts, and a newer one is durable", step=intent.step)
                continue
            if time.monotonic() < self._next_try.get(intent.operation, 0.0):
                waiting = True
                continue
            outcome = await self._advance(generation, store)
            if outcome in ENDS:
                await in_thread(self.folder.end, intent.operation, ENDS[outcome])
                log.info("a snapshot has ended", step=intent.step, operation=intent.operation, outcome=outcome.value)
            if outcome is Outcome.COMMITTED:
                self._committed_age = max(self._committed_age, generation.age)
            waiting = waiting or outcome in (None, Outcome.WAITING)
        await in_thread(self.folder.put_troubles, STORING, self._troubles)
        await in_thread(self.folder.forget_ended)
        return not waiting

    async def _advance(self, generation: Generation, run: Backend) -> Outcome | None:
        """Go on with one snapshot; None after a failure of storage, which is logged.

        The next try is later each time, also while other hosts are not done: the last of them commits.
        """
        intent, marks = generation.intent, list(generation.marks)
        if self._is_stuck(intent.operation):  # other hosts may be lost
            marks += generation.copies
            self._copier.stuck.add(intent.operation)
        if not marks:
            self._waits_since.setdefault(intent.operation, time.monotonic())
            return Outcome.WAITING
        path = f"{self.durable.rstrip('/')}/{intent.place}".rstrip("/")
        try:
            outcome = await advance(self.folder, marks, run, path, self.node)
        except CorruptError as error:
            log.error(
                "a snapshot in memory is damaged, and is given up", path=shown(path), step=intent.step, error=str(error)
            )
            await in_thread(self.folder.end, intent.operation, f"DAMAGED: {error}")
            return Outcome.GONE
        except (BcpError, OSError) as error:
            log.warning("a snapshot is not durable yet", path=shown(path), step=intent.step, error=str(error))
            self._put_off(intent.operation)
            self._troubles[intent.operation] = f"step {intent.step}: {error}"
            return None
        self._troubles.pop(intent.operation, None)
        if outcome is Outcome.WAITING:
            self._waits_since.setdefault(intent.operation, time.monotonic())
            self._put_off(intent.operation)
        return outcome

    def _forget_others(self, operations: Collection[str]) -> None:
        """Forget the tries of snapshots that have ended."""
        self._copier.stuck.intersection_update(operations)
        for tries in (self._tries, self._next_try, self._waits_since, self._troubles):
            for operation in tries.keys() - operations:
                del tries[operation]

    def _put_off(self, operation: str) -> None:
        """Try a snapshot again after a pause, twice as long each time."""
        count = self._tries[operation] = self._tries.get(operation, 0) + 1
        self._next_try[operation] = time.monotonic() + min(self.poll_seconds * 2**count, LONGEST_PAUSE_SECONDS)

    def _is_stuck(self, operation: str) -> bool:
        """Whether a snapshot has been waiting for other hosts for long: they may never have had it."""
        since = self._waits_since.get(operation)
        return since is not None and time.monotonic() - since > self.patience_seconds

    def _generations(self) -> list[Generation]:
        """List the saves on this host that have not ended, the newest first."""
        ended, ages, copies = self.folder.ended(), self.folder.ages(), self.folder.copies()
        found: list[Generation] = []
        for operation, marks in groupby(sorted(ages), attrgetter("operation")):
            there = list(marks)
            own, copied = [each for each in there if each not in copies], [each for each in there if each in copies]
            age = max(ages[mark] for mark in own or copied)
            if ended.get(operation) == COMMITTED:  # by an earlier life of this agent, too
                self._committed_age = max(self._committed_age, age)
            if operation in ended:
                continue
            with self.folder.holding(there[0]) as held:
                if held is not None:
                    found.append(Generation(held.intent, own, copied, age))
        return sorted(found, key=lambda each: -each.age)
