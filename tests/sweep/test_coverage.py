from __future__ import annotations

import pytest
from coverage_table import Key, Section
from write import SECTIONS

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize(
    ("section", "key"),
    [pytest.param(section, key, id="/".join((section.title, *key))) for section in SECTIONS for key in section.cases],
)
def test_the_page_has_the_result_of(section: Section, key: Key) -> None:
    section.check(key)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_the_page_lists_these_cases_and_no_others(section: Section) -> None:
    assert list(section.rows()) == list(section.cases)
