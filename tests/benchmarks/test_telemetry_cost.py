"""That the benchmark runs and leaves telemetry as it was; never how long anything takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bcp.telemetry import sinks
from bcp.telemetry.settings import COARSE, settings
from benchmarks.figures import Figures
from benchmarks.telemetry import blocking, cpu, opened, replay

MIB = 1 << 20


@pytest.mark.long
def test_small_saves_are_compared_in_pairs(tmp_path: Path) -> None:
    figures = Figures()
    before = tuple(sinks())
    place = str(tmp_path / "checkpoint")
    with opened(tmp_path) as arms:
        arms.none.switch()
        assert sinks() == ()
        for arm in (arms.default, arms.everything):
            cpu(arms.none, arm, place, MIB, 2, figures)
            replay(arms.none, arm, place, MIB, figures)
            blocking(arms.none, arm, place, 10, 2, figures)
        assert len(sinks()) == len(before) + 2
    assert tuple(sinks()) == before
    assert settings.spans == COARSE
    goals = [figure.name for figure in figures.found if figure.goal is not None]
    assert len(goals) == 4
    assert '"event": "saved"' in (tmp_path / "log.jsonl").read_text()
