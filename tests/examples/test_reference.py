from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import bcp
import bcp.data
import bcp.dcp
import bcp.extend
import bcp.policies
import bcp.telemetry
import bcp.tools

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
LISTED = set(re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE))
MODULES = {"__version__", "extend", "policies", "telemetry", "tools"}


DOORS = [bcp, bcp.extend, bcp.policies, bcp.data, bcp.dcp, bcp.telemetry, bcp.tools]


@pytest.mark.parametrize("module", DOORS, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    names = set(module.__all__) - MODULES - set(bcp.errors.__all__)  # bcp.errors is listed as a whole
    assert "bcp.errors" in LISTED
    assert {f"{module.__name__}.{name}" for name in names} <= LISTED


@pytest.mark.parametrize("name", ["AsyncCheckpoint", "Checkpoint", "Run"])
def test_a_class_of_several_rooms_is_shown_whole(name: str) -> None:
    """Its methods stand in bases that have no entry of their own."""
    bases = [base for base in getattr(bcp, name).__mro__[1:] if base.__module__.startswith("bcp.")]
    assert bases
    assert f"::: bcp.{name}\n    options:\n      inherited_members: true\n" in PAGE


def test_no_name_has_two_doors() -> None:
    assert not set(bcp.__all__) & set(bcp.extend.__all__)
