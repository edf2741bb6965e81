from __future__ import annotations

import pytest
from coverage_table import Key
from module_cases import SECTION

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("key", SECTION.cases, ids="/".join)
def test_the_page_has_the_result_of(key: Key) -> None:
    SECTION.check(key)


def test_the_page_lists_these_cases_and_no_others() -> None:
    assert list(SECTION.rows()) == list(SECTION.cases)
