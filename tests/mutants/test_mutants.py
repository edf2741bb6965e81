"""The draw of mutants, and where they are found again."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from mutant_draw import Mutant, applied, draw, lines_of
from mutant_edits import edits
from mutant_judge import Verdict, _transposed, read_map
from mutants import read_verdicts, write_verdicts

SOURCE = '''"""A file."""

LIMIT = 3


class Bucket:
    """A bucket."""

    def fill(self, items: list[int], most: int = 7) -> int:
        """Fill the bucket with 2 items."""
        if len(items) > most and not self.full:
            raise ValueError(f"more than {most + 1}")
        log.info("filled", count=most + 1)
        self.total += sum(items, start=1)
        for item in items:
            self.items.append(item)
        return self.total

    def __repr__(self) -> str:
        return f"<{1 + 1}>"


async def fill(buckets: list[Bucket]) -> None:
    def each(bucket: Bucket) -> int:
        return bucket.fill([1])

    await gather(buckets, limit=min(2, LIMIT))
    await gather(buckets, limit=min(2, LIMIT))
'''
EVERYWHERE = {"a.py": set(range(100))}


def made(source: str) -> dict[str, set[str]]:
    """Return the new lines of all mutants, by function."""
    found: dict[str, set[str]] = {}
    for edit in edits(source):
        data = source.encode()
        text = (data[: edit.begin] + edit.text.encode() + data[edit.end :]).decode()
        found.setdefault(edit.function, set()).add(text.splitlines()[edit.first - 1].strip())
    return found


def test_all_edits_of_a_file() -> None:
    found = made(SOURCE)
    assert found == {
        "Bucket.fill": {
            "if len(items) >= most and not self.full:",
            "if len(items) > most or not self.full:",
            "if len(items) > most and self.full:",
            "if not (len(items) > most and not self.full):",
            "pass",  # of a raise, an addition and a call
            "self.total -= sum(items, start=1)",
            "self.total += sum(items)",
            "self.total += sum(items, start=2)",
            "return None",
        },
        "fill.each": {"return None", "return bucket.fill([2])"},
        "fill": {
            "pass",
            "await gather(buckets)",
            "await gather(buckets, limit=max(2, LIMIT))",
            "await gather(buckets, limit=min(3, LIMIT))",
        },
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a is not b", "a is b"),
        ("a not in b", "a in b"),
        ("(a) + (b)", "(a) - (b)"),
        ("'ß' and a", "'ß' or a"),
        ("f(x=1)", "f()"),
        ("any(a)", "all(a)"),
        ("True", "False"),
    ],
)
def test_operators_and_calls(before: str, after: str) -> None:
    assert f"a = {after}" in made(f"def f(a, b):\n    a = {before}\n")["f"]


def test_a_draw_depends_on_the_seed_and_the_sources_alone() -> None:
    drawn = draw({"a.py": SOURCE}, EVERYWHERE, seed=1, count=4)
    assert drawn == draw({"a.py": SOURCE}, EVERYWHERE, seed=1, count=4)
    assert drawn != draw({"a.py": SOURCE}, EVERYWHERE, seed=2, count=4)
    every = draw({"a.py": SOURCE}, EVERYWHERE, seed=1, count=100)
    assert every[:4] == drawn
    line = lines_of(drawn[0], SOURCE)
    assert line is not None
    fewer = draw({"a.py": SOURCE}, {"a.py": EVERYWHERE["a.py"] - set(line)}, seed=1, count=100)
    assert fewer == every[1:]
    assert draw({"a.py": SOURCE}, {}, seed=1, count=4) == []


def test_every_mutant_is_another_program() -> None:
    for seed in range(20):
        for mutant in draw({"a.py": SOURCE}, EVERYWHERE, seed=seed, count=100):
            text = applied(mutant, SOURCE)
            assert text is not None
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))


def test_a_mutant_is_found_again_where_lines_have_moved() -> None:
    call = "await gather(buckets, limit=min(2, LIMIT))"
    mutant = Mutant("a.py", "fill", "removed", f"    {call}", "    pass", nth=1)
    assert lines_of(mutant, SOURCE) == range(28, 29)
    moved = "import x\n\n" + SOURCE.replace("def fill(self", "def filled(self")
    assert lines_of(mutant, moved) == range(30, 31)
    inner = SOURCE.replace(f"    {call}\n" * 2, f"    {call}\n    if x:\n        {call}\n")
    assert (applied(mutant, inner) or "").endswith(f"    {call}\n    if x:\n        pass\n")


def test_a_mutant_whose_lines_are_gone_is_not_found() -> None:
    mutant = Mutant("a.py", "Bucket.fill", "return", "        return self.total", "        return None")
    assert lines_of(mutant, SOURCE) is not None
    for gone in (SOURCE.replace("return self.total", "return 1"), SOURCE.replace("def fill(self", "def other(self")):
        assert lines_of(mutant, gone) is None
        assert applied(mutant, gone) is None
    assert applied(replace(mutant, nth=1), SOURCE) is None


def test_a_map_lists_the_tests_of_a_line_with_few_lines_first(tmp_path: Path) -> None:
    records = [
        {"test": "wide", "passed": True, "seconds": 0.1, "lines": {"a.py": [1, 2, 3]}},
        {"test": "narrow", "passed": True, "seconds": 9.0, "lines": {"a.py": [2]}},
        {"test": "failed", "passed": False, "seconds": 0.1, "lines": {"a.py": [2]}},
    ]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"sources": {"a.py": "00"}, **_transposed(records)}))
    reach = read_map(path)
    assert reach.of("a.py", [2]) == ["narrow", "wide"]
    assert reach.of("a.py", [3, 4]) == ["wide"]
    assert reach.of("a.py", [4]) == reach.of("b.py", [1]) == []
    assert reach.failed == ("failed",)


def test_verdicts_are_read_as_they_were_written(tmp_path: Path) -> None:
    (mutant,) = draw({"a.py": SOURCE}, EVERYWHERE, seed=1, count=1)
    verdicts = [Verdict(mutant, "killed", "tests/test_a.py::test_b", 3, 1.5)]
    path, sources = tmp_path / "out" / "found.json", {"tests": "00", "a.py": "00"}
    write_verdicts(path, verdicts, sources, seed=1)
    assert read_verdicts(path) == read_verdicts(path, sources) == verdicts
    assert read_verdicts(path, {**sources, "tests": "11"}) == []
