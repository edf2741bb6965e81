from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from layouts import Case, cases
from ranks import Ranks
from roundtrip import round_trip

pytestmark = pytest.mark.dist


@pytest.mark.timeout(900)
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_any_layout_loads_under_any_other(ranks4: Ranks, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "checkpoint"
    try:
        assert ranks4.run(round_trip, case, path) == [[]] * 4
    finally:
        shutil.rmtree(path, ignore_errors=True)
