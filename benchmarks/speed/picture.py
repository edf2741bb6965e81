"""The samples as a picture: each library at its best, beside what the machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.speed.cases import SINGLE
from benchmarks.speed.goals import over
from benchmarks.speed.samples import RAW, Samples

__all__ = ["draw"]

OURS, OTHERS, LIMIT = "#1f6f8b", "#b8bec4", "#c0392b"
SHARES = (
    ("save", "write", "Save until durable"),
    ("cold load", "cold load", "Load, cold"),
    ("warm load",) * 2 + ("Load, warm",),
)
"""Kind of the samples, kind of the raw limit, title."""


def draw(samples: Samples, path: Path) -> None:
    """Draw one panel for each comparison, one bar for each library."""
    libraries = list(dict.fromkeys(library for library, _ in samples.ways("save") if library != RAW))[::-1]
    figure = Figure(figsize=(11, 0.9 + 0.36 * len(libraries)), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    for panel, (kind, limit, title) in zip(panels, SHARES, strict=False):
        shares = [over(samples.best(limit, RAW), samples.best(kind, library)) for library in libraries]
        values = [None if share is None else 100 * share for share in shares]
        _bars(panel, libraries, values, "{:.0f} %")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("% of the best raw " + ("write" if limit == "write" else "read"), fontsize=8)
        panel.set_xlim(0, 1.25 * max(100, *(value or 0 for value in values)))
        panel.axvline(100, color=LIMIT, linewidth=1, linestyle="--")
    waits = [samples.best("background", library, name="stall") for library in libraries]
    _bars(panels[3], libraries, waits, "{:.2f} s")
    panels[3].set_title("Background save", fontsize=10)
    panels[3].set_xlabel("s that training stands still for", fontsize=8)
    panels[3].set_xlim(0, 1.25 * max((wait for wait in waits if wait is not None), default=1))
    about = samples.about
    figure.supxlabel(
        f"{about.get('state')} in {SINGLE}, {about.get('machine')}, torch {about.get('torch')}", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bars(panel: Any, libraries: Sequence[str], values: Sequence[float | None], form: str) -> None:
    """Draw horizontal bars with their values at the end; bcp's stands out."""
    colors = [OURS if library == "bcp" else OTHERS for library in libraries]
    bars = panel.barh(libraries, [value or 0.0 for value in values], color=colors, height=0.66)
    labels = ["-" if value is None else form.format(value) for value in values]
    above_line = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    panel.bar_label(bars, labels, fontsize=8, padding=4, bbox=above_line)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0, labelsize=9)
    panel.tick_params(axis="x", labelsize=8)
