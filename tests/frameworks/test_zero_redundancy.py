from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsdp1
import pytest
from exact import trained
from fsdp1 import Layout
from logical import differences, hyper, logical
from ranks import Ranks

pytestmark = pytest.mark.dist

ZERO, SLOW = "zero1", ("bias", "scale")
CHANGES = [
    (Layout(ZERO), Layout(ZERO, size=2)),
    (Layout(ZERO, size=2), Layout(ZERO)),
    (Layout(ZERO), Layout("plain", size=1)),
    (Layout("plain", size=1), Layout(ZERO)),
    (Layout(ZERO), Layout("ddp", size=2)),
    (Layout("ddp"), Layout(ZERO, size=2)),
    (Layout(ZERO), Layout(orig=False)),
    (Layout(), Layout(ZERO)),
    (Layout(ZERO), Layout("fsdp2", size=2)),
    (Layout("fsdp2", size=2), Layout(ZERO)),
]


@pytest.fixture(scope="module")
def saved(ranks4: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    paths: dict[Layout, Path] = {}

    def path_of(layout: Layout) -> Path:
        if layout not in paths:
            paths[layout] = tmp_path_factory.mktemp(str(layout)) / "checkpoint"
            ranks4.run(fsdp1.train, paths[layout], layout)
        return paths[layout]

    return path_of


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_training_goes_on_in_another_layout(
    ranks4: Ranks, tmp_path: Path, saved: Callable[[Layout], Path], before: Layout, after: Layout, steps_before: int
) -> None:
    twin = trained(2, before.size)
    assert not differences(logical(saved(before)), twin.state())
    ranks4.run(fsdp1.go_on, saved(before), tmp_path, after, steps_before)
    assert not differences(logical(tmp_path / "again"), twin.state())
    twin.step(2, after.size)
    assert not differences(logical(tmp_path / "stepped"), twin.state())


@pytest.mark.parametrize("after", [Layout(ZERO, size=2, slow=SLOW, swapped=True), Layout(slow=SLOW)], ids=str)
def test_hyper_parameters_go_by_name(ranks4: Ranks, tmp_path: Path, after: Layout) -> None:
    ranks4.run(fsdp1.train, tmp_path / "saved", Layout(ZERO, slow=SLOW))
    twin = trained(2, 4, slow=SLOW)
    assert not differences(logical(tmp_path / "saved"), twin.state())
    ranks4.run(fsdp1.go_on, tmp_path / "saved", tmp_path, after)
    assert hyper(tmp_path / "again") == hyper(tmp_path / "saved")
    twin.step(2, after.size)
    assert not differences(logical(tmp_path / "stepped"), twin.state())


def test_states_are_made_where_they_belong_before_the_first_step(
    ranks4: Ranks, saved: Callable[[Layout], Path]
) -> None:
    owners = ranks4.run(fsdp1.owned_states, saved(Layout("ddp")))
    assert all(mine == wanted for mine, wanted in owners)
    assert sum(len(mine) for mine, _ in owners) == len(list(trained(0, 1).model.parameters()))
    assert all(mine for mine, _ in owners)


def test_overlap_with_ddp_is_refused(ranks4: Ranks, tmp_path: Path) -> None:
    (said,) = set(ranks4.run(fsdp1.refused, tmp_path / "checkpoint", "overlap"))
    assert said.startswith("StateError: ZeroRedundancyOptimizer(overlap_with_ddp=True) keeps its states in"), said
    assert not any(tmp_path.iterdir())
