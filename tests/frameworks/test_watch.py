from __future__ import annotations

import pytest
import watch
from ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("what", ["all_reduce", "gather_object", "redistribute"])
def test_collectives_of_any_thread_are_seen(ranks4: Ranks, what: str) -> None:
    for seen in ranks4.run(watch.seen_of, what):
        assert any(name.startswith("sequence of ") for name in seen.collectives), seen


@pytest.mark.parametrize("what", ["allocate", "allocate elsewhere"])
def test_allocations_of_any_thread_are_seen(ranks4: Ranks, what: str) -> None:
    assert [seen.largest for seen in ranks4.run(watch.seen_of, what)] == [4 << 20] * 4


@pytest.mark.parametrize("what", ["nothing", "look"])
def test_what_takes_no_memory_and_tells_nobody_is_not_seen(ranks4: Ranks, what: str) -> None:
    for seen in ranks4.run(watch.seen_of, what):
        assert not seen.collectives
        assert seen.largest < 1 << 10
