"""Tests of the sweep are collected by `make sweep` alone: they need the packages of the extra ``sweep``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:  # noqa: ARG001 -- pytest's hook
    """Leave the folder out where the mark expression does not ask for it."""
    return None if config.getoption("markexpr") == "sweep" else True
