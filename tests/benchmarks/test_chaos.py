"""A sample of the kill points of ``make chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import Case, kill_and_resume

FEW, MORE = 2, 4
OVERWRITE = Case("overwrite", ranks=2, victim=1)
CASES = [
    (OVERWRITE, FEW),
    pytest.param(OVERWRITE, MORE, marks=pytest.mark.kills),
    *(pytest.param(Case(name), MORE, marks=pytest.mark.kills) for name in ("lazy", "run", "run-standby")),
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "points"), CASES, ids=str)
def test_a_job_that_is_killed_in_a_save_resumes_where_it_would_have_been(
    case: Case, points: int, tmp_path: Path
) -> None:
    verdicts = [kill.verdict for kill in kill_and_resume(case, tmp_path, points=points, jobs=2)]
    assert set(verdicts) <= {"PASS", "UNREACHED"}
    assert verdicts.count("PASS") >= points - 1
