"""Jobs that save to storage elsewhere: save, be killed in an upload, go on with fewer ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from remote import assert_survives_kills

pytestmark = pytest.mark.dist


def test_a_file_system_of_fsspec(tmp_path: Path) -> None:
    assert_survives_kills(f"local://{tmp_path}/run")


def test_local_files(tmp_path: Path) -> None:
    assert_survives_kills(f"file://{tmp_path}/run")
