from __future__ import annotations

import pytest
from ragged import plan_uninitialised
from ranks import Ranks


@pytest.mark.dist
def test_a_placement_whose_base_was_never_initialised_is_read():
    process = Ranks(1)  # of its own, as what is wrong ends it
    try:
        assert process.run(plan_uninitialised) == [("vescale", [8, 1, 8, 8])]
    finally:
        process.close()
