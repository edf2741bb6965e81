from __future__ import annotations

from typing import Literal

import pytest


def pytest_ignore_collect(config: pytest.Config) -> Literal[True] | None:
    """Leave this folder out, unless its tests are asked for: its files import trainers of another environment."""
    return None if config.option.markexpr == "hosts" else True
