"""Names of the folders of a run's checkpoints, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bcp.errors import InputError
from bcp.runs.ledger import LARGEST_STEP

__all__ = ["in_order", "step_name", "step_of"]

_STEP = re.compile(r"step-([0-9]{1,64})")


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


def in_order(names: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Group names by their steps, newest first. For one step the run's own name comes first, then shorter ones.

    Names without a step are left out.

    Example:
        >>> in_order(["step-5", "step-00000005", "step-7", "run.json"])
        {7: ('step-7',), 5: ('step-00000005', 'step-5')}

    """
    by_step: dict[int, list[str]] = {}
    for name in names:
        step = step_of(name)
        if step is not None:
            by_step.setdefault(step, []).append(name)
    return {
        step: tuple(sorted(by_step[step], key=lambda name: (name != step_name(step), len(name))))
        for step in sorted(by_step, reverse=True)
    }
