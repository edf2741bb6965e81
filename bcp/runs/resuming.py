"""The choice of the checkpoint to resume from: the newest committed one that loads, and the reasons for it.

Rank 0 looks at storage, all ranks load what it chose, and all hear how every rank fared. A checkpoint that is damaged
on one rank is passed over by all. An error that would meet every checkpoint, as a model of another shape, ends the
resumption: passing over good checkpoints would lose their work in silence.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bcp.errors import BcpError, CheckpointError, FormatVersionError, MissingCodecError, PeerError
from bcp.protocols import Coordinator

__all__ = ["Choice", "Resumed", "Trust", "resume"]

Trust = Literal["any", "verified"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that was looked at.

    Attributes:
        step: its step.
        reason: why it was passed over; empty for the one that was loaded.
    """

    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """How a run came back.

    Attributes:
        step: the step that was loaded; 0 if there was nothing to load.
        passed_over: newer checkpoints and why they were not loaded, newest first.
    """

    step: int = 0
    passed_over: tuple[Choice, ...] = field(default=())

    def __str__(self) -> str:
        """Say it in words."""
        chosen = f"resumed from step {self.step}" if self.step else "nothing to resume from: a new run"
        return "; ".join([chosen, *(f"step {each.step} passed over: {each.reason}" for each in self.passed_over)])


async def resume(
    ranks: Coordinator,
    url: str,
    timeout: float,
    candidates: Callable[[], Awaitable[tuple[Sequence[int], Sequence[Choice]]]],
    load: Callable[[int], Awaitable[object]],
) -> Resumed:
    """Load the newest candidate that loads on every rank. Collective.

    Args:
        ranks: the ranks of the job.
        url: the run's place, for messages.
        timeout: seconds of silence after which a rank is given up.
        candidates: asked on rank 0 only: steps to try, the best first, and those that are not to be tried.
        load: loads a step, collectively.

    """
    async with ranks.begin(f"resume the run at {url}", timeout) as agreement:

        async def choose(_: Sequence[bytes]) -> bytes:
            steps, others = await candidates()
            return json.dumps([list(steps), [[each.step, each.reason] for each in others]]).encode()

        steps, others = json.loads(await agreement.decide("choose", b"", choose))
    passed_over = [Choice(step, reason) for step, reason in others]
    for step in steps:
        reason = await _tried(ranks, url, timeout, step, load)
        if not reason:
            newer = sorted((each for each in passed_over if each.step > step), key=lambda each: -each.step)
            return Resumed(step, tuple(newer))
        passed_over.append(Choice(step, reason))
    return Resumed(0, tuple(sorted(passed_over, key=lambda each: -each.step)))


async def _tried(
    ranks: Coordinator, url: str, timeout: float, step: int, load: Callable[[int], Awaitable[object]]
) -> str:
    """Load a step on all ranks; return why it cannot be loaded by any, or nothing. Raise an error of another kind."""
    error: BcpError | None = None
    try:
        await load(step)
    except BcpError as caught:
        error = caught
    async with ranks.begin(f"resume the run at {url}: outcome of step {step}", timeout) as agreement:

        async def judge(outcomes: Sequence[bytes]) -> bytes:
            return _verdict([json.loads(each) for each in outcomes])

        fatal, reason = json.loads(await agreement.decide("outcome", _outcome(error), judge))
    if fatal:
        raise error if error is not None else PeerError(int(fatal) - 1, reason)
    return str(reason)


def _outcome(error: BcpError | None) -> bytes:
    """Say how this rank fared: "" for well, "peer" for another rank's error, "damaged", or "fatal"."""
    damaged = isinstance(error, CheckpointError) and not isinstance(error, FormatVersionError | MissingCodecError)
    kind = "" if error is None else "peer" if isinstance(error, PeerError) else "damaged" if damaged else "fatal"
    return json.dumps([kind, "" if error is None else f"{type(error).__name__}: {error}"]).encode()


def _verdict(outcomes: Sequence[Sequence[str]]) -> bytes:
    """Return [rank + 1 of a fatal error or 0, the reason of the first error that is a rank's own]."""
    ranked = [(kind, rank, text) for rank, (kind, text) in enumerate(outcomes) if kind]
    for wanted in ("fatal", "damaged", "peer"):
        for kind, rank, text in ranked:
            if kind == wanted:
                said = text if len(outcomes) == 1 else f"rank {rank}: {text}"
                return json.dumps([0 if kind == "damaged" else rank + 1, said]).encode()
    return json.dumps([0, ""]).encode()
