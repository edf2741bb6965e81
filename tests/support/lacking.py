"""What an older or a newer torch lacks, so that tests of it are skipped there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import pytest
import torch

__all__ = ["lacking"]

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PINNED = re.findall(r"^torch==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)


def lacking(what: str) -> NoReturn:
    """Skip the test that needs it. With the pinned torch, which has all that tests need, the test fails."""
    reason = f"torch {torch.__version__} has no {what}"
    if torch.__version__.partition("+")[0] in PINNED:
        pytest.fail(reason)
    pytest.skip(reason)
