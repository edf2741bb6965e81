from __future__ import annotations

from pathlib import Path

import owners
import pytest
from ranks import Ranks

pytestmark = pytest.mark.dist


def test_owners_that_communicate_meet_whatever_the_order_of_keys_on_each_rank(ranks4: Ranks, tmp_path: Path) -> None:
    found = ranks4.run(owners.save_and_load, tmp_path)
    assert found == [{"a": [10, 10], "b": [100, 100], "c": [1000, 1000], "loader": [10, 10]}] * 4


@pytest.mark.parametrize("kind", ["DTensor", "ShardedTensor"])
def test_a_sharded_tensor_is_no_extra_state(ranks4: Ranks, tmp_path: Path, kind: str) -> None:
    for said in ranks4.run(owners.refused, tmp_path, kind):
        assert [f"extra_states.a is a {kind}; put it under" in each for each in said] == [True, True]
