from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
ROOMS = re.compile(r"`([\w/]+(?:/|\.py))`")


@cache
def functions(file: str) -> frozenset[str]:
    """Names of all functions of a file, with the class that they are in."""
    found = set[str]()
    for node in ast.parse((ROOT / "bcp" / file).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + f.name for f in inside if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(found)


@pytest.mark.parametrize(("file", "function"), sorted(set(NAMED.findall(PAGE))))
def test_a_function_of_the_page_exists(file: str, function: str) -> None:
    assert function in functions(file)


def test_every_room_of_the_page_exists_and_every_room_is_on_the_page() -> None:
    rows = re.findall(r"^\|.*?\|", PAGE, re.MULTILINE)
    listed = {room.rstrip("/") for row in rows for room in ROOMS.findall(row)}
    assert {room for room in listed if not (ROOT / "bcp" / room).exists()} == set()
    rooms = {path.name for path in (ROOT / "bcp").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {room.partition("/")[0] for room in listed} == {"__init__.py", "extend.py"}


def test_the_bytes_pass_few_functions() -> None:
    walk = PAGE.partition("## The bytes, from")[2].partition("\n## ")[0]
    named = [NAMED.search(line) for line in re.findall(r"^\d+\. .*$", walk, re.MULTILINE)]
    passed = [match.groups() for match in named if match]
    assert len(passed) == len(named) <= 18
    assert len({file for file, _ in passed}) <= 8
    assert f"{len(passed)} functions in {len({file for file, _ in passed})} files" in walk
