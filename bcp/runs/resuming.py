"""The choice of the checkpoint to resume from: the newest committed one that loads on every rank.

Rank 0 lists the checkpoints. All ranks load the newest one, and all learn how every rank fared. A checkpoint that is
damaged for one rank, or cannot be read, is passed over by all ranks. An error that every checkpoint would raise ends
the resumption, as a model of another shape does: passing over good checkpoints would lose their work in silence.

A checkpoint that cannot be read may be whole. So a resumption that has met one never begins anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from bcp._messages.running import Candidates, Choice, Outcome, Verdict
from bcp.errors import (
    CheckpointError,
    CorruptError,
    FormatVersionError,
    InputError,
    MissingCodecError,
    PeerError,
    StorageError,
)
from bcp.protocols import Coordinator
from bcp.tiers.near import UnreachableError

__all__ = ["Candidates", "Choice", "Resumed", "resume"]

Kind = Literal["peer", "unreadable", "damaged", "fatal"]
Load = Callable[[int, str], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Resumed:
    """How a run came back.

    Attributes:
        step: the step that was loaded; 0 if there was none to load.
        passed_over: checkpoints that were tried before, newer ones that must not be tried, and the reasons against
            them, newest first.
        life: id of this life of the job, equal on all ranks.
        name: of the folder that was loaded, as in ``"step-00001000"``; empty if there was none to load.
        hosts: it was loaded from the memory of so many hosts; 0: from storage.
        from_storage: bytes that a load from memory has read from storage on all ranks: hosts have lost these, or have
            damaged copies.
        folders: names of all folders of steps that were listed. With an exact step, older ones are left out.
    """

    step: int = 0
    passed_over: tuple[Choice, ...] = ()
    life: str = ""
    name: str = ""
    hosts: int = 0
    from_storage: int = 0
    folders: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        chosen = f"resumed from step {self.step}" if self.name else "nothing to resume from: a new run"
        if self.hosts:
            hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
            chosen += f": memory of {hosts}, {self.from_storage} bytes from storage"
        if self.passed_over and not self.name:
            chosen += ", though the folder has checkpoints"
        return "; ".join([chosen, *(f"step {choice.step} passed over: {choice.reason}" for choice in self.passed_over)])


@dataclass(frozen=True, slots=True)
class _Failed:
    """A checkpoint that did not load.

    Attributes:
        choice: the checkpoint and the reason.
        unreadable: the rank that storage failed; None if the checkpoint is damaged.
        error: this rank's own error.
    """

    choice: Choice
    unreadable: int | None
    error: Exception | None

    def raised(self) -> Exception:
        """Return the error that this rank raises for the checkpoint."""
        if self.error is not None and not isinstance(self.error, PeerError):
            return self.error
        if self.unreadable is not None:
            return PeerError(self.unreadable, self.choice.reason)
        return CorruptError(f"step {self.choice.step}: {self.choice.reason}")


async def resume(
    ranks: Coordinator,
    name: str,
    patience: float,
    candidates: Callable[[], Awaitable[Candidates]],
    load: Load,
    *,
    look: Callable[[], Awaitable[object]] | None = None,
    exactly: bool = False,
) -> Resumed:
    """Load the first candidate that loads on every rank. Collective.

    Args:
        ranks: the ranks of the job.
        name: of the operation, for messages.
        patience: seconds of silence after which a rank is given up.
        candidates: called on rank 0 only.
        load: loads a step from a folder, collectively.
        look: asks storage anything, on rank 0, after a checkpoint could not be read. An error means that the store is
            down as a whole, so that no other checkpoint is tried.
        exactly: the caller has asked for one step; its own error is raised if it does not load.

    Raises:
        CorruptError: all checkpoints that were tried are damaged. The states may hold parts of them.
        StorageError: none of them loads, and one that cannot be read may be whole.
        BcpError: an error that every checkpoint would raise.

    """

    async def list_them(_: Sequence[bytes]) -> bytes:
        return (await candidates()).encode()

    async with ranks.begin(name, patience) as agreement:
        listing = Candidates.decode(await agreement.gather_broadcast("candidates", b"", list_them), sender=0)
    step, folder = 0, ""
    failed: list[_Failed] = []
    folders = listing.names or [""] * len(listing.steps)
    for candidate, candidate_folder in zip(listing.steps, folders, strict=True):
        load_it = partial(load, candidate, candidate_folder)
        verdict, error = await _tried(ranks, f"{name}: step {candidate}", patience, load_it, look)
        if not verdict.reason:
            step, folder = candidate, candidate_folder
            break
        failed.append(_Failed(Choice(candidate, verdict.reason, candidate_folder), verdict.unreadable, error))
    else:
        _refuse_to_begin_anew(failed, exactly=exactly)
    newer = [choice for choice in listing.others if choice.step > step or not folder]
    passed_over = sorted([*newer, *(failure.choice for failure in failed)], key=lambda choice: -choice.step)
    listed = (*folders, *(choice.name for choice in listing.others))
    return Resumed(step, tuple(passed_over), listing.life, folder, folders=listed)


def _refuse_to_begin_anew(failed: Sequence[_Failed], *, exactly: bool) -> None:
    """Refuse to begin anew where checkpoints were tried: their work, and the states as they were, would be lost."""
    if not failed:
        return
    reasons = "; ".join(f"step {failure.choice.step}: {failure.choice.reason}" for failure in failed)
    if exactly:
        raise failed[0].raised()
    for failure in failed:
        if failure.unreadable is not None:
            error = failure.raised()
            error.add_note(
                f"None of {len(failed)} checkpoints loads. Some cannot be read but may be whole, so the run does not "
                f"begin anew. Make storage readable, and resume again: {reasons}"
            )
            raise error
    raise CorruptError(
        f"none of {len(failed)} checkpoints can be loaded, and the states may hold parts of them. Repair one, or "
        f"make a new model and begin in another folder: {reasons}"
    )


async def _tried(
    ranks: Coordinator,
    name: str,
    patience: float,
    load: Callable[[], Awaitable[object]],
    look: Callable[[], Awaitable[object]] | None,
) -> tuple[Verdict, Exception | None]:
    """Load a checkpoint on all ranks; return the verdict and this rank's error. Raise an error that ends it all."""
    error: Exception | None = None
    try:
        await load()
    except Exception as caught:  # noqa: BLE001 -- a user's object may raise anything, and all ranks have to know
        error = caught

    async def judge(outcomes: Sequence[bytes]) -> bytes:
        verdict = _verdict(Outcome.decode_all(outcomes))
        if verdict.unreadable is not None and look is not None:
            try:
                await look()
            except StorageError as down:
                verdict = Verdict(verdict.unreadable, f"{verdict.reason}; the store is down: {down}")
        return verdict.encode()

    async with ranks.begin(name, patience) as agreement:
        answer = await agreement.gather_broadcast("outcome", _outcome(error).encode(), judge)
        verdict = Verdict.decode(answer, sender=0)
    if verdict.culprit is not None:
        raise error if error is not None else PeerError(verdict.culprit, verdict.reason)
    return verdict, _without_frames(error)


def _without_frames(error: Exception | None) -> Exception | None:
    """Forget the way of an error that may be raised later: its frames keep the tensors of the states alive."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _outcome(error: Exception | None) -> Outcome:
    """Return this rank's outcome. An error of a message or of a user's object is fatal: no checkpoint causes it.

    A host that does not answer is fatal, too: an older checkpoint would give up a snapshot that may be whole.
    """
    if error is None:
        return Outcome("")
    return Outcome(_kind(error), f"{type(error).__name__}: {error}")


def _kind(error: Exception) -> Kind:
    if isinstance(error, PeerError):
        return "peer"
    if isinstance(error, UnreachableError):
        return "fatal"
    if isinstance(error, StorageError) or type(error) is InputError:  # the latter of a link that leads elsewhere
        return "unreadable"
    damaged = isinstance(error, CheckpointError) and not isinstance(error, FormatVersionError | MissingCodecError)
    return "damaged" if damaged else "fatal"


def _verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """Return the first decisive error, and its rank if it ends the resumption."""
    for decisive in ("fatal", "damaged", "unreadable", "peer"):
        for rank, outcome in enumerate(outcomes):
            if outcome.kind == decisive:
                words = outcome.text if len(outcomes) == 1 else f"rank {rank}: {outcome.text}"
                ends_it = decisive in ("fatal", "peer")
                return Verdict(rank if ends_it else None, words, rank if decisive == "unreadable" else None)
    return Verdict(None)
