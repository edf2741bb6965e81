"""The examples in the docstrings of planning are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["read", "strided", "write"])
def test_the_examples_of_the_documentation_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"bcp.plan.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
