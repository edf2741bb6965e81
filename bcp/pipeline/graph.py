"""The pipeline: stages one after the other, and the tasks that carry items through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from bcp._log import bind
from bcp.errors import InputError, StageError
from bcp.events import BudgetEvent, Observer, StageEvent, StageStart, ignore, told
from bcp.pipeline.budget import Budget
from bcp.pipeline.failure import FirstFailure, is_cancellation, running_task
from bcp.pipeline.stage import Stage

__all__ = ["Item", "Pipeline"]


class Item(Protocol):
    """An item that enters a pipeline."""

    @property
    def name(self) -> str:
        """The item's name in errors and events."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes while it is inside, as counted by the byte budget."""


A = TypeVar("A", bound=Item)
O = TypeVar("O")  # noqa: E741 -- O for out
X = TypeVar("X")


@dataclass(frozen=True)  # no slots: with them Pipeline[A, B](...) is a TypeError before Python 3.14
class Pipeline(Generic[A, O]):
    """Stages in a row. Never changes: every edit returns a new one.

    Edits raise :class:`~bcp.errors.InputError` for a stage that is not there, or a name that is there already.

    Attributes:
        stages: the stages, first to last.
    """

    stages: tuple[Stage[Any, Any], ...] = ()

    def __post_init__(self) -> None:
        for index, name in enumerate(self.names):
            if name in self.names[:index]:
                raise InputError(f"there are two stages named {name!r} in {self._listing}; give one another name")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages, first to last."""
        return tuple(stage.name for stage in self.stages)

    def then(self, stage: Stage[O, X]) -> Pipeline[A, X]:
        """Add a stage at the end."""
        return Pipeline((*self.stages, stage))

    def before(self, name: str, stage: Stage[X, X]) -> Pipeline[A, O]:
        """Put a stage in front of the one called ``name``."""
        index = self._find(name)
        return Pipeline((*self.stages[:index], stage, *self.stages[index:]))

    def after(self, name: str, stage: Stage[X, X]) -> Pipeline[A, O]:
        """Put a stage behind the one called ``name``."""
        index = self._find(name) + 1
        return Pipeline((*self.stages[:index], stage, *self.stages[index:]))

    def replacing(self, name: str, stage: Stage[Any, Any]) -> Pipeline[A, O]:
        """Put a stage in the place of the one called ``name``."""
        index = self._find(name)
        return Pipeline((*self.stages[:index], stage, *self.stages[index + 1 :]))

    async def run(self, items: Sequence[A], *, budget: Budget, observe: Observer = ignore) -> list[O]:
        """Carry all items through all stages and return the results, in the order of the items.

        Items enter in order. Each borrows its bytes from the budget at the entrance, and gives them back when it has
        left the last stage; so nobody waits for bytes while holding bytes. The places between stages hold as many items
        as the budget lets in: a slow stage holds up the stages before it by the budget, and by nothing else.
        ``observe`` gets a :class:`~bcp.events.BudgetEvent` for each item, and a :class:`~bcp.events.StageStart` and a
        :class:`~bcp.events.StageEvent` for each item and stage.

        The first failure cancels everything and is raised as one :class:`~bcp.errors.StageError` with the original
        error as its cause; later failures become notes. An interrupt (KeyboardInterrupt, SystemExit) comes out
        as itself, and cancellation as cancellation. However it ends, no task, no thread and no borrowed byte is left.
        """
        parcels = [_Parcel(index, item.name, item.nbytes, item) for index, item in enumerate(items)]
        for parcel in parcels:
            if parcel.nbytes < 0:
                raise InputError(f"item {parcel.name!r} says that it has {parcel.nbytes} bytes; nbytes is at least 0")
        if self.stages and parcels:
            await _Run(self.stages, parcels, budget, observe).to_the_end()
        return [parcel.value for parcel in parcels]

    @property
    def _listing(self) -> str:
        return f"[{', '.join(self.names)}]"

    def _find(self, name: str) -> int:
        """Return the place of the stage of that name."""
        if name not in self.names:
            raise InputError(f"there is no stage named {name!r}; there are {self._listing}")
        return self.names.index(name)


@dataclass(slots=True, eq=False)
class _Parcel:
    """An item on its way. There is one for each item, and it alone holds the value: no stage keeps memory alive."""

    index: int
    name: str
    nbytes: int
    value: Any
    queued: float = 0.0


_Sink = MemoryObjectSendStream[_Parcel]
_Source = MemoryObjectReceiveStream[_Parcel]


class _InPlanOrder:
    """Sorts arriving items. It cannot block: an awaited item entered the pipeline before all that are kept."""

    __slots__ = ("_early", "_next", "_source")

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._early: dict[int, _Parcel] = {}
        self._next = 0

    def __aiter__(self) -> _InPlanOrder:
        return self

    async def __anext__(self) -> _Parcel:
        while self._next not in self._early:
            parcel = await self._source.__anext__()
            self._early[parcel.index] = parcel
        self._next += 1
        return self._early.pop(self._next - 1)


class _Run:
    """One run of a pipeline: a channel in front of every stage, and tasks that take from it."""

    def __init__(
        self, stages: tuple[Stage[Any, Any], ...], parcels: list[_Parcel], budget: Budget, observe: Observer
    ) -> None:
        self._stages = stages
        self._parcels = parcels
        self._budget = budget
        self._observe = observe
        self._streams = ExitStack()
        self._borrowed_bytes = 0
        self._inside = len(parcels)
        names = [stage.name for stage in stages]
        self._onward = dict(zip(names, [*names[1:], ""], strict=True))

    async def to_the_end(self) -> None:
        """Carry the parcels through the stages."""
        try:
            async with anyio.create_task_group() as group:
                self._failure = FirstFailure(group.cancel_scope, StageError)
                await self._feed(self._start(group))
        finally:
            self._streams.close()
            self._budget.release(self._borrowed_bytes)
            if self._inside:  # the error may live long, and its traceback leads here: keep no buffers alive
                self._stages = ()
                for parcel in self._parcels:
                    parcel.value = None
        self._failure.reraise()
        if self._inside:
            raise asyncio.CancelledError("a task of the pipeline was cancelled from outside")

    def _start(self, group: TaskGroup) -> _Sink:
        """Start the workers, last stage first, and return the entrance of the first stage."""
        sink: _Sink | None = None
        for stage in reversed(self._stages):
            # Room for all: what may be inside is the budget's business. With less, a slow upload would hold up the
            # copies to the host, and thereby training, although there is memory for them.
            entrance, source = anyio.create_memory_object_stream[_Parcel](len(self._parcels))
            self._streams.enter_context(source)
            arrivals: AsyncIterator[_Parcel] = _InPlanOrder(source) if stage.ordered else source
            for _ in range(min(stage.workers, len(self._parcels))):
                own = sink and self._streams.enter_context(sink.clone())
                group.start_soon(self._work, stage, arrivals, own, name=f"bcp stage {stage.name}")
            if sink is not None:
                sink.close()
            sink = self._streams.enter_context(entrance)
        assert sink is not None  # noqa: S101 -- there is at least one stage
        return sink

    async def _feed(self, entrance: _Sink) -> None:
        """Let the parcels in, in order, as the budget allows."""
        for parcel in self._parcels:
            asked = time.monotonic()
            await self._budget.acquire(parcel.nbytes)
            self._borrowed_bytes += parcel.nbytes
            parcel.queued = time.monotonic()
            try:
                self._observe(BudgetEvent(parcel.name, parcel.nbytes, asked, parcel.queued, next(iter(self._onward))))
            except Exception as error:  # noqa: BLE001 -- told as a stage's error is
                self._failure.add("budget", parcel.name, error)
                return
            await entrance.send(parcel)
        entrance.close()

    async def _work(self, stage: Stage[Any, Any], arrivals: AsyncIterator[_Parcel], sink: _Sink | None) -> None:
        """Be one worker of a stage."""
        bind(stage=stage.name)
        try:
            async for parcel in arrivals:
                if not await self._process(stage, parcel):
                    return
                if sink is None:
                    self._leave(parcel)
                else:
                    sink.send_nowait(parcel)
        finally:
            del stage  # anyio's cancellations lead back to themselves, by way of this frame
        if sink is not None:
            sink.close()  # only here, where all went well: for the next stage an end must not look like a failure

    async def _process(self, stage: Stage[Any, Any], parcel: _Parcel) -> bool:
        """Put one parcel through one stage; say whether it went well."""
        started, task = time.monotonic(), running_task()
        event = partial(StageEvent, stage.name, parcel.name, parcel.nbytes, started, waited=started - parcel.queued)
        try:
            self._observe(StageStart(stage.name, parcel.name, parcel.nbytes, parcel.queued, started))
            parcel.value = await stage.run(parcel.value)
            parcel.queued = time.monotonic()
            self._observe(event(parcel.queued, onward=self._onward[stage.name]))
        except BaseException as error:
            if is_cancellation(error, task):
                raise
            self._failure.add(stage.name, parcel.name, error)
            with suppress(Exception):  # an observer that raised before: its error has been added
                self._observe(event(time.monotonic(), error=told(error)))
            return False
        return True

    def _leave(self, parcel: _Parcel) -> None:
        """Let a parcel out that is through the last stage."""
        self._inside -= 1
        self._borrowed_bytes -= parcel.nbytes
        self._budget.release(parcel.nbytes)
