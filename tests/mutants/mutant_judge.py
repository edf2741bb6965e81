"""Which tests reach which lines, and which mutants these tests kill."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutant_draw import Mutant, applied, lines_of
from mutant_tree import Scratch

__all__ = ["Map", "Verdict", "judge", "make_map", "read_map"]

FOLDERS = ("unit", "api", "coordinators", "data", "doctor", "planners", "read", "runs", "runtime", "telemetry")
"""Folders of tests that call bcp in their own process."""

ELSEWHERE = re.compile(r"mark\.dist|torchrun|ranks4|megatron4")
"""Words in files whose tests start ranks."""

TEST_SECONDS = 45
"""A test that takes longer hangs, which kills the mutant."""

TRACED_SECONDS = 300
"""A test that takes longer while its lines are recorded is left out: it could not judge within the time limit."""

FIRST = 20
"""Tests of the first run, which ends soon: those that run the fewest lines."""


@dataclass(frozen=True, slots=True)
class Map:
    """The tests by the lines that they reach."""

    sources: Mapping[str, str]  # files, and all tests, and their digests
    tests: Mapping[str, tuple[float, int]]  # seconds, and the number of lines
    reached: Mapping[str, Mapping[int, tuple[str, ...]]]
    failed: tuple[str, ...]  # tests that fail or are skipped without mutants

    def of(self, file: str, lines: Iterable[int]) -> list[str]:
        """Return the tests of any of the lines: those first that reach the fewest lines of all."""
        at = self.reached.get(file, {})
        return sorted(
            {test for line in lines for test in at.get(line, ())}, key=lambda test: (self.tests[test][1], test)
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one mutant."""

    mutant: Mutant
    outcome: str  # killed, survived, time limit, gone, unreached
    by: str = ""  # the test that failed
    tests: int = 0  # tests that reach it
    seconds: float = 0.0


def digests(scratch: Scratch) -> dict[str, str]:
    """Return the digest of each source file, and one of all tests."""
    tests = [path.read_text() for path in sorted((scratch.folder / "tests").rglob("*.py"))]
    return {"tests": _digest("".join(tests)), **{file: _digest(text) for file, text in scratch.sources().items()}}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_map(scratch: Scratch, path: Path, *, processes: int) -> None:
    """Run the tests, folder by folder, and write the map to ``path``. The marks are those of pyproject.

    A call that was ended goes on where it was, if sources and tests are the same. It leaves a folder beside ``path``.
    """
    sources = digests(scratch)
    parts = path.with_name(f"{path.name}.{_digest(json.dumps(sources))}")
    for name in FOLDERS:
        part = parts / name
        if not (part / "done").exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            files = sorted((scratch.folder / "tests" / name).rglob("test_*.py"))
            chosen = [str(file.relative_to(scratch.folder)) for file in files if not ELSEWHERE.search(file.read_text())]
            code, output = _traced(scratch, part.resolve(), chosen, processes) if chosen else (0, "")  # no file: all
            if code not in (0, 1, 5):
                raise SystemExit(f"pytest ended with {code} in tests/{name}; call again to go on:\n{output[-3000:]}")
            (part / "done").touch()
    records = [json.loads(line) for each in sorted(parts.rglob("*.jsonl")) for line in each.read_text().splitlines()]
    path.write_text(json.dumps({"sources": sources, **_transposed(records)}))
    shutil.rmtree(parts)


def _traced(scratch: Scratch, part: Path, chosen: list[str], processes: int) -> tuple[int | None, str]:
    plugins = ["-p", "mutant_reach", "-p", "no:cacheprovider"]
    options = ["-q", "-n", str(processes), f"--timeout={TRACED_SECONDS}", "--tb=no"]
    return scratch.pytest(*plugins, *options, *chosen, seconds=None, environment={"MUTANTS_REACH": str(part)})


def _transposed(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tests by file and line. A set of tests is a number with a bit for each test, in hexadecimal digits."""
    tests = sorted((each for each in records if each["passed"]), key=lambda each: str(each["test"]))
    masks: dict[str, dict[int, int]] = {}
    for number, test in enumerate(tests):
        for file, lines in test["lines"].items():
            at = masks.setdefault(file, {})
            for line in lines:
                at[line] = at.get(line, 0) | 1 << number
    return {
        "tests": [[each["test"], each["seconds"], sum(map(len, each["lines"].values()))] for each in tests],
        "reached": {file: {line: f"{mask:x}" for line, mask in at.items()} for file, at in sorted(masks.items())},
        "failed": sorted(each["test"] for each in records if not each["passed"]),
    }


def read_map(path: Path) -> Map:
    """Read a map that :func:`make_map` has written."""
    record: dict[str, Any] = json.loads(path.read_text())
    names = [name for name, _, _ in record["tests"]]
    known: dict[str, tuple[str, ...]] = {}
    for at in record["reached"].values():
        for mask in at.values():
            if mask not in known:
                bits = f"{int(mask, 16):b}"[::-1]
                known[mask] = tuple(names[place.start()] for place in re.finditer("1", bits))
    return Map(
        record["sources"],
        {name: (seconds, lines) for name, seconds, lines in record["tests"]},
        {file: {int(line): known[mask] for line, mask in at.items()} for file, at in record["reached"].items()},
        tuple(record["failed"]),
    )


def judge(mutant: Mutant, scratch: Scratch, reach: Map, *, limit: float, say: Callable[[str], None]) -> Verdict:
    """Run the tests that reach a mutant until one fails; ``limit`` is in seconds, for all of them."""
    source = scratch.sources().get(mutant.file, "")
    place, text = lines_of(mutant, source), applied(mutant, source)
    if place is None or text is None:
        return Verdict(mutant, "gone")
    tests = reach.of(mutant.file, place)
    if not tests:
        return Verdict(mutant, "unreached")
    began = time.monotonic()
    sick: set[str] = set()
    groups = [tests[:FIRST], sorted(tests[FIRST:], key=lambda test: reach.tests[test])]
    for group in groups:
        while waiting := [test for test in group if test not in sick]:
            with scratch.changed(mutant.file, text):
                outcome, by = _run(scratch, waiting, began + limit - time.monotonic())
            if outcome == "killed" and by and _run(scratch, [by], limit)[0] != "survived":
                say(f"{by} fails without a mutant")
                sick.add(by)
                continue
            if outcome == "renamed":  # parameters of a test are named after values that the mutant changes
                say(f"{by} has other parameters")
                sick.update([test for test in waiting if test.partition("[")[0] == by] or waiting)
                continue
            if outcome != "survived":
                return Verdict(mutant, outcome, by, len(tests), round(time.monotonic() - began, 1))
            break
    return Verdict(mutant, "survived", "", len(tests), round(time.monotonic() - began, 1))


def _run(scratch: Scratch, tests: list[str], seconds: float) -> tuple[str, str]:
    """Return the outcome of a run, and the test that failed, or that the mutant gave other parameters."""
    last, chosen = scratch.folder / ".last", scratch.folder / ".chosen"
    last.write_text("")
    chosen.write_text("\n".join(tests))
    arguments = ["-x", "-q", "-n", "0", "-p", "mutant_reach", "-p", "no:cacheprovider", "--tb=no"]
    stop = [f"--timeout={TEST_SECONDS}", "--timeout-method=thread", f"@{chosen}"]
    code, output = scratch.pytest(*arguments, *stop, seconds=max(seconds, 1), environment={"MUTANTS_LAST": str(last)})
    if code is None:
        return "time limit", last.read_text()
    if code in {4, 5}:
        if re.search(r"^ERROR tests/\S+\.py - ", output, re.MULTILINE):  # a file of tests cannot be imported
            return "killed", ""
        if missing := re.search(r"^ERROR: not found: \S*?(tests/[^\s\[]+)", output, re.MULTILINE):
            return "renamed", missing[1]
        raise SystemExit(f"pytest ended with {code}; make a new map:\n{output}")
    return ("killed", last.read_text()) if code else ("survived", "")
