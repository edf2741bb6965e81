"""Tests of seconds that pass: a busy machine gets more of them."""

from __future__ import annotations

from collections.abc import Callable


def patiently(check: Callable[[float], None], *seconds: float) -> None:
    """Call ``check`` with the first number of seconds, and with the next one if that fails.

    For checks in which one party is silent or slow on purpose. A busy machine may silence another party for longer
    than a test can wait. A defect fails with each number. The error of the last one is raised.
    """
    for each in seconds[:-1]:
        try:
            return check(each)
        except AssertionError as error:
            print(f"not with {each} s: {error}")  # noqa: T201 -- pytest shows it if the last one fails too
    return check(seconds[-1])
