"""When to save: policies that look at the step that has just ended, and at a clock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol, cast

from bcp.errors import InputError
from bcp.policies.checks import amount, steps_of, whole

__all__ = [
    "AnyOf",
    "AtSteps",
    "Continuously",
    "Costs",
    "EverySeconds",
    "EverySteps",
    "FirstStep",
    "Moment",
    "OnPreemption",
    "SavePolicy",
    "as_save_policy",
    "divided",
    "elapsed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measurements of a run, for :class:`~bcp.policies.Tuned`. Zero: not measured yet.

    Attributes:
        stall: seconds of training that one save takes away.
        durable: seconds from the call of a save to its commit.
        step: mean seconds of a training step.
        failures: how many failures the run has seen. Preemptions with notice do not count: they lose no work.
        observed_hours: over how many hours it has seen them.
        restart: seconds from a failure until the training goes on.

    Example:
        >>> Costs(stall=0.2, durable=40.0, failures=2, observed_hours=30.0).restart
        0.0

    """

    stall: float = 0.0
    durable: float = 0.0
    step: float = 0.0
    failures: int = 0
    observed_hours: float = 0.0
    restart: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment that a policy is asked about.

    Attributes:
        step: the step that has just ended.
        seconds: seconds since the run began or was resumed, by a clock that only goes forward.
        last_step: step of the newest save that has begun, or of the checkpoint that was resumed from. None: neither.
        last_seconds: when that save began, by the same clock. None: not in this life of the run.
        preempted: whether the run has been asked to stop.
        saving: whether a save is still running.
        costs: measurements of the run.

    Example:
        >>> EverySeconds(600).due(Moment(step=70, seconds=615.0, last_step=None, last_seconds=None))
        True

    """

    step: int
    seconds: float
    last_step: int | None
    last_seconds: float | None
    preempted: bool = False
    saving: bool = False
    costs: Costs = field(default_factory=Costs)


class SavePolicy(Protocol):
    """Says when to save. Any object with these two members is one.

    Example::

        class OnMondays:
            timed = True

            def due(self, moment):
                return time.localtime().tm_wday == 0 and moment.seconds - (moment.last_seconds or 0) > 86_400

    """

    @property
    def timed(self) -> bool:
        """Whether the answer depends on a clock or on measurements. Then rank 0 alone is asked."""

    def due(self, moment: Moment) -> bool:
        """Return whether a save begins behind this step.

        A timed policy that says yes says so at all later ``seconds`` as well, everything else unchanged.
        """


def elapsed(moment: Moment) -> float:
    """Return seconds since the last save began, or since the run began or was resumed; never less than zero."""
    return max(0.0, moment.seconds - (moment.last_seconds or 0.0))


class _Stepwise:
    """A policy with the same answer on every rank."""

    __slots__ = ()

    @property
    def timed(self) -> bool:
        """Whether the answer depends on a clock or on measurements: no."""
        return False


class _Timed:
    """A policy that looks at a clock."""

    __slots__ = ()

    @property
    def timed(self) -> bool:
        """Whether the answer depends on a clock or on measurements: yes."""
        return True


@dataclass(frozen=True, slots=True)
class EverySteps(_Stepwise):
    """Save at the multiples of ``n``. A multiple that was left out is caught up with at the next step.

    Args:
        n: how many steps.

    Raises:
        InputError: ``n`` is no whole number above zero.

    Example:
        >>> EverySteps(100).due(Moment(step=200, seconds=9.0, last_step=100, last_seconds=4.0))
        True
        >>> EverySteps(100).due(Moment(step=0, seconds=0.0, last_step=None, last_seconds=None))
        False

    """

    n: int

    def __post_init__(self) -> None:
        whole("EverySteps", "n", self.n)

    def due(self, moment: Moment) -> bool:
        """Return whether the step is a multiple, or the first one since a multiple was left out."""
        if moment.last_step is None:
            return moment.step > 0 and moment.step % self.n == 0
        return moment.step // self.n > moment.last_step // self.n


@dataclass(frozen=True, slots=True)
class EverySeconds(_Timed):
    """Save when so many seconds have passed since the last save began, or since the run began or was resumed.

    Args:
        seconds: how many seconds.

    Raises:
        InputError: ``seconds`` is no finite number above zero.

    Example:
        >>> EverySeconds(600).due(Moment(step=7, seconds=700.0, last_step=1, last_seconds=101.0))
        False

    """

    seconds: float

    def __post_init__(self) -> None:
        amount("EverySeconds", "seconds", self.seconds)

    def due(self, moment: Moment) -> bool:
        """Return whether the seconds have passed."""
        return elapsed(moment) >= self.seconds


@dataclass(frozen=True, slots=True)
class AtSteps(_Stepwise):
    """Save at these steps. One that was left out is caught up with at the next step.

    Args:
        steps: the steps, in any order.

    Raises:
        InputError: there are none, or one is no whole number from zero on.

    Example:
        >>> AtSteps([10, 100]).due(Moment(step=100, seconds=4.0, last_step=10, last_seconds=1.0))
        True

    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        steps = steps_of("AtSteps", self.steps)
        if not steps:
            raise InputError("AtSteps([]) never saves; pass at least one step")
        object.__setattr__(self, "steps", steps)

    def due(self, moment: Moment) -> bool:
        """Return whether the step is one of them, or the first one since one of them was left out."""
        last = moment.last_step
        if last is None:
            return moment.step in self.steps
        return any(last < step <= moment.step for step in self.steps)


@dataclass(frozen=True, slots=True)
class Continuously(_Timed):
    """Save as soon as the save before is durable.

    Args:
        gap: least seconds from the beginning of one save to that of the next.

    Raises:
        InputError: ``gap`` is no finite number from zero on.

    Example:
        >>> running = Moment(step=8, seconds=70.0, last_step=1, last_seconds=3.0, saving=True)
        >>> Continuously(gap=60).due(running)
        False

    """

    gap: float = 0.0

    def __post_init__(self) -> None:
        amount("Continuously", "gap", self.gap, zero=True)

    def due(self, moment: Moment) -> bool:
        """Return whether no save is running, and both the gap and the measured seconds of a save have passed."""
        return not moment.saving and elapsed(moment) >= max(self.gap, moment.costs.durable)


@dataclass(frozen=True, slots=True)
class OnPreemption(_Stepwise):
    """Save when the run has been asked to stop.

    Example:
        >>> OnPreemption().due(Moment(step=8, seconds=7.0, last_step=1, last_seconds=3.0, preempted=True))
        True

    """

    def due(self, moment: Moment) -> bool:
        """Return whether the run has been asked to stop."""
        return moment.preempted


@dataclass(frozen=True, slots=True)
class FirstStep(_Stepwise):
    """Save the first step of a new run, so that a broken configuration shows early.

    Example:
        >>> FirstStep().due(Moment(step=1, seconds=2.0, last_step=None, last_seconds=None))
        True

    """

    def due(self, moment: Moment) -> bool:
        """Return whether the run has neither saved nor been resumed."""
        return moment.last_step is None


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Save when any of these policies says so.

    Args:
        policies: save policies; a number is :class:`EverySteps` of it.

    Raises:
        InputError: there are none, or one is no save policy.

    Example:
        >>> both = AnyOf(EverySteps(1000), EverySeconds(600))
        >>> both.timed, both.due(Moment(step=1000, seconds=61.0, last_step=None, last_seconds=None))
        (True, True)

    """

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy | int) -> None:
        if not policies:
            raise InputError("AnyOf() never saves; pass at least one save policy")
        object.__setattr__(self, "policies", tuple(as_save_policy(policy) for policy in policies))

    @property
    def timed(self) -> bool:
        """Whether the answer of any of them depends on a clock or on measurements."""
        return any(policy.timed for policy in self.policies)

    def due(self, moment: Moment) -> bool:
        """Return whether any of them says so."""
        return any(policy.due(moment) for policy in self.policies)


def as_save_policy(value: SavePolicy | int) -> SavePolicy:
    """Return the save policy that an argument means.

    Args:
        value: a save policy; or a number, which is :class:`EverySteps` of it.

    Raises:
        InputError: it is neither.

    Example:
        >>> as_save_policy(500)
        EverySteps(n=500)

    """
    if isinstance(value, int) and not isinstance(value, bool):
        return EverySteps(value)
    if isinstance(value, type):
        raise InputError(f"{value.__name__} is a class; pass an instance, as in {value.__name__}(...)")
    missing = [name for name in ("due", "timed") if not hasattr(value, name)]
    if missing:
        raise InputError(
            f"{value!r} is no save policy: it has no {' and no '.join(missing)}; pass a number of steps or, say, "
            "bcp.policies.AtSteps([100, 1000])"
        )
    return cast("SavePolicy", value)


def divided(policy: SavePolicy) -> tuple[SavePolicy | None, SavePolicy | None]:
    """Return the parts of a policy that look at steps alone, and those that look at a clock; None for no such part.

    The first give the same answer on every rank, so that no step that they name has to be announced.

    Example:
        >>> divided(AnyOf(AtSteps([20]), EverySeconds(600)))
        (AnyOf(policies=(AtSteps(steps=frozenset({20})),)), AnyOf(policies=(EverySeconds(seconds=600),)))

    """
    simple = _flat(policy)
    stepwise = [simple_policy for simple_policy in simple if not simple_policy.timed]
    timed = [simple_policy for simple_policy in simple if simple_policy.timed]
    return AnyOf(*stepwise) if stepwise else None, AnyOf(*timed) if timed else None


def _flat(policy: SavePolicy) -> list[SavePolicy]:
    """Return the policies of an :class:`AnyOf`, at any depth; any other policy alone."""
    return (
        [simple_policy for part in policy.policies for simple_policy in _flat(part)]
        if isinstance(policy, AnyOf)
        else [policy]
    )
