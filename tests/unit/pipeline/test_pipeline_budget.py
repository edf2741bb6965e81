from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.errors import InputError
from bcp.pipeline import Budget

pytestmark = pytest.mark.anyio


async def test_first_come_first_served_also_where_a_later_one_would_fit() -> None:
    budget, served = Budget(10), list[int]()
    await budget.acquire(8)

    async def want(nbytes: int) -> None:
        await budget.acquire(nbytes)
        served.append(nbytes)

    async with anyio.create_task_group() as group:
        for nbytes in (5, 1, 4):  # 1 would fit at once, but 5 was there before
            group.start_soon(want, nbytes)
            await wait_all_tasks_blocked()
        assert served == []
        budget.release(8)
    assert served == [5, 1, 4]
    assert budget.in_use == 10


async def test_one_that_is_too_large_runs_alone() -> None:
    budget = Budget(10)
    await budget.acquire(1)
    async with anyio.create_task_group() as group:
        group.start_soon(budget.acquire, 25)
        await wait_all_tasks_blocked()
        assert budget.in_use == 1
        budget.release(1)
        await wait_all_tasks_blocked()
        assert budget.in_use == 25
        group.start_soon(budget.acquire, 0)
        await wait_all_tasks_blocked()
        assert "1 waiting" in repr(budget)
        budget.release(25)
    assert (budget.in_use, budget.peak, budget.capacity) == (0, 25, 10)


async def test_a_cancelled_waiter_leaves_nothing_and_lets_the_next_one_in() -> None:
    budget = Budget(10)
    await budget.acquire(6)
    async with anyio.create_task_group() as group:
        first = anyio.CancelScope()

        async def large() -> None:
            with first:
                await budget.acquire(9)

        group.start_soon(large)
        await wait_all_tasks_blocked()
        group.start_soon(budget.acquire, 4)
        await wait_all_tasks_blocked()
        assert budget.in_use == 6
        first.cancel()
    assert budget.in_use == 10
    assert "0 waiting" in repr(budget)


async def test_bytes_granted_to_a_waiter_that_is_cancelled_meanwhile_go_to_the_next() -> None:
    budget = Budget(10)
    await budget.acquire(10)
    first = asyncio.create_task(budget.acquire(10))
    await wait_all_tasks_blocked()
    second = asyncio.create_task(budget.acquire(3))
    await wait_all_tasks_blocked()
    budget.release(10)  # granted to the first ...
    assert budget.in_use == 10
    first.cancel()  # ... who is cancelled before it hears of it
    await second
    assert first.cancelled()
    assert budget.in_use == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6), st.booleans()), max_size=15))
async def test_never_more_than_the_capacity_or_the_largest(capacity: int, wants: list[tuple[int, int, bool]]) -> None:
    budget, lent = Budget(capacity), 0
    bound = max([capacity, *(nbytes for nbytes, _, _ in wants)])

    async def want(nbytes: int, holds: int, scope: anyio.CancelScope) -> None:
        nonlocal lent
        with scope:
            await budget.acquire(nbytes)
            lent += nbytes
            assert lent <= bound
            with anyio.CancelScope(shield=True):
                for _ in range(holds):
                    await checkpoint()
            lent -= nbytes
            budget.release(nbytes)

    async with anyio.create_task_group() as group:
        scopes = []
        for nbytes, holds, cancelled in wants:
            scope = anyio.CancelScope()
            group.start_soon(want, nbytes, holds, scope)
            if cancelled:
                scopes.append(scope)
        await checkpoint()
        for scope in scopes:
            scope.cancel()
            await checkpoint()
    assert budget.in_use == 0
    assert budget.peak <= bound


async def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="-1 bytes"):
        Budget(-1)
    with pytest.raises(InputError, match="-2 bytes"):
        await Budget(1).acquire(-2)
    budget = Budget(5)
    await budget.acquire(2)
    with pytest.raises(ValueError, match="cannot give back 3 bytes; 2 are lent"):
        budget.release(3)


async def test_repr_shows_how_it_stands() -> None:
    budget = Budget(5)
    await budget.acquire(2)
    assert repr(budget) == "<Budget 2/5 bytes in use, peak 2, 0 waiting, 0.000 s waited>"
    assert budget.waited_seconds == 0.0
