from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from counted import growth
from goods import Crate, crates
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.errors import InputError
from bcp.events import BudgetEvent, Event, RetryEvent, StageEvent, StageStart
from bcp.pipeline import Budget, Pipeline, Stage
from bcp.runtime.threads import in_thread

pytestmark = pytest.mark.anyio

# -- random pipelines ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A random pipeline: per stage (workers, ordered, in a thread), per item a size, per both a delay."""

    stages: list[tuple[int, bool, bool]]
    sizes: list[int]
    delays: list[list[int]]
    budget: int


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kinds = st.tuples(st.integers(1, 4), st.booleans(), st.booleans()).map(
        lambda kind: (1, *kind[1:]) if kind[1] else kind
    )
    stages = draw(st.lists(kinds, min_size=1, max_size=4))
    sizes = draw(st.lists(st.integers(0, 50), max_size=12))
    row = st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes))
    delays = draw(st.lists(row, min_size=len(stages), max_size=len(stages)))
    return Plan(stages, sizes, delays, draw(st.integers(0, 120)))


Value = tuple[int, tuple[int, ...]]  # index of the item, stages that it has been through


class Watch:
    """Measures inside the stages what the pipeline promises."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.flying: set[int] = set()
        self.most_bytes = 0
        self.busy = [0] * len(plan.stages)
        self.most_busy = [0] * len(plan.stages)
        self.seen: list[list[int]] = [[] for _ in plan.stages]

    def stage(self, number: int) -> Stage[Any, Value]:
        workers, ordered, threaded = self.plan.stages[number]
        return Stage(f"s{number}", partial(self.visit, number, threaded), workers=workers, ordered=ordered)

    async def visit(self, number: int, threaded: bool, value: Crate | Value) -> Value:  # noqa: FBT001 -- a random flag
        index, been = (int(value.name[1:]), ()) if isinstance(value, Crate) else value
        self.enter(number, index)
        for _ in range(self.plan.delays[number][index]):
            await checkpoint()
        result = (index, (*been, number))
        if threaded:
            result = await in_thread(lambda: (index, (*been, number)))
        self.leave(number, index)
        return result

    def enter(self, number: int, index: int) -> None:
        self.flying.add(index)
        self.most_bytes = max(self.most_bytes, sum(self.plan.sizes[i] for i in self.flying))
        self.seen[number].append(index)
        self.busy[number] += 1
        self.most_busy[number] = max(self.most_busy[number], self.busy[number])

    def leave(self, number: int, index: int) -> None:
        self.busy[number] -= 1
        if number == len(self.plan.stages) - 1:
            self.flying.remove(index)


@settings(max_examples=80, deadline=None)
@given(plans())
async def test_a_random_pipeline_equals_a_for_loop_within_its_budget(plan: Plan) -> None:
    watch, budget, events = Watch(plan), Budget(plan.budget), list[Event]()
    numbers = range(len(plan.stages))
    pipeline = Pipeline[Crate, Any](tuple(watch.stage(number) for number in numbers))

    results = await pipeline.run(crates(*plan.sizes), budget=budget, observe=events.append)

    assert results == [(index, tuple(numbers)) for index in range(len(plan.sizes))]
    assert watch.most_bytes <= max(plan.budget, *plan.sizes, 0)
    assert watch.most_bytes <= budget.peak <= max(plan.budget, *plan.sizes, 0)
    assert budget.in_use == 0
    for number, (workers, ordered, _) in enumerate(plan.stages):
        assert watch.most_busy[number] <= workers
        assert not ordered or watch.seen[number] == list(range(len(plan.sizes)))
    every = sorted((f"s{number}", f"w{i}", size) for number in numbers for i, size in enumerate(plan.sizes))
    for kind in (StageStart, StageEvent):
        assert sorted((event.stage, event.item, event.nbytes) for event in events if isinstance(event, kind)) == every
    entered = [event for event in events if isinstance(event, BudgetEvent)]
    assert [(event.item, event.nbytes) for event in entered] == [(f"w{i}", size) for i, size in enumerate(plan.sizes)]
    onward = {f"s{number}": f"s{number + 1}" for number in numbers} | {f"s{len(plan.stages) - 1}": ""}
    assert all(event.onward == onward[event.stage] for event in events if isinstance(event, StageEvent))
    assert {event.onward for event in entered} <= {"s0"}
    assert all(event.queued <= event.started for event in events if isinstance(event, StageStart))
    assert all(event.started <= event.ended for event in events if not isinstance(event, StageStart | RetryEvent))


# -- order, back-pressure, edges -------------------------------------------------------------------


def stage(name: str, run: Callable[[Any], Awaitable[Any]], **how: Any) -> Stage[Any, Any]:
    return Stage(name, run, **how)


async def same(item: Any) -> Any:
    return item


async def test_an_ordered_stage_sees_plan_order_though_earlier_stages_finish_backwards() -> None:
    finished, ordered = list[str](), list[str]()
    turns = [anyio.Event() for _ in range(5)]
    turns[4].set()

    async def backwards(item: Crate) -> Crate:
        index = int(item.name[1:])
        await turns[index].wait()
        finished.append(item.name)
        if index:
            turns[index - 1].set()
        return item

    async def note(item: Crate) -> Crate:
        ordered.append(item.name)
        return item

    pipeline = (
        Pipeline[Crate, Crate]().then(stage("back", backwards, workers=5)).then(stage("note", note, ordered=True))
    )
    await pipeline.run(crates(1, 1, 1, 1, 1), budget=Budget(5))

    assert finished == ["w4", "w3", "w2", "w1", "w0"]
    assert ordered == ["w0", "w1", "w2", "w3", "w4"]


async def test_workers_are_really_at_work_at_once() -> None:
    together = anyio.Event()
    inside = 0

    async def meet(item: Crate) -> Crate:
        nonlocal inside
        inside += 1
        if inside == 3:
            together.set()
        await together.wait()  # with fewer than three at once this would wait for ever
        return item

    with anyio.fail_after(60):
        await Pipeline[Crate, Crate]().then(stage("meet", meet, workers=3)).run(crates(1, 1, 1), budget=Budget(3))


async def test_a_slow_last_stage_does_not_hold_up_the_first_while_the_budget_lasts() -> None:
    copied, go = list[str](), anyio.Event()

    async def copy(item: Crate) -> Crate:
        copied.append(item.name)
        if len(copied) == 20:
            go.set()  # all are copied although none is uploaded
        return item

    async def upload(item: Crate) -> Crate:
        await go.wait()
        return item

    pipeline = (
        Pipeline[Crate, Crate]().then(stage("copy", copy)).then(stage("same", same)).then(stage("upload", upload))
    )
    with anyio.fail_after(60):
        await pipeline.run(crates(*[8] * 20), budget=Budget(160))


async def test_a_small_budget_holds_up_the_first_stage_and_counts_the_waiting() -> None:
    budget = Budget(16)
    inside = 0

    async def enter(item: Crate) -> Crate:
        nonlocal inside
        inside += 1
        assert inside <= 2
        return item

    async def leave(item: Crate) -> Crate:
        nonlocal inside
        await checkpoint()
        inside -= 1
        return item

    pipeline = Pipeline[Crate, Crate]().then(stage("in", enter, workers=4)).then(stage("out", leave))
    await pipeline.run(crates(*[8] * 10), budget=budget)
    assert budget.peak == 16
    assert budget.waited_seconds > 0


async def test_two_pipelines_share_one_budget() -> None:
    budget = Budget(10)
    pipeline = Pipeline[Crate, Crate]().then(stage("a", same, workers=2)).then(stage("b", same, ordered=True))
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(partial(pipeline.run, crates(*[4] * 9), budget=budget))
    assert budget.in_use == 0
    assert budget.peak <= 10


async def test_no_items_and_no_stages() -> None:
    items = crates(1, 2)
    assert await Pipeline[Crate, Crate]().then(stage("a", same)).run([], budget=Budget(1)) == []
    assert await Pipeline[Crate, Crate]().run(items, budget=Budget(1)) == items


async def test_a_negative_size_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'w1' says that it has -1 bytes"):
        await Pipeline[Crate, Crate]().then(stage("a", same)).run(crates(1, -1), budget=Budget(1))


def test_twice_the_items_are_at_most_twice_the_work() -> None:
    pipeline = Pipeline[Crate, Crate](tuple(stage(f"s{i}", same) for i in range(3)))
    assert growth(lambda n: partial(anyio.run, partial(pipeline.run, crates(*[1] * n), budget=Budget(n))), 250) <= 2.1


async def test_the_memory_of_an_item_is_free_when_it_has_left() -> None:
    alive = 0

    class Buffer:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    most = 0

    async def fill(_: Crate) -> Buffer:
        nonlocal most
        buffer = Buffer()
        most = max(most, alive)
        return buffer

    async def drop(_: Buffer) -> None:
        await checkpoint()

    pipeline = Pipeline[Crate, Any]().then(stage("fill", fill, workers=2)).then(stage("drop", drop, workers=2))
    await pipeline.run(crates(*[1] * 20), budget=Budget(1))
    assert most == 1


# -- edits -----------------------------------------------------------------------------------------


def test_edits_make_new_pipelines() -> None:
    base = Pipeline[Crate, Crate]().then(stage("a", same)).then(stage("b", same))
    assert base.names == ("a", "b")
    assert base.before("a", stage("x", same)).names == ("x", "a", "b")
    assert base.before("b", stage("x", same)).names == ("a", "x", "b")
    assert base.after("a", stage("x", same)).names == ("a", "x", "b")
    assert base.after("b", stage("x", same)).names == ("a", "b", "x")
    assert base.replacing("b", stage("x", same)).names == ("a", "x")
    assert base.replacing("b", stage("b", same, workers=3)).stages[1].workers == 3
    assert base.names == ("a", "b")
    assert Pipeline[Crate, Crate]().stages == ()


def test_edits_name_the_stages_there_are() -> None:
    base = Pipeline[Crate, Crate]().then(stage("d2h", same)).then(stage("upload", same))
    for edit in (base.before, base.after, base.replacing):
        with pytest.raises(InputError, match=r"no stage named 'd2x'; there are \[d2h, upload\]"):
            edit("d2x", stage("x", same))
    with pytest.raises(InputError, match=r"two stages named 'd2h' in \[d2h, upload, d2h\]"):
        base.then(stage("d2h", same))
    with pytest.raises(InputError, match="two stages named 'upload'"):
        base.replacing("d2h", stage("upload", same))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"name": "s", "workers": 0}, "'s' has workers=0"),
        ({"name": "s", "workers": 2, "ordered": True}, "'s' is ordered and has workers=2"),
    ],
)
def test_a_stage_that_cannot_work_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stage(run=same, **how)
