from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import any_to_any
import fsdp1
import pytest
from any_to_any import How, Task, goes_on
from exact import trained
from fsdp1 import Layout
from logical import differences, hyper, logical
from ranks import Ranks

pytestmark = pytest.mark.dist

ZERO, SLOW = "zero1", ("bias", "scale")
CHANGES = [
    (Layout(ZERO), Layout(ZERO, size=2)),
    (Layout(ZERO, size=2), Layout(ZERO)),
    (Layout("ddp"), Layout(ZERO, size=2)),
]


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_training_goes_on_in_another_layout(
    ranks4: Ranks, tmp_path: Path, saved: Callable[[How], Path], before: Layout, after: Layout, steps_before: int
) -> None:
    twin = trained(2, before.size)
    assert not differences(logical(saved(before)), twin.state())
    goes_on(ranks4, saved(before), tmp_path, twin, after, Task(steps_before=steps_before))


@pytest.mark.parametrize("after", [Layout(ZERO, size=2, slow=SLOW, swapped=True), Layout(slow=SLOW)], ids=str)
def test_hyper_parameters_go_by_name(ranks4: Ranks, tmp_path: Path, after: Layout) -> None:
    ranks4.run(any_to_any.train, tmp_path / "saved", Layout(ZERO, slow=SLOW))
    twin = trained(2, 4, slow=SLOW)
    assert not differences(logical(tmp_path / "saved"), twin.state())
    goes_on(ranks4, tmp_path / "saved", tmp_path, twin, after)
    assert hyper(tmp_path / "again") == hyper(tmp_path / "saved")


def test_states_are_made_where_they_belong_before_the_first_step(ranks4: Ranks, saved: Callable[[How], Path]) -> None:
    owners = ranks4.run(fsdp1.owned_states, saved(Layout("ddp")))
    assert all(mine == wanted for mine, wanted in owners)
    assert sum(len(mine) for mine, _ in owners) == len(list(trained(0, 1).model.parameters()))
    assert all(mine for mine, _ in owners)


def test_overlap_with_ddp_is_refused(ranks4: Ranks, tmp_path: Path) -> None:
    (said,) = set(ranks4.run(fsdp1.refused, tmp_path / "checkpoint", "overlap"))
    assert said.startswith("StateError: ZeroRedundancyOptimizer(overlap_with_ddp=True) keeps its states in"), said
    assert not any(tmp_path.iterdir())
