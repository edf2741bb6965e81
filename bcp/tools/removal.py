"""Delete one checkpoint: its metadata first, and nothing of other saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import Any

from bcp._deletion import Committed, delete_unnamed, read_committed, remove_folders, withdraw
from bcp._text import shown
from bcp.backends import LocalBackend, child
from bcp.backends.cooled import above, cooled
from bcp.backends.place import Path, place_of
from bcp.backends.prefixed import PrefixedBackend
from bcp.backends.siblings import referring
from bcp.errors import BcpError, ExistsError, InputError, NotACheckpointError, UncommittedError
from bcp.format.metadata import METADATA_KEY, is_over_foreign, operation_of
from bcp.protocols import Backend, ObjectInfo
from bcp.read.opening import read_metadata
from bcp.runs.latest import folder_of
from bcp.runs.ledger import Ledger
from bcp.runs.names import step_of
from bcp.runtime.threads import in_thread
from bcp.telemetry.store import FOLDER as TELEMETRY
from bcp.tools.calls import called

__all__ = ["RemoveResult", "aremove", "remove"]


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """The outcome of :func:`bcp.tools.remove`.

    Attributes:
        path: of the checkpoint, absolute.
        operation: id of the save that had made it; "" if its metadata could not be decoded.
        files: number of deleted files, with the metadata.
        nbytes: bytes of these files.
        kept: keys of files that stay, because another save or another library has written them.
    """

    path: str
    operation: str
    files: int
    nbytes: int
    kept: tuple[str, ...]


def remove(
    path: Path,
    *,
    role: str | None = None,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> RemoveResult:
    """Delete one committed checkpoint.

    The metadata go first, so a reader sees a whole checkpoint or none. Only files of the save that is named by the
    metadata go, and recordings. Files of any other save may belong to a save that runs now: they stay. So do files of
    another library: of a checkpoint that was imported without a copy, only ``metadata.arrow`` goes. Data files that
    :func:`bcp.cool` has moved go with the others.

    A training job may go on in the run. Its ledger drops the step at its next start.

    Args:
        path: the checkpoint, as for :class:`bcp.Checkpoint`.
        role: the role of the checkpoint below the path, if it was saved with one.
        force: delete also a pinned checkpoint, a checkpoint beside files of other saves, and one with damaged metadata.
        storage_options: for the file system of a URL.

    Returns:
        The number of deleted files and bytes.

    Raises:
        InputError: the checkpoint is pinned in its run, or another save has files here, and ``force`` is not set;
            another step of the run refers to it, also with ``force``; or the path is a symbolic link.
        NotACheckpointError: there is no checkpoint.
        UncommittedError: there are files of a save without a commit: :func:`bcp.tools.collect` deletes them.
        ExistsError: another save has committed here meanwhile. Its checkpoint is untouched.
        StorageError: storage failed. A second call ends the work.

    Example:
        >>> import torch
        >>> _ = bcp.save("ckpt/old", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> bcp.tools.remove("ckpt/old").kept
        ()

    """
    return called(
        lambda: aremove(path, role=role, force=force, storage_options=storage_options), f"delete {shown(str(path))}"
    )


async def aremove(
    path: Path,
    *,
    role: str | None = None,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> RemoveResult:
    """Do the same as :func:`remove` from a coroutine."""
    place = place_of(path, role, storage_options)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(place.opened)
        backend = _without_dots(place.backend)
        parent = await in_thread(_above, path, backend)
        if isinstance(backend, LocalBackend) and backend.root.is_symlink():
            raise InputError(f"{place.path} is a symbolic link to {backend.root.resolve()}: pass that, or unlink it")
        if parent[0] and role is None and not isinstance(path, Backend):
            backend = await stack.enter_async_context(aclosing(cooled(backend, path, storage_options)))
        version = await backend.version(METADATA_KEY)
        if version is None:
            await _refuse(backend, place.path)
            raise NotACheckpointError(f"{place.path} was written by another library: delete its files by other means")
        committed, listed = await read_committed(backend), await backend.list()
        if not force:
            await _check(parent, place.path, committed, listed, storage_options)
        await _refuse_base(backend, parent, place.path, storage_options, force=force)
        own = [info for info in listed if _is_own(info.key, committed)]
        if not await withdraw(backend, {METADATA_KEY: version}):
            raise ExistsError(f"{place.path}: another save has committed here meanwhile; nothing was deleted")
        try:  # a save that has begun since finds no metadata here, and refers to others
            await _refuse_base(backend, parent, place.path, storage_options, force=force)
        except InputError:
            if committed.data:
                await backend.put_if(METADATA_KEY, committed.data, None)
            raise
        kept = await delete_unnamed(backend, [info.key for info in own if info.key != METADATA_KEY], is_needed=False)
        others = [info.key for info in listed if not _is_own(info.key, committed)]
        nbytes = sum(info.nbytes for info in own if info.key not in kept)
        if not kept and committed.operations & (await read_committed(backend)).operations:
            # a copy of the same save has committed since the metadata went, and its files have gone with the others
            await withdraw(backend, {METADATA_KEY: await backend.version(METADATA_KEY)})
    run, name = parent
    if run and not kept and not others:
        await _remove_folder(*((f"{run}/{name}", role) if role else (run, name)), storage_options)
    return RemoveResult(place.path, committed.operation, len(own) - len(kept), nbytes, (*kept, *others))


async def _refuse_base(
    backend: Backend,
    above: tuple[str, str],
    where: str,
    storage_options: Mapping[str, Any] | None,
    *,
    force: bool,
) -> None:
    """Raise InputError if other steps of the run need the checkpoint; ``force`` deletes no such one either.

    A save that has begun may need it, too. A killed one is forgotten at the next start of the run, or by ``force``.
    """
    if names := await referring(backend):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 -- as below
        raise InputError(
            f"{where} has blocks that {', '.join(names[:3])}{more} refer to, and these could not be loaded without it: "
            "delete them first, or copy those that shall stay with `bcp cp`, which copies these blocks"
        )
    run, name = above
    step = step_of(name) if run and not force else None
    ledger = None if step is None else await _ledger(run, storage_options)
    saving = [] if ledger is None else [saving.step for saving in ledger.saving if step in saving.refers]
    if saving:
        raise InputError(
            f"a save of step {saving[0]} has begun that may refer to {where}: wait until it is committed. If no job "
            "saves there, pass force=True (--force)"
        )


async def _refuse(backend: Backend, where: str) -> None:
    """Raise, and say what is at a path without metadata, unless another library has written the files."""
    try:
        await read_metadata(backend, where)
    except UncommittedError as error:
        raise UncommittedError(
            f"{where} has files of a save that never committed, and no checkpoint: if no job saves there, `bcp gc` "
            "deletes them"
        ) from error


def _without_dots(backend: Backend) -> Backend:
    """Return a backend whose directory stays, while folders go: ``model/..`` would go with ``model``."""
    if isinstance(backend, PrefixedBackend):
        return child(_without_dots(backend.whole), backend.prefix)
    if isinstance(backend, LocalBackend) and ".." in backend.root.parts:
        return LocalBackend(backend.root.resolve())
    return backend


async def _check(
    above: tuple[str, str],
    where: str,
    committed: Committed,
    listed: Sequence[ObjectInfo],
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Raise InputError if somebody may need the checkpoint, or may be saving there."""
    if committed.may_name_anything:
        raise InputError(
            f"{where}/{METADATA_KEY} is damaged, so its files are unknown; force deletes the files of all saves there"
        )
    others = {operation for info in listed if _is_here(info.key) and (operation := operation_of(info.key))}
    if others := others - committed.operations:
        raise InputError(
            f"{where} has files of other saves ({', '.join(sorted(others)[:3])}): one of them may be running. Wait "
            "until no job saves there, or delete remains with `bcp gc`; force deletes the checkpoint beside them"
        )
    parent, name = above
    if parent and (step := step_of(name)) is not None and await _is_pinned(parent, step, storage_options):
        raise InputError(
            f"{where} is pinned in its run: unpin it with run.pin({step}, pinned=False) or `bcp pin --off`, or pass "
            "force=True (--force)"
        )


async def _is_pinned(run: str, step: int, storage_options: Mapping[str, Any] | None) -> bool:
    """Whether the ledger of a run, if there is one, has a step as pinned."""
    ledger = await _ledger(run, storage_options)
    entry = None if ledger is None else ledger.entry(step)
    return entry is not None and entry.pinned


async def _ledger(run: str, storage_options: Mapping[str, Any] | None) -> Ledger | None:
    folder, _ = folder_of(run, storage_options)
    try:
        return await folder.peek()
    finally:
        await folder.aclose()


def _is_here(key: str) -> bool:
    """Whether a file belongs to a save at the path itself, and to no role or step below it."""
    return key.count("/") == 1


def _is_own(key: str, committed: Committed) -> bool:
    """Whether a file goes with the checkpoint. Damaged metadata may name the files of any save."""
    if key == METADATA_KEY:
        return True
    if committed.data is not None and is_over_foreign(committed.data):
        return False
    if key.startswith(TELEMETRY):
        return True
    operation = operation_of(key)
    is_named = committed.may_name_anything or operation in committed.operations
    return _is_here(key) and operation is not None and is_named


def _above(path: Path, backend: Backend) -> tuple[str, str]:
    """Return the folder of a checkpoint and its name there; ("", "") for a backend and for the root of a store."""
    if isinstance(path, Backend):
        return "", ""
    return above(path, backend.whole if isinstance(backend, PrefixedBackend) else backend)


async def _remove_folder(parent: str, name: str, storage_options: Mapping[str, Any] | None) -> None:
    """Remove the empty directory of a deleted checkpoint, where storage has directories."""
    above = place_of(parent, None, storage_options)
    async with above.opened:
        with suppress(BcpError):  # the checkpoint is gone, and an empty directory harms nobody
            await remove_folders(above.backend, [name])
