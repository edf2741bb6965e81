"""Which checkpoints to keep: policies that choose among durable ones, and those that no policy may give up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bcp.errors import InputError
from bcp.policies.checks import amount, steps_of, whole

__all__ = [
    "AnyKept",
    "Best",
    "ClosestTo",
    "Entry",
    "EveryKSteps",
    "Everything",
    "KeepPolicy",
    "LastDays",
    "Latest",
    "Pinned",
    "as_keep_policy",
    "best_of",
    "doomed",
]

DAY = 86_400.0
"""Seconds of a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A committed checkpoint of a run.

    Attributes:
        step: its step.
        committed: when it was committed, in Unix seconds.
        metrics: values that the run has noted for the step, as for :class:`Best`.
        trust: the mark that it has in the run.
        reason: why.
        pinned: whether it is kept under any policy.
        launch: of the roles, if the run has several; None if it is not known.
        about: operations of the checkpoints that a mark as suspect is about, if the step was about to be saved again;
            empty for whatever is there.
        refers: steps whose checkpoints have some of its blocks (``Run(since="auto")``).

    Example:
        >>> Entry(step=300, committed=1_700_000_000.0, metrics={"loss": 2.5}).trust
        'unknown'

    """

    step: int
    committed: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    trust: Literal["unknown", "verified", "suspect"] = "unknown"
    reason: str = ""
    pinned: bool = False
    launch: str | None = None
    about: tuple[str, ...] = ()
    refers: tuple[int, ...] = ()


class KeepPolicy(Protocol):
    """Chooses the checkpoints to keep. Any object with this method is one.

    Example::

        class EvenSteps:
            def kept(self, entries, now):
                return {entry.step for entry in entries if entry.step % 2 == 0}

    """

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the steps of the checkpoints to keep.

        Args:
            entries: the durable checkpoints of the run, in any order.
            now: Unix seconds.

        """


@dataclass(frozen=True, slots=True)
class Latest:
    """Keep the newest ``n`` checkpoints.

    Args:
        n: how many.

    Raises:
        InputError: ``n`` is no whole number above zero.

    Example:
        >>> Latest(2).kept([Entry(step=step, committed=0.0) for step in (10, 20, 30)], now=0.0) == {20, 30}
        True

    """

    n: int

    def __post_init__(self) -> None:
        whole("Latest", "n", self.n)

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the largest steps."""
        del now
        return set(sorted({entry.step for entry in entries})[-self.n :])


@dataclass(frozen=True, slots=True)
class EveryKSteps:
    """Keep the checkpoints whose step is a multiple of ``k``.

    Args:
        k: how many steps.

    Raises:
        InputError: ``k`` is no whole number above zero.

    Example:
        >>> EveryKSteps(20).kept([Entry(step=step, committed=0.0) for step in (10, 20, 30)], now=0.0)
        {20}

    """

    k: int

    def __post_init__(self) -> None:
        whole("EveryKSteps", "k", self.k)

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the steps that are multiples."""
        del now
        return {entry.step for entry in entries if entry.step % self.k == 0}


@dataclass(frozen=True, slots=True)
class ClosestTo:
    """Keep the closest checkpoint to each multiple of ``every_k``; of two that are as close the older one.

    The multiples begin with ``every_k`` itself. Zero is none of them. A checkpoint that is the closest one to a
    multiple stays so: no later checkpoint is closer to a step that the run has passed.

    Args:
        every_k: how many steps.

    Raises:
        InputError: ``every_k`` is no whole number above zero.

    Example:
        >>> entries = [Entry(step=step, committed=0.0) for step in (70, 98, 130, 210)]
        >>> sorted(ClosestTo(100).kept(entries, now=0.0))
        [98, 210]

    """

    every_k: int

    def __post_init__(self) -> None:
        whole("ClosestTo", "every_k", self.every_k)

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the closest step to each multiple, up to the first multiple that the run has not passed."""
        del now
        k, steps = self.every_k, sorted({entry.step for entry in entries})
        multiples = {multiple for step in steps for multiple in (step // k * k, step // k * k + k) if multiple}
        kept = set()
        for multiple in multiples:  # others lie in gaps, and are farther from the same checkpoints
            index = bisect_left(steps, multiple)
            kept.add(min((abs(step - multiple), step) for step in steps[max(0, index - 1) : index + 1])[1])
        return kept


@dataclass(frozen=True, slots=True)
class LastDays:
    """Keep the checkpoints that were committed in the last ``days`` days.

    A checkpoint whose commit lies in the future is kept: then a clock has jumped.

    Args:
        days: how many days; a fraction is fine.

    Raises:
        InputError: ``days`` is no finite number above zero.

    Example:
        >>> entries = [Entry(step=10, committed=0.0), Entry(step=20, committed=86_400.0)]
        >>> LastDays(0.5).kept(entries, now=90_000.0)
        {20}

    """

    days: float

    def __post_init__(self) -> None:
        amount("LastDays", "days", self.days)

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the steps of the young ones."""
        return {entry.step for entry in entries if not now - entry.committed > self.days * DAY}  # so NaN is kept


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``n`` checkpoints with the best values of a metric; of equal ones the newer.

    A checkpoint without the metric, or with NaN, is not among them.

    Args:
        metric: its name, as in ``run.maybe_save(step, metrics={"loss": loss})``.
        n: how many.
        mode: ``"min"``: the smallest values are the best; ``"max"``: the largest.

    Raises:
        InputError: ``metric`` is no name, ``n`` no whole number above zero, or ``mode`` neither of the two.

    Example:
        >>> losses = {10: 3.0, 20: 2.0, 30: float("nan")}
        >>> Best("loss").kept([Entry(step=s, committed=0.0, metrics={"loss": x}) for s, x in losses.items()], now=0.0)
        {20}

    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise InputError(f"Best(metric={self.metric!r}): no name; pass that of a metric, as in Best('loss')")
        whole("Best", "n", self.n)
        if self.mode not in ("min", "max"):
            raise InputError(f"Best(mode={self.mode!r}) is unknown; use 'min' or 'max'")

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the steps of the best ones."""
        del now
        return set(self.ranked(entries)[: self.n])

    def ranked(self, entries: Sequence[Entry]) -> list[int]:
        """Return the steps of all that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        values = {entry.step: entry.metrics.get(self.metric, math.nan) for entry in entries}
        ranked = sorted((sign * value, -step) for step, value in values.items() if not math.isnan(value))
        return [-step for _, step in ranked]


@dataclass(frozen=True, slots=True)
class Pinned:
    """Keep the checkpoints of these steps, and all that are pinned.

    Args:
        steps: the steps; none by default.

    Raises:
        InputError: one is no whole number from zero on.

    Example:
        >>> Pinned([20]).kept([Entry(step=step, committed=0.0) for step in (10, 20, 30)], now=0.0)
        {20}

    """

    steps: Collection[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", steps_of("Pinned", self.steps))

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the steps of those that are there."""
        del now
        return {entry.step for entry in entries if entry.pinned or entry.step in self.steps}


@dataclass(frozen=True, slots=True)
class Everything:
    """Keep all checkpoints.

    Example:
        >>> Everything().kept([Entry(step=10, committed=0.0)], now=0.0)
        {10}

    """

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return all steps."""
        del now
        return {entry.step for entry in entries}


@dataclass(frozen=True, slots=True, init=False)
class AnyKept:
    """Keep each checkpoint that any of these policies keeps.

    Args:
        policies: keep policies; a number is :class:`Latest` of it.

    Raises:
        InputError: there are none, or one is no keep policy.

    Example:
        >>> entries = [Entry(step=step, committed=0.0) for step in (10, 20, 30, 40)]
        >>> sorted(AnyKept(Latest(1), EveryKSteps(20)).kept(entries, now=0.0))
        [20, 40]

    """

    policies: tuple[KeepPolicy, ...]

    def __init__(self, *policies: KeepPolicy | int) -> None:
        if not policies:
            raise InputError("AnyKept() would delete every checkpoint; pass at least one keep policy")
        object.__setattr__(self, "policies", tuple(as_keep_policy(policy) for policy in policies))

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        """Return the steps that any of them keeps."""
        return {step for policy in self.policies for step in policy.kept(entries, now)}


def best_of(policy: KeepPolicy, metric: str | None = None) -> Best:
    """Return the one :class:`Best` that a policy is, or has in an :class:`AnyKept`.

    Args:
        policy: the policy.
        metric: of the one to return; None for any.

    Raises:
        InputError: there is none, or several.

    Example:
        >>> best_of(AnyKept(3, Best("loss", 2)))
        Best(metric='loss', n=2, mode='min')

    """
    found = [each for each in _parts(policy) if isinstance(each, Best) and metric in (None, each.metric)]
    if len(found) == 1:
        return found[0]
    which = "" if metric is None else f" of {metric!r}"
    if found:
        names = ", ".join(repr(each.metric) for each in found)
        raise InputError(f"the run keeps the best{which} by several policies, {names}: say metric=")
    keep = f"bcp.policies.AnyKept(3, bcp.policies.Best({metric or 'loss'!r}))"
    raise InputError(f"the run keeps the best{which} by no policy: pass keep={keep}")


def _parts(policy: KeepPolicy) -> list[KeepPolicy]:
    if isinstance(policy, AnyKept):
        return [part for each in policy.policies for part in _parts(each)]
    return [policy]


def as_keep_policy(value: KeepPolicy | int) -> KeepPolicy:
    """Return the keep policy that an argument means.

    Args:
        value: a keep policy; or a number, which is :class:`Latest` of it.

    Raises:
        InputError: it is neither.

    Example:
        >>> as_keep_policy(3)
        Latest(n=3)

    """
    if isinstance(value, bool | type) or not (isinstance(value, int) or hasattr(value, "kept")):
        raise InputError(f"{value!r} is no keep policy; pass a number of checkpoints or, say, bcp.policies.LastDays(7)")
    return Latest(value) if isinstance(value, int) else value


def doomed(
    entries: Sequence[Entry],
    keep: KeepPolicy,
    now: float,
    distrusted: Collection[int] = frozenset(),
    needed: Collection[int] = frozenset(),
) -> list[int]:
    """Return the steps of the checkpoints that may be deleted, oldest first.

    These checkpoints stay under any policy: the newest, the newest verified one, the newest one that is not suspect,
    and pinned ones. All checkpoints stay if the policy keeps none, because its metric, for example, is never noted.

    Suspect and distrusted checkpoints do not displace others: the policy and these rules choose once among all
    checkpoints, and once among those that are neither. A checkpoint to which one that stays refers stays as well.

    Args:
        entries: the durable checkpoints of the run, in any order.
        keep: the policy.
        now: Unix seconds.
        distrusted: steps that the run could not, or must not, resume from.
        needed: steps to which saves refer that are no entries yet.

    Example:
        >>> entries = [Entry(step=step, committed=0.0) for step in (10, 20, 30)]
        >>> doomed(entries, Latest(1), now=0.0)
        [10, 20]
        >>> doomed(entries, Best("los"), now=0.0)
        []
        >>> doomed(entries, Latest(1), now=0.0, distrusted={20, 30})
        [20]

    """
    steps = {entry.step for entry in entries}
    sound = [entry for entry in entries if entry.trust != "suspect" and entry.step not in distrusted]
    kept = (set(keep.kept(entries, now)) | set(keep.kept(sound, now))) & steps
    if not kept:
        return []
    kept |= {entry.step for entry in entries if entry.pinned}
    for chosen in (
        steps,
        [entry.step for entry in entries if entry.trust == "verified"],
        [entry.step for entry in entries if entry.trust != "suspect"],
        [entry.step for entry in sound if entry.trust == "verified"],
        [entry.step for entry in sound],
    ):
        kept |= set(sorted(chosen)[-1:])
    kept |= set(needed)
    for entry in sorted(entries, key=lambda entry: -entry.step):  # a reference leads to an older step
        kept |= set(entry.refers) if entry.step in kept else set()
    return sorted(steps - kept)
