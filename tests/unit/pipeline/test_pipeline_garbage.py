"""Garbage collection waits while something is planned, in whatever thread, and is left as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest

from bcp.runtime.threads import gc_paused, in_thread_gc_paused

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["on", "off"], autouse=True)
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Switch it on or off before, and on after."""
    (gc.enable if request.param else gc.disable)()
    before = gc.get_threshold()
    yield request.param
    assert gc.get_threshold() == before
    gc.enable()


def put_off() -> bool:
    return gc.get_threshold()[0] == 0


async def test_it_is_put_off_until_the_last_one_is_done(enabled: bool) -> None:  # noqa: FBT001 -- a fixture
    with gc_paused():
        assert await in_thread_gc_paused(put_off)
        assert put_off()
    assert not put_off()
    assert gc.isenabled() is enabled


async def test_it_comes_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread_gc_paused(lambda: 1 // 0)
    assert not put_off()


async def test_calls_at_once() -> None:
    seen: list[bool] = []

    async def look() -> None:
        seen.append(await in_thread_gc_paused(put_off))

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(look)
    assert seen == [True] * 20
    assert not put_off()


def test_what_others_switch_meanwhile_stays_so() -> None:
    before = gc.get_threshold()
    with gc_paused():
        gc.disable()
    assert not gc.isenabled()
    with gc_paused():
        gc.set_threshold(50_000, 20, 20)
    assert gc.get_threshold() == (50_000, 20, 20)
    gc.set_threshold(*before)


FORKED = """
import gc, os
from bcp.runtime.threads import gc_paused

def put_off():
    return gc.get_threshold()[0] == 0

with gc_paused():
    child = os.fork()
    if child == 0:
        collects = not put_off()
        with gc_paused():
            assert put_off()
        os._exit(7 if collects and not put_off() else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert put_off()
assert not put_off()
"""


def test_a_fork_meanwhile_collects() -> None:
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED], check=True)  # noqa: S603 -- ours
