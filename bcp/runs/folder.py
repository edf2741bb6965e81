"""The folder of a run: ``step-00001000/`` for each checkpoint, and the ledger ``run.json``.

One job at a time writes the ledger. Whoever takes the folder leaves a token in it, and the job before finds another
token than its own at its next change. The ledger is derived: a checkpoint is committed if its commit object is there.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio

from bcp._log import log
from bcp.backends import child
from bcp.backends.cold import ColdPlaces
from bcp.backends.cooled import CooledBackend
from bcp.backends.links import LinkFollower, followed, links_of
from bcp.backends.objects.retry import JITTER, in_turns
from bcp.backends.small import get_small
from bcp.errors import BcpError, CheckpointError, CorruptError, InputError, RunTakenError, StorageError
from bcp.format.metadata import LEDGER_KEY, METADATA_KEY, Commit, decode_commit
from bcp.policies.keep import Entry
from bcp.protocols import Backend, RetryPolicy, Sweeper, Unfinished, Version, folders_of
from bcp.runs.deletion import delete_checkpoint
from bcp.runs.launches import stored_launch
from bcp.runs.ledger import Ledger, Life
from bcp.runs.ledger_file import FIRST_KEY, TRIES, busy, decoded, put_ledger, stored_ledger
from bcp.runs.names import in_order, step_name, step_of
from bcp.runs.words import owner_words
from bcp.runtime.threads import in_thread
from bcp.tiers.records import forget_records

__all__ = ["Folder", "Steps", "step_name", "step_of"]

_PAUSE_SECONDS = 0.05
_MOST_ID = 256


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a listing.

    Attributes:
        folders: steps that have a folder or a link to one, newest first. Whether each is committed, is not known.
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

    def __init__(
        self,
        backend: Backend,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        retries: RetryPolicy | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the place; nothing is read yet.

        Args:
            backend: over the folder. :meth:`aclose` closes it.
            url: for messages, without secrets.
            storage_options: of the backend, for cold places of the run in the same kind of storage.
            retries: of failed requests to them.
            clock: returns Unix seconds.

        """
        self._backend = backend
        self._url = url
        self._clock = clock
        self._places = ColdPlaces(backend, url, storage_options, retries)
        self._ledger: Ledger | None = None
        self._version: Version | None = None
        self._names: dict[int, tuple[str, ...]] = {}
        self._removed: set[int] = set()
        self._unreadable: set[str] = set()
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        return f"Folder({self._url})"

    @property
    def backend(self) -> Backend:
        """Storage over the folder."""
        return self._backend

    @property
    def url(self) -> str:
        """The folder's URL, for messages."""
        return self._url

    @property
    def ledger(self) -> Ledger | None:
        """The newest known ledger; None before :meth:`take`."""
        return self._ledger

    @property
    def listed(self) -> Steps:
        """The steps of the last listing, as :meth:`take` makes one."""
        return Steps(tuple(self._names))

    def names_of(self, step: int) -> tuple[str, ...]:
        """Return the folders of a step as they were listed, in the order of a resumption; else the run's own."""
        return self._names.get(step) or (step_name(step),)

    # -- checkpoints --------------------------------------------------------------------------

    async def steps(self) -> list[int]:
        """List the steps that have a folder or a link to one, newest first, by one request for each thousand.

        Raises:
            StorageError: storage failed.

        """
        self._names = in_order({*await folders_of(self._backend), *await links_of(self._backend)})
        return list(self._names)

    async def commit_of(self, name: str) -> Version:
        """Return the version of the commit object in a folder; "" if there is none. Links are followed.

        Raises:
            InputError: the commit object is a link out of the folder.
            StorageError: storage failed.

        """
        return await followed(self._backend, name).version(METADATA_KEY) or ""

    async def read_commit(self, name: str) -> Commit:
        """Read the commit record of a checkpoint. Links are followed.

        Raises:
            CorruptError: the metadata are damaged.
            FileNotFoundError: there are none.
            InputError: as :meth:`commit_of`.
            StorageError: storage failed.

        """
        data = await get_small(followed(self._backend, name), METADATA_KEY)
        return await in_thread(decode_commit, data, name)

    async def nbytes_of(self, name: str) -> tuple[int, int, str]:
        """Return the bytes of all files of a folder, those of the files that lie in cold places alone, and a complaint.

        Links are followed. The complaint says why the cold places were not asked; it is empty for none.

        Raises:
            InputError: the folder is a link out of the run.
            StorageError: the folder cannot be listed.

        """
        view = CooledBackend(followed(self._backend, name), (self._places, name))
        hot = {info.key: info.nbytes for info in await view.hot.list()}
        try:
            cold_files = await view.cold_files(again=False)
        except BcpError as error:
            return sum(hot.values()), 0, str(error)
        cold = sum(info.nbytes for info in cold_files if info.key not in hot)
        return sum(hot.values()) + cold, cold, ""

    async def committed(self, step: int) -> bool:
        """Ask storage whether a step has a commit object.

        Raises:
            InputError: as :meth:`commit_of`.
            StorageError: storage failed.

        """
        return any([await self.commit_of(name) for name in self.names_of(step)])

    async def leftovers(self, live: Collection[int]) -> list[int]:
        """List the remains that may be removed: half-deleted checkpoints, and interrupted saves.

        A save that was interrupted counts once a newer checkpoint is committed. If agents had a part in it, their
        records go now, and it counts the next time: until then one of them may commit. A folder that stays after its
        removal, for somebody has put other files there, is not listed again by this job. A folder that cannot be read
        is none.

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
        needed = ledger.referred()
        steps = [step for step in await self.steps() if step in removing or (step < newest and step not in known)]
        steps = [step for step in steps if step not in needed]
        asked = [step for step in steps if step not in live and step not in self._removed]
        commits = await self._commits(asked)
        leftovers = []
        for step in asked:
            versions = [commits.get(name) for name in self.names_of(step)]
            if step in removing:
                is_left = all(version in ("", removing[step]) for version in versions)
            else:
                is_left = (
                    not any(version != "" for version in versions)
                    and not await self._has_roles(step)
                    and not await self._was_uploaded(step)
                )
            leftovers += [step] if is_left else []
        return leftovers

    async def remove(
        self, step: int, *, spare_pinned: bool = False, check: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Delete a checkpoint: its entry, then its commit object, then the rest. Of a link only the link goes.

        A crash at any point leaves a whole checkpoint, or one that no list calls committed. Then :meth:`leftovers` has
        its step, and another call ends the work. An absent checkpoint is no error.

        A checkpoint to which another one refers, or a save that has begun, stays as it is.

        Args:
            step: its step.
            spare_pinned: leave the checkpoint if somebody has pinned it meanwhile.
            check: awaited once the ledger says that the deletion begins. If it raises an error, nothing is deleted.

        Raises:
            InputError: the folder was not taken.
            RunTakenError: another job has taken it since. No checkpoint of the ledger is deleted.
            StorageError: storage failed.

        """
        names = self.names_of(step)
        commits = [await self.commit_of(name) for name in names]
        version = next(filter(None, commits), "")
        if self._taken().entry(step) is not None:
            ledger = await self.change(partial(_leaving, step, version, spare_pinned))
            if ledger.entry(step) is not None:
                return
        elif step in self._taken().referred():
            return
        if check is not None:
            await check()
        for name, commit in reversed(list(zip(names, commits, strict=True))):  # the ledger has noted the first commit
            await self._delete(name, commit)
        self._removed.add(step)
        await self.change(lambda ledger: ledger.without(step))

    async def end_uploads(self, name: str, operation: str = "") -> bool:
        """Delete the records of uploads by agents, of all or of one save; return whether there were any.

        Without them nobody commits the save.

        Raises:
            StorageError: storage failed.

        """
        return await forget_records(child(self._backend, name), operation) > 0

    async def led_to(self, steps: Collection[int]) -> set[int]:
        """Return those of some steps that must stay while the others go: the link of another step leads to them.

        Raises:
            StorageError: storage failed.

        """
        if not steps or not isinstance(self._backend, LinkFollower):
            return set()
        links = [(link, step_of(link)) for link in await self._backend.links()]
        kept = [link for link, step in links if step is not None and step not in steps]
        ways = await in_turns(partial(self._backend.behind, link) for link in kept)
        names = {name for way in ways for name in way}
        return {step for step in map(step_of, names) if step is not None and step in steps}

    async def drop(self, name: str) -> None:
        """Delete the empty directories of a save that has written nothing; objects, whoever wrote them, stay.

        Raises:
            StorageError: storage failed.

        """
        if name not in await links_of(self._backend) and not await self._backend.list(f"{name}/"):
            await self._delete(name, "")

    async def unlink(self, name: str) -> bool:
        """Remove a folder's name if it is a symbolic link; the target stays. Return whether it was one.

        Raises:
            StorageError: storage failed.

        """
        if not isinstance(self._backend, LinkFollower) or name not in await self._backend.links():
            return False
        await self._backend.unlink(name)
        return True

    async def _delete(self, name: str, commit: Version) -> None:
        if not await self.unlink(name):
            await delete_checkpoint(self._backend, name, commit, self._places)

    async def _commits(self, steps: Sequence[int]) -> dict[str, Version]:
        """Return the commit of each folder of some steps. Folders that cannot be read are told, and left out."""
        names = [name for step in steps for name in self.names_of(step)]
        versions = dict(zip(names, await in_turns(partial(self._readable, name) for name in names), strict=True))
        return {name: version for name, version in versions.items() if version is not None}

    async def _readable(self, name: str) -> Version | None:
        try:
            return await self.commit_of(name)
        except (StorageError, InputError, CorruptError) as error:
            if name not in self._unreadable:
                self._unreadable.add(name)
                log.warning("%s cannot be read; it is not deleted: %s", name, error, run=self._url)
            return None

    async def _was_uploaded(self, step: int) -> bool:
        """End uploads by agents; return whether there were any. One of them may be about to commit: ask again later."""
        return any([await self.end_uploads(name) for name in self.names_of(step)])

    async def _has_roles(self, step: int) -> bool:
        """Whether there is a commit object below: the checkpoint of a role, which no ledger has."""
        below = [info for name in self.names_of(step) for info in await self._backend.list(f"{name}/")]
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
        await self._backend.delete([FIRST_KEY])

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
            for _ in range(TRIES):
                stored, version = await stored_ledger(self._backend, self._url)
                ledger_there = await decoded(self._backend, self._url, stored, self._clock())
                if ledger_there is not None and run_id not in (None, ledger_there.run_id):
                    raise RunTakenError(
                        f"{self._url} holds run {ledger_there.run_id!r}, and this job is run {run_id!r}; pass "
                        f"run_id={ledger_there.run_id!r} to go on with that run, or choose another folder"
                    )
                before = ledger_there or Ledger(run_id=run_id or uuid.uuid4().hex[:12], owner="")
                reconciled = await self._reconciled(before, is_lost=ledger_there is None)
                ledger = replace(await self._settled(reconciled), owner=owner).with_life(life)
                if await self._put(ledger, version):
                    return ledger
                await _pause()
        raise busy(self._url)

    async def peek(self) -> Ledger | None:
        """Return the stored ledger and change nothing; None if there is none, or if it cannot be read.

        Raises:
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        with suppress(CorruptError):
            stored, _ = await stored_ledger(self._backend, self._url)
            return None if stored is None else Ledger.from_bytes(stored, f"{self._url}/{LEDGER_KEY}")
        log.warning("the ledger of a run cannot be read; marks are unknown", run=self._url)
        return None

    async def roles(self) -> Sequence[str]:
        """Return the names of the roles of a run that lies here, each in a folder of its own; none for other runs.

        Raises:
            CorruptError: the file that names them cannot be read.
            FormatVersionError: a newer bcp has written it.
            StorageError: storage failed.

        """
        launch, _ = await stored_launch(self._backend, self._url)
        return () if launch is None else launch.roles

    async def has_ledger(self) -> bool:
        """Ask storage whether there is a ledger, whatever its contents.

        Raises:
            StorageError: storage failed.

        """
        return await self._backend.version(LEDGER_KEY) is not None

    async def amend(self, step: int, change: Callable[[Ledger], Ledger]) -> Ledger:
        """Change the entry of a step in the name of the job that has the folder, which goes on.

        A committed checkpoint that the ledger lacks becomes an entry first. So does a whole one whose deletion has
        begun.

        Args:
            step: the step.
            change: as for :meth:`change`.

        Raises:
            InputError: ``change`` has raised it: there is no checkpoint of that step.
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        async with self._lock:
            for _ in range(TRIES):
                stored, version = await stored_ledger(self._backend, self._url)
                ledger_there = await decoded(self._backend, self._url, stored, self._clock())
                before = ledger_there or Ledger(run_id=uuid.uuid4().hex[:12], owner="")
                ledger = await self._reconciled(before, is_lost=ledger_there is None)
                if any([await self.commit_of(name) for name in self._names.get(step, ())]):
                    ledger = ledger.staying(step, float(self._clock()))
                if await self._put(change(ledger), version):
                    return ledger
                await _pause()
        raise busy(self._url)

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
            for _ in range(TRIES):
                known = self._taken()
                ledger = change(known)
                if ledger == known or await self._put(ledger, self._version):
                    return ledger
                await self._read_again(known)
                await _pause()
        raise busy(self._url)

    async def check_owner(self) -> None:
        """Read whether this job still has the folder, and the changes that other jobs have made to the ledger.

        Raises:
            InputError: the folder was not taken.
            RunTakenError: another job has taken it since.
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        async with self._lock:
            known = self._taken()
            if await self._backend.version(LEDGER_KEY) != self._version:
                await self._read_again(known)

    def _check_owner(self, known: Ledger, stored: Ledger | None) -> None:
        if stored is not None and stored.owner != known.owner:
            raise RunTakenError(
                f"another job took the folder {self._url}{owner_words(stored)}; this one stops writing. Let one job at "
                "a time use the folder of a run"
            )

    async def aclose(self) -> None:
        """Close the connections to storage."""
        await self._places.aclose()
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
        unknown = [step for step in steps if step not in known]
        commits = await self._commits(unknown)
        removing = {removal.step: removal.version for removal in ledger.removing}
        added = [
            step
            for step in unknown
            if any(commits.get(name, "") not in ("", removing.get(step)) for name in self.names_of(step))
        ]
        if gone := sorted(known.difference(steps)):
            log.warning("checkpoints of the ledger are gone", run=self._url, steps=gone)
        if added and is_lost:
            log.warning(
                "the folder has checkpoints and no ledger that can be read. It was lost, or bcp.save wrote them "
                "without a run; all of them are pinned, because a lost ledger may have had marks and pins. Call "
                "run.pin(step, pinned=False) for those that the policy may delete",
                run=self._url,
                steps=sorted(added),
            )
        elif added:
            log.info("committed checkpoints were not in the ledger", run=self._url, steps=sorted(added))
        # a policy of days counts from now: the true time is not known, and they must not go at once
        noted = await in_turns(partial(self._noted, step) for step in added)
        entries = [
            Entry(step=step, committed=float(self._clock()), metrics=metrics, pinned=is_lost, refers=refers)
            for step, (metrics, refers) in zip(added, noted, strict=True)
        ]
        return await self.renewed(ledger.only(set(steps)).with_entries(entries))

    async def renewed(self, ledger: Ledger) -> Ledger:
        """Forget the marks of checkpoints whose place others have taken, without the ledger. The steps were listed.

        Agents commit while no trainer lives, and a job may be killed between its commit and the ledger.
        """
        entries = []
        for entry in ledger.entries:
            commit = await self._first_commit(entry.step) if entry.about else None
            if commit is not None and commit.operations.isdisjoint(entry.about):
                committed = float(self._clock())
                found = Entry(step=entry.step, committed=committed, metrics=commit.metrics, pinned=entry.pinned)
                entries.append(replace(found, refers=tuple(sorted({*entry.refers, *commit.refers}))))
        return ledger.with_entries(entries)

    async def _first_commit(self, step: int) -> Commit | None:
        """Return the commit record of the first committed folder of a step; None if it cannot be read."""
        for name in self.names_of(step):
            try:
                return await self.read_commit(name)
            except FileNotFoundError:
                continue
            except BcpError as error:
                log.warning("a checkpoint cannot be read, so that its mark stays", checkpoint=name, error=repr(error))
                break
        return None

    async def operations_of(self, step: int) -> frozenset[str] | None:
        """Return the operations of the committed checkpoints of a step; None if storage does not tell.

        Those with damaged metadata are left out.
        """
        found = set()
        for name in self.names_of(step):
            try:
                found.add((await self.read_commit(name)).operation)
            except (FileNotFoundError, CheckpointError):
                continue
            except BcpError as error:
                log.warning("the commit of a checkpoint cannot be read", checkpoint=name, error=repr(error))
                return None
        return frozenset(found)

    async def _settled(self, ledger: Ledger) -> Ledger:
        """Note to which steps those saves refer that a job before has begun: it may have died before it noted that.

        A save whose commit cannot be read stays noted as begun.
        """
        for saving in ledger.saving:
            refers = await self.refers_of(saving.step)
            if refers is None:
                continue
            entry = ledger.entry(saving.step)
            ledger = ledger.settled([saving.step])
            if entry is not None:
                ledger = ledger.with_entries([replace(entry, refers=refers)])
        return ledger

    async def refers_of(self, step: int) -> tuple[int, ...] | None:
        """Return the steps to which the committed folders of a step refer; None if one of them cannot be read.

        The steps were listed.
        """
        found: set[int] = set()
        for name in self._names.get(step, ()):
            try:
                found |= {*(await self.read_commit(name)).refers}
            except FileNotFoundError:
                continue
            except BcpError as error:
                log.warning("it is not known to which steps a checkpoint refers", checkpoint=name, error=repr(error))
                return None
        return tuple(sorted(found))

    async def _noted(self, step: int) -> tuple[Mapping[str, float], tuple[int, ...]]:
        """Return the metrics of a checkpoint, and the steps to which it refers; all older ones if that is unknown."""
        refers = await self.refers_of(step)
        if refers is None:
            refers = tuple(sorted(older for older in self._names if older < step))
        for name in self.names_of(step):
            try:
                return (await self.read_commit(name)).metrics, refers
            except (BcpError, FileNotFoundError) as error:
                log.debug("the metrics of a checkpoint are unknown", checkpoint=name, error=repr(error))
        return {}, refers

    async def _put(self, ledger: Ledger, version: Version | None) -> bool:
        """Store a ledger if the one there has this version; say whether it is stored."""
        data = ledger.to_bytes()
        made = await put_ledger(self._backend, data, version)
        if made is None:
            stored, made = await stored_ledger(self._backend, self._url)
            if stored != data:  # else an attempt whose answer was lost has stored it
                return False
        self._ledger, self._version = ledger, made
        return True

    async def _read_again(self, known: Ledger) -> None:
        """Take over a change of something else than this job; a ledger that was lost or broken is replaced."""
        stored, version = await stored_ledger(self._backend, self._url)
        ledger_there = await decoded(self._backend, self._url, stored, self._clock())
        self._check_owner(known, ledger_there)
        # not before: with the version of another job's ledger the next change would replace that
        self._ledger, self._version = ledger_there or known, version


def _leaving(step: int, version: Version, spare_pinned: bool, ledger: Ledger) -> Ledger:  # noqa: FBT001 -- for partial
    entry = ledger.entry(step)
    is_spared = spare_pinned and entry is not None and entry.pinned
    return ledger if is_spared or step in ledger.referred() else ledger.leaving(step, version)


async def _pause() -> None:
    await anyio.sleep(JITTER.uniform(0, _PAUSE_SECONDS))
