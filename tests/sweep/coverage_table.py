"""The frame of the sweep: cases in sections, their results, and docs/coverage.md made of both.

A section is one file beside this one with a ``SECTION``. `python tests/sweep/write.py` runs all cases and writes the
page. The tests run them too, and compare each result with its row of the page.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"

EXACT, AS_TORCH, REFUSED, NOT_TRIED = "exact", "as torch", "refused", "not tried"

RESULTS = {
    EXACT: "A fresh object that loads the checkpoint goes on bit by bit as the saved one.",
    AS_TORCH: "torch's own state dict does not restore the object, or not exactly. bcp's result equals torch's.",
    REFUSED: "The save, or the strict load, raises an error that names the reason, before a byte is written.",
    NOT_TRIED: "The class cannot be made or run on a CPU with these versions, for the reason given.",
}
"""The results that a case may have, and their meaning. Any other outcome is an error of the sweep."""

_HEAD = """# Optimizers and modules that were tried

<!-- Written by `python tests/sweep/write.py`; `make sweep` compares it with new results. -->

[The rule](concepts.md#nothing-is-dropped) says that a save drops nothing silently. The sweep looks for exceptions: it
saves and loads every optimizer class and many modules of the packages below, on a CPU, and compares with torch's own
`state_dict()` and `load_state_dict()`. Versions are those of `constraints.txt`.

| result | meaning |
|---|---|
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case: one of ``RESULTS``, and a remark for the page."""

    result: str
    remark: str = ""


Key = tuple[str, str]
"""(group, name): a package or a kind, and a class or a situation in it."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page."""

    title: str
    intro: str  # Markdown; lines of at most 120 letters
    column: str  # heading of the names
    cases: Mapping[Key, Callable[[], Outcome]]

    def run(self, key: Key) -> Outcome:
        """Run a case. Other libraries may warn; warnings about bcp and errors of the case fail it."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module=r"bcp\.")
            outcome = self.cases[key]()
        assert outcome.result in RESULTS, outcome
        assert outcome.remark or outcome.result == EXACT, f"{key}: {outcome.result} needs a reason"
        return Outcome(outcome.result, _cell(outcome.remark))

    def check(self, key: Key) -> None:
        """Run a case and compare the result with the page."""
        outcome, row = self.run(key), self.rows().get(key)
        assert outcome == row, f"docs/coverage.md has {row}; run python tests/sweep/write.py, and read the difference"

    def rows(self) -> dict[Key, Outcome]:
        """Return the results on the page."""
        return dict(_rows(PAGE.read_text(), self.title)) if PAGE.exists() else {}

    def text(self, rows: Mapping[Key, Outcome]) -> str:
        """Return the section as Markdown: a table for each group."""
        lines = [f"## {self.title}", "", self.intro.strip(), ""]
        for group in dict.fromkeys(group for group, _ in rows):
            lines += [f"### {group}", "", f"| {self.column} | result | remark |", "|---|---|---|"]
            lines += [
                f"| `{name}` | {row.result} | {row.remark} |" for (other, name), row in rows.items() if other == group
            ]
            lines.append("")
        return "\n".join(lines)


def page(sections: list[tuple[Section, Mapping[Key, Outcome]]]) -> str:
    """Return the whole page."""
    legend = "".join(f"| {result} | {meaning} |\n" for result, meaning in RESULTS.items())
    return _HEAD + legend + "\n" + "\n".join(section.text(rows) for section, rows in sections)


def _rows(text: str, title: str) -> Iterator[tuple[Key, Outcome]]:
    """Read the tables of a section."""
    group, inside = "", False
    for line in text.splitlines():
        if line.startswith("## "):
            inside = line == f"## {title}"
        elif line.startswith("### "):
            group = line.removeprefix("### ")
        elif inside and (found := re.fullmatch(r"\| `(.*?)` \| (.*?) \| (.*?) ?\|", line)):
            name, result, remark = found.groups()
            yield (group, name), Outcome(result, remark)


def _cell(text: str) -> str:
    """Return text that can stand in a table: one line, without bars."""
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;")
