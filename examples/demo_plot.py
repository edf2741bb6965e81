"""Draw the loss curves of the demo, in the manner of the paper's Fig. 14."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Losses = Mapping[int, float]


def draw(path: Path, reference: Losses, killed: Losses, resumed: Mapping[str, Losses]) -> None:
    """Write one panel for each resumed run: the reference beneath, the killed run, the crash, the run that goes on."""
    figure = Figure(figsize=(4.6 * len(resumed), 3.8))
    FigureCanvasAgg(figure)  # pixels in memory; needs no display
    panels = figure.subplots(1, len(resumed), sharey=True, squeeze=False)
    crash = max(killed) + 1
    for axes, (title, losses) in zip(panels[0], resumed.items(), strict=True):
        line(axes, reference, "uninterrupted", color="0.82", linewidth=5)
        line(axes, killed, "until it was killed", color="tab:blue", linewidth=1.4)
        line(axes, losses, "resumed", color="tab:orange", linewidth=1.4)
        axes.axvline(crash, color="tab:red", linestyle="--", linewidth=1, label="SIGKILL in the middle of a save")
        axes.axvline(min(losses), color="tab:green", linestyle=":", linewidth=1.4, label="newest committed checkpoint")
        axes.set_title(f"{title}\nmax |difference| {difference(losses, reference):.2g}", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    panels[0, 0].set_ylabel("training loss")
    panels[0, -1].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def line(axes: Axes, losses: Losses, label: str, **style: Any) -> None:
    """Draw one curve."""
    axes.plot(sorted(losses), [losses[step] for step in sorted(losses)], label=label, **style)


def difference(losses: Losses, reference: Losses) -> float:
    """Return the largest difference at a step that both have."""
    return max(abs(losses[step] - reference[step]) for step in losses.keys() & reference.keys())
