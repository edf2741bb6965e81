"""A plugin of pytest that records the lines of bcp run by each test: ``pytest -p mutant_reach``.

Each process writes a file into the folder ``MUTANTS_REACH``, with a line of JSON for each test. With ``MUTANTS_LAST``,
a path, the plugin writes nothing but the test that began last: this name survives a process that is killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from coverage import Coverage

EXAMPLES = 25
SETTINGS = "_hypothesis_internal_use_settings"  # of a test with settings of its own
ROOT = str(Path.cwd() / "bcp") + os.sep


class Reach:
    """Records tests, their seconds, their outcomes and their lines. Lines run by other processes are not seen."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.jsonl"
        self._coverage = Coverage(data_file=None, include=[f"{ROOT}*"], config_file=False)
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Let hypothesis make few examples: tracing slows each of them, and further ones enter few new lines."""
        few = hypothesis.settings(hypothesis.settings.default, deadline=None, max_examples=EXAMPLES)
        hypothesis.settings.register_profile("reach", few)
        hypothesis.settings.load_profile("reach")
        for item in session.items:
            test = getattr(item, "obj", None)
            own = getattr(test, SETTINGS, None)
            if own is not None and own.max_examples > EXAMPLES:
                setattr(getattr(test, "__func__", test), SETTINGS, hypothesis.settings(own, max_examples=EXAMPLES))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Let the lines of the test, and of fixtures made for it, have the name of the test."""
        began = time.perf_counter()
        if not self._seconds:
            self._coverage.start()  # not in a process that lets others run the tests
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")
            self._seconds[item.nodeid] = round(time.perf_counter() - began, 3)

    def pytest_sessionfinish(self) -> None:
        """Write the tests of this process."""
        if not self._seconds:
            return
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {test: {} for test in self._seconds}
        for path in data.measured_files():
            name = "bcp/" + path.removeprefix(ROOT)
            for line, tests in data.contexts_by_lineno(path).items():
                for test in filter(None, tests):
                    lines[test].setdefault(name, []).append(line)
        with self._file.open("w") as file:
            for test, seconds in self._seconds.items():
                passed = test not in self._failed
                record = {"test": test, "passed": passed, "seconds": seconds, "lines": lines[test]}
                file.write(json.dumps(record) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note tests that fail or are skipped."""
        if not report.passed:
            self._failed.add(report.nodeid)


class Last:
    """Writes the name of the running test."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write the name before the test runs."""
        self._path.write_text(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Choose by the environment."""
    last = os.environ.get("MUTANTS_LAST")
    config.pluginmanager.register(Last(Path(last)) if last else Reach(Path(os.environ["MUTANTS_REACH"])))
