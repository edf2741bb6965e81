from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CONCEPTS = (DOCS / "concepts.md").read_text()


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


NOUNS = re.findall(r"^\| ([a-z ]+) \|(?!-)", section(CONCEPTS, "Glossary"), re.MULTILINE)[1:]
CLASSES = re.findall(
    r"^\| ([a-z ]+) \| (`bcp.*) \|$",
    section((DOCS / "architecture.md").read_text(), "Nouns and classes"),
    re.MULTILINE,
)


def test_the_glossary_is_short_and_at_the_top() -> None:
    assert CONCEPTS.index("## Glossary") == CONCEPTS.index("\n## ") + 1
    assert 0 < len(NOUNS) <= 14
    assert "`bcp." not in section(CONCEPTS, "Glossary")


def test_all_nouns_of_the_glossary_have_classes() -> None:
    assert [noun for noun, _ in CLASSES] == NOUNS


@pytest.mark.parametrize(("noun", "classes"), CLASSES)
def test_a_noun_of_the_glossary_is_a_class(noun: str, classes: str) -> None:
    assert noun
    for name in re.findall(r"`([\w.]+)`", classes):
        assert isinstance(pkgutil.resolve_name(name), type)
