"""A sample of random forgeries with valid checksums, loaded by the public call; ``forging.py`` tries more."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path

import forging
import pytest
from samples import sample

CASES = 75
MOST_GROWTH = 100 << 20


@pytest.mark.parametrize("seed", sample([22, 23], 22))
def test_a_forged_checkpoint_ends_in_an_error_of_bcps_or_is_loaded(tmp_path: Path, seed: int) -> None:
    made, dice = forging.bases(tmp_path), random.Random(seed)  # noqa: S311 -- a sample, no secret
    gc.freeze()  # each failed load is followed by a collection, which need not look at what other tests imported
    cases = [dice.randrange(2**63) for _ in range(CASES)]
    said = {case: forging.attempt(made, tmp_path / "case", case) for case in cases}
    assert {case: text for case, (text, _) in said.items() if text.startswith("FOREIGN")} == {}
    assert len(Counter(text for text, _ in said.values())) > 3
    assert max(grown for _, grown in said.values()) < MOST_GROWTH
