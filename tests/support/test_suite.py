"""Options of the suite itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from samples import sample, sample_of
from sharing import ByFile

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
    marks = [[mark.name for mark in case.marks] for case in sample(["a", "b", "c"], "a", full=["b"])]
    assert marks == [[], ["long", "full"], ["long"]]
    with pytest.raises(AssertionError, match="leaves a sample"):
        sample([1, 2])
    with pytest.raises(AssertionError, match="no cases"):
        sample([1, 2], 3)
    named = sample_of({"one": [1], "two": [2]}, "two")
    assert [(case.id, case.values, len(case.marks)) for case in named] == [("one", ([1],), 1), ("two", ([2],), 0)]


class Process:
    """A process of xdist, as the sharing of tests sees it."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_process_that_dies_leaves_its_tests_to_others(tmp_path: Path) -> None:
    """The second one dies while the one in place of the first collects its tests."""
    tests = [f"test_{file}.py::test_{number}" for file in "abcd" for number in range(3)]
    for test in tests:
        (tmp_path / test.partition("::")[0]).touch()
    option = SimpleNamespace(markexpr="", loadscopereorder=False)
    config = SimpleNamespace(getvalue=lambda _: ["2*popen"], option=option, rootpath=tmp_path)
    share, (one, two, new) = ByFile(cast("Any", config)), cast("Any", [Process() for _ in range(3)])
    for process in (one, two):
        share.add_node(process)
        share.add_node_collection(process, tests)
    share.schedule()
    assert (one.given, two.given) == ([0, 1, 2], [3, 4, 5])
    share.mark_test_complete(two, 3)
    assert two.given == [3, 4, 5, 6, 7, 8]
    assert share.remove_node(one) == tests[0]
    share.add_node(new)
    assert share.remove_node(two) == tests[4]
    assert new.given == []
    share.add_node_collection(new, tests)
    share.schedule()
    for number in (9, 10, 11, 1, 2, 5, 6, 7, 8):
        share.mark_test_complete(new, number)
    assert new.given == [9, 10, 11, 1, 2, 5, 6, 7, 8]
    assert new.shutting_down


SHARED = """\
import sharing

def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return sharing.ByFile(config, log)
"""
DYING = """\
import os

def test_before():
    pass

def test_that_dies():
    os._exit(3)

def test_after():
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_test_that_ends_its_process_runs_once_and_is_named(tmp_path: Path, processes: int) -> None:
    (tmp_path / "conftest.py").write_text(SHARED)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(DYING)
    (tmp_path / "test_sound.py").write_text("def test_sound(): pass")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", str(processes), "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(  # noqa: S603 -- our own tests
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "2 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    for name in ("one", "two"):
        assert f"crashed while running 'test_{name}.py::test_that_dies'" in done.stdout
