from __future__ import annotations

from pathlib import Path

import failures
import pytest
from ranks import Ranks

pytestmark = pytest.mark.dist


def check(results: list[failures.Said], guilty: str, cause: str) -> None:
    """The guilty rank raises what went wrong; all others name it and its cause."""
    for rank, (kind, text, _) in enumerate(results):
        if rank == failures.GUILTY:
            assert kind == guilty
            assert cause in text
        else:
            assert kind == "PeerError"
            assert f"rank {failures.GUILTY}" in text
            assert cause in text


@pytest.mark.parametrize(
    ("operation", "key"),
    [("open_write", "model"), ("write_part", "model"), ("commit", "model"), ("put", "receipts")],
)
def test_a_full_disk_on_one_rank_ends_the_save_on_all(ranks4: Ranks, tmp_path: Path, operation: str, key: str) -> None:
    results = ranks4.run(failures.save, tmp_path, operation, key)
    check(results, results[failures.GUILTY][0], "No space left on device")
    assert results[failures.GUILTY][0] in {"StageError", "OSError"}


@pytest.mark.parametrize(("operation", "key"), [("get", "receipts"), ("read_into", "model")])
def test_a_broken_disk_on_one_rank_ends_the_load_on_all(
    ranks4: Ranks, tmp_path: Path, operation: str, key: str
) -> None:
    results = ranks4.run(failures.load, tmp_path, operation, key)
    check(results, results[failures.GUILTY][0], "Input/output error")


@pytest.mark.parametrize("name", ["d2h"])
def test_a_custom_stage_that_fails_is_named_everywhere(ranks4: Ranks, tmp_path: Path, name: str) -> None:
    results = ranks4.run(failures.stage, tmp_path, name)
    check(results, "StageError", "stage 'mine' failed on model part 0")


def test_ranks_that_do_different_things_are_told_so(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(failures.different_calls, tmp_path)
    assert {kind for kind, *_ in results} == {"InputError"}
    assert all("/a " in text and "/b " in text for _, text, *_ in results)
