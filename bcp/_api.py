"""The public calls: what ``import bcp`` gives for saving and loading, asynchronous and synchronous.

Whatever has to happen at the moment of the call, in the caller's thread (choosing planner, backend and coordinator,
taking this rank's place in the order of operations, marking the CUDA stream), is in ``_save_job`` and ``_load_job``.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Literal, overload

import anyio
from anyio.abc import TaskStatus

from bcp import _bridge
from bcp._job import LoadJob, SaveJob
from bcp._pending import Pending
from bcp._workflow import aload as _aload
from bcp._workflow import asave as _asave
from bcp.backends import child, resolve
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import InputError
from bcp.events import LoadReport, SaveReport
from bcp.options import LoadOptions, SaveOptions, with_overrides
from bcp.plan.shards import KINDS
from bcp.planners import planner as planner_for
from bcp.protocols import Backend, Coordinator, Planner, States
from bcp.stages.device import record_fence
from bcp.telemetry.timeline import Timeline

__all__ = ["aload", "asave", "load", "save"]

Path = str | os.PathLike[str] | Backend
Framework = str | Planner | None
Snapshot = Literal["eager", "lazy"] | None
ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
RESERVED = (*KINDS, "receipts")


def _nothing() -> None:
    """Tell nobody that training may go on: nobody waits for it."""


# -- asynchronous ----------------------------------------------------------------------------------


@overload
async def asave(
    path: Path,
    states: States,
    *,
    framework: Framework = ...,
    role: str | None = ...,
    async_checkpoint: Literal[False] = ...,
    overwrite: bool | None = ...,
    progress: bool | None = ...,
    snapshot: Snapshot = ...,
    options: SaveOptions | None = ...,
    coordinator: Coordinator | None = ...,
    task_status: TaskStatus[None] = ...,
) -> SaveReport: ...
@overload
async def asave(
    path: Path,
    states: States,
    *,
    framework: Framework = ...,
    role: str | None = ...,
    async_checkpoint: Literal[True],
    overwrite: bool | None = ...,
    progress: bool | None = ...,
    snapshot: Snapshot = ...,
    options: SaveOptions | None = ...,
    coordinator: Coordinator | None = ...,
    task_status: TaskStatus[None] = ...,
) -> Pending[SaveReport]: ...
async def asave(
    path: Path,
    states: States,
    *,
    framework: Framework = None,
    role: str | None = None,
    async_checkpoint: bool = False,
    overwrite: bool | None = None,
    progress: bool | None = None,
    snapshot: Snapshot = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> SaveReport | Pending[SaveReport]:
    """Save a checkpoint from a coroutine. Collective: every rank calls it, in the same order as its other operations.

    Returns when the checkpoint is committed and durable: all of it, or none. A save that fails, is cancelled or is
    killed leaves an older checkpoint at the same path as it was. Needs an asyncio loop (anyio on asyncio will do).

    Args:
        path: a directory, a URL, or a :class:`~bcp.protocols.Backend`.
        states: ``{"model": ..., "optimizer": ..., "dataloader": ..., "extra_states": ...}``, any subset. Modules and
            optimizers are passed as they are; (nested) dicts of tensors work too. The optimizer's names come from
            the model, so pass both.
        framework: ``"plain"``, ``"ddp"``, ``"fsdp2"``, a :class:`~bcp.protocols.Planner`, or None to detect it.
        role: keeps several models apart under one path, as in ``"actor"`` and ``"critic"`` (RL).
        async_checkpoint: return a :class:`~bcp.Pending` once the snapshot is safe: training may go on, storage is
            written in the background, on bcp's own loop.
        overwrite: replace a committed checkpoint at ``path``, atomically. Overrides ``options.overwrite``.
        progress: draw a bar on rank 0. Overrides ``options.progress``.
        snapshot: ``"lazy"``, with ``async_checkpoint=True``: return at once, copy while forward and backward run, and
            hold the optimizer's next step back until that is done. Overrides ``options.snapshot``.
        options: how to save.
        coordinator: how ranks agree; None: over the default process group's store, or alone.
        task_status: for ``await tg.start(partial(bcp.asave, path, states))``, which returns once the snapshot is safe.

    Raises:
        InputError: the states, options or path cannot be saved (:class:`StateError`, :class:`StateChangedError`);
            nothing has been written.
        ExistsError: a committed checkpoint is there and ``overwrite`` is not set; nothing has been written.
        CoverageError: the ranks' shards of a tensor leave a gap or overlap; nothing has been written.
        StageError: a stage failed; names stage and item.
        StorageError: storage failed.
        PeerError: another rank failed, died, or fell silent.

    """
    _require_asyncio()
    options = with_overrides(options or SaveOptions(), overwrite=overwrite, progress=progress, snapshot=snapshot)
    job = _save_job(path, states, framework, role, options, coordinator, background=async_checkpoint)
    if async_checkpoint:
        background = _bridge.start(
            lambda started: _asave(job(on_snapshot=started, goes_on=True)), what=f"save to {path}"
        )
        await background.astarted()
        return Pending(background)
    goes_on = task_status is not anyio.TASK_STATUS_IGNORED
    return await _asave(job(on_snapshot=task_status.started, goes_on=goes_on))


async def aload(
    path: Path,
    states: States,
    *,
    framework: Framework = None,
    role: str | None = None,
    strict: bool | None = None,
    overlap_loading: bool | None = None,
    progress: bool | None = None,
    options: LoadOptions | None = None,
    coordinator: Coordinator | None = None,
) -> LoadReport:
    """Load a checkpoint from a coroutine, in place, whatever parallelism saved it. Collective, as :func:`asave`.

    Tensors are filled where they are; an optimizer's states are created where it has none yet (no parameter and no
    hyper-parameter changes by that); values that are not tensors are set when every rank has all its tensors.

    Args:
        path: where it was saved.
        states: the same kinds of things as for :func:`asave`; any subset of what was saved.
        framework: as for :func:`asave`.
        role: as for :func:`asave`.
        strict: names must be the same in checkpoint and states. Overrides ``options.strict``.
        overlap_loading: ranks that want the same bytes share the reading. Overrides ``options.overlap_loading``.
        progress: draw a bar on rank 0. Overrides ``options.progress``.
        options: how to load.
        coordinator: as for :func:`asave`.

    Raises:
        NotACheckpointError: nothing that bcp wrote is at ``path``.
        UncommittedError: a save began there and never committed.
        FormatVersionError: the format is of another version.
        MismatchError: names, shapes or dtypes differ (:class:`FqnMismatchError`, :class:`ShapeMismatchError`,
            :class:`DtypeMismatchError`); the target has not been touched.
        CorruptError: stored bytes are not those that were saved; a note says if the target is half loaded.
        MissingCodecError: the checkpoint needs a codec that ``options.codecs`` lacks.
        StageError: a stage failed; names stage and item.
        PeerError: another rank failed, died, or fell silent.

    """
    options = with_overrides(
        options or LoadOptions(), strict=strict, overlap_loading=overlap_loading, progress=progress
    )
    _require_asyncio()
    return await _aload(_load_job(path, states, framework, role, options, coordinator))


# -- synchronous -----------------------------------------------------------------------------------


@overload
def save(
    path: Path,
    states: States,
    *,
    framework: Framework = ...,
    role: str | None = ...,
    async_checkpoint: Literal[False] = ...,
    overwrite: bool | None = ...,
    progress: bool | None = ...,
    snapshot: Snapshot = ...,
    options: SaveOptions | None = ...,
    coordinator: Coordinator | None = ...,
) -> SaveReport: ...
@overload
def save(
    path: Path,
    states: States,
    *,
    framework: Framework = ...,
    role: str | None = ...,
    async_checkpoint: Literal[True],
    overwrite: bool | None = ...,
    progress: bool | None = ...,
    snapshot: Snapshot = ...,
    options: SaveOptions | None = ...,
    coordinator: Coordinator | None = ...,
) -> Pending[SaveReport]: ...
def save(
    path: Path,
    states: States,
    *,
    framework: Framework = None,
    role: str | None = None,
    async_checkpoint: bool = False,
    overwrite: bool | None = None,
    progress: bool | None = None,
    snapshot: Snapshot = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
) -> SaveReport | Pending[SaveReport]:
    """Save a checkpoint from ordinary code, from a notebook, or inside a running event loop (which it blocks).

    With ``async_checkpoint=True`` it blocks only until the snapshot is safe and returns a :class:`~bcp.Pending`. A save
    that nobody waits for is finished before the process exits. Ctrl-C cancels: nothing is committed. Arguments and
    errors are those of :func:`asave`.
    """
    options = with_overrides(options or SaveOptions(), overwrite=overwrite, progress=progress, snapshot=snapshot)
    job = _save_job(path, states, framework, role, options, coordinator, background=async_checkpoint)
    if not async_checkpoint:
        return _bridge.run(lambda: _asave(job(on_snapshot=_nothing, goes_on=False)))
    background = _bridge.start(lambda started: _asave(job(on_snapshot=started, goes_on=True)), what=f"save to {path}")
    background.wait_started()
    return Pending(background)


def load(
    path: Path,
    states: States,
    *,
    framework: Framework = None,
    role: str | None = None,
    strict: bool | None = None,
    overlap_loading: bool | None = None,
    progress: bool | None = None,
    options: LoadOptions | None = None,
    coordinator: Coordinator | None = None,
) -> LoadReport:
    """Load a checkpoint from ordinary code. Arguments and errors are those of :func:`aload`."""
    options = with_overrides(
        options or LoadOptions(), strict=strict, overlap_loading=overlap_loading, progress=progress
    )
    job = _load_job(path, states, framework, role, options, coordinator)
    return _bridge.run(lambda: _aload(job))


# -- the moment of the call ------------------------------------------------------------------------


def _save_job(
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


def _load_job(
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


def _require_asyncio() -> None:
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
        raise InputError(f"framework={framework!r} is neither a name nor a planner")
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
