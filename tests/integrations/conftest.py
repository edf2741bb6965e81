from __future__ import annotations

from typing import Literal

import pytest


def pytest_ignore_collect(config: pytest.Config) -> Literal[True] | None:
    """Leave this folder out, unless its tests are asked for: its files import trainers of another environment."""
    words = config.option.markexpr.split()
    return None if words[:1] == ["hosts"] else True
