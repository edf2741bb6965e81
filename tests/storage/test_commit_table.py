"""A part of the table of commits: every request, and every answer; ``benchmarks.commit_table`` tries the whole."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from samples import sample
from servers.commit_stores import STORES

from benchmarks.commit_table.cells import ALWAYS, Answer, Cell, Fault, Faults
from benchmarks.commit_table.rows import few_of
from benchmarks.commit_table.run import run
from benchmarks.commit_table.table import Counts, counts_of, read_counts, written
from benchmarks.commit_table.trial import Outcome, try_cell

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"
SHARES = {"GCS": 20, "S3": 50, "HDFS": 60, "shared files": 40, "fsspec": 25}


@pytest.mark.parametrize("name", sample(STORES, "fsspec"))
def test_no_answer_loses_a_checkpoint_or_makes_a_save_tell_something_untrue(name: str) -> None:
    cells, outcomes = anyio.run(run, STORES[name], SHARES[name])
    wrong = [str(outcome) for outcome in outcomes if outcome.problems]
    assert not wrong, "\n".join(wrong)
    assert counts_of(few_of(cells, SHARES[name])).requests == counts_of(cells).requests
    assert read_counts(PAGE.read_text("utf-8"), name) == counts_of(cells), (
        f"the requests of a save are others now: python -m benchmarks.commit_table --docs --store {name!r}"
    )


def test_a_file_system_that_does_not_rename_keeps_the_old_checkpoint() -> None:
    """The old metadata went aside, so that a rename over them might succeed."""
    taken = Fault("mv metadata.arrow", Answer("taken"), times=ALWAYS)

    async def outcome() -> Outcome:
        with STORES["fsspec"]() as store:
            return await try_cell(store, Cell("overwrite", large=False, faults=(taken,)))

    found = anyio.run(outcome)
    assert not found.problems, str(found)
    assert found.found == "value 1"


def test_a_fault_waits_for_the_one_before() -> None:
    faults = Faults()
    lost, stale = Answer("lost", acted=True), Answer("stale")
    faults.arm([Fault("put", lost, skip=1), Fault("get", stale, times=2)])
    taken = [faults.take(request) for request in ("get", "put", "get", "put", "put", "get", "get", "get")]
    assert [fault and fault.answer for fault in taken] == [None, None, None, lost, None, stale, stale, None]
    assert faults.disarm() == [1, 2]


def test_counts_are_read_as_they_were_written() -> None:
    counts = Counts(12, 19, 3456)
    page = written("| store | a | b | c |\n| S3 | 0 | 0 | 0 |\n", "S3", counts)
    assert "| S3 | 12 | 19 | 3,456 |" in page
    assert read_counts(page, "S3") == counts
    assert read_counts(page, "GCS") is None
