"""Versions that stand in two files are the same: pre-commit and the public CI take those of constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINS = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("path", "package"), [(".pre-commit-config.yaml", "ruff"), (".github/workflows/ci.yml", "torch")]
)
def test_the_version_is_the_pinned_one(path: str, package: str) -> None:
    assert f'"{package}=={PINS[package]}"' in (ROOT / path).read_text()
