from __future__ import annotations

from pathlib import Path

import pytest
import ragged
from exact import ADAMW, trained
from logical import differences, logical
from ranks import Ranks

pytestmark = pytest.mark.dist

MOVES = [
    ("ragged", ["other", "tp"]),
    ("tp", ["ragged"]),
]


@pytest.mark.parametrize(("saved", "loaded"), MOVES)
def test_ragged_shards_load_as_other_ones_and_back(
    ranks4: Ranks, tmp_path: Path, saved: str, loaded: list[str]
) -> None:
    twin = trained(ragged.STEPS, 4)
    ranks4.run(ragged.train_and_save, saved, tmp_path / "first")
    assert not differences(logical(tmp_path / "first"), twin.state())
    twin.step(ragged.STEPS, 4)
    for how in loaded:
        again, after = tmp_path / f"{how}-again", tmp_path / f"{how}-after"
        assert ranks4.run(ragged.load_and_save, how, tmp_path / "first", again, after) == [ADAMW["lr"]] * 4
        assert not differences(logical(again), logical(tmp_path / "first"))
        assert not differences(logical(after), twin.state())
