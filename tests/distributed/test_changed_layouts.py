from __future__ import annotations

from pathlib import Path

import changed_layouts
import pytest
from ranks import Ranks
from samples import sample

from bcp._save import leader as save_root
from bcp._save import plan as save_plan

pytestmark = pytest.mark.dist


CHANGES = [name for name in changed_layouts.CHANGES if name != "nothing"]


@pytest.mark.parametrize("change", sample(CHANGES, *CHANGES[::2]))
def test_a_changed_layout_is_planned_again_and_the_old_one_is_remembered(
    ranks4: Ranks, tmp_path: Path, change: str
) -> None:
    for cached in ranks4.run(changed_layouts.save_changing, tmp_path, change):
        assert cached[1:4] == [True, False, True]
        # A rank on which nothing changed has only its last plan in mind, which is of the other layout.
        assert cached[4] or change == "more on one rank"


def test_plans_are_bounded() -> None:
    assert save_plan._plans.capacity == save_root._layouts.capacity == 16
