"""Every Markdown table is whole: a head, a line of dashes, and rows with as many columns as the head."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = {"site", "node_modules"}
PAGES = [
    page
    for page in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in HIDDEN for part in page.relative_to(ROOT).parts)
]
DASHES = re.compile(r"\|( *:?-+:? *\|)+")


def outside_of_code(text: str) -> list[tuple[int, str]]:
    """Return the lines that are in no block of code, with their numbers."""
    lines, fence = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" *(```+|~~~+)", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence:
            lines.append((number, line.strip()))
    return lines


def columns(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def faults(text: str) -> list[str]:
    """Return what is wrong with the tables of a page."""
    found = []
    for is_row, group in groupby(outside_of_code(text), lambda line: line[1].startswith("|")):
        rows = list(group)
        if not is_row:
            found += [f"line {number}: a table is not on lines of its own" for number, line in rows if "|---" in line]
            continue
        (first, head), dashes = rows[0], rows[1][1] if len(rows) > 1 else ""
        if not DASHES.fullmatch(dashes):
            found.append(f"line {first}: no line of dashes is below the head of a table")
        found += [
            f"line {number}: {columns(row)} columns, and {columns(head)} in the head"
            for number, row in rows
            if columns(row) != columns(head) or not row.endswith("|")
        ]
    return found


def test_there_are_tables() -> None:
    assert len(PAGES) > 20
    assert sum(page.read_text().count("\n|---") for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "| a | b |\n|---|---|\n| 1 | 2 | | 3 | 4 |\n",
        "| a | b | |---|---| | 1 | 2 |\n",
        "| a | b |\n|---|---|\n| 1 |\n",
        "| a | b |\n| 1 | 2 |\n",
        "text | a | b |\n|---|---|\n",
        "so: a | b |---|---| 1 | 2\n",
        "| a | b |\n|---|\n",
    ],
)
def test_a_broken_table_is_found(text: str) -> None:
    assert faults(text)


def test_code_and_escaped_lines_are_no_tables() -> None:
    assert not faults("```text\n| a | b |\n| 1 |\n```\n\n| a | b |\n|:--|--:|\n| x \\| y | `z` |\n")
