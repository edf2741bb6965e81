"""Jobs of torchrun's that save, are killed, and go on with fewer ranks: on local files."""

from __future__ import annotations

from pathlib import Path

import pytest
from left_over import assert_nothing_left
from remote import assert_survives_kills

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(1500)]


def test_a_job_on_local_files(tmp_path: Path) -> None:
    marks, run = tmp_path / "marks", tmp_path / "run"
    marks.mkdir()
    url = f"file://{run}"
    assert_survives_kills(url, marks)
    assert_nothing_left(url, [file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()])
