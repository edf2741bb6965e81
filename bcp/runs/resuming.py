"""The choice of the checkpoint to resume from: the newest committed one that loads on every rank.

Rank 0 lists the checkpoints. All ranks load the newest one, and all learn how every rank fared. A checkpoint that is
damaged for one rank is passed over by all ranks. An error that every checkpoint would raise ends the resumption, as a
model of another shape does: passing over good checkpoints would lose their work in silence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bcp._messages.running import Candidates, Choice, Outcome, Verdict
from bcp.errors import CheckpointError, CorruptError, FormatVersionError, MissingCodecError, PeerError
from bcp.protocols import Coordinator

__all__ = ["Candidates", "Choice", "Resumed", "Trust", "resume"]

Trust = Literal["any", "verified"]
Kind = Literal["peer", "damaged", "fatal"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """How a run came back.

    Attributes:
        step: the step that was loaded; 0 if there was none to load.
        passed_over: newer checkpoints and the reasons against them, newest first.
        life: id of this life of the job, equal on all ranks.
    """

    step: int = 0
    passed_over: tuple[Choice, ...] = ()
    life: str = ""

    def __str__(self) -> str:
        chosen = f"resumed from step {self.step}" if self.step else "nothing to resume from: a new run"
        return "; ".join([chosen, *(f"step {choice.step} passed over: {choice.reason}" for choice in self.passed_over)])


async def resume(
    ranks: Coordinator,
    name: str,
    patience: float,
    candidates: Callable[[], Awaitable[Candidates]],
    load: Callable[[int], Awaitable[object]],
) -> Resumed:
    """Load the newest candidate that loads on every rank. Collective.

    Args:
        ranks: the ranks of the job.
        name: of the operation, for messages.
        patience: seconds of silence after which a rank is given up.
        candidates: called on rank 0 only.
        load: loads a step, collectively.

    Raises:
        CorruptError: all checkpoints that were tried are damaged. The states may hold parts of them.
        BcpError: an error that every checkpoint would raise.

    """

    async def list_them(_: Sequence[bytes]) -> bytes:
        return (await candidates()).encode()

    async with ranks.begin(name, patience) as agreement:
        listing = Candidates.decode(await agreement.gather_broadcast("candidates", b"", list_them), sender=0)
    chosen, damaged = 0, []
    for step in listing.steps:
        reason = await _reason_against(ranks, f"{name}: step {step}", patience, step, load)
        if not reason:
            chosen = step
            break
        damaged.append(Choice(step, reason))
    else:
        _refuse_if_damaged(damaged)
    passed_over = [*listing.others, *damaged]
    newer = sorted((choice for choice in passed_over if choice.step > chosen), key=lambda choice: -choice.step)
    return Resumed(chosen, tuple(newer), listing.life)


def _refuse_if_damaged(damaged: Sequence[Choice]) -> None:
    """Refuse to begin anew where checkpoints were tried: their work, and the states as they were, would be lost."""
    if damaged:
        reasons = "; ".join(f"step {choice.step}: {choice.reason}" for choice in damaged)
        raise CorruptError(
            f"none of {len(damaged)} checkpoints can be loaded, and the states may hold parts of them. Repair one, or "
            f"make a new model and begin in another folder: {reasons}"
        )


async def _reason_against(
    ranks: Coordinator, name: str, patience: float, step: int, load: Callable[[int], Awaitable[object]]
) -> str:
    """Load a step on all ranks; return the damage that keeps it from loading, or "". Raise any other error."""
    error: Exception | None = None
    try:
        await load(step)
    except Exception as caught:  # noqa: BLE001 -- a user's object may raise anything, and all ranks have to know
        error = caught

    async def judge(outcomes: Sequence[bytes]) -> bytes:
        return _verdict(Outcome.decode_all(outcomes)).encode()

    async with ranks.begin(name, patience) as agreement:
        answer = await agreement.gather_broadcast("outcome", _outcome(error).encode(), judge)
        verdict = Verdict.decode(answer, sender=0)
    if verdict.culprit is not None:
        raise error if error is not None else PeerError(verdict.culprit, verdict.reason)
    return verdict.reason


def _outcome(error: Exception | None) -> Outcome:
    """Return this rank's outcome. An error of a message or of a user's object is fatal: no checkpoint causes it."""
    if error is None:
        return Outcome("")
    damaged = isinstance(error, CheckpointError) and not isinstance(error, FormatVersionError | MissingCodecError)
    kind: Kind = "peer" if isinstance(error, PeerError) else "damaged" if damaged else "fatal"
    return Outcome(kind, f"{type(error).__name__}: {error}")


def _verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """Return the first decisive error, and its rank if it ends the resumption."""
    for decisive in ("fatal", "damaged", "peer"):
        for rank, outcome in enumerate(outcomes):
            if outcome.kind == decisive:
                words = outcome.text if len(outcomes) == 1 else f"rank {rank}: {outcome.text}"
                return Verdict(None if decisive == "damaged" else rank, words)
    return Verdict(None)
