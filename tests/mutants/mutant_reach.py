"""A plugin of pytest that records the lines of bcp entered by each test: ``pytest -p mutant_reach``.

Each process writes a file into the folder ``MUTANTS_REACH``, with a line of JSON for each test. With ``MUTANTS_LAST``,
a path, the plugin writes nothing but the test that began last: this name survives a process that is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest

EXAMPLES = 25
SETTINGS = "_hypothesis_internal_use_settings"  # of a test with settings of its own
ROOT = str(Path.cwd() / "bcp") + os.sep


class Recorder:
    """The lines entered since :meth:`restart`, in all threads of this process. Other processes are not seen."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []  # keeps the ids below in use
        self._line_counts: dict[int, int] = {}
        self._seen: dict[int, tuple[str, set[int]]] = {}

    def restart(self) -> dict[str, set[int]]:
        """Return the lines by file, and forget them."""
        seen, self._seen = self._seen, {}
        lines: dict[str, set[int]] = {}
        for file, each in list(seen.values()):
            lines.setdefault(file, set()).update(list(each))
        return lines

    def enter(self, frame: FrameType, event: str, _: object) -> Any:
        """Trace the frame if lines of its code are new; ``sys.settrace`` calls this method for each frame."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return None
        key = id(code)
        if key not in self._line_counts:
            self._codes.append(code)
            self._line_counts[key] = len({line for _, _, line in code.co_lines() if line is not None})
        lines = self._seen.setdefault(key, ("bcp/" + code.co_filename.removeprefix(ROOT), set()))[1]
        if len(lines) >= self._line_counts[key]:
            return None
        add = lines.add

        def line(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                add(frame.f_lineno)
            return line

        return line


class Reach:
    """Records tests, their seconds, their outcomes and their lines."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.jsonl"
        self._recorder = Recorder()
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
        """Trace the test and the fixtures made for it."""
        self._recorder.restart()
        began = time.perf_counter()
        threading.settrace(self._recorder.enter)
        sys.settrace(self._recorder.enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines = self._recorder.restart()
            record = {
                "test": item.nodeid,
                "passed": item.nodeid not in self._failed,
                "seconds": round(time.perf_counter() - began, 3),
                "lines": {file: sorted(each) for file, each in lines.items()},
            }
            with self._file.open("a") as file:
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
