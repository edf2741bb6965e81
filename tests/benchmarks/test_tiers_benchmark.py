"""That the benchmark of the memory tier runs, and that both sides of a figure move the same bytes; never how fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bcp.plan.holders import newest_whole
from benchmarks.figures import Figures
from benchmarks.tiers import raw
from benchmarks.tiers.hosts import filled, memory_of
from benchmarks.tiers.losses import Cluster, losses, planning
from benchmarks.tiers.recovery import from_here, from_peer
from benchmarks.tiers.snapshot import beside_copies, staging

MIB = 1 << 20

Part = Callable[[int, int, Path, Path, Figures], None]


def values(figures: Figures) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures.found}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(staging, marks=pytest.mark.long),
        from_here,
        pytest.param(from_peer, marks=pytest.mark.long),
        pytest.param(beside_copies, marks=[pytest.mark.long, pytest.mark.full]),
    ],
)
def test_a_part_runs_on_a_small_state(part: Part, tmp_path: Path) -> None:
    """Parts compare what they have brought back with what was saved."""
    memory, disk, figures = tmp_path / "memory", tmp_path / "disk", Figures()
    memory.mkdir()
    disk.mkdir()
    part(4 * MIB, 1, memory, disk, figures)
    assert len(figures.found) > 2
    assert all(figure.value > 0 for figure in figures.found)
    assert sum(figure.goal is not None for figure in figures.found) in (1, 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_raw_copies_and_transfers_are_of_all_bytes(threads: int, tmp_path: Path) -> None:
    path, data = tmp_path / "data", np.random.default_rng(0).bytes(33 * MIB + 5)
    path.write_bytes(data)
    sizes = (1, 33 * MIB, 0, 3)
    outs = [memoryview(bytearray(size)) for size in sizes]
    raw.copied(path, outs, threads)
    assert b"".join(outs) == data[: sum(sizes)]
    again = [memoryview(bytearray(size)) for size in sizes]
    with raw.sender(path) as address:
        raw.sent(address, again, threads)
    assert again == outs


def test_the_compared_memory_is_that_of_all_tensors() -> None:
    state, states = filled(MIB)
    views = memory_of(states)
    assert sum(map(len, views)) == state.nbytes
    before = state.digest()
    for view in views:
        view[:] = bytes(len(view))
    assert state.digest() != before
    assert not any(tensor.any() for tensor in states["model"].values())


def test_a_cluster_survives_what_its_copies_cover() -> None:
    alone, ring, rack = Cluster(6, 2, 1, 1), Cluster(6, 2, 2, 1), Cluster(6, 2, 2, 3)
    assert [alone.survives(lost) for lost in ([], [3])] == [True, False]
    assert [ring.survives(lost) for lost in ([3], [3, 4], [3, 5], [0, 5])] == [True, False, True, False]
    assert [rack.survives(lost) for lost in ([0, 1, 2], [0, 3])] == [True, False]
    assert all(Cluster(6, 2, 3, 1).survives([one, two]) for one in range(6) for two in range(6))


def test_the_newest_snapshot_of_a_cluster_lacks_the_lost_hosts() -> None:
    told = Cluster(6, 2, 2, 1).generations(3, lost=(2, 3))
    whole, reasons = newest_whole(told)
    assert whole is not None
    assert (whole.step, whole.world_size) == (2, 12)
    assert [*reasons.values()] == ["step 3: no host has the files of rank 4 and 1 more"]


@pytest.mark.long
def test_losses_are_tabulated(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures()
    planning(figures)
    losses(2, figures)
    found = values(figures)
    assert found["planning of a recovery, both"] > 0
    promises = [value for name, value in found.items() if name.startswith("losses survived")]
    assert promises == [1.0] * 5
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("1 rack ", "2 neighbours "))]
    assert [row.split()[3:] for row in rows] == [
        ["0.000", "0.000", "1.000", "1.000", "1.000"],
        ["0.000", "0.000", "1.000", "0.000", "1.000"],
    ]
