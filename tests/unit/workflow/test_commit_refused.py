"""A commit that storage carries out and refuses, as to a client that repeats a request whose answer was lost."""

from __future__ import annotations

import pytest
from commit_jobs import OPTIONS, Answer, Job, World, check_told, states_of

import bcp
from bcp.backends import MemoryBackend


async def begun(world: World, value: int, *, overwrite: bool) -> Job:
    """Begin a save, and answer truly until it requests its commit."""
    job = Job(world, value)
    options = bcp.SaveOptions(overwrite=overwrite, **OPTIONS)
    await job.begin(lambda: bcp.asave(job, states_of(value), options=options))
    while job.request != "put_if":
        await job.go_on("true")
    return job


async def end(job: Job, first: Answer) -> BaseException | None:
    """Answer the commit, and truly from then on; return what the save raises."""
    await job.go_on(first)
    while not job.task.done():
        await job.go_on("true")
    return job.task.exception()


@pytest.mark.anyio
async def test_a_save_that_committed_and_was_replaced_does_not_deny_it() -> None:
    world = World(MemoryBackend("refused"))
    try:
        one = await begun(world, 1, overwrite=False)
        await one.go_on("refused")
        two = await begun(world, 2, overwrite=True)
        assert await end(two, "true") is None
        error = await end(one, "true")
    finally:
        MemoryBackend.forget("refused")
    assert world.commits == [None, one.operation, two.operation]
    assert isinstance(error, bcp.ExistsError)
    assert f"operation {two.operation}, while operation {one.operation} was saving there" in str(error)
    check_told(world, one, error)


@pytest.mark.anyio
async def test_a_save_that_committed_finds_itself() -> None:
    world = World(MemoryBackend("refused"))
    try:
        one = await begun(world, 1, overwrite=False)
        assert await end(one, "refused") is None
    finally:
        MemoryBackend.forget("refused")
    assert world.commits == [None, one.operation]
