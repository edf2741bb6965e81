"""The public calls: what ``import bcp`` gives for saving and loading, asynchronous and synchronous."""

from __future__ import annotations

from typing import Literal, overload

import anyio
from anyio.abc import TaskStatus

from bcp._calls import Framework, Path, load_call, prepare_call, require_asyncio, save_call
from bcp._pending import Pending
from bcp._plain import plain, warn_if_nothing
from bcp.errors import BcpError
from bcp.events import LoadReport, SaveReport
from bcp.options import LoadOptions, SaveOptions
from bcp.protocols import Coordinator, States
from bcp.runtime import bridge as _bridge

__all__ = ["aload", "aprepare", "asave", "load", "prepare", "save"]

Snapshot = Literal["eager", "lazy"] | None


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
            nothing has been written. The other ranks raise :class:`PeerError` at once.
        ExistsError: a committed checkpoint is there and ``overwrite`` is not set; nothing has been written.
        CoverageError: the ranks' shards of a tensor leave a gap or overlap; nothing has been written.
        StageError: a stage failed; names stage and item.
        StorageError: storage failed.
        PeerError: another rank failed, died, or fell silent.

    """
    try:
        require_asyncio()
        call = save_call(
            path,
            states,
            framework,
            role,
            options,
            coordinator,
            background=async_checkpoint,
            overwrite=overwrite,
            progress=progress,
            snapshot=snapshot,
        )
        if async_checkpoint:
            background = _bridge.start(
                lambda started: call.run(on_snapshot=started, returns_after_snapshot=True), what=call.what
            )
            await background.astarted()
            return Pending(background)
        returns_after_snapshot = task_status is not anyio.TASK_STATUS_IGNORED
        return await call.run(on_snapshot=task_status.started, returns_after_snapshot=returns_after_snapshot)
    except BcpError as error:
        raise plain(error) from error.__cause__


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
        strict: names must be the same in checkpoint and states, and keys of ``extra_states`` and ``dataloader`` must be
            in the checkpoint. Overrides ``options.strict``.
        overlap_loading: ranks that want the same bytes share the reading. Overrides ``options.overlap_loading``.
        progress: draw a bar on rank 0. Overrides ``options.progress``.
        options: how to load.
        coordinator: as for :func:`asave`.

    Raises:
        InputError: an argument cannot be used; the target has not been touched. The other ranks raise
            :class:`PeerError` at once.
        NotACheckpointError: nothing that bcp wrote is at ``path``.
        UncommittedError: a save began there and never committed.
        FormatVersionError: the format is of another version.
        MismatchError: names, shapes or dtypes differ (:class:`FqnMismatchError`, :class:`ShapeMismatchError`,
            :class:`DtypeMismatchError`); the target has not been touched. Hyper-parameters that were saved as tensors,
            and values of targets that share memory, are compared when they are loaded: a note says that the target is
            half loaded by then.
        StateError: a leaf cannot be loaded into, as a tensor that has an element twice; the target has not been
            touched.
        CorruptError: stored bytes are not those that were saved; a note says if the target is half loaded.
        MissingCodecError: the checkpoint needs a codec that ``options.codecs`` lacks.
        StageError: a stage failed; names stage and item.
        PeerError: another rank failed, died, or fell silent.

    Warns:
        NothingLoadedWarning: with ``strict=False``, none of the names of a kind is in the checkpoint.

    """
    try:
        require_asyncio()
        call = load_call(
            path,
            states,
            framework,
            role,
            options,
            coordinator,
            strict=strict,
            overlap_loading=overlap_loading,
            progress=progress,
        )
        report = await call.run()
    except BcpError as error:
        raise plain(error) from error.__cause__
    warn_if_nothing(report, 2)
    return report


async def aprepare(
    states: States,
    *,
    framework: Framework = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
) -> Pending[None]:
    """Make the first asynchronous save of these states as fast as the later ones. Collective, as :func:`asave`.

    What a first save does once is done now: the ranks agree on who writes what (paper sec. 4.1), and this rank's
    staging memory is allocated and touched, which takes longer than the copy that it is for. Returns once it is known
    what this rank holds, after some milliseconds; the rest goes on in the background, beside training. Waiting for the
    :class:`~bcp.Pending` is not needed. Writes nothing.

    Call it when the optimizer has its states, after the first step or a load: without them it prepares another layout.

    Args:
        states: what will be saved, as for :func:`asave`.
        framework: as for :func:`asave`.
        options: those of the saves to come; with ``budget_bytes``, only so much memory is prepared.
        coordinator: as for :func:`asave`.

    Raises:
        InputError: the states cannot be saved.
        CoverageError: the ranks' shards of a tensor leave a gap or overlap.
        PeerError: another rank failed, died, or fell silent.

    """
    try:
        require_asyncio()
        call = prepare_call(states, framework, options, coordinator)
        background = _bridge.start(
            lambda started: call.run(on_snapshot=started, returns_after_snapshot=True), what=call.what
        )
        await background.astarted()
    except BcpError as error:
        raise plain(error) from error.__cause__
    return Pending(background)


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
    try:
        call = save_call(
            path,
            states,
            framework,
            role,
            options,
            coordinator,
            background=async_checkpoint,
            overwrite=overwrite,
            progress=progress,
            snapshot=snapshot,
        )
        if not async_checkpoint:
            return _bridge.run(lambda: call.run(on_snapshot=_nothing, returns_after_snapshot=False))
        background = _bridge.start(
            lambda started: call.run(on_snapshot=started, returns_after_snapshot=True), what=call.what
        )
        background.wait_started()
    except BcpError as error:
        raise plain(error) from error.__cause__
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
    try:
        call = load_call(
            path,
            states,
            framework,
            role,
            options,
            coordinator,
            strict=strict,
            overlap_loading=overlap_loading,
            progress=progress,
        )
        report = _bridge.run(call.run)
    except BcpError as error:
        raise plain(error) from error.__cause__
    warn_if_nothing(report, 2)
    return report


def prepare(
    states: States,
    *,
    framework: Framework = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
) -> Pending[None]:
    """Make the first asynchronous save of these states as fast as the later ones, from ordinary code.

    Arguments, promises and errors are those of :func:`aprepare`.
    """
    try:
        call = prepare_call(states, framework, options, coordinator)
        background = _bridge.start(
            lambda started: call.run(on_snapshot=started, returns_after_snapshot=True), what=call.what
        )
        background.wait_started()
    except BcpError as error:
        raise plain(error) from error.__cause__
    return Pending(background)
