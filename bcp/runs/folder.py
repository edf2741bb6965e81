"""The folder of a run: ``step-00001000/`` for each checkpoint, and the ledger ``run.json``.

One job at a time writes the ledger. Whoever takes the folder leaves a token in it, and the job before finds another
token than its own at its next change. The ledger is derived: a checkpoint is committed if its commit object is there.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import anyio

from bcp._deletion import delete_unnamed, withdraw
from bcp._log import log
from bcp.backends import child
from bcp.backends.keys import check_key
from bcp.backends.objects.retry import in_turns
from bcp.errors import CorruptError, InputError, RunTakenError, StorageError
from bcp.format.metadata import METADATA_KEY
from bcp.policies import Entry
from bcp.protocols import Backend, Sweeper, Unfinished, Version, folders_of
from bcp.runs.ledger import LARGEST_STEP, Ledger, Life

__all__ = ["LEDGER_KEY", "Folder", "Steps", "step_name", "step_of"]

LEDGER_KEY = "run.json"
_FIRST_KEY = "run.json.new"
"""Put beside the first ledger: ``put_if`` makes no directory."""

_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})")
_NO_KEY = "nothing"
"""A key that no object has."""

_TRIES = 30
_PAUSE_SECONDS = 0.05
_MOST_ID = 256


def step_name(step: int) -> str:
    """Return the name of a step's folder.

    Raises:
        InputError: ``step`` is no whole number of 0 or more.

    Example:
        >>> step_name(1000)
        'step-00001000'

    """
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise InputError(f"step={step!r} has to be a whole number from 0 to {LARGEST_STEP}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name; None for names that :func:`step_name` does not make.

    Example:
        >>> step_of("step-00001000"), step_of("step-1000")
        (1000, None)

    """
    match = _STEP.fullmatch(name)
    step = None if match is None else int(match[1])
    return None if step is None or step > LARGEST_STEP else step


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a listing.

    Attributes:
        folders: steps that have a folder, newest first. Whether each is committed, is not known.
    """

    folders: tuple[int, ...] = ()


class Folder:
    """The folder of a run as its job sees it. Only rank 0 has one.

    Example::

        folder = Folder(backend, "s3://bucket/pretrain")
        ledger = await folder.take(None)
        await folder.change(lambda ledger: ledger.with_checkpoint(1000, time.time(), {"loss": 2.5}))
        await folder.remove(500)

    """

    def __init__(self, backend: Backend, url: str, *, clock: Callable[[], float] = time.time) -> None:
        """Take the place; nothing is read yet.

        Args:
            backend: over the folder. :meth:`aclose` closes it.
            url: for messages, without secrets.
            clock: returns Unix seconds.

        """
        self._backend = backend
        self._url = url
        self._clock = clock
        self._ledger: Ledger | None = None
        self._version: Version | None = None
        self._listed = Steps()
        self._removed: set[int] = set()
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        return f"Folder({self._url})"

    @property
    def ledger(self) -> Ledger | None:
        """The newest known ledger; None before :meth:`take`."""
        return self._ledger

    @property
    def listed(self) -> Steps:
        """The steps of the last listing, as :meth:`take` makes one."""
        return self._listed

    # -- checkpoints --------------------------------------------------------------------------

    async def steps(self) -> list[int]:
        """List the steps that have a folder, newest first, by one request for each thousand.

        Raises:
            StorageError: storage failed.

        """
        folder_steps = {step_of(name) for name in await folders_of(self._backend)}
        steps = sorted((step for step in folder_steps if step is not None), reverse=True)
        self._listed = Steps(tuple(steps))
        return steps

    async def committed(self, step: int) -> bool:
        """Ask storage whether a step has its commit object.

        Raises:
            StorageError: storage failed.

        """
        return bool(await self._commit(step))

    async def leftovers(self, live: Collection[int]) -> list[int]:
        """List the remains that may be removed: half-deleted checkpoints, and interrupted saves.

        A save that was interrupted counts once a newer checkpoint is committed. A folder that stays after its removal,
        for somebody has put other files there, is not listed again by this job.

        Args:
            live: steps that are being saved now; they are left out.

        Raises:
            InputError: the folder was not taken.
            StorageError: storage failed.

        """
        ledger = self._taken()
        known = {entry.step for entry in ledger.entries}
        removing = {removal.step: removal.version for removal in ledger.removing}
        newest = max(known, default=-1)
        steps = [step for step in await self.steps() if step in removing or (step < newest and step not in known)]
        asked = [step for step in steps if step not in live and step not in self._removed]
        commits = await self._commits(asked)
        leftovers = []
        for step in asked:
            if step in removing:
                is_left = commits[step] in ("", removing[step])
            else:
                is_left = not commits[step] and not await self._has_roles(step)
            leftovers += [step] if is_left else []
        return leftovers

    async def remove(self, step: int) -> None:
        """Delete a checkpoint: its entry, then its commit object, then the rest.

        A crash at any point leaves a whole checkpoint, or one that no list calls committed. Then :meth:`leftovers` has
        its step, and another call ends the work. An absent checkpoint is no error.

        Raises:
            InputError: the folder was not taken.
            RunTakenError: another job has taken it since. No checkpoint of the ledger is deleted.
            StorageError: storage failed.

        """
        name, commit = step_name(step), await self._commit(step)
        if any(entry.step == step for entry in self._taken().entries):
            await self.change(lambda ledger: ledger.leaving(step, commit))
        await self._delete(name, commit)
        self._removed.add(step)
        await self.change(lambda ledger: ledger.without(step))

    async def drop(self, step: int) -> None:
        """Delete the empty directories of a save that has written nothing; objects, whoever wrote them, stay.

        Raises:
            StorageError: storage failed.

        """
        name = step_name(step)
        if not await self._backend.list(f"{name}/"):
            await self._delete(name, "")

    async def _delete(self, name: str, commit: Version) -> None:
        """Delete the objects below a folder, its metadata first, and the empty directories.

        Metadata that are not those of ``commit`` stay with their files: somebody has committed there since.
        """
        view = child(self._backend, name)
        keys = _deletable([info.key for info in await view.list()])
        if not await withdraw(view, {METADATA_KEY: commit}):
            return
        roles = [key for key in keys if key != METADATA_KEY and key.rpartition("/")[2] == METADATA_KEY]
        await withdraw(view, dict.fromkeys(roles))
        await delete_unnamed(view, keys)
        if commit and name not in await folders_of(self._backend):
            return
        if isinstance(view, Sweeper):
            await view.discard(await view.unfinished())  # metadata name finished files only
        folders = [f"{name}/"]
        for folder in folders:  # it grows
            below = await folders_of(self._backend, folder)
            folders += _deletable([f"{folder}{subfolder}/" for subfolder in below])
        # the deletion of a key removes its directory if that is empty
        await self._backend.delete([f"{folder}{_NO_KEY}" for folder in reversed(folders)])

    async def _commit(self, step: int) -> Version:
        return await self._backend.version(f"{step_name(step)}/{METADATA_KEY}") or ""

    async def _commits(self, steps: Sequence[int]) -> dict[int, Version]:
        return dict(zip(steps, await in_turns(partial(self._commit, step) for step in steps), strict=True))

    async def _has_roles(self, step: int) -> bool:
        """Whether there is a commit object below: the checkpoint of a role, which no ledger has."""
        below = await self._backend.list(f"{step_name(step)}/")
        return any(info.key.rpartition("/")[2] == METADATA_KEY for info in below)

    async def unfinished(self) -> Sequence[Unfinished]:
        """List the remains of interrupted writes of the ledger, for :meth:`discard`. It may look at every object.

        A change of the ledger has to come between the two. Then every listed writer, if it lives, has been displaced.

        Raises:
            StorageError: storage failed.

        """
        unfinished = await self._backend.unfinished() if isinstance(self._backend, Sweeper) else ()
        return [write for write in unfinished if write.key.startswith(LEDGER_KEY)]

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Delete such remains.

        Raises:
            StorageError: storage failed.

        """
        if unfinished and isinstance(self._backend, Sweeper):
            await self._backend.discard(unfinished)  # of the ledger, which no metadata name
        await self._backend.delete([_FIRST_KEY])

    # -- the ledger ---------------------------------------------------------------------------

    async def take(self, run_id: str | None) -> Ledger:
        """Make this job the one that writes, and bring the ledger in line with storage.

        Checkpoints that are gone leave the ledger, and committed ones that it does not have are added. Only for the
        latter are commit objects asked for. A ledger that cannot be read is kept as ``run.json.broken-TIME``. Without a
        ledger that can be read, every checkpoint is pinned: one of them may have been pinned or verified.

        Args:
            run_id: name of the run; None takes the folder's, or makes one for an empty folder.

        Returns:
            The ledger, with a new life of this process.

        Raises:
            RunTakenError: the folder belongs to a run of another name.
            FormatVersionError: a newer bcp has written the ledger.
            InputError: ``run_id`` is no name.
            StorageError: storage failed.

        """
        if run_id is not None and not (
            isinstance(run_id, str) and run_id.isprintable() and 0 < len(run_id) <= _MOST_ID
        ):
            raise InputError(f"run_id={run_id!r} is no name; use 1 to {_MOST_ID} printable characters")
        owner = secrets.token_hex(8)
        life = Life(float(self._clock()), socket.gethostname(), os.getpid())
        async with self._lock:
            for _ in range(_TRIES):
                stored, version = await self._stored()
                stored_ledger = None if stored is None else await self._decoded(stored)
                if stored_ledger is not None and run_id not in (None, stored_ledger.run_id):
                    raise RunTakenError(
                        f"{self._url} holds run {stored_ledger.run_id!r}, and this job is run {run_id!r}; pass "
                        f"run_id={stored_ledger.run_id!r} to go on with that run, or choose another folder"
                    )
                before = stored_ledger or Ledger(run_id=run_id or uuid.uuid4().hex[:12], owner="")
                reconciled = await self._reconciled(before, is_lost=stored_ledger is None)
                ledger = replace(reconciled, owner=owner).with_life(life)
                if await self._put(ledger, version):
                    return ledger
                await _pause()
        raise self._busy()

    async def peek(self) -> Ledger | None:
        """Return the stored ledger and change nothing; None if there is none, or if it cannot be read.

        Raises:
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        with suppress(CorruptError):
            stored, _ = await self._stored()
            return None if stored is None else Ledger.from_bytes(stored, f"{self._url}/{LEDGER_KEY}")
        log.warning("the ledger of a run cannot be read; marks are unknown", run=self._url)
        return None

    async def change(self, change: Callable[[Ledger], Ledger]) -> Ledger:
        """Change the ledger in storage, by one request if nothing else has.

        Args:
            change: makes the new ledger from the newest one; called again where something else has changed it. If it
                returns an equal one, nothing is written.

        Returns:
            The new ledger.

        Raises:
            InputError: the folder was not taken, or ``change`` has raised it.
            RunTakenError: another job has taken the folder since.
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        async with self._lock:
            for _ in range(_TRIES):
                known = self._taken()
                ledger = change(known)
                if ledger == known or await self._put(ledger, self._version):
                    return ledger
                await self._read_again(known)
                await _pause()
        raise self._busy()

    async def aclose(self) -> None:
        """Close the connections to storage."""
        await self._backend.aclose()

    def _taken(self) -> Ledger:
        if self._ledger is None:
            raise InputError(f"{self._url}: take() the folder of the run first")
        return self._ledger

    async def _reconciled(self, ledger: Ledger, *, is_lost: bool) -> Ledger:
        """Bring a ledger in line with storage. It was read first: a folder that is missing now has left since.

        Args:
            ledger: as it was read, or a new one.
            is_lost: the folder has no ledger that can be read.

        """
        steps = await self.steps()
        known = {entry.step for entry in ledger.entries}
        commits = await self._commits([step for step in steps if step not in known])
        removing = {removal.step: removal.version for removal in ledger.removing}
        added = [step for step, commit in commits.items() if commit and commit != removing.get(step)]
        if gone := sorted(known.difference(steps)):
            log.warning("checkpoints of the ledger are gone", run=self._url, steps=gone)
        if added and is_lost:
            log.warning(
                "the folder has checkpoints and no ledger that can be read: all of them are pinned, because marks and "
                "pins are lost; call run.pin(step, pinned=False) for those that the policy may delete",
                run=self._url,
                steps=sorted(added),
            )
        elif added:
            log.info("committed checkpoints were not in the ledger", run=self._url, steps=sorted(added))
        # a policy of days counts from now: the true time is not known, and they must not go at once
        entries = [Entry(step=step, committed=float(self._clock()), pinned=is_lost) for step in added]
        return ledger.only(set(steps)).with_entries(entries)

    async def _stored(self) -> tuple[bytes | None, Version | None]:
        """Return the stored ledger and a version that is not newer than it; None for none."""
        for _ in range(_TRIES):
            version = await self._backend.version(LEDGER_KEY)
            if version is None:
                return None, None
            with suppress(FileNotFoundError):  # deleted since
                return bytes(await self._backend.get(LEDGER_KEY)), version
        raise self._busy()

    async def _decoded(self, stored: bytes) -> Ledger | None:
        """Return the ledger of these bytes; None after a copy was kept, if they are none."""
        try:
            return Ledger.from_bytes(stored, f"{self._url}/{LEDGER_KEY}")
        except CorruptError as error:
            copy = f"{LEDGER_KEY}.broken-{_moment(self._clock(), '%Y%m%dT%H%M%S%f')}"
            log.warning(
                "the ledger of a run cannot be read and is made anew, without metrics and marks",
                run=self._url,
                error=str(error),
                copy=copy,
            )
            await self._backend.put(copy, stored)
            return None

    async def _put(self, ledger: Ledger, version: Version | None) -> bool:
        """Store a ledger if the one there has this version; say whether it is stored."""
        data = ledger.to_bytes()
        made = await self._put_if(data, version)
        if made is None:
            stored, made = await self._stored()
            if stored != data:  # else an attempt whose answer was lost has stored it
                return False
        self._ledger, self._version = ledger, made
        return True

    async def _put_if(self, data: bytes, version: Version | None) -> Version | None:
        """Store a ledger; for the first one its directory is made."""
        try:
            return await self._backend.put_if(LEDGER_KEY, data, version)
        except (StorageError, FileNotFoundError):
            if version is not None:
                raise
        await self._backend.put(_FIRST_KEY, b"")
        made = await self._backend.put_if(LEDGER_KEY, data, None)
        await self._backend.delete([_FIRST_KEY])
        return made

    async def _read_again(self, known: Ledger) -> None:
        """Take over a change of something else than this job; a ledger that was lost or broken is replaced."""
        stored, version = await self._stored()
        stored_ledger = None if stored is None else await self._decoded(stored)
        if stored_ledger is not None and stored_ledger.owner != known.owner:
            raise RunTakenError(
                f"another job took the folder {self._url}{_by(stored_ledger)}; this one stops writing. Let one job at "
                "a time use the folder of a run"
            )
        # not before: with the version of another job's ledger the next change would replace that
        self._ledger, self._version = stored_ledger or known, version

    def _busy(self) -> StorageError:
        return StorageError(
            f"{self._url}: {LEDGER_KEY} was changed by others in each of {_TRIES} attempts; let one job at a time use "
            "the folder of a run"
        )


def _by(ledger: Ledger) -> str:
    """Say who began the last life of a ledger."""
    if not ledger.lives:
        return ""
    life = ledger.lives[-1]
    return f" at {_moment(life.started, '%Y-%m-%d %H:%M:%S UTC')}, host {life.host!r}, pid {life.pid}"


def _moment(seconds: float, form: str) -> str:
    """Return a time as text; the number itself if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def _deletable(keys: Sequence[str]) -> list[str]:
    """Leave out keys that no backend takes, as a name with a backslash that somebody has put there."""
    valid_keys = []
    for key in keys:
        with suppress(InputError):
            check_key(key.removesuffix("/"))
            valid_keys.append(key)
    return valid_keys


async def _pause() -> None:
    await anyio.sleep(random.uniform(0, _PAUSE_SECONDS))  # noqa: S311 -- no secret
