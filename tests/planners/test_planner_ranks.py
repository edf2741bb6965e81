from __future__ import annotations

import os
import signal

import pytest
import torch
from ranks import RankFailedError, Ranks
from torch import distributed as dist

pytestmark = pytest.mark.dist


def total(value):
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor, dist.get_rank(), os.getpid()


def fails_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def unsendable():
    return lambda: 0


def test_results_come_in_rank_order_from_processes_that_stay(ranks4):
    first, second = ranks4.run(total, 1), ranks4.run(total, 1)
    assert [(tensor.item(), rank) for tensor, rank, _ in first] == [(10, rank) for rank in range(4)]
    assert [pid for *_, pid in first] == [pid for *_, pid in second]


def test_a_failing_function_shows_its_traceback_and_leaves_the_pool_alive(ranks4):
    pids = [pid for *_, pid in ranks4.run(total, 0)]
    with pytest.raises(RankFailedError, match=r"(?s)on ranks \[2\].*in fails_on.*no luck on 2") as caught:
        ranks4.run(fails_on, 2)
    assert caught.value.ranks == [2]
    with pytest.raises(RankFailedError, match=r"(?i)can't pickle|pickle"):
        ranks4.run(unsendable)
    assert [pid for *_, pid in ranks4.run(total, 0)] == pids


def test_a_dead_rank_is_reported_and_the_next_run_starts_anew():
    ranks = Ranks(2)
    try:
        with pytest.raises(RankFailedError, match="dies: rank 1 died with exit code -9"):
            ranks.run(dies)
        assert "not started" in repr(ranks)
        assert [tensor.item() for tensor, *_ in ranks.run(total, 0)] == [1, 1]
    finally:
        ranks.close()
    assert "not started" in repr(ranks)
    ranks.close()
