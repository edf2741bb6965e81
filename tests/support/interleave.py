"""Runs tasks step by step in every order, or in every order with few changes of the task that runs.

A task calls ``await turns.step(me)`` before each of its steps. One task goes on at a time; the others wait.

::

    for turns in orders(changes=3, deaths=1):
        results = await turns.run([first, second], look)    # look() is called after every step
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import anyio

__all__ = ["Dead", "Scripted", "Turns", "orders"]


class Dead(BaseException):
    """Raised in a task that has died: from every step that its cleaning up attempts, and returned as its result."""


class Turns:
    """One order of the steps of several tasks.

    Attributes:
        taken: what was done, in words: the task that goes on, or dies.
    """

    def __init__(self, prefix: Sequence[int], changes: int, deaths: int) -> None:
        self.taken: list[str] = []
        self.choices: list[tuple[int, int]] = []
        self._prefix = prefix
        self._changes = changes
        self._deaths = deaths
        self._waiting: dict[int, tuple[asyncio.Event, str]] = {}
        self._dead: set[int] = set()
        self._parked = asyncio.Event()

    async def step(self, me: int, what: str) -> None:
        """Wait for this task's turn to do ``what``."""
        if me in self._dead:
            raise Dead
        go = asyncio.Event()
        self._waiting[me] = go, what
        self._parked.set()
        with anyio.CancelScope(shield=True):
            await go.wait()
        if me in self._dead:
            raise Dead

    async def run(self, tasks: Sequence[Callable[[Any, int], Awaitable[Any]]], look: Callable[[], object]) -> list[Any]:
        """Return the tasks' results or exceptions; a task that died has :class:`Dead`."""
        results: list[Any] = [None] * len(tasks)

        async def begin(me: int) -> None:
            try:
                await self.step(me, "begin")
                results[me] = await tasks[me](self, me)
            except (Exception, Dead) as error:  # noqa: BLE001 -- the tests look at whatever it is
                results[me] = error
            finally:
                self._parked.set()

        running = [asyncio.create_task(begin(me)) for me in range(len(tasks))]
        await asyncio.sleep(0)  # all begin, and wait for their first turn
        last = -1
        while self._waiting:
            last = self._choose(last)
            go, what = self._waiting.pop(last)
            self.taken.append(f"{last} {'dies before' if last in self._dead else ''} {what}")
            self._parked.clear()
            go.set()
            await self._parked.wait()
            look()
        await asyncio.gather(*running)
        return results

    def _choose(self, last: int) -> int:
        """Choose who goes on: the last one by preference, another one as often as is allowed; or who dies."""
        goes_on = [last] if last in self._waiting else []
        others = [me for me in sorted(self._waiting) if me != last] if self._changes > 0 or not goes_on else []
        lives = goes_on + others
        dying = [me for me in lives if me not in self._dead] if len(self._dead) < self._deaths else []
        place = len(self.choices)
        choice = self._prefix[place] if place < len(self._prefix) else 0
        self.choices.append((choice, len(lives) + len(dying)))
        me = (lives + dying)[choice]
        if choice >= len(lives):
            self._dead.add(me)
        self._changes -= bool(goes_on) and me != last
        return me


class Scripted(Turns):
    """An order that is written down: (task, the step that it does not take yet), one after the other, then the rest."""

    def __init__(self, script: Sequence[tuple[int, str]]) -> None:
        super().__init__([], 0, 0)
        self._script = list(script)

    def _choose(self, last: int) -> int:
        while self._script:
            me, until = self._script[0]
            if me in self._waiting and self._waiting[me][1] != until:
                return me
            self._script.pop(0)
        return super()._choose(last)


def orders(*, changes: int, deaths: int = 0) -> Iterator[Turns]:
    """Yield every order with so many changes of a task that could go on, and so many deaths, at most."""
    prefix: list[int] = []
    while True:
        turns = Turns(prefix, changes, deaths)
        yield turns
        choices = turns.choices
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return
        prefix = [choice for choice, _ in choices[:-1]] + [choices[-1][0] + 1]
