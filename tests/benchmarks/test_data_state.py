"""That the benchmark runs; never how long anything takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data_state.gather import AHEAD, SHARDS, gather
from benchmarks.data_state.units import reshard, upload
from benchmarks.figures import Figures

MIB = 1 << 20


@pytest.mark.long
def test_a_small_state_is_gathered() -> None:
    figures = Figures()
    gather(8 * SHARDS * AHEAD * 1600, 1, 0.0, figures)
    values = {figure.name: figure.value for figure in figures.found}
    assert values["unit_states without prefetch"] > 0
    assert values["unit_states with prefetch"] > 0
    assert 8 * SHARDS * AHEAD * 1500 < values["tokens of the state"] * MIB < 8 * SHARDS * (AHEAD + 3) * 1600


def test_small_units_are_uploaded_and_resharded(tmp_path: Path) -> None:
    figures = Figures()
    upload(8 * MIB, figures)
    reshard(64 * MIB, tmp_path, figures)
    values = {figure.name: figure for figure in figures.found}
    assert values["times faster"].value > 0
    assert not values["bytes read, as a part of those stored"].missed
    assert not values["units lost"].missed
