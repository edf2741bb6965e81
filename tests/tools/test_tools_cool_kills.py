"""A move to or from a cold place that dies at any request, or meets others in any order, loses no byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from cooled_runs import COLD, HOT, STEPS, Stores, states, train, turn
from interleave import Dead, Turns, orders
from samples import sample

import bcp

pytestmark = pytest.mark.anyio
DATA = ("model/", "extra_states/")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def loaded(step: int) -> dict[str, torch.Tensor]:
    async with bcp.AsyncCheckpoint(f"{HOT}/step-{step:08d}") as ckpt:
        return {name: await ckpt.read(name) for name in ("w", "b")}


async def assert_whole(steps: tuple[int, ...], where: object) -> None:
    for step in steps:
        found = await loaded(step)
        assert all(torch.equal(found[name], value) for name, value in states(step)["model"].items()), (step, where)


def cool() -> Awaitable[Any]:
    return bcp.acool(HOT, to=COLD, days=0)


def promote() -> Awaitable[Any]:
    return bcp.apromote(HOT, 1)


def remove() -> Awaitable[Any]:
    return bcp.tools.aremove(f"{HOT}/step-00000001")


async def hot_data(stores: Stores) -> list[str]:
    keys = await stores.contents()
    return [key for key in keys if key.startswith("hot/") and any(kind in key for kind in DATA)]


async def cold_data(stores: Stores) -> list[str]:
    return [key for key in await stores.contents() if key.startswith("cold/") and ".cold/" in key]


async def prepared(stores: Stores, *, cooled: bool = False, steps: tuple[int, ...] = STEPS) -> dict[str, bytes]:
    for step in steps:
        await bcp.asave(f"{HOT}/step-{step:08d}", states(step), options=bcp.SaveOptions(record=False))
    await asyncio.to_thread(train, HOT, ())  # makes the ledger
    for step in steps:
        await bcp.tools.apin(HOT, step, pinned=False)
    if cooled:
        await cool()
    return dict(await stores.contents())


async def requests_of(stores: Stores, call: Callable[[], Awaitable[Any]]) -> list[str]:
    """Count the requests of a call that nothing disturbs."""
    stores.requests.clear()
    await call()
    return list(stores.requests)


# -- kills -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sample(["objects", "memory"], "objects"))
async def test_a_move_that_dies_at_any_request_loses_nothing(kind: str) -> None:
    stores = Stores(objects=kind == "objects")
    before = await prepared(stores, steps=(1, 2))
    last = len(await requests_of(stores, cool))
    assert last > 20
    for at in range(1, last + 1):
        await stores.restore(before)
        stores.dies_at = at
        with contextlib.suppress(Dead, BaseExceptionGroup):
            await cool()
        where = stores.requests[at - 1]
        stores.dies_at = None
        await assert_whole((1, 2), where)
        assert all(not each.reason for each in await cool())
        await assert_whole((1, 2), where)
        assert not [key for key in await hot_data(stores) if "step-00000001" in key], where
        assert len(await cold_data(stores)) == 1, where
        assert stores.unfinished() == [], where


async def test_a_promotion_that_dies_at_any_request_loses_nothing() -> None:
    stores = Stores()
    before = await prepared(stores, cooled=True, steps=(1, 2))
    last = len(await requests_of(stores, promote))
    assert last > 10
    for at in range(1, last + 1):
        await stores.restore(before)
        stores.dies_at = at
        with contextlib.suppress(Dead, BaseExceptionGroup):
            await promote()
        where = stores.requests[at - 1]
        stores.dies_at = None
        await assert_whole((1, 2), where)
        await promote()
        await assert_whole((1, 2), where)
        assert len([key for key in await hot_data(stores) if "step-00000001" in key]) == 1, where


async def test_a_deletion_that_dies_at_any_request_is_ended_by_the_next() -> None:
    stores = Stores()
    before = await prepared(stores, cooled=True)

    async def retain() -> None:
        await asyncio.to_thread(train, HOT, (4,), 1)

    last = len(await requests_of(stores, retain))
    for at in range(1, last + 1):
        await stores.restore(before)
        stores.dies_at = at
        with contextlib.suppress(Dead, Exception):
            await retain()
        where = stores.requests[at - 1]
        stores.dies_at = None
        await asyncio.to_thread(train, HOT, (5, 6), 1)
        assert await cold_data(stores) == [], where


# -- races -------------------------------------------------------------------------------------------


def in_turns(call: Callable[[], Awaitable[Any]]) -> Callable[[Turns, int], Awaitable[Any]]:
    async def task(turns: Turns, me: int) -> Any:
        turn.set((turns, me))
        return await call()

    return task


@pytest.mark.parametrize(("changes", "deaths"), sample([(1, 0), (0, 1)], (1, 0)))
@pytest.mark.parametrize(
    ("one", "other", "cooled"),
    sample(
        [(cool, cool, False), (cool, promote, True), (cool, promote, False), (promote, promote, True)],
        (cool, promote, True),
    ),
)
async def test_moves_in_any_order_lose_nothing(
    one: Callable[[], Awaitable[Any]],
    other: Callable[[], Awaitable[Any]],
    cooled: bool,  # noqa: FBT001 -- a parameter of the test
    changes: int,
    deaths: int,
) -> None:
    stores = Stores()
    before = await prepared(stores, cooled=cooled, steps=(1, 2))
    for turns in orders(changes=changes, deaths=deaths):
        await stores.restore(before)
        results = await turns.run([in_turns(one), in_turns(other)], lambda: None)
        await assert_whole((1, 2), turns.taken)
        if not deaths:
            failed = [each for each in results if isinstance(each, BaseException)]
            assert all("was moved to a cold place again" in str(each) for each in failed), (failed, turns.taken)
        await cool()
        await assert_whole((1, 2), turns.taken)


@pytest.mark.parametrize(("kind", "changes"), sample([("objects", 1), ("memory", 1), ("memory", 2)], ("objects", 1)))
async def test_a_load_beside_a_move_finds_every_file(kind: str, changes: int) -> None:
    stores = Stores(objects=kind == "objects")
    before = await prepared(stores, steps=(1, 2))
    for call, cooled in ((cool, False), (promote, True)):
        if cooled:
            await cool()
            before = dict(await stores.contents())
        for turns in orders(changes=changes):
            await stores.restore(before)
            found, _ = await turns.run([in_turns(lambda: loaded(1)), in_turns(call)], lambda: None)
            assert not isinstance(found, BaseException), (found, turns.taken)
            assert torch.equal(found["w"], states(1)["model"]["w"]), turns.taken


async def test_a_deletion_beside_a_move_leaves_no_copy_for_ever() -> None:
    stores = Stores()
    before = await prepared(stores, steps=(1, 2))
    for turns in orders(changes=1):
        await stores.restore(before)
        results = await turns.run([in_turns(cool), in_turns(remove)], lambda: None)
        assert not [each for each in results if isinstance(each, BaseException)], (results, turns.taken)
        assert not any(each.is_damaged for each in results[0]), (results, turns.taken)
        await assert_whole((2,), turns.taken)
        await asyncio.to_thread(train, HOT, (3,))  # the ledger drops the step
        await cool()
        assert not [key for key in await cold_data(stores) if "step-00000001" in key], (results, turns.taken)
        assert not [key for key in await hot_data(stores) if "step-00000001" in key], (results, turns.taken)
        await assert_whole((2, 3), turns.taken)


async def test_a_save_of_the_step_beside_a_move_wins() -> None:
    stores = Stores()
    before = await prepared(stores, steps=(1, 2))

    async def save_again() -> None:
        await bcp.asave(f"{HOT}/step-00000001", states(7), overwrite=True)

    for turns in orders(changes=1):
        await stores.restore(before)
        results = await turns.run([in_turns(cool), in_turns(save_again)], lambda: None)
        assert not [each for each in results if isinstance(each, BaseException)], (results, turns.taken)
        assert not any(each.is_damaged for each in results[0]), (results, turns.taken)
        found = await loaded(1)
        assert torch.equal(found["w"], states(7)["model"]["w"]), turns.taken
        await cool()
        found = await loaded(1)
        assert torch.equal(found["w"], states(7)["model"]["w"]), turns.taken
