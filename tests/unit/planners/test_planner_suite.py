"""bcp's own planner and the one of the docs pass the suite, and the suite notices planners that break the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bcp.extend import LoadTargets, LocalShards, Planner, ShardRow, ShardTable
from bcp.planners import PlainPlanner
from bcp.protocols import States
from bcp.testing import PlannerSuite

DOCS = Path(__file__).parents[3] / "docs" / "extending.md"


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    net.extra = nn.Linear(3, 4)
    net.extra.weight = net[0].weight  # tied
    return net


class TestPlain(PlannerSuite):
    """Replicas on every rank, and an optimizer that has no states when it is loaded."""

    def planner(self) -> Planner:
        return PlainPlanner()

    def states(self, rank: int, world_size: int, seed: int) -> States:
        del rank, world_size
        model = network(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
        model[0](torch.rand(5, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def target_states(self, rank: int, world_size: int) -> States:
        del rank, world_size
        model = network(1)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def flat_planner() -> dict[str, Any]:
    """Return the names that the planner's block of the page defines."""
    source = next(part for part in DOCS.read_text().split("```python\n") if "class FlatPlanner" in part)
    names: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(source.partition("\nruns = ")[0], names)  # noqa: S102 -- our own page
    return names


class TestFlatOfTheDocs(PlannerSuite):
    """Flat runs whose cuts are in the middle of rows."""

    names = flat_planner()

    def planner(self) -> Planner:
        planner: Planner = self.names["FlatPlanner"]()
        return planner

    def states(self, rank: int, world_size: int, seed: int) -> States:
        torch.manual_seed(seed)
        runs = []
        for name, shape in (("w", (8, 5)), ("b", (7,))):
            whole = torch.rand(shape).flatten()
            part = whole.tensor_split(world_size)[rank].clone()
            start = sum(len(each) for each in whole.tensor_split(world_size)[:rank])
            runs.append(self.names["FlatRun"](name, shape, start, part))
        return {"model": runs}


# -- planners that break the contract ----------------------------------------------------------------


class Copies(PlainPlanner):
    def local_shards(self, states: States) -> LocalShards:
        shards = super().local_shards(states)
        return LocalShards(shards.table, [tensor.clone() for tensor in shards.tensors], shards.objects)

    def load_targets(self, states: States, saved: Any) -> LoadTargets:
        targets = super().load_targets(states, saved)
        copies = [tensor.clone() for tensor in targets.shards.tensors]
        return replace(targets, shards=replace(targets.shards, tensors=copies))


class Overlaps(PlainPlanner):
    """States the first element of a tensor twice."""

    def local_shards(self, states: States) -> LocalShards:
        shards = super().local_shards(states)
        table, tensors = shards.table, [*shards.tensors, shards.tensors[0].flatten()[:1]]
        rows = [ShardRow(table.meta(row), table.box(row)) for row in range(len(table))]
        rows.append(ShardRow(table.meta(0), table.box(0), 0, 1))
        return LocalShards(ShardTable.build(rows, table.objects), tensors, shards.objects)


class Drops(PlainPlanner):
    """Leaves the last element of each tensor out."""

    def local_shards(self, states: States) -> LocalShards:
        shards = super().local_shards(states)
        table, tensors = shards.table, shards.tensors
        rows = [
            ShardRow(table.meta(row), table.box(row), 0, max(tensor.numel() - 1, 0))
            for row, tensor in enumerate(tensors)
        ]
        parts = [tensor.flatten()[: max(tensor.numel() - 1, 0)] for tensor in tensors]
        return LocalShards(ShardTable.build(rows, table.objects), parts, shards.objects)


class Resets(PlainPlanner):
    def load_targets(self, states: States, saved: Any) -> LoadTargets:
        targets = super().load_targets(states, saved)
        targets.shards.tensors[0].zero_()
        return targets


class Selects(PlainPlanner):
    def load_targets(self, states: States, saved: Any) -> LoadTargets:
        model = {name: value for name, value in states["model"].items() if ("model", name) in saved.rows}
        return super().load_targets({"model": model}, saved)


class Gathers(PlainPlanner):
    def local_shards(self, states: States) -> LocalShards:
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "0")
        return super().local_shards(states)


def suite(planner: type[PlainPlanner]) -> PlannerSuite:
    class Suite(PlannerSuite):
        def planner(self) -> Planner:
            return planner()

        def states(self, rank: int, world_size: int, seed: int) -> States:
            del rank, world_size
            return {"model": {"w": torch.arange(6.0).view(2, 3) + seed + 1, "b": torch.ones(2) + seed}}

    return Suite()


CASES: list[tuple[type[PlainPlanner], Callable[[PlannerSuite], None]]] = [
    (Copies, lambda suite: suite.test_shards_are_live_memory()),
    (Copies, lambda suite: suite.test_what_ranks_save_other_ranks_load(0)),
    (Drops, lambda suite: suite.test_shards_tile_every_tensor(2)),
    (Overlaps, lambda suite: suite.test_shards_tile_every_tensor(1)),
    (Resets, lambda suite: suite.test_targets_change_nothing_before_finish(1)),
    (Selects, lambda suite: suite.test_targets_keep_names_that_the_checkpoint_lacks()),
    (Gathers, lambda suite: suite.test_nothing_is_communicated()),
]


@pytest.mark.parametrize(("planner", "check"), CASES, ids=[planner.__name__ for planner, _ in CASES])
def test_the_suite_notices_planners_that_break_the_contract(
    planner: type[PlainPlanner], check: Callable[[PlannerSuite], None]
) -> None:
    check(suite(PlainPlanner))
    with pytest.raises(AssertionError):
        check(suite(planner))
