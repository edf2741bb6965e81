"""Several roles of one run, as the actor and the critic of an RL job: a step counts once all of them have committed it.

Each role is a world of its own: its ranks exchange nothing with the ranks of other roles. It has a run's folder of its
own, ``PATH/actor``, with a ledger of its own. Roles meet in storage alone. A launch is one start of all of them. Its id
is in each checkpoint. A step is whole if all roles have committed it in one launch.

The first role that resumes decides for all: it takes the newest whole step, and writes it into ``PATH/roles.json``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from bcp.backends import resolve, shown
from bcp.backends.place import RESERVED, ROLE
from bcp.errors import CorruptError, InputError, RunTakenError
from bcp.policies.keep import Entry
from bcp.protocols import Backend, RetryPolicy, folders_of
from bcp.runs.candidates import Candidate, Goal
from bcp.runs.folder import Folder
from bcp.runs.launches import LAUNCHES_KEY, Launch, stored_launch
from bcp.runs.ledger import Ledger
from bcp.runs.ledger_file import TRIES, busy
from bcp.runs.names import step_of

__all__ = ["LAUNCH", "Role", "Roles", "Whole", "has_roles", "roles_at"]

LAUNCH = "bcp.launch"
"""Name of the launch in the metadata of a checkpoint."""

WITHOUT_ROLES = "saved without roles"
"""Of a checkpoint: whether those of other roles belong to it, only the caller can know."""

_MOST_ID = 128


@dataclass(frozen=True, slots=True)
class Role:
    """The part that one world of ranks plays in a run of several, for :class:`bcp.Run`.

    The actor and the critic of an RL job train in worlds of their own. With roles, a step of the run counts once all
    roles have committed it: a resumption, :func:`bcp.latest` and retention see no other.

    Args:
        name: of this world, as ``"actor"``.
        of: names of all roles, this one among them; the same for all.
        launch: id of this start of the job, the same for all roles. Each restart of the job needs a new one: an id of
            the scheduler with its count of restarts, or a random one that the driver hands out.

    Raises:
        InputError: a name cannot be that of a folder, ``of`` lacks ``name`` or has one twice, or ``launch`` is no id.

    Example:
        >>> role = bcp.Role("actor", of=["actor", "critic"], launch="job-7.0")
        >>> with bcp.Run("ckpt/rl-2", {"model": torch.nn.Linear(4, 4)}, save=10, role=role) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> bcp.latest("ckpt/rl-2", role="actor") is None  # the critic has not saved it yet
        True

    """

    name: str
    of: Sequence[str] = field(kw_only=True)
    launch: str = field(kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.of, str) or not isinstance(self.of, Sequence):
            raise InputError(f"Role(of={self.of!r}): pass a list with the names of all roles, as ['actor', 'critic']")
        for name in (self.name, *self.of):
            if not isinstance(name, str) or not ROLE.fullmatch(name) or name in RESERVED or step_of(name) is not None:
                raise InputError(
                    f"Role: {name!r} cannot name the folder of a role: use letters, digits, '-' and '_', and none of "
                    f"{', '.join(RESERVED)} or step-1000"
                )
            if len(name) > _MOST_ID:
                raise InputError(f"Role: {name!r} has {len(name)} characters, and {_MOST_ID} are the most")
        object.__setattr__(self, "of", tuple(sorted(self.of)))
        if self.name not in self.of or len(set(self.of)) < len(self.of):
            raise InputError(f"Role({self.name!r}, of={list(self.of)}): name each role once, this one among them")
        if not isinstance(self.launch, str) or not self.launch.isprintable() or not 0 < len(self.launch) <= _MOST_ID:
            raise InputError(
                f"Role(launch={self.launch!r}) is no id of a launch: pass 1 to {_MOST_ID} printable characters, the "
                "same for all roles, and others after each restart of the job"
            )


@dataclass(frozen=True, slots=True)
class Whole:
    """The checkpoints of a role, as the other roles complete them.

    Attributes:
        entries: of the whole steps. Pins, metrics and marks "verified" of all roles are in them.
        doubted: steps among them that another role calls suspect.
        broken: of the other steps, those that will never be whole. Steps that are pinned in any role, or verified in
            this one, are left out.
    """

    entries: Sequence[Entry]
    doubted: Collection[int]
    broken: Collection[int]


@dataclass(frozen=True, slots=True)
class Weighed:
    """The candidates of a role, as the other roles complete them.

    Attributes:
        listing: the candidates, with reasons against those that are newer than the chosen one.
        chosen: the newest one of a whole step; None if no step is whole.
        launch: in which all roles have saved it.
        is_damaged: metadata of a newer checkpoint are lost or damaged, in any role.
    """

    listing: Sequence[Candidate]
    chosen: Candidate | None = None
    launch: str = ""
    is_damaged: bool = False

    @property
    def step(self) -> int:
        """The step of the chosen one; 0 for none."""
        return 0 if self.chosen is None else self.chosen.step


class Roles:
    """What one role knows of the others. Exists on its rank 0 only."""

    def __init__(self, role: Role, url: str, backend: Backend, open_folder: Callable[[str], Folder]) -> None:
        """Take the place; nothing is read yet.

        Args:
            role: this one.
            url: of the path above the folders of the roles, for messages.
            backend: over that path. :meth:`aclose` closes it.
            open_folder: opens the folder of a role.

        """
        self._role, self._url, self._backend, self._open = role, url, backend, open_folder
        self._token = secrets.token_hex(8)

    @property
    def launch(self) -> str:
        """The id of the launch, for the checkpoints that are saved in it."""
        return self._role.launch

    async def refuse(self, goal: Goal, own: Folder) -> None:
        """Raise an error of :meth:`agreed` that needs no look at checkpoints, before the role's folder is taken."""
        stored, _ = await stored_launch(self._backend, self._url)
        if stored is not None:
            self._check(stored, goal)
            if not goal.fresh:
                await self._check_losses(stored, own)
        elif any(step_of(name) is not None for name in await folders_of(self._backend)):
            raise InputError(
                f"{self._url} has checkpoints of a run without roles: use another folder for a run of several roles"
            )

    async def agreed(self, goal: Goal, own: Folder, listing: Sequence[Candidate]) -> list[Candidate]:
        """Keep the step that this launch goes on from, and give each other candidate a reason.

        The first role of a launch decides. Others take its step.

        Args:
            goal: as for :meth:`bcp.Run.resume`; the same for all roles.
            own: the folder of this role.
            listing: its candidates, newest first.

        Raises:
            RunTakenError: another launch has begun since, or this role has resumed in it already.
            InputError: the roles differ from those in the folder, or have asked for different steps.
            CorruptError: no step is whole any more, or this role lacks the step of the launch.
            StorageError: storage failed.

        """
        launch, weighed = await self._join(goal, own, listing)
        listing = [await self._of_launch(launch, candidate, own) for candidate in listing]
        if launch.step not in {0, *(candidate.step for candidate in listing if not candidate.reason)}:
            why = "; ".join(each.reason for each in listing if each.step == launch.step) or "it is not there"
            raise CorruptError(
                f"launch {launch.id!r} goes on from step {launch.step}, and {self._role.name} cannot load it: {why}. "
                "Restart all roles with another launch=; they go on from an older step"
            )
        chosen = f"launch {launch.id!r} goes on from {f'step {launch.step}' if launch.step else 'the beginning'}"
        known = {(each.step, each.name): each.reason for each in weighed.listing}
        return [
            candidate
            if candidate.step == launch.step or candidate.reason
            else replace(candidate, reason=known[candidate.step, candidate.name] or chosen)
            for candidate in listing
        ]

    async def _of_launch(self, launch: Launch, candidate: Candidate, own: Folder) -> Candidate:
        """Give a folder of the step a reason if it is not the checkpoint that the first role has seen."""
        if candidate.step != launch.step or candidate.reason:
            return candidate
        saved, reason = await _launch_or_reason(own, candidate.name)
        if not reason and saved != launch.saved:
            reason = f"it was saved in launch {saved!r}, and the other roles have it from launch {launch.saved!r}"
        return replace(candidate, reason=reason)

    async def whole(self, entries: Sequence[Entry], own: Folder) -> Whole:
        """Say which checkpoints of this role are whole, by the ledgers of all roles.

        Raises:
            BcpError: a ledger, or the metadata of a checkpoint, cannot be read.

        """
        steps = {entry.step for entry in entries}
        mine = {entry.step: await _with_launch(own, entry) for entry in entries}
        others = [await self._entries(name, steps) for name in self._others]
        whole: list[Entry] = []
        doubted: set[int] = set()
        pinned: set[int] = set()
        for step, entry in mine.items():
            twins = [theirs[step] for theirs in others if step in theirs]
            pinned |= {step} if any(each.pinned for each in (*twins, entry)) else set()
            if len(twins) < len(others) or any(each.launch != entry.launch for each in twins) or not entry.launch:
                continue
            metrics = {name: value for each in (*twins, entry) for name, value in each.metrics.items()}
            is_verified = entry.trust != "suspect" and any(each.trust == "verified" for each in twins)
            trust = "verified" if is_verified else entry.trust
            whole.append(replace(entry, metrics=metrics, pinned=step in pinned, trust=trust))
            doubted |= {step} if any(twin.trust == "suspect" for twin in twins) else set()
        sound = [entry.step for entry in whole if entry.trust != "suspect" and entry.step not in doubted]
        left = [mine[step] for step in steps - {entry.step for entry in whole} if step < max(sound, default=0)]
        broken = {entry.step for entry in left if entry.step not in pinned and entry.trust != "verified"}
        return Whole(whole, doubted, broken)

    async def check(self) -> None:
        """Raise RunTakenError if another launch has begun since; StorageError if that cannot be read."""
        launch, _ = await stored_launch(self._backend, self._url)
        if launch is not None and launch.id != self.launch:
            raise self._taken(launch)

    async def aclose(self) -> None:
        """Close the connections to storage."""
        await self._backend.aclose()

    @property
    def _others(self) -> Sequence[str]:
        return [name for name in self._role.of if name != self._role.name]

    # -- resumption ---------------------------------------------------------------------------

    async def weighed(self, goal: Goal, own: Folder, listing: Sequence[Candidate]) -> Weighed:
        """Look for the newest whole step.

        Raises:
            BcpError: a ledger, or the metadata of a checkpoint, cannot be read.

        """
        folders = {name: self._open(name) for name in self._others}
        try:
            ledgers = {name: await folder.peek() for name, folder in folders.items()}
            for folder in folders.values():
                await folder.steps()
            weighed, is_damaged = list(listing), False
            for place, candidate in enumerate(listing):
                if candidate.reason:
                    continue
                launch, reason = await _launch_or_reason(own, candidate.name)
                reasons, damages = [reason], [bool(reason)]
                if not launch and not reason and goal.step is None:
                    reasons = [WITHOUT_ROLES]
                elif not reason:
                    looks = [(name, folder, ledgers[name]) for name, folder in folders.items()]
                    answers = [await self._against(candidate.step, launch, goal, *look) for look in looks]
                    reasons, damages = [each for each, _ in answers], [damaged for _, damaged in answers]
                if not any(reasons):
                    return Weighed(weighed, candidate, launch, is_damaged)
                is_damaged = is_damaged or any(damages)
                weighed[place] = replace(candidate, reason="; ".join(filter(None, reasons)))
            return Weighed(weighed, is_damaged=is_damaged)
        finally:
            for folder in folders.values():
                await folder.aclose()

    async def _against(
        self, step: int, launch: str, goal: Goal, name: str, folder: Folder, ledger: Ledger | None
    ) -> tuple[str, bool]:
        """Return why a checkpoint of another role does not complete a step, and if it is damaged; "" if it does."""
        entry = None if ledger is None else ledger.entry(step)
        names = folder.names_of(step) if step in folder.listed.folders else ()
        there = [each for each in names if await folder.commit_of(each)]
        if not there:
            return f"{name} has no committed checkpoint of it", entry is not None
        found = [await _launch_or_reason(folder, each) for each in there]
        if not any(theirs == launch and not reason for theirs, reason in found):
            theirs, reason = found[0]
            mine = f"{self._role.name} in launch {launch!r}"
            why = f"{name}: {reason}" if reason else f"{name} has saved it in launch {theirs!r}, and {mine}"
            return why, any(reason for _, reason in found)
        trust, why = "unknown" if entry is None else entry.trust, ""
        if goal.step is None and trust == "suspect":
            why = f"{name} has marked it as suspect"
        elif goal.step is None and _is_leaving(ledger, step):
            why = f"{name} has begun to delete it"
        elif goal.trust == "verified" and trust != "verified":
            why = f"{name} has not verified it"
        return why, False

    async def _join(self, goal: Goal, own: Folder, listing: Sequence[Candidate]) -> tuple[Launch, Weighed]:
        """Take part in the launch; begin it if this role is the first. Return the candidates that were weighed, too."""
        weighed: Weighed | None = None
        for _ in range(TRIES):
            stored, version = await stored_launch(self._backend, self._url)
            if stored is not None:
                self._check(stored, goal)
            if stored is not None and stored.id == self.launch:
                launch = stored
            else:
                weighed = weighed or await self._newest(goal, own, listing)
                launch = self._begun(stored, goal, weighed)
            launch = launch.with_role(self._role.name, self._token)
            if launch == stored or await self._backend.put_if(LAUNCHES_KEY, launch.to_bytes(), version) is not None:
                if launch.step and weighed is not None and goal.step is None:
                    await self._check_stays(launch)
                return launch, weighed or Weighed(listing)
        raise busy(self._url, LAUNCHES_KEY)

    async def _check_stays(self, launch: Launch) -> None:
        """Raise CorruptError if a job of the launch before deletes the step meanwhile, or has.

        Such a job notes the deletion, then looks for another launch, then deletes.
        """
        for name in self._others:
            folder = self._open(name)
            try:
                await folder.steps()
                if _is_leaving(await folder.peek(), launch.step) or not await folder.committed(launch.step):
                    raise CorruptError(
                        f"launch {launch.id!r} goes on from step {launch.step}, and {name} of the launch before has "
                        "begun to delete it: restart all roles with another launch="
                    )
            finally:
                await folder.aclose()

    async def _newest(self, goal: Goal, own: Folder, listing: Sequence[Candidate]) -> Weighed:
        """Look for the newest whole step. Raises InputError if the step of the goal is not whole."""
        weighed = await self.weighed(goal, own, listing)
        if weighed.chosen is None and goal.step is not None:
            reasons = "; ".join(candidate.reason for candidate in weighed.listing if candidate.step == goal.step)
            raise InputError(f"the run cannot be resumed from step {goal.step}: {reasons}. Pass another step, or none")
        return weighed

    async def _check_losses(self, stored: Launch, own: Folder) -> None:
        """Raise CorruptError if a role that has resumed in the last launch has an empty folder now.

        A folder without a ledger that has checkpoints gets a new ledger.
        """
        folders = {self._role.name: own, **{name: self._open(name) for name in self._others}}
        try:
            lost = [
                name
                for name, folder in folders.items()
                if name in stored.joined and not await folder.has_ledger() and not await folder.steps()
            ]
        finally:
            for name in self._others:
                await folders[name].aclose()
        for name in lost:
            raise CorruptError(
                f"{name} has resumed in launch {stored.id!r}, and {self._url}/{name} has no ledger now: bring the "
                "folder back, or pass fresh=True to resume() in all roles"
            )

    def _check(self, stored: Launch, goal: Goal) -> None:
        """Raise an error if this role can neither take part in the last launch nor begin another."""
        if stored.roles != self._role.of:
            raise InputError(
                f"{self._url} has a run of the roles {', '.join(stored.roles)}, and this launch has "
                f"{', '.join(self._role.of)}: pass the same roles, or use another folder"
            )
        if self.launch in stored.earlier:
            raise self._taken(stored)
        if stored.id != self.launch:
            return
        if stored.joined.get(self._role.name, self._token) != self._token:
            raise RunTakenError(
                f"{self._role.name} has been resumed in launch {stored.id!r} of {self._url} already, and the other "
                "roles may have trained on since: restart all roles with another launch="
            )
        if stored.goal != str(goal):
            raise InputError(
                f"{self._role.name} calls resume({goal}), and launch {stored.id!r} has begun with "
                f"resume({stored.goal}): pass the same arguments in all roles"
            )

    def _begun(self, stored: Launch | None, goal: Goal, weighed: Weighed) -> Launch:
        """Begin a launch. It begins anew only where no checkpoint was whole before, or if asked to."""
        step = weighed.step
        begun = Launch(
            roles=self._role.of, id=self.launch, goal=str(goal), step=step, saved=weighed.launch, newest=step
        )
        if not step and goal == Goal():
            self._check_anew(stored, weighed)
        return begun if stored is None else stored.followed(begun)

    def _check_anew(self, stored: Launch | None, weighed: Weighed) -> None:
        """Raise an error before a run begins anew though there may be work of all roles."""
        alone = [each.step for each in weighed.listing if each.reason == WITHOUT_ROLES]
        if stored is None and alone:
            raise InputError(
                f"{self._url}/{self._role.name} has checkpoints that were saved without roles, and no step of all "
                f"roles: pass resume(step={alone[0]}) in all roles if theirs of this step belong together, or "
                "fresh=True to begin anew"
            )
        if weighed.is_damaged or (stored is not None and stored.newest):
            reasons = "; ".join(f"step {each.step}: {each.reason}" for each in weighed.listing if each.reason)
            raise CorruptError(
                f"no step of the run at {self._url} is whole any more, and the run does not begin anew by itself: "
                "restore the checkpoints, or pass fresh=True to resume() in all roles. "
                f"{reasons or 'There is no checkpoint'}"
            )

    def _taken(self, stored: Launch) -> RunTakenError:
        return RunTakenError(
            f"launch {stored.id!r} has begun at {self._url} since, and {self._role.name} belongs to launch "
            f"{self.launch!r}: this job stops writing. Pass an id to launch= that no launch had before"
        )

    async def _entries(self, name: str, steps: set[int]) -> dict[int, Entry]:
        """Return the checkpoints of another role, of these steps, that its ledger has and a listing shows."""
        folder = self._open(name)
        try:
            ledger = await folder.peek()
            listed = steps & set(await folder.steps())
            entries = () if ledger is None else ledger.entries
            return {entry.step: await _with_launch(folder, entry) for entry in entries if entry.step in listed}
        finally:
            await folder.aclose()


def roles_at(
    role: Role, url: str, storage_options: Mapping[str, Any] | None, retries: RetryPolicy | None = None
) -> Roles:
    """Return what a role asks about the others, below a path."""

    def open_folder(name: str) -> Folder:
        below = f"{url}/{name}"
        return Folder(resolve(below, storage_options, retries), shown(below), storage_options, retries)

    return Roles(role, shown(url), resolve(url, storage_options, retries), open_folder)


def has_roles(url: str, names: Sequence[str]) -> str:
    """Return the error of a caller without a role."""
    return f"{url} has a run of the roles {', '.join(names)}: pass role=, or use another folder"


async def _with_launch(folder: Folder, entry: Entry) -> Entry:
    """Return an entry whose launch is known; one that the ledger has not noted is read from the checkpoint."""
    if entry.launch is not None:
        return entry
    for name in folder.names_of(entry.step):
        with suppress(FileNotFoundError):  # deleted since
            return replace(entry, launch=await _launch_in(folder, name))
    return replace(entry, launch="")


async def _launch_in(folder: Folder, name: str) -> str:
    """Return the launch that a committed checkpoint was saved in; "" if it was saved without roles."""
    return str((await folder.read_commit(name)).user.get(LAUNCH, ""))


def _is_leaving(ledger: Ledger | None, step: int) -> bool:
    """Whether a deletion of a step has begun."""
    return ledger is not None and any(removal.step == step for removal in ledger.removing)


async def _launch_or_reason(folder: Folder, name: str) -> tuple[str, str]:
    """Return the launch of a committed checkpoint, or why its metadata cannot say it."""
    try:
        return await _launch_in(folder, name), ""
    except (CorruptError, FileNotFoundError, InputError) as error:
        return "", f"its metadata cannot be read: {error}"
