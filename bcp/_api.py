"""The public calls that save and load, synchronous and asynchronous.

One rule separates keywords from options. Keywords describe a single call: the states, their place, the ranks, and
whether training waits. Options describe a job, are made once and passed to every call. A keyword that is an option as
well overrides it for one call; None keeps the option.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, overload

import anyio
from anyio.abc import TaskStatus

from bcp._calls import load_call, prepare_call, require_asyncio, save_call
from bcp._pending import Pending
from bcp._plain import plain, warn_if_nothing
from bcp.backends.place import Path
from bcp.errors import BcpError
from bcp.events import LoadResult, SaveResult
from bcp.options import LoadOptions, SaveOptions
from bcp.planners import Framework
from bcp.protocols import Coordinator, States
from bcp.runtime import bridge as _bridge

__all__ = ["aload", "aprepare", "asave", "load", "prepare", "save", "save_async"]

Snapshot = Literal["eager", "lazy"] | None


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
) -> SaveResult: ...
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
) -> Pending[SaveResult]: ...
@overload
async def asave(
    path: Path,
    states: States,
    *,
    framework: Framework = ...,
    role: str | None = ...,
    async_checkpoint: bool,
    overwrite: bool | None = ...,
    progress: bool | None = ...,
    snapshot: Snapshot = ...,
    options: SaveOptions | None = ...,
    coordinator: Coordinator | None = ...,
    task_status: TaskStatus[None] = ...,
) -> SaveResult | Pending[SaveResult]: ...
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
) -> SaveResult | Pending[SaveResult]:
    """Save a checkpoint from a coroutine.

    The call is collective, as :func:`save`, whose arguments, promises and errors it has. It needs asyncio's event loop;
    anyio on asyncio will do. It returns when the checkpoint is committed and durable.

    Args:
        path: as for :func:`save`.
        states: as for :func:`save`.
        framework: as for :func:`save`.
        role: as for :func:`save`.
        async_checkpoint: return a :class:`~bcp.Pending` once the snapshot is safe.
        overwrite: as for :func:`save`.
        progress: as for :func:`save`.
        snapshot: as for :func:`save`.
        options: as for :func:`save`.
        coordinator: as for :func:`save`.
        task_status: for ``await tg.start(partial(bcp.asave, path, states))``, which returns once the snapshot is safe.

    Returns:
        The figures of the save on this rank, or the :class:`~bcp.Pending` save.

    Example::

        result = await bcp.asave("ckpt/step-200", states)
        print(result.nbytes, result.seconds)

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
            background = _bridge.start(call.run, name=call.name)
            background.progress = call.progress
            await background.astarted()
            return Pending(background)
        return await call.run(None if task_status is anyio.TASK_STATUS_IGNORED else task_status.started)
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
) -> LoadResult:
    """Load a checkpoint of any parallel layout into live states, from a coroutine.

    The call is collective, as :func:`load`, whose arguments, promises, results and errors it has. It needs asyncio's
    event loop.

    Example::

        result = await bcp.aload("ckpt/step-100", states)
        print(result.read_nbytes, result.seconds)

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
        result = await call.run()
    except BcpError as error:
        raise plain(error) from error.__cause__
    warn_if_nothing(result, 2)
    return result


async def aprepare(
    states: States,
    *,
    framework: Framework = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
) -> Pending[None]:
    """Make the first asynchronous save of these states as fast as the later ones, from a coroutine.

    The call is collective, as :func:`save`. It does the one-time work of a first save: the ranks agree on a plan
    (paper sec. 4.1), and this rank allocates and touches its staging memory. It writes nothing.

    It returns after some milliseconds, when the layout of this rank's state is known. The rest goes on in the
    background, beside training. Waiting for the :class:`~bcp.Pending` is not needed.

    Call it when the optimizer has its states, after the first step or a load. A state without them has another layout.

    Args:
        states: the states of the saves to come, as for :func:`save`.
        framework: as for :func:`save`.
        options: options of the saves to come; with ``budget_bytes``, only so much memory is prepared.
        coordinator: as for :func:`save`.

    Returns:
        The preparation, which is not waited for.

    Raises:
        InputError: the states cannot be saved.
        CoverageError: the ranks' shards of a tensor leave a gap or overlap.
        PeerError: another rank failed, died or fell silent.

    Example::

        await bcp.aprepare(states)
        pending = await bcp.asave("ckpt/step-200", states, async_checkpoint=True)
        result = await pending

    """
    try:
        require_asyncio()
        call = prepare_call(states, framework, options, coordinator)
        background = _bridge.start(call.run, name=call.name)
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
) -> SaveResult: ...
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
) -> Pending[SaveResult]: ...
@overload
def save(
    path: Path,
    states: States,
    *,
    framework: Framework = ...,
    role: str | None = ...,
    async_checkpoint: bool,
    overwrite: bool | None = ...,
    progress: bool | None = ...,
    snapshot: Snapshot = ...,
    options: SaveOptions | None = ...,
    coordinator: Coordinator | None = ...,
) -> SaveResult | Pending[SaveResult]: ...
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
) -> SaveResult | Pending[SaveResult]:
    """Save a checkpoint from ordinary code, from a notebook, or inside a running event loop, which it blocks.

    The call is collective: every rank makes it, in the same order as its other saves and loads.

    It returns when the checkpoint is committed and durable. A save that fails, is cancelled or is killed leaves an
    older checkpoint at the same path unchanged. Ctrl-C cancels the save, and nothing is committed.

    Args:
        path: a directory, a URL, or a :class:`~bcp.protocols.Backend`.
        states: ``{"model": ..., "optimizer": ..., "dataloader": ..., "extra_states": ...}``, any subset. Values are
            modules, optimizers, or nested dicts of tensors. Pass model and optimizer together: the names of optimizer
            states come from the model.
        framework: name of the training framework, a :class:`~bcp.protocols.Planner`, or None to detect it.
        role: name of one of several models under one path, as in ``"actor"`` and ``"critic"``.
        async_checkpoint: return a :class:`~bcp.Pending` once the snapshot is safe. Storage is written in the
            background, on bcp's own event loop. :func:`save_async` is the same call.
        overwrite: replace a committed checkpoint at ``path`` atomically. Overrides ``options.overwrite``.
        progress: draw a progress bar on rank 0. Overrides ``options.progress``.
        snapshot: ``"lazy"`` with ``async_checkpoint=True``: return at once and copy while forward and backward run.
            The optimizer's next step waits for the copy. Overrides ``options.snapshot``.
        options: options of the job's saves.
        coordinator: agreement between the ranks. None: a tree over the default process group, or one rank alone.

    Returns:
        The figures of the save on this rank, or the :class:`~bcp.Pending` save.

    Raises:
        InputError: states, options or path cannot be saved (:class:`StateError`, :class:`StateChangedError`); nothing
            has been written. The other ranks raise :class:`PeerError` at once.
        ExistsError: a committed checkpoint is at ``path`` and ``overwrite`` is not set; nothing has been written.
        CoverageError: the ranks' shards of a tensor leave a gap or overlap; nothing has been written.
        StageError: a stage failed; names stage and item.
        StorageError: storage failed.
        PeerError: another rank failed, died or fell silent.

    Example::

        result = bcp.save("ckpt/step-200", states)
        print(result.nbytes, result.seconds)

    """
    if async_checkpoint:
        return save_async(
            path,
            states,
            framework=framework,
            role=role,
            overwrite=overwrite,
            progress=progress,
            snapshot=snapshot,
            options=options,
            coordinator=coordinator,
        )
    try:
        call = save_call(
            path,
            states,
            framework,
            role,
            options,
            coordinator,
            background=False,
            overwrite=overwrite,
            progress=progress,
            snapshot=snapshot,
        )
        return _bridge.run(partial(call.run, None))
    except BcpError as error:
        raise plain(error) from error.__cause__


def save_async(
    path: Path,
    states: States,
    *,
    framework: Framework = None,
    role: str | None = None,
    overwrite: bool | None = None,
    progress: bool | None = None,
    snapshot: Snapshot = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
) -> Pending[SaveResult]:
    """Save a checkpoint in the background, from ordinary code.

    It blocks until the snapshot is safe: training may then change the states. A save without a waiter is finished
    before the process exits. Arguments and errors are those of :func:`save`; the :class:`~bcp.Pending` raises errors of
    the background. ``bcp.save(..., async_checkpoint=True)`` is the same call, in the paper's spelling.

    Example::

        pending = bcp.save_async("ckpt/step-200", states)
        model(torch.rand(2, 8)).sum().backward()
        optimizer.step()  # the checkpoint has the weights from before this step
        result = pending.wait()

    """
    try:
        call = save_call(
            path,
            states,
            framework,
            role,
            options,
            coordinator,
            background=True,
            overwrite=overwrite,
            progress=progress,
            snapshot=snapshot,
        )
        background = _bridge.start(call.run, name=call.name)
        background.progress = call.progress
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
) -> LoadResult:
    """Load a checkpoint of any parallel layout into live states, from ordinary code.

    The call is collective, as :func:`save`. Tensors are filled in place. Optimizer states that do not exist yet are
    created, which changes no parameter and no hyper-parameter. Values that are not tensors are set when every rank has
    all its tensors.

    Args:
        path: the path of the save; or files of another library: a folder of Hugging Face,
            ``torch.distributed.checkpoint``, DeepSpeed or Megatron-core, a safetensors file, a file of ``torch.save``.
        states: the same kinds as for :func:`save`; any subset of those that were saved. Parameters and persistent
            buffers of a module may be on the meta device, also sharded by FSDP2 or TP. Each that is loaded gets memory
            of its own: on the CPU, or its shard on the device of the mesh. It keeps its identity, so that an optimizer
            may be made before the load. A load that fails changes nothing of them.
        framework: as for :func:`save`.
        role: as for :func:`save`.
        strict: names must be the same in checkpoint and states, and the checkpoint must have all keys of
            ``extra_states`` and ``dataloader``. Overrides ``options.strict``.
        overlap_loading: ranks that need the same bytes share the reading. Overrides ``options.overlap_loading``.
        progress: draw a progress bar on rank 0. Overrides ``options.progress``.
        options: options of the job's loads.
        coordinator: as for :func:`save`.

    Returns:
        The figures of the load on this rank.

    Raises:
        InputError: an argument cannot be used; the target has not been touched. The other ranks raise
            :class:`PeerError` at once.
        NotACheckpointError: nothing that bcp can read is at ``path``.
        UncommittedError: a save began there and never committed.
        FormatVersionError: the format is of another version.
        MismatchError: names, shapes or dtypes differ (:class:`FqnMismatchError`, :class:`ShapeMismatchError`,
            :class:`DtypeMismatchError`); the target has not been touched. Hyper-parameters that were saved as tensors,
            and values of targets that share memory, are compared while they are loaded. A note then says that the
            target is half loaded.
        StateError: a leaf cannot be loaded into, as a tensor that has an element twice, or a non-persistent buffer on
            the meta device; the target has not been touched.
        CorruptError: stored bytes are not those that were saved; a note says if the target is half loaded.
        MissingCodecError: the checkpoint needs a codec that ``options.codecs`` lacks.
        StageError: a stage failed; names stage and item.
        PeerError: another rank failed, died or fell silent.

    Warns:
        NothingLoadedWarning: with ``strict=False``, none of the names of a kind is in the checkpoint.

    Example::

        result = bcp.load("ckpt/step-100", states)
        bcp.load("ckpt/step-100", {"model": model})  # a subset

    """
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
        result = _bridge.run(call.run)
    except BcpError as error:
        raise plain(error) from error.__cause__
    warn_if_nothing(result, 2)
    return result


def prepare(
    states: States,
    *,
    framework: Framework = None,
    options: SaveOptions | None = None,
    coordinator: Coordinator | None = None,
) -> Pending[None]:
    """Make the first asynchronous save of these states as fast as the later ones, from ordinary code.

    Arguments, promises and errors are those of :func:`aprepare`.

    Example::

        bcp.prepare(states)
        pending = bcp.save_async("ckpt/step-200", states)
        result = pending.wait()

    """
    try:
        call = prepare_call(states, framework, options, coordinator)
        background = _bridge.start(call.run, name=call.name)
        background.progress = call.progress
        background.wait_started()
    except BcpError as error:
        raise plain(error) from error.__cause__
    return Pending(background)
