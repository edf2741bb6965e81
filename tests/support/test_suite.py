"""Options of the suite itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from samples import sample, sample_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("test", "examples"),
    [
        pytest.param("plan/test_rename.py", 100, marks=pytest.mark.long),
        ("stages/test_gather.py", 60),
        pytest.param("workflow/test_commit_machine.py::TestLocalCommits", 8, marks=pytest.mark.long),
    ],
)
def test_a_soak_tries_more_examples(test: str, examples: int) -> None:
    """A test of the default number, one of its own number, and a machine of states."""
    chosen = ["-n", "0", "-m", "hypothesis", "-p", "no:cacheprovider", f"tests/unit/{test}"]
    options = ["--examples=2", "--hypothesis-seed=0", "--hypothesis-show-statistics"]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 -- our own tests
    assert f"settings.max_examples={2 * examples}" in done.stdout, done.stdout + done.stderr


def test_a_matrix_leaves_a_sample() -> None:
    marks = [[mark.name for mark in case.marks] for case in sample([("a", 1), ("a", 2), ("b", 1)], ("a", 2))]
    assert marks == [["long"], [], ["long"]]
    with pytest.raises(AssertionError, match="leaves a sample"):
        sample([1, 2])
    with pytest.raises(AssertionError, match="no cases"):
        sample([1, 2], 3)
    named = sample_of({"one": [1], "two": [2]}, "two")
    assert [(case.id, case.values, len(case.marks)) for case in named] == [("one", ([1],), 1), ("two", ([2],), 0)]
