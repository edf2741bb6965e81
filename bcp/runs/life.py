"""The life of a run: who may call it, and how it ends."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from types import TracebackType
from typing import Self

from bcp._log import log
from bcp.backends import resolve, shown
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import InputError
from bcp.options import SaveOptions
from bcp.protocols import Coordinator
from bcp.runs.calls import Body, adrive, drive, noting
from bcp.runs.ending import CTRL_C, CTRL_C_TWICE, await_save
from bcp.runs.folder import Folder
from bcp.runs.keeper import End, Keeper
from bcp.runs.meetings import Meetings
from bcp.runs.preemption import Preemption
from bcp.runs.saver import Saver
from bcp.runs.saves import Saves, Watchdog
from bcp.runs.schedule import Schedule
from bcp.runs.tiered import Tiered

__all__ = ["RunLife"]


class RunLife:
    """The part of :class:`bcp.Run` that closes it, and that refuses calls at the wrong time or in the wrong process."""

    _url: str
    _given: Coordinator | None
    _pid: int
    _save_options: SaveOptions
    _preemption: Preemption
    _saves: Saves
    _saver: Saver
    _schedule: Schedule
    _tiered: Tiered | None
    _keeper: Keeper | None = None
    _meetings: Meetings | None = None
    _watchdog: Watchdog | None = None
    _closed = False  # close() was called
    _is_over = False  # and has ended
    _stops = False  # the ranks have agreed that a step is the last one

    def close(self) -> None:
        """Wait for the running save and the housekeeping; raise the error of the last save.

        Raises:
            BcpError: the last save failed.

        """
        drive(self._close("finished"), f"close the run at {shown(self._url)}")

    async def aclose(self) -> None:
        """Do the same from a coroutine."""
        await adrive(self._close("finished"), f"close the run at {shown(self._url)}")

    def _close(self, end: End, again: str = "") -> Body[None]:
        """Close one part after the other, whichever of them fails. A signal that comes meanwhile stops no save.

        Args:
            end: how the run ends.
            again: for a run that was interrupted: what a further interrupt does.

        """
        if self._closed or os.getpid() != self._pid:  # a forked child has nothing to close
            return
        self._refuse_in_callback("close")
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.step_ended()
        errors: list[Exception] = []
        end = "preempted" if self._stops else end
        interrupt: KeyboardInterrupt | None = None
        try:
            drop_standby = partial(noting, errors, self._saver.drop_standby)
            interrupt = yield from await_save(self._saves, drop_standby, again)
            is_durable = False
            if end != "failed" and interrupt is None:
                is_durable, interrupt = yield from self._drained(errors)
            for part in (self._saves.kept, self._schedule.ended):
                yield from noting(errors, part)
            if self._tiered is not None:
                yield from noting(errors, partial(self._tiered.close, clear=is_durable))
            self._is_over = True
            yield from noting(errors, self._saver.aclose)
            if self._keeper is not None:
                yield from noting(errors, partial(self._keeper.close, "failed" if interrupt else end))
        finally:
            self._is_over = True
            self._saves.stop()
            if self._meetings is not None:
                self._meetings.close()
            self._preemption.close()
        if interrupt is not None:
            raise interrupt
        self._saves.raise_failure(last=True)
        self._saves.drains.raise_failure()
        if errors:
            raise errors[0]

    def _drained(self, errors: list[Exception]) -> Body[tuple[bool, KeyboardInterrupt | None]]:
        """Wait until agents have made the newest snapshot durable. A Ctrl-C leaves that to them.

        Returns:
            Whether it is durable, and the interrupt for the caller to raise.

        """
        tiered, drains = self._tiered, self._saves.drains
        if tiered is None:
            return False, None
        try:
            yield partial(drains.promote, tiered)
            return bool((yield partial(drains.ended, tiered, self._patience, self._saves.warn))), None
        except KeyboardInterrupt as error:
            log.warning("interrupted; agents go on with steps %s", sorted(drains.steps))
            return False, error
        except Exception as error:  # noqa: BLE001 -- the caller raises it
            errors.append(error)
            return False, None

    def _leave(self, error: BaseException | None, again: str) -> Body[None]:
        is_interrupt = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        try:
            yield from self._close("finished" if error is None else "failed", again if is_interrupt else "")
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"The run failed to close as well: {failure!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drive(self._leave(error, CTRL_C), f"close the run at {shown(self._url)}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await adrive(self._leave(error, CTRL_C_TWICE), f"close the run at {shown(self._url)}")

    @property
    def _ranks(self) -> Coordinator:
        return coordinator_for(self._given)

    @property
    def _patience(self) -> float:
        return self._save_options.timeout

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InputError("the run is closed; make a new Run and resume() it")
        self._refuse_in_child()

    def _refuse_in_callback(self, call: str) -> None:
        if self._saves.is_telling:
            raise InputError(
                f"{call}() in on_commit or on_failure would wait for the save that calls it: return from the callback, "
                "and call it in the training loop. stop(), mark() and pin() may be called there"
            )

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._pid:
            raise InputError(f"the run belongs to process {self._pid}, and this is its forked child; use it there")

    @property
    def _started(self) -> Meetings:
        self._refuse_if_closed()
        if self._meetings is None:
            raise InputError("call resume() before the first step: it takes the run's folder and listens for signals")
        return self._meetings

    def _folder(self) -> Folder:
        options = self._save_options
        backend = resolve(self._url, options.storage_options, options.retries)
        return Folder(backend, shown(self._url), options.storage_options, options.retries)
