"""Whether a soaked job has kept all promises, and by how much."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from benchmarks.soak.life import Life, lost_steps
from benchmarks.soak.rules import SAVE_EVERY
from benchmarks.soak.soak import Outcome

__all__ = ["Verdict", "verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict over one job.

    Attributes:
        wrong: each broken promise, in words.
        phases: how many kills hit which work.
        lost: steps that each kill lost.
        beyond: the same without the steps that ran while the lost save was in flight.
        survived: seconds from each kill to the end of the last process.
        back: seconds from each kill to the end of the next resumption.
    """

    wrong: list[str]
    phases: Counter[str]
    lost: list[int]
    beyond: list[int]
    survived: list[float]
    back: list[float]


def verdict(outcome: Outcome, kills: int, digest: str) -> Verdict:
    """Judge a job.

    Args:
        outcome: its history.
        kills: how many kills were planned.
        digest: of the last weights of the undisturbed job; "" leaves them out.

    """
    lives = outcome.lives
    wrong = [f"folder: {words}" for words in outcome.retention.wrong]
    wrong += [f"life {life.number}: {words}" for life in lives for words in life.wrong]
    killed = [life for life in lives if life.kill is not None]
    if outcome.status or len(killed) != kills or len(lives) != kills + 1:
        wrong.append(f"{len(killed)} of {kills} kills, {len(lives)} lives, exit status {outcome.status}")
    if digest and lives[-1].digest != digest:
        wrong.append(f"the last weights are {lives[-1].digest[:8]}, not {digest[:8]}")
    wrong += _wrong_ledger(outcome, kills)
    found = Verdict(wrong, Counter(), [], [], [], [])
    before = 0
    for life in lives:
        wrong += _wrong_resumption(life, before)
        before = life.newest_at_end or 0
        if life.kill is None or life.ended_at is None:
            continue
        lost, in_flight = lost_steps(life, before)
        if lost - in_flight > SAVE_EVERY or in_flight > SAVE_EVERY:
            wrong.append(f"life {life.number}: {lost} steps were lost, {in_flight} of them during the save in flight")
        if sum(step > before for step in life.saves) > 1:
            wrong.append(f"life {life.number}: of the saves {life.saves} only {before} was committed")
        found.phases[life.kill.phase] += 1
        found.lost.append(lost)
        found.beyond.append(lost - in_flight)
        found.survived.append(life.ended_at - life.kill.at)
    for life, following in pairwise(lives):
        if life.kill is not None and following.resumed_at is not None:
            found.back.append(following.resumed_at - life.kill.at)
    return found


def _wrong_resumption(life: Life, newest: int) -> list[str]:
    """Return a word against a life that did not resume from the newest checkpoint that its predecessors left."""
    if life.resumed is None:
        return []
    wrong = []
    if life.resumed != newest:
        wrong.append(f"life {life.number}: resumed from step {life.resumed}, and {newest} was committed")
    if any(step != newest + SAVE_EVERY or "not committed" not in reason for step, reason in life.passed_over):
        wrong.append(f"life {life.number}: passed over {life.passed_over}")
    return wrong


def _wrong_ledger(outcome: Outcome, kills: int) -> list[str]:
    """Return words against the ledger at the end."""
    ledger = cast("dict[str, Any]", outcome.ledger)
    steps = [entry["step"] for entry in ledger["checkpoints"]]
    wrong = []
    if steps != sorted(outcome.retention.committed) or ledger["removing"]:
        wrong.append(f"the ledger has {steps}, and {ledger['removing']} are being removed")
    resumed = sum(life.resumed is not None for life in outcome.lives)
    if not resumed <= ledger["total_lives"] <= kills + 1 or ledger["failures"] != ledger["total_lives"] - 1:
        wrong.append(f"the ledger counts {ledger['total_lives']} lives and {ledger['failures']} failures")
    if ledger["lives"][-1]["ended"] != "finished":
        wrong.append(f"the last life has ended as {ledger['lives'][-1]['ended']!r}")
    return wrong
