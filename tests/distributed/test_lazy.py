from __future__ import annotations

from pathlib import Path

import lazy_jobs
import pytest
from exact import trained
from fsdp1 import Layout
from lazy_jobs import Case, assert_lazy_is_eager
from logical import differences, logical
from ranks import Ranks
from samples import sample

pytestmark = pytest.mark.dist

DDP, FSDP2 = Layout("ddp"), Layout("fsdp2")
HELD = [
    Case(DDP, model="normed"),
    Case(Layout("zero1")),
    Case(Layout()),
    Case(Layout(orig=False)),
    Case(Layout(orig=False, mixed=True)),
    Case(Layout(strategy="SHARD_GRAD_OP", mixed=True)),
    Case(FSDP2, model="recomputed"),
    Case("hsdp"),
    Case("tp_fsdp2"),
]
MEANWHILE = [
    Case(DDP, "backward", micro=2, model="normed"),
    Case(Layout("zero1"), "backward", micro=2),
    Case(Layout(mixed=True), "backward", micro=2),
    Case(Layout(orig=False), "backward", micro=2),
    Case(FSDP2, "backward", micro=2, model="recomputed"),
    Case("hsdp", "backward", micro=2),
    Case("tp_fsdp2", "backward", micro=2),
]


@pytest.mark.parametrize("case", sample(HELD, *HELD[::6]), ids=str)
def test_a_step_waits_until_the_state_before_it_is_copied(ranks4: Ranks, tmp_path: Path, case: Case) -> None:
    assert all(assert_lazy_is_eager(ranks4, tmp_path, case))


@pytest.mark.parametrize("case", sample(MEANWHILE, *MEANWHILE[::6]), ids=str)
def test_the_state_is_copied_during_backward(ranks4: Ranks, tmp_path: Path, case: Case) -> None:
    assert_lazy_is_eager(ranks4, tmp_path, case)


def test_ranks_that_dawdle_do_not_wait_for_each_other_for_ever(ranks4: Ranks, tmp_path: Path) -> None:
    twin = trained(0, 4)
    ranks4.run(lazy_jobs.rounds, tmp_path, 20)
    for number in range(20):
        assert not differences(logical(tmp_path / str(number)), twin.state())
        twin.step(number, 4)
