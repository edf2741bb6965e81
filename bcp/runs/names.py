"""Names of the folders of a run's checkpoints, and their order."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import partial
from typing import SupportsIndex

from bcp.errors import InputError
from bcp.runs.ledger import LARGEST_STEP

__all__ = ["free_name", "in_order", "step_name", "step_of", "whole_step"]

_MOST_DIGITS = 64
_STEP = re.compile(rf"step-([0-9]{{1,{_MOST_DIGITS}}})")


def whole_step(step: SupportsIndex) -> int:
    """Return a step as an int; integers of numpy and torch are steps, too.

    Raises:
        InputError: it is no whole number of 0 or more.

    Example:
        >>> whole_step(7)
        7

    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= LARGEST_STEP:
        raise InputError(f"step={step!r} is no step; pass a whole number from 0 to {LARGEST_STEP}")
    return number


def step_name(step: int) -> str:
    """Return the name of the folder into which a run saves a step.

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
    """Return the step of a folder's name, padded with zeros or not; None for any other name.

    Example:
        >>> step_of("step-00001000"), step_of("step-1000"), step_of("latest")
        (1000, 1000, None)

    """
    match = _STEP.fullmatch(name)
    step = None if match is None else int(match[1])
    return None if step is None or step > LARGEST_STEP else step


def free_name(step: int, names: Iterable[str], *, beside: bool) -> str:
    """Return the name under which a new checkpoint of a step comes before those that are there.

    Args:
        step: the step.
        names: of the step's folders.
        beside: all of these folders stay; else the first of them may be replaced.

    Example:
        >>> free_name(5, ["step-00000005"], beside=True), free_name(5, ["step-5"], beside=True)
        ('step-000000005', 'step-00000005')

    """
    longest = max(map(len, names), default=0)
    digits = max(len(step_name(step)), longest + beside) - len("step-")
    return f"step-{step:0{min(digits, _MOST_DIGITS)}d}"


def in_order(names: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Group names by their steps, newest first. For one step longer names come first, and shorter ones last.

    The run's own name is between them. Shorter names come in the order of their lengths. Names without a step are left
    out.

    Example:
        >>> in_order(["step-5", "step-00000005", "step-000000005", "step-7", "run.json"])
        {7: ('step-7',), 5: ('step-000000005', 'step-00000005', 'step-5')}

    """
    by_step: dict[int, list[str]] = {}
    for name in names:
        step = step_of(name)
        if step is not None:
            by_step.setdefault(step, []).append(name)
    return {step: tuple(sorted(by_step[step], key=partial(_place, step))) for step in sorted(by_step, reverse=True)}


def _place(step: int, name: str) -> tuple[bool, int]:
    is_shorter = len(name) < len(step_name(step))
    return is_shorter, len(name) if is_shorter else -len(name)
