"""That the benchmark runs; never how long anything takes."""

from __future__ import annotations

from benchmarks.data_state.gather import AHEAD, SHARDS, gather
from benchmarks.figures import Figures

MIB = 1 << 20


def test_a_small_state_is_gathered() -> None:
    figures = Figures()
    gather(8 * SHARDS * AHEAD * 1600, 1, 0.0, figures)
    values = {figure.name: figure.value for figure in figures.found}
    assert values["unit_states without prefetch"] > 0
    assert values["unit_states with prefetch"] > 0
    assert 8 * SHARDS * AHEAD * 1500 < values["tokens of the state"] * MIB < 8 * SHARDS * (AHEAD + 3) * 1600
