"""The moment of a call, in the caller's thread; the same for the synchronous and the asynchronous calls.

Arguments are checked. Planner, backend and coordinator are chosen. The caller's device and streams are noted, and this
rank takes its place in the order of operations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypedDict, TypeVar

import bcp.telemetry.otel  # noqa: F401 -- spans and metrics follow all saves and loads
from bcp._agree import nothing_in, refuse_on_all_ranks
from bcp._job import Earlier, Job, LoadJob, OnSnapshot, Operation, Permit, SaveJob
from bcp._workflow import achoose, aload, aprepare, asave
from bcp.backends import MemoryBackend
from bcp.backends.place import Path, place_of, words_of
from bcp.coordinators import coordinator as coordinator_for
from bcp.coordinators.process_group import exchange_device
from bcp.errors import InputError
from bcp.events import LoadResult, SaveResult
from bcp.options import LoadOptions, SaveOptions, timeout_of, with_overrides
from bcp.plan.shards import KINDS
from bcp.planners import Framework
from bcp.planners import planner as planner_for
from bcp.protocols import REFUSED, Backend, Codec, Coordinator, Planner, States
from bcp.runtime.device import Caller
from bcp.runtime.threads import with_thread_setup
from bcp.stages.zstd import zstd
from bcp.telemetry.watch import Kind, Watch
from bcp.tiers.memory import TierMemory
from bcp.tiers.near import NearBackend
from bcp.tiers.saving import Aim, akeep

__all__ = [
    "LoadCall",
    "SaveCall",
    "check_kinds",
    "choose_call",
    "keep_call",
    "load_call",
    "prepare_call",
    "require_asyncio",
    "save_call",
    "snapshot_call",
]

T = TypeVar("T")
J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class LoadCall(Generic[T]):
    """A load on one rank, which has its place among the operations of all ranks.

    A call whose arguments were refused has its place, too: it tells the other ranks, and raises the error.
    """

    name: str  # names the call in messages
    run: Callable[[], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class SaveCall(Generic[T]):
    """A save on one rank; otherwise as :class:`LoadCall`."""

    name: str  # names the call in messages
    # does the work; its argument is called once training may go on, and is None if the caller waits for the end
    run: Callable[[OnSnapshot | None], Awaitable[T]]
    progress: Callable[[], str] = str  # says how much is written and how much is left, while that is known


@dataclass(frozen=True, slots=True)
class _Checked(Generic[J]):
    """A call whose arguments are right."""

    name: str  # names the call in messages
    does: str  # the words that all ranks have to agree on
    timeout: float  # seconds that a rank may be silent
    job: Callable[[Operation], J]  # makes the job, given the rank's place


@dataclass(frozen=True, slots=True)
class _Place(Generic[J]):
    """A place in the next operation: the name of the call, and its job or the error that refused its arguments."""

    name: str
    job: Callable[[], Awaitable[J]]


class _Common(TypedDict):
    """Fields of :class:`~bcp._job.Job` that the arguments of a save and of a load determine alike."""

    path: str
    place: str
    backend: Backend
    opened: AbstractAsyncContextManager[object]
    beside: Backend | None
    states: States
    planner: Callable[[], Planner]
    rank: int
    world_size: int
    watch: Watch
    caller: Caller


def save_call(
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: SaveOptions | None,
    given: Coordinator | None,
    *,
    background: bool,
    permit: Permit | None = None,
    metrics: Mapping[str, float] | None = None,
    earlier: Earlier | None = None,
    **overrides: object,
) -> SaveCall[SaveResult]:
    """Take this rank's place in a save. Raises only if there is no way to tell the other ranks."""
    ranks = coordinator_for(given)

    def check() -> _Checked[SaveJob]:
        chosen = with_overrides(SaveOptions, options, overrides)
        return _check_save("save", path, states, framework, role, chosen, ranks, background=background)

    async def work(job: SaveJob) -> SaveResult:
        return await asave(replace(job, permit=permit, metrics=metrics or {}, earlier=earlier))

    return _save_call(_take_place(ranks, "begin", options, check), work)


def keep_call(
    memory: TierMemory,
    aim: Aim,
    states: States,
    framework: Framework,
    options: SaveOptions | None,
    given: Coordinator | None,
    *,
    metrics: Mapping[str, float] | None = None,
    path: str = "",
    names: Sequence[int] | None = None,
) -> SaveCall[SaveResult]:
    """Take this rank's place in a save into the memory of the hosts.

    Args:
        memory: of this rank.
        aim: of the save.
        states: as in :func:`save_call`, like all others.
        framework: see there.
        options: see there.
        given: see there.
        metrics: see there.
        path: where the checkpoint will be, for telemetry; empty for the memory.
        names: as in :class:`~bcp._job.SaveJob`.

    """
    ranks = coordinator_for(given)

    def check() -> _Checked[SaveJob]:
        chosen = with_overrides(SaveOptions, options, {})
        if chosen.codecs:
            names = ", ".join(codec.name for codec in chosen.codecs)
            raise InputError(f"codecs={names} do not go with a memory tier, whose agents have no code of yours")
        checked = _check_save("save", memory.folder.files, states, framework, None, chosen, ranks, background=True)
        does = (
            f"keep {aim} with world_size={ranks.world_size} balance={chosen.balance} part_bytes={chosen.part_bytes} "
            f"replicas={chosen.replicas} record={chosen.record}"
        )

        def job(operation: Operation) -> SaveJob:
            made = checked.job(operation)
            made.watch.tier = "memory"
            made.watch.path = path or made.watch.path
            return made

        return replace(checked, name=f"snapshot of step {aim.step}", does=does, job=job)

    async def work(job: SaveJob) -> SaveResult:
        kept = await akeep(replace(job, metrics=metrics or {}, names=names), memory, aim)
        return replace(kept, path=str(memory.folder.root))

    return _save_call(_take_place(ranks, "begin", options, check), work)


def snapshot_call(
    name: str,
    check: Callable[[], str],
    states: States,
    framework: Framework,
    given: Coordinator | None,
    work: Callable[[SaveJob], Awaitable[T]],
    *,
    background: bool,
    steps: object = None,
) -> SaveCall[T]:
    """Take this rank's place in an operation that plans a save of the states, and stores them in a way of its own.

    Args:
        name: of the call, for messages.
        check: refuses arguments by an error; returns the words that all ranks have to agree on.
        states: as in :func:`save_call`, like all others.
        framework: see there.
        given: see there.
        work: does the work.
        background: see there.
        steps: optimizers whose steps are held back until all is copied, so that the caller goes on at once; or None.

    """
    ranks = coordinator_for(given)

    async def with_steps(job: SaveJob) -> T:
        return await work(replace(job, steps=steps))

    def checked() -> _Checked[SaveJob]:
        does, place = check(), MemoryBackend("publish()")
        options = SaveOptions(snapshot="eager" if steps is None else "lazy", progress=False, record=False)
        made = _check_save("prepare", place, states, framework, None, options, ranks, background=background)
        return replace(made, name=name, does=f"{does} with world_size={ranks.world_size}")

    return _save_call(_take_place(ranks, "begin", None, checked), with_steps)


def prepare_call(
    states: States, framework: Framework, options: SaveOptions | None, given: Coordinator | None
) -> SaveCall[None]:
    """Take this rank's place in the first part of a save, to an empty place that is forgotten after it."""
    ranks = coordinator_for(given)

    def check() -> _Checked[SaveJob]:
        chosen = with_overrides(SaveOptions, options, {})
        place = MemoryBackend("prepare()")
        checked = _check_save("prepare", place, states, framework, None, chosen, ranks, background=True)
        return replace(checked, name="prepare")

    return _save_call(_take_place(ranks, "begin", options, check), aprepare)


def choose_call(
    path: Path,
    states: States,
    codec: Codec | None,
    framework: Framework,
    storage_options: Mapping[str, Any] | None,
    given: Coordinator | None,
) -> SaveCall[list[Codec]]:
    """Take this rank's place in a trial of a codec, or of :func:`zstd`."""
    ranks, chosen = coordinator_for(given), list[Codec]()

    def check() -> _Checked[SaveJob]:
        if not isinstance(codec, Codec | None):
            raise InputError(f"codec={codec!r} is no bcp.extend.Codec; pass one, or None for bcp.zstd()")
        chosen.append(codec or zstd())
        options = with_overrides(SaveOptions, None, {"storage_options": storage_options})
        checked = _check_save("prepare", path, states, framework, None, options, ranks, background=False)
        name = f"trial of codec {chosen[0].name}"
        return replace(checked, name=name, does=f"{name} for {words_of(path)} with world_size={ranks.world_size}")

    async def work(job: SaveJob) -> list[Codec]:
        return await achoose(job, chosen[0])

    return _save_call(_take_place(ranks, "begin", None, check), work)


def load_call(
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: LoadOptions | None,
    given: Coordinator | None,
    **overrides: object,
) -> LoadCall[LoadResult]:
    """Take this rank's place in a load. Raises only if there is no way to tell the other ranks."""
    ranks = coordinator_for(given)

    def check() -> _Checked[LoadJob]:
        chosen = with_overrides(LoadOptions, options, overrides)
        common = _common("load", path, states, framework, role, chosen, ranks)
        device = exchange_device(chosen.exchange, ranks) if chosen.overlap_loading else None
        does = (
            f"load {common['path']} with world_size={ranks.world_size} overlap_loading={chosen.overlap_loading} "
            f"exchange={chosen.exchange} record={chosen.record}"
        )

        def job(operation: Operation) -> LoadJob:
            return LoadJob(**common, operation=operation, options=chosen, exchange_device=device)

        return _Checked(f"load of {common['path']}", does, chosen.timeout, job)

    place = _take_place(ranks, "open", options, check)

    async def run() -> LoadResult:
        return await _watched(await place.job(), aload)

    return LoadCall(place.name, run)


def _save_call(place: _Place[SaveJob], work: Callable[[SaveJob], Awaitable[T]]) -> SaveCall[T]:
    """Return the call that does the work of a save, or of a part of one."""
    watches: list[Watch] = []

    async def run(on_snapshot: OnSnapshot | None) -> T:
        job = await place.job()
        watches.append(job.watch)
        try:
            return await _watched(job.telling(on_snapshot), work)
        finally:
            watches.clear()  # it leads to the events

    return SaveCall(place.name, run, lambda: watches[0].progress() if watches else "")


async def _watched(job: J, work: Callable[[J], Awaitable[T]]) -> T:
    """Do the work of a job on the caller's device, followed by its watch."""
    with with_thread_setup(job.caller.enter), job.watch.running():
        result = await work(job)
        job.watch.result = result if isinstance(result, SaveResult | LoadResult) else None
        return result


def _take_place(ranks: Coordinator, step: str, options: object, check: Callable[[], _Checked[J]]) -> _Place[J]:
    """Take this rank's place in the next operation. If ``check`` raises, the first ``step`` tells the other ranks."""
    try:
        checked = check()
    except Exception as error:  # noqa: BLE001 -- raised again once the other ranks were told
        return _refused(ranks, step, timeout_of(options), error)
    made = checked.job(ranks.begin(checked.does, checked.timeout))

    async def job() -> J:
        return made

    return _Place(checked.name, job)


def _refused(ranks: Coordinator, step: str, timeout: float, error: Exception) -> _Place[Any]:
    """Take this rank's place only to tell the other ranks of an error in the first step, and to raise it."""
    operation = ranks.begin(REFUSED, timeout)
    errors = [error]

    async def job() -> NoReturn:
        # the caller's frame keeps the call, not the error
        await refuse_on_all_ranks(operation, step, ranks.rank, errors.pop())

    return _Place(REFUSED, job)


def _check_save(
    kind: Kind,
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: SaveOptions,
    ranks: Coordinator,
    *,
    background: bool,
) -> _Checked[SaveJob]:
    """Check the arguments of a save."""
    if options.snapshot == "lazy" and not background:
        raise InputError(
            "snapshot='lazy' needs async_checkpoint=True: training goes on while the state is copied in the background"
        )
    common = _common(kind, path, states, framework, role, options, ranks)
    codecs = [codec.name for codec in options.codecs]
    does = (
        f"save {common['path']} with world_size={ranks.world_size} overwrite={options.overwrite} "
        f"balance={options.balance} part_bytes={options.part_bytes} codecs={codecs} replicas={options.replicas} "
        f"record={options.record}"
    )

    def job(operation: Operation) -> SaveJob:
        return SaveJob(**common, operation=operation, options=options, folder=words_of(path).rpartition("/")[0])

    return _Checked(f"save to {common['path']}", does, options.timeout, job)


def _common(
    kind: Kind,
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: SaveOptions | LoadOptions,
    ranks: Coordinator,
) -> _Common:
    """Check the arguments that a save and a load have in common; return those fields of their jobs."""
    started = time.monotonic()
    check_kinds(states)
    if not states and ranks.world_size == 1:  # ranks of a larger job may be empty, but not all of them
        raise nothing_in(1)
    planner = _chooser(framework, states)
    cold = options.cold if isinstance(options, LoadOptions) else None
    place = place_of(path, role, options.storage_options, options.retries, cold=cold)
    where = place.path
    watch = Watch(
        kind,
        where,
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=options.step,
        observe=options.observe,
        started=started,
    )
    watch.tier = "memory" if isinstance(path, NearBackend) else "storage"
    return {
        "path": where,
        "place": f"{where} {id(path)}" if isinstance(path, Backend) else where,
        "backend": place.backend,
        "opened": place.opened,
        "beside": place.beside,
        "states": states,
        "planner": planner,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "watch": watch,
        "caller": Caller.here(),
    }


def require_asyncio() -> None:
    """Raise InputError if a coroutine of bcp runs on another event loop than asyncio's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise InputError(
            "bcp.asave and bcp.aload need asyncio's event loop (anyio on asyncio will do); elsewhere, on trio for "
            "instance, call bcp.save and bcp.load in a thread"
        ) from error


def _chooser(framework: Framework, states: States) -> Callable[[], Planner]:
    """Choose the planner later, where an error can be told to the other ranks."""
    if framework is None or isinstance(framework, str):
        return lambda: planner_for(framework, states)
    if not hasattr(framework, "local_shards"):
        raise InputError(f"framework={framework!r} is neither a name nor a planner; pass None to detect it")
    return lambda: framework


def check_kinds(states: States) -> None:
    """Raise InputError for states that are no mapping from kinds to states."""
    if not isinstance(states, Mapping):
        raise InputError(
            f"states is {type(states).__name__}, not a mapping; its keys are {', '.join(KINDS)}, any of them, as in "
            "bcp.save(path, {'model': model})"
        )
    unknown = sorted(map(str, set(states) - set(KINDS)))
    if unknown:
        raise InputError(
            f"states has {unknown}; its keys are {', '.join(KINDS)}. Other state, such as a scheduler, goes into "
            "states['extra_states']"
        )
    for kind in ("model", "optimizer"):  # None in one of the others is refused where its state is collected
        if kind in states and states[kind] is None:
            raise InputError(f"states[{kind!r}] is None; leave the key out, or pass the {kind}")
