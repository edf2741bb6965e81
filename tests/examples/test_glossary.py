from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
TABLE = PAGE.partition("## Glossary")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ([a-z ]+) \| .* \| (`bcp.*) \|$", TABLE, re.MULTILINE)


def test_the_glossary_is_short_and_at_the_top() -> None:
    assert PAGE.index("## Glossary") == PAGE.index("\n## ") + 1
    assert 0 < len(ROWS) <= 14
    assert len(ROWS) == len(re.findall(r"^\|", TABLE, re.MULTILINE)) - 2  # all rows but the head


@pytest.mark.parametrize(("noun", "classes"), ROWS)
def test_a_noun_of_the_glossary_is_a_class(noun: str, classes: str) -> None:
    assert noun
    for name in re.findall(r"`([\w.]+)`", classes):
        assert isinstance(pkgutil.resolve_name(name), type)
