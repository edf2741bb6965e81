"""Tests of seconds that pass: a busy machine gets more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bcp.backends.objects import ObjectBackend
from bcp.events import RetryEvent


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


def more_patient(backend: ObjectBackend) -> ObjectBackend:
    """Double the seconds of an attempt at each retry, and return the backend.

    For servers that are silent on purpose: the first attempts end soon, and a slow machine gets as long as it needs.
    """
    retries = backend.retries

    def double(_: RetryEvent) -> None:
        retries.policy = replace(retries.policy, attempt_seconds=2 * retries.policy.attempt_seconds)

    retries.policy = replace(retries.policy, on_retry=double)
    return backend


def impatient_now(backend: ObjectBackend, seconds: float) -> None:
    """Let requests fail for good after so many seconds from now on; those under way, too.

    For saves that fail with a fault: until the fault is made, they are as patient as they were.
    """
    backend.retries.policy = replace(backend.retries.policy, deadline_seconds=seconds)
