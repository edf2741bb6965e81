"""The rank with the most bytes is named, wherever it stands."""

from __future__ import annotations

import pytest

from bcp.telemetry.recording import RankRecord
from bcp.telemetry.summary import _balance


@pytest.mark.parametrize("nbytes", [[9, 1, 2], [1, 9, 2], [1, 2, 9]])
def test_the_rank_with_the_most_bytes_is_named(nbytes: list[int]) -> None:
    ranks = [
        RankRecord(rank=rank, host="host", local_rank=rank, figures={"nbytes": each})
        for rank, each in enumerate(nbytes)
    ]
    balance = _balance(ranks)
    assert balance is not None
    assert (balance.rank, balance.most, balance.mean, balance.ratio) == (nbytes.index(9), 9, 4, 9 / 4)


def test_ranks_without_bytes_are_balanced() -> None:
    balance = _balance([RankRecord(rank=0, host="host", local_rank=0, figures={"nbytes": 0})])
    assert balance is not None
    assert balance.ratio == 1
    assert _balance([RankRecord(rank=0, host="host", local_rank=0)]) is None
