from __future__ import annotations

from pathlib import Path

import megatron_shards as jobs
import pytest
from logical import differences, logical
from ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("even rows", "uneven rows"),
        ("uneven rows", "columns"),
        ("columns", "backwards"),
        ("on one rank", "on all ranks"),
        ("two and two", "even rows"),
    ],
)
def test_several_shards_of_one_key_load_as_megatron_loads_them(
    megatron4: Ranks, tmp_path: Path, before: str, after: str
) -> None:
    assert megatron4.run(jobs.exchanged, tmp_path, before, after) == [[]] * 4
    whole = {("model", key): jobs.values(key) for key in jobs.SHAPES}
    assert not differences(logical(tmp_path / "bcp"), whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one axis", "no axis"),
        ("no axis", "one axis"),
        ("two axes", "no axis, on two ranks"),
        ("no axis, columns", "two axes"),
        ("one axis", "two axes"),
        ("two axes", "one axis"),
    ],
)
def test_prepended_axes_load_as_megatron_loads_them(megatron4: Ranks, tmp_path: Path, before: str, after: str) -> None:
    assert megatron4.run(jobs.reformed, tmp_path, before, after) == [[]] * 4


@pytest.mark.parametrize(
    ("before", "after"),
    [((8, 6), (8, 9)), ((8, 6), (12, 4)), ((4, 3, 5), (8, 2, 7)), ((8, 3, 5), (4, 3, 2))],
    ids=str,
)
def test_other_lengths_load_as_megatron_loads_them(
    megatron4: Ranks, tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    assert megatron4.run(jobs.reformed, tmp_path, before, after) == [[]] * 4
