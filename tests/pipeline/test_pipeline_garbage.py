"""Garbage collection waits while something is planned, in whatever thread, and is left as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest

from bcp.pipeline import planning, uncollected

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["on", "off"], autouse=True)
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Switch it on or off before, and on after."""
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


async def test_it_is_put_off_until_the_last_one_is_done(enabled: bool) -> None:  # noqa: FBT001 -- a fixture
    with uncollected():
        assert not await planning(gc.isenabled)
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


async def test_it_comes_back_after_an_error(enabled: bool) -> None:  # noqa: FBT001 -- a fixture
    with pytest.raises(ZeroDivisionError):
        await planning(lambda: 1 // 0)
    assert gc.isenabled() is enabled


async def test_calls_at_once(enabled: bool) -> None:  # noqa: FBT001 -- a fixture
    seen: list[bool] = []

    async def look() -> None:
        seen.append(await planning(gc.isenabled))

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(look)
    assert seen == [False] * 20
    assert gc.isenabled() is enabled


FORKED = """
import gc, os
from bcp.pipeline import uncollected

with uncollected():
    child = os.fork()
    if child == 0:
        enabled = gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        os._exit(7 if enabled and gc.isenabled() else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not gc.isenabled()
assert gc.isenabled()
"""


def test_a_fork_meanwhile_collects() -> None:
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED], check=True)  # noqa: S603 -- ours
