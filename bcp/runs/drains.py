"""The snapshots of a run that agents make durable, as their trainer sees them: it waits, and does the housekeeping."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

import anyio

from bcp._log import log
from bcp.errors import StorageError
from bcp.events import SaveResult
from bcp.runs.tiered import Tiered
from bcp.runtime import bridge as _bridge
from bcp.runtime.bridge import Background
from bcp.runtime.threads import in_thread

__all__ = ["Drains"]

TELL_SECONDS = 10.0
"""Between two lines about snapshots that the end of a run waits for."""

ALONE_SECONDS = 30.0
"""How long the end of a run waits for an agent where there is none."""


@dataclass(frozen=True, slots=True)
class Staying:
    """The newest snapshot, if it is to stay in memory.

    Attributes:
        step: of the training.
        operation: id of the save.
        drained: waits until it is durable.
    """

    step: int
    operation: str
    drained: Callable[[], Awaitable[SaveResult]]


class Drains:
    """What agents have of one rank.

    Attributes:
        newest: step of the newest snapshot of this life that all ranks have marked, or of a newer save of their own to
            storage; None before the first.
        committed: step of the newest one that is durable; None before the first.
        staying: the newest snapshot, if nobody makes it durable.
    """

    def __init__(
        self,
        committed: Callable[[int, SaveResult], Awaitable[None]],
        failed: Callable[[int, BaseException], Awaitable[None]],
    ) -> None:
        """Remember what to await for a snapshot that is durable, and for one that never will be."""
        self._on_committed, self._on_failed = committed, failed
        self._saves: dict[int, Background[SaveResult]] = {}
        self._adopted: tuple[int, Background[None]] | None = None
        self._failure: tuple[int, Exception] | None = None
        self.newest: int | None = None
        self.committed: int | None = None
        self.staying: Staying | None = None

    @property
    def steps(self) -> Collection[int]:
        """The steps that agents have, and that are not durable yet."""
        self._saves = {step: save for step, save in [*self._saves.items()] if not save.done()}
        adopted = () if self._adopted is None or self._adopted[1].done() else (self._adopted[0],)
        return {*self._saves, *adopted}

    def begin(self, step: int, save: Background[SaveResult]) -> None:
        """Take note of a save that agents will have."""
        self._saves = {other: each for other, each in [*self._saves.items()] if not each.done()} | {step: save}

    def kept(
        self, step: int, kept: SaveResult, durable: Callable[[SaveResult], Awaitable[SaveResult]], *, stays: bool
    ) -> Callable[[], Awaitable[SaveResult]]:
        """Take note of a snapshot that all ranks have marked; return what waits until it is durable."""
        drained = partial(self._drained, step, partial(durable, kept))
        self.newest, self.staying = step, Staying(step, kept.operation, drained) if stays else None
        return drained

    def stored(self, step: int) -> None:
        """Take note of a step that this job has saved to storage itself: older snapshots may stay in memory."""
        self.newest = self.committed = step
        self.staying = None

    async def promote(self, tier: Tiered) -> Background[SaveResult] | None:
        """Let the newest snapshot become durable, though it was to stay in memory; None if there is no such one."""
        staying, self.staying = self.staying, None
        if staying is None:
            return None
        await in_thread(tier.want, staying.operation)

        async def wait(_: Callable[[], None], handed_over: Callable[[], None]) -> SaveResult:
            handed_over()
            return await staying.drained()

        save = _bridge.start_handed_over(wait, name=f"upload of step {staying.step}")
        self.begin(staying.step, save)
        return save

    def adopt(self, step: int, uploaded: Callable[[], Awaitable[bool]], keep: Callable[[int], None]) -> None:
        """Wait for a snapshot of an earlier life in the background, on rank 0.

        Args:
            step: of the snapshot.
            uploaded: waits for its end; returns whether it is durable.
            keep: begins the housekeeping after its commit.

        """

        async def wait(_: Callable[[], None]) -> None:
            if await uploaded():
                keep(step)

        self._adopted = step, _bridge.start(wait, name=f"upload of step {step} from memory", daemon=True)

    async def ended(self, tier: Tiered, patience: float, warn: Callable[..., None]) -> bool:
        """Wait at the end of a run until agents have made durable what shall be, at most so many seconds.

        Returns:
            Whether the newest snapshot is durable, so that the memory is not needed any more.

        Raises:
            StorageError: no agent serves this host.

        """
        alone = 0.0
        while steps := self._awaited():
            names = ", ".join(map(str, sorted(steps)))
            pause = min(TELL_SECONDS, patience)
            with anyio.move_on_after(pause):
                await steps[max(steps)].ended()
                continue
            patience -= pause
            alone = 0.0 if await in_thread(tier.is_served) else alone + pause
            if alone >= ALONE_SECONDS:
                raise StorageError(f"steps {names} are not durable, and the run ends: {tier.no_agent()}")
            if patience <= 0:
                served = await in_thread(tier.is_served)
                more = "agents go on with them" if served else tier.no_agent()
                warn("steps %s are not durable yet, and are in the memory of their hosts: %s", names, more)
                return False
            warn("waiting until the agents have made steps %s durable", names)
        return self.newest is not None and self.newest == self.committed

    def _awaited(self) -> dict[int, Background[SaveResult] | Background[None]]:
        """Return the uploads that the end of a run waits for; an adopted one only if nothing newer is durable."""
        waiting: dict[int, Background[SaveResult] | Background[None]] = {
            step: save for step, save in self._saves.items() if not save.done()
        }
        if self.committed is None and self._adopted is not None and not self._adopted[1].done():
            waiting[self._adopted[0]] = self._adopted[1]
        return waiting

    def raise_failure(self) -> None:
        """Raise the error of the newest snapshot, if it will never be durable."""
        if self._failure is not None and self._failure[0] == self.newest:
            raise self._failure[1]

    def stop(self) -> None:
        """Wait no more: the run is over. The agents go on."""
        for save in self._saves.values():
            save.cancel()
        if self._adopted is not None:
            self._adopted[1].cancel()

    async def _drained(self, step: int, durable: Callable[[], Awaitable[SaveResult]]) -> SaveResult:
        """Wait until a snapshot is durable; do what follows."""
        try:
            result = await durable()
        except Exception as error:
            log.warning("step %d: %s", step, error)
            self._failure = step, error
            await self._on_failed(step, error)
            raise
        self.committed = max(step, self.committed or step)
        await self._on_committed(step, result)
        return result
