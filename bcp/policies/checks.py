"""Checks of the arguments of policies."""

from __future__ import annotations

import math
from collections.abc import Collection

from bcp.errors import InputError

__all__ = ["amount", "steps_of", "whole"]


def whole(where: str, name: str, value: object) -> None:
    """Refuse everything but a whole number above zero.

    Args:
        where: the policy that has got the value, as in ``"Latest"``.
        name: name of its argument.
        value: the value.

    Raises:
        InputError: names the policy, the argument and the value.

    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}({name}={value!r}): a {type(value).__name__} is no whole number; pass an int")
    if value < 1:
        raise InputError(
            f"{where}({name}={value}): the number must be 1 or more; pass {where}({name}=1) or a larger one"
        )


def amount(where: str, name: str, value: object, *, zero: bool = False, most: float = math.inf) -> None:
    """Refuse everything but a finite number above zero.

    Args:
        where: the policy that has got the value, as in ``"EverySeconds"``.
        name: name of its argument.
        value: the value.
        zero: whether zero is allowed, too.
        most: the largest value that is allowed.

    Raises:
        InputError: names the policy, the argument and the value.

    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}({name}={value!r}): a {type(value).__name__} is no number; pass a float")
    if not math.isfinite(value):
        raise InputError(f"{where}({name}={value}): the number must be finite; pass one that is")
    if value < 0 or (value == 0 and not zero) or value > most:
        least = "zero or more" if zero else "above zero"
        bound = "" if math.isinf(most) else f" and at most {most:g}"
        raise InputError(f"{where}({name}={value}): the number must be {least}{bound}; pass one that is")


def steps_of(where: str, value: object) -> frozenset[int]:
    """Return steps as a set.

    Args:
        where: the policy that has got them, as in ``"AtSteps"``.
        value: the steps, in any collection.

    Raises:
        InputError: it is no collection, or has something else than whole numbers from zero on.

    """
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise InputError(f"{where}(steps={value!r}): no collection of steps; pass a list, as in {where}([1000, 2000])")
    for step in value:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InputError(f"{where}(steps=...) has {step!r}; pass whole numbers that are 0 or more")
    return frozenset(value)
