"""The newest checkpoint of a run, for jobs that only read it: evaluation, inference, export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from bcp._log import log
from bcp._plain import plain
from bcp.backends import resolve, shown
from bcp.errors import BcpError, CorruptError, InputError, StorageError
from bcp.runs.candidates import Goal, Trust, candidates
from bcp.runs.folder import Folder
from bcp.runs.launches import stored_launch
from bcp.runs.ledger import Ledger
from bcp.runs.ledger_file import TRIES
from bcp.runs.roles import Role, has_roles, roles_at
from bcp.runs.words import lost_metadata
from bcp.runtime import bridge as _bridge

__all__ = ["alatest", "check_trust", "folder_of", "latest"]


def latest(
    path: str | os.PathLike[str],
    *,
    role: str | None = None,
    trust: Trust = "any",
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the path of the newest committed checkpoint of a run, for :func:`bcp.load`; None if there is none.

    It is the first checkpoint that :meth:`Run.resume` would try. The answer comes from a listing of the run's folder,
    not from a file that names a checkpoint. Storage is asked whether the newest ones are committed; nothing is loaded.
    Nothing is written, so another job may train in the run meanwhile. The training job may delete the checkpoint later,
    as its policy says: :meth:`Run.pin` prevents it.

    A checkpoint that cannot be read is passed over with a warning, if an older one can be. So is a checkpoint of the
    run's ledger without its metadata.

    Args:
        path: the run's folder, as for :class:`~bcp.Run`.
        role: of a run of several roles: the one whose checkpoint to return. It is of the newest step that all roles
            have committed.
        trust: ``"any"``: all checkpoints but those that :meth:`Run.mark` called suspect. ``"verified"``: only those
            that it called verified.
        storage_options: for the file system of a URL, as in :class:`~bcp.SaveOptions`.

    Raises:
        InputError: the URL or ``trust`` cannot be used, the run has no such role, or it has roles and none is passed.
        FormatVersionError: a newer bcp has written the run's ledger.
        StorageError: storage failed, or none of the checkpoints can be read.
        CorruptError: the run's ledger has checkpoints to try, and the metadata of all of them are gone.

    Example:
        >>> with bcp.Run("ckpt/run-9", {"model": torch.nn.Linear(4, 4)}, save=10) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> bcp.latest("ckpt/run-9")
        'ckpt/run-9/step-00000010'

    """
    try:
        return _bridge.run(
            partial(alatest, path, role=role, trust=trust, storage_options=storage_options),
            name=f"list {shown(str(path))}",
        )
    except BcpError as error:
        raise plain(error) from error.__cause__


async def alatest(
    path: str | os.PathLike[str],
    *,
    role: str | None = None,
    trust: Trust = "any",
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Do the same as :func:`latest` from a coroutine."""
    check_trust(trust)
    folder, place = folder_of(path, storage_options)
    if role is not None:
        await folder.aclose()
        return await _latest_whole(place, role, trust, storage_options)
    try:
        for attempt in range(TRIES):
            ledger = await folder.peek()
            await folder.steps()
            try:
                name = await _first(folder, ledger, trust)
            except CorruptError:
                # the job that trains may have deleted the step since, after another commit
                if attempt == TRIES - 1 or await folder.peek() == ledger:
                    raise
            else:
                break
        if name is None and (names := await folder.roles()):
            raise InputError(has_roles(folder.url, names))
    finally:
        await folder.aclose()
    return None if name is None else f"{place}/{name}"


def check_trust(trust: Trust) -> None:
    """Raise InputError for a word that is none of the two."""
    if trust not in ("any", "verified"):
        raise InputError(f"trust={trust!r}: pass 'any' or 'verified'")


def folder_of(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Folder, str]:
    """Return the folder of a run for a reader, and its path for names below it. Raises InputError for no path."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path={path!r} is a {type(path).__name__}; pass a directory or a URL, as 'ckpt/run-7'")
    place = os.fsdecode(path)
    if "://" not in place:
        place = os.path.expanduser(place)  # noqa: PTH111 -- a relative path stays one
        if ".." in place.split("/"):
            place = os.path.normpath(place)  # a run looks there, too
    return Folder(resolve(place, storage_options), shown(place), storage_options), place.rstrip("/")


async def _latest_whole(place: str, role: str, trust: Trust, storage_options: Mapping[str, Any] | None) -> str | None:
    """Return the path of a role's checkpoint of the newest step that all roles have; None if there is none."""
    async with aclosing(resolve(place, storage_options)) as backend:
        launch, _ = await stored_launch(backend, shown(place))
    if launch is None or role not in launch.roles:
        known = "no roles yet" if launch is None else f"the roles {', '.join(launch.roles)}"
        raise InputError(f"role={role!r}: the run at {shown(place)} has {known}; pass one of its roles, or none")
    below = f"{place}/{role}"
    folder = Folder(resolve(below, storage_options), shown(below))
    roles = roles_at(Role(role, of=launch.roles, launch=launch.id), place, storage_options)
    async with aclosing(folder), aclosing(roles):
        ledger = await folder.peek()
        await folder.steps()
        listing = [candidate async for candidate in candidates(folder, ledger, trust)]
        chosen = (await roles.weighed(Goal(trust), folder, listing)).chosen
    return None if chosen is None else f"{below}/{chosen.name}"


async def _first(folder: Folder, ledger: Ledger | None, trust: Trust) -> str | None:
    """Return the name of the first candidate that is committed. Raise if there are candidates, but none is."""
    failed: dict[str, BcpError] = {}
    async with aclosing(candidates(folder, ledger, trust)) as listing:
        async for candidate in listing:
            if candidate.reason:
                continue
            try:
                committed = candidate.is_certain or bool(await folder.commit_of(candidate.name))
            except (StorageError, InputError, CorruptError) as error:
                failed[candidate.name] = error
                continue
            if committed:
                for name, reason in failed.items():
                    log.warning("%s is passed over: %s", name, reason)
                return candidate.name
            failed[candidate.name] = CorruptError(lost_metadata(f"{folder.url}/{candidate.name}"))
    if failed:  # storage may answer again; lost metadata stay lost
        raise min(failed.values(), key=lambda error: isinstance(error, CorruptError))
    return None
