"""The moment of a call, in the caller's thread.

Choosing planner, backend and coordinator, taking this rank's place in the order of operations, marking the CUDA stream:
what has to happen before anything else does, and is the same for the synchronous and the asynchronous calls.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial

from bcp._job import LoadJob, SaveJob
from bcp.backends import MemoryBackend, child, resolve
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import InputError
from bcp.options import LoadOptions, SaveOptions
from bcp.plan.shards import KINDS
from bcp.planners import planner as planner_for
from bcp.protocols import Backend, Coordinator, Planner, States
from bcp.stages.device import record_fence
from bcp.telemetry.timeline import Timeline

__all__ = ["Framework", "Path", "load_job", "prepare_job", "require_asyncio", "save_job"]

Path = str | os.PathLike[str] | Backend
Framework = str | Planner | None
ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
RESERVED = (*KINDS, "receipts")


def save_job(
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: SaveOptions,
    given: Coordinator | None,
    *,
    background: bool,
) -> Callable[..., SaveJob]:
    """Prepare a save; what is left open is whom to tell that training may go on."""
    if options.snapshot == "lazy" and not background:
        raise InputError(
            "snapshot='lazy' needs async_checkpoint=True: training goes on while the state is copied in the background"
        )
    where, backend, opened = _place(path, states, role)
    ranks = coordinator_for(given)
    codecs = [codec.name for codec in options.codecs]
    what = (
        f"save {where} with world_size={ranks.world_size} overwrite={options.overwrite} balance={options.balance} "
        f"part_bytes={options.part_bytes} codecs={codecs}"
    )
    return partial(
        SaveJob,
        path=where,
        place=f"{where} {id(path)}" if isinstance(path, Backend) else where,
        backend=backend,
        opened=opened,
        states=states,
        planner=_chooser(framework, states),
        rank=ranks.rank,
        world_size=ranks.world_size,
        operation=ranks.begin(what, options.timeout),
        clock=Timeline(options.observe),
        options=options,
        fence=record_fence(),
    )


def prepare_job(
    states: States, framework: Framework, options: SaveOptions, given: Coordinator | None
) -> Callable[..., SaveJob]:
    """Prepare the first part of a save, to an empty place that is forgotten after it."""
    return save_job(MemoryBackend("prepare()"), states, framework, None, options, given, background=True)


def load_job(
    path: Path,
    states: States,
    framework: Framework,
    role: str | None,
    options: LoadOptions,
    given: Coordinator | None,
) -> LoadJob:
    """Prepare a load."""
    where, backend, opened = _place(path, states, role)
    ranks = coordinator_for(given)
    what = f"load {where} with world_size={ranks.world_size} overlap_loading={options.overlap_loading}"
    return LoadJob(
        path=where,
        place=f"{where} {id(path)}" if isinstance(path, Backend) else where,
        backend=backend,
        opened=opened,
        states=states,
        planner=_chooser(framework, states),
        rank=ranks.rank,
        world_size=ranks.world_size,
        operation=ranks.begin(what, options.timeout),
        clock=Timeline(options.observe),
        options=options,
    )


def _words(path: Path) -> str:
    """Name the place: the same on every rank, so without what a backend's repr may say of this one."""
    if isinstance(path, Backend):
        return type(path).__name__
    return str(path) if "://" in str(path) else str(pathlib.Path(path).absolute())


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


def _place(path: Path, states: States, role: str | None) -> tuple[str, Backend, AbstractAsyncContextManager[object]]:
    """Return where the checkpoint is, in words and as storage, and what closes it; after a look at the arguments."""
    if not isinstance(states, Mapping):
        raise InputError(
            f"states is {type(states).__name__}, not a mapping; its keys are {', '.join(KINDS)}, any of them, as in "
            "bcp.save(path, {'model': model})"
        )
    unknown = sorted(map(str, set(states) - set(KINDS)))
    if unknown or not states:
        raise InputError(f"states has {unknown or 'nothing'}; its keys are {', '.join(KINDS)}, any subset of them")
    if role is not None and (role in RESERVED or not ROLE.fullmatch(str(role))):
        raise InputError(
            f"role={role!r} cannot name a directory of a checkpoint: use letters, digits, '-' and '_', and none of "
            f"{', '.join(RESERVED)}"
        )
    backend = resolve(path)
    where = _words(path)
    opened = nullcontext() if isinstance(path, Backend) else aclosing(backend)
    return (where, backend, opened) if role is None else (f"{where}/{role}", child(backend, role), opened)
