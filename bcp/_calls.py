"""The moment of a call, in the caller's thread; the same for the synchronous and the asynchronous calls.

Arguments are checked, planner, backend and coordinator are chosen, the caller's device and streams are noted, and this
rank takes its place in the order of operations.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from bcp._agree import refuse_on_all_ranks
from bcp._job import LoadJob, SaveJob
from bcp._workflow import aload, aprepare, asave
from bcp.backends import MemoryBackend, child, resolve, shown
from bcp.coordinators import coordinator as coordinator_for
from bcp.coordinators.process_group import exchange_device
from bcp.errors import InputError
from bcp.events import LoadReport, SaveReport
from bcp.options import LoadOptions, SaveOptions, timeout_of, with_overrides
from bcp.plan.shards import KINDS
from bcp.planners import planner as planner_for
from bcp.protocols import REFUSED, Backend, Coordinator, Planner, States
from bcp.runtime.device import Caller
from bcp.runtime.threads import with_thread_setup
from bcp.telemetry.watch import Kind, Watch

__all__ = ["Call", "Framework", "Path", "load_call", "prepare_call", "require_asyncio", "save_call"]

T = TypeVar("T")
Path = str | os.PathLike[str] | Backend
Framework = str | Planner | None
ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
RESERVED = (*KINDS, "receipts")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call of the public API on one rank, which has its place among the operations of all ranks.

    A call whose arguments were refused has its place, too: it tells the other ranks, and raises the error.

    Attributes:
        what: names the call in messages.
        run: does the work. A save's takes ``on_snapshot`` and ``returns_after_snapshot`` of :class:`~bcp._job.SaveJob`.
    """

    what: str
    run: Callable[..., Awaitable[T]]


@dataclass(frozen=True, slots=True)
class _Checked:
    """A call whose arguments are right: its name, the words all ranks agree on, the job but for its operation."""

    name: str
    does: str
    job: Callable[..., Any]
    timeout: float


def save_call(
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: SaveOptions | None,
    given: Coordinator | None,
    *,
    background: bool,
    **overrides: object,
) -> Call[SaveReport]:
    """Take this rank's place in a save. Raises only where there is no way to tell the other ranks."""
    ranks = coordinator_for(given)

    def check() -> _Checked:
        chosen = with_overrides(SaveOptions, options, overrides)
        return _check_save("save", path, states, framework, role, chosen, ranks, background=background)

    return _take_place(ranks, "begin", options, check, asave)


def prepare_call(
    states: States, framework: Framework, options: SaveOptions | None, given: Coordinator | None
) -> Call[None]:
    """Take this rank's place in the first part of a save, to an empty place that is forgotten after it."""
    ranks = coordinator_for(given)

    def check() -> _Checked:
        chosen = with_overrides(SaveOptions, options, {})
        place = MemoryBackend("prepare()")
        checked = _check_save("prepare", place, states, framework, None, chosen, ranks, background=True)
        return replace(checked, name="prepare")

    return _take_place(ranks, "begin", options, check, aprepare)


def load_call(
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: LoadOptions | None,
    given: Coordinator | None,
    **overrides: object,
) -> Call[LoadReport]:
    """Take this rank's place in a load. Raises only where there is no way to tell the other ranks."""
    ranks = coordinator_for(given)

    def check() -> _Checked:
        chosen = with_overrides(LoadOptions, options, overrides)
        common = _common("load", path, states, framework, role, chosen, ranks)
        device = exchange_device(chosen.exchange, ranks) if chosen.overlap_loading else None
        does = (
            f"load {common['path']} with world_size={ranks.world_size} overlap_loading={chosen.overlap_loading} "
            f"exchange={chosen.exchange} record={chosen.record}"
        )
        job = partial(LoadJob, **common, options=chosen, exchange_device=device)
        return _Checked(f"load of {common['path']}", does, job, chosen.timeout)

    return _take_place(ranks, "open", options, check, aload)


def _take_place(
    ranks: Coordinator, step: str, options: object, check: Callable[[], _Checked], work: Callable[[Any], Awaitable[T]]
) -> Call[T]:
    """Take this rank's place in the next operation, whether or not its arguments are right.

    Args:
        ranks: the ranks that take part.
        step: name of the operation's first step, in which errors are told.
        options: as the caller passed them.
        check: checks the arguments.
        work: does the work of a job.

    """
    try:
        checked = check()
    except Exception as error:  # noqa: BLE001 -- raised again once the other ranks were told
        return _refused(ranks, step, timeout_of(options), error)
    operation = ranks.begin(checked.does, checked.timeout)

    async def run(**moment: object) -> T:
        job = checked.job(operation=operation, **moment)
        job.watch.background = moment.get("returns_after_snapshot", False)
        with with_thread_setup(job.caller.enter), job.watch.running():
            report = await work(job)
            job.watch.report = report
            return report

    return Call(checked.name, run)


def _refused(ranks: Coordinator, step: str, timeout: float, error: Exception) -> Call[Any]:
    """Take this rank's place only to tell the other ranks of an error in the first step, and to raise it."""
    operation = ranks.begin(REFUSED, timeout)
    errors = [error]

    async def run(**_: object) -> NoReturn:
        await refuse_on_all_ranks(
            operation, step, ranks.rank, errors.pop()
        )  # the caller's frame keeps the call, not the error

    return Call(REFUSED, run)


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
) -> _Checked:
    """Check the arguments of a save."""
    if options.snapshot == "lazy" and not background:
        raise InputError(
            "snapshot='lazy' needs async_checkpoint=True: training goes on while the state is copied in the background"
        )
    common = _common(kind, path, states, framework, role, options, ranks)
    codecs = [codec.name for codec in options.codecs]
    does = (
        f"save {common['path']} with world_size={ranks.world_size} overwrite={options.overwrite} "
        f"balance={options.balance} part_bytes={options.part_bytes} codecs={codecs} "
        f"record={options.record}"
    )
    job = partial(SaveJob, **common, options=options)
    return _Checked(f"save to {common['path']}", does, job, options.timeout)


def _common(
    kind: Kind,
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: SaveOptions | LoadOptions,
    ranks: Coordinator,
) -> dict[str, Any]:
    """Check the arguments that a save and a load have in common; return those fields of their jobs."""
    started = time.monotonic()
    _check_states(states)
    planner = _chooser(framework, states)
    where, backend, opened = _place(path, role, options)
    watch = Watch(
        kind,
        where,
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=options.step,
        observe=options.observe,
        started=started,
    )
    return {
        "path": where,
        "place": f"{where} {id(path)}" if isinstance(path, Backend) else where,
        "backend": backend,
        "opened": opened,
        "states": states,
        "planner": planner,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "watch": watch,
        "caller": Caller.here(),
    }


def _words(path: Path) -> str:
    """Name the place: the same on every rank, so without what a backend's repr may say of this one."""
    if isinstance(path, Backend):
        return type(path).__name__
    return shown(str(path)) if "://" in str(path) else str(pathlib.Path(path).absolute())


def require_asyncio() -> None:
    """Say what is wrong where a coroutine of bcp runs on another loop than asyncio's."""
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


def _check_states(states: States) -> None:
    """Refuse states that are no mapping from kinds."""
    if not isinstance(states, Mapping):
        raise InputError(
            f"states is {type(states).__name__}, not a mapping; its keys are {', '.join(KINDS)}, any of them, as in "
            "bcp.save(path, {'model': model})"
        )
    unknown = sorted(map(str, set(states) - set(KINDS)))
    if unknown or not states:
        raise InputError(
            f"states has {unknown or 'nothing'}; its keys are {', '.join(KINDS)}, any subset of them; a rank that "
            "holds nothing passes {'model': {}}"
        )


def _place(
    path: Path, role: str | None, options: SaveOptions | LoadOptions
) -> tuple[str, Backend, AbstractAsyncContextManager[object]]:
    """Return where the checkpoint is, in words and as storage, and what closes it; after a look at the arguments."""
    if role is not None and (role in RESERVED or not ROLE.fullmatch(str(role))):
        raise InputError(
            f"role={role!r} cannot name a directory of a checkpoint: use letters, digits, '-' and '_', and none of "
            f"{', '.join(RESERVED)}"
        )
    backend, where = resolve(path, options.storage_options, options.retries), _words(path)
    opened = nullcontext() if isinstance(path, Backend) else aclosing(backend)
    return (where, backend, opened) if role is None else (f"{where}/{role}", child(backend, role), opened)
