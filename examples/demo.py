"""Train, crash in the middle of a save, resume on other layouts: the paper's Fig. 14 on one CPU machine.

``make demo`` runs this; it takes two to three minutes on two cores. It trains a small GPT five times:

0. on 4 ranks without interruption, for reference;
1. on 4 ranks again, until rank 1 is killed with SIGKILL in the middle of a save;
2. from the newest checkpoint that the killed run committed: (a) on 4 ranks, (b) on 2 ranks,
   (c) on 4 ranks as 2-way tensor parallelism inside 2-way FSDP2.

What has to hold is asserted: the torn save is passed over, (a) repeats the reference bit by bit, (b) and (c) differ
from it by rounding only, and each run fed every sample of the reference once. Losses are drawn to
``demo-out/loss.png``, and ``demo-out/report.html`` shows the saves of run (c), rank by rank and stage by stage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_plot import difference, draw

import bcp

TOLERANCE = 1e-3
"""Most that a loss may differ from the reference's on another layout: float32 sums in another order."""

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, below the run's own."""

Sample = tuple[str, int, int]
"""Source, epoch and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        name: its folder.
        title: for the table and the figure.
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        resume: name of the run whose checkpoints it gets copies of, or None.
        kill_at_save: in which save rank 1 kills itself, or None.
    """

    name: str
    title: str
    dp: int
    tp: int = 1
    resume: str | None = None
    kill_at_save: int | None = None

    @property
    def layout(self) -> str:
        """The parallelism, as in ``FSDP2 4``."""
        return f"FSDP2 {self.dp}" + (f" x TP {self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left in its log.

    Attributes:
        run: which run.
        losses: step to global mean loss.
        samples: step to the ids of the samples that begin in its windows, on all ranks.
        resumed_from: step of the checkpoint it started from; 0 without one.
        blocking_seconds: of each save, how long training stood still.
        total_seconds: of each save, how long it took to commit.
    """

    run: Run
    losses: dict[int, float]
    samples: dict[int, list[Sample]]
    resumed_from: int = 0
    blocking_seconds: list[float] = field(default_factory=list)
    total_seconds: list[float] = field(default_factory=list)


def launch(run: Run, out: Path, steps: int, save_every: int) -> Outcome:
    """Run one training under torchrun; a run that is to be killed has to fail, any other to succeed."""
    ranks = run.dp * run.tp
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--local-addr", "localhost"]  # torchrun waits for ever where the machine's own name has no address
    command += [str(Path(__file__).with_name("train_gpt.py")), "--out", str(out / run.name), "--steps", str(steps)]
    command += ["--save-every", str(save_every), "--dp", str(run.dp), "--tp", str(run.tp)]
    if run.kill_at_save is not None:
        command += ["--kill-at-save", str(run.kill_at_save)]
    (out / run.name).mkdir(parents=True)
    if run.resume is not None:
        shutil.copytree(out / run.resume / CHECKPOINTS, out / run.name / CHECKPOINTS)
    output = out / run.name / "output.txt"
    print(f"{run.title:<20} {run.layout:<16}", end="", flush=True)
    began = time.monotonic()
    with output.open("w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, check=False).returncode  # noqa: S603 -- our own script
    print(f"{time.monotonic() - began:5.0f} s", flush=True)
    if (code != 0) != (run.kill_at_save is not None):
        sys.exit(f"{run.title} ended with exit code {code}; the end of {output}:\n{output.read_text()[-6000:]}")
    return outcome(run, out / run.name / "log.jsonl")


def outcome(run: Run, log: Path) -> Outcome:
    """Read a run's log."""
    records: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    saves = [record for record in records if "saved" in record]
    steps = [record for record in records if "loss" in record]
    return Outcome(
        run=run,
        losses={record["step"]: record["loss"] for record in steps},
        samples={record["step"]: [tuple(sample) for sample in record["samples"]] for record in steps},
        resumed_from=next((record["resumed"] for record in records if "resumed" in record), 0),
        blocking_seconds=[record["blocking_seconds"] for record in saves],
        total_seconds=[record["seconds"] for record in saves],
    )


def count_samples(reference: Outcome, killed: Outcome, resumed: Outcome) -> tuple[int, int]:
    """Return how many samples a run lost, and how many it fed too often, over the kill.

    The run consists of the killed run's steps before the checkpoint and of the resumed run's steps. The later steps of
    the killed run count for nothing, because their weights died with it. Its samples should be the reference's.
    """
    first = min(resumed.samples)
    kept = {step: samples for step, samples in killed.samples.items() if step < first} | resumed.samples
    fed = Counter(sample for samples in kept.values() for sample in samples)
    once = Counter({sample for samples in reference.samples.values() for sample in samples})
    return (once - fed).total(), (fed - once).total()


def check(reference: Outcome, killed: Outcome, resumed: list[Outcome], save_every: int) -> list[str]:
    """Return what does not hold; empty where all is well."""
    first = (killed.run.kill_at_save or 0) * save_every - save_every  # step at which resumed runs have to begin
    wrong = []
    if off := difference(killed.losses, reference.losses):
        wrong.append(f"the killed run should repeat the reference as far as it got, but differs by {off}")
    for outcome in resumed:
        if outcome.resumed_from != first:
            start = outcome.resumed_from
            wrong.append(f"{outcome.run.title} should start from step {first}, but started from step {start}")
        if set(outcome.losses) != set(range(first, len(reference.losses))):
            steps = sorted(outcome.losses)
            wrong.append(f"{outcome.run.title} should train every step from {first} on, but trained {steps}")
        allowed = 0.0 if outcome.run.layout == killed.run.layout else TOLERANCE
        if (off := difference(outcome.losses, reference.losses)) > allowed:
            wrong.append(f"{outcome.run.title} differs from the reference by {off}; allowed is {allowed}")
        lost, extra = count_samples(reference, killed, outcome)
        if lost or extra:
            wrong.append(f"{outcome.run.title} should feed each sample once; {lost} were lost, {extra} fed too often")
    return wrong


def table(reference: Outcome, outcomes: list[Outcome]) -> str:
    """Return the results as text; save times are means over the run's saves, as rank 0 saw them."""
    rows = [("run", "layout", "from", "final loss", "max |difference|", "save: blocking", "total")]
    for outcome in outcomes:
        last = max(outcome.losses)
        killed = outcome.run.kill_at_save is not None
        rows.append(
            (
                outcome.run.title,
                outcome.run.layout,
                f"step {outcome.resumed_from}" if outcome.resumed_from else "-",
                f"died at step {last}" if killed else f"{outcome.losses[last]:.6f}",
                f"{difference(outcome.losses, reference.losses):.2g}",
                f"{mean(outcome.blocking_seconds) * 1e3:.0f} ms",
                f"{mean(outcome.total_seconds) * 1e3:.0f} ms",
            ),
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def mean(values: list[float]) -> float:
    """Return the arithmetic mean; nan of nothing."""
    return sum(values) / len(values) if values else float("nan")


def main() -> None:
    """Run everything, print the table, draw the figure; exit with 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="is emptied first")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)

    runs = [
        Run(name="reference", title="uninterrupted", dp=4),
        Run(name="killed", title="killed in save 3", dp=4, kill_at_save=3),
        Run(name="resumed-4", title="(a) same layout", dp=4, resume="killed"),
        Run(name="resumed-2", title="(b) half the ranks", dp=2, resume="killed"),
        Run(name="resumed-2x2", title="(c) TP inside FSDP2", dp=2, tp=2, resume="killed"),
    ]
    outcomes = [launch(run, args.out, args.steps, args.save_every) for run in runs]
    reference, killed, *resumed = outcomes

    print("\n" + table(reference, outcomes))
    panels = {f"{killed.run.layout} -> {outcome.run.layout}": outcome.losses for outcome in resumed}
    draw(args.out / "loss.png", reference.losses, killed.losses, panels)
    print(f"\nloss curves: {args.out / 'loss.png'}")
    bcp.report(args.out / runs[-1].name / CHECKPOINTS).html(args.out / "report.html")
    print(f"saves of {runs[-1].title}, by rank, stage and file: {args.out / 'report.html'}")
    wrong = check(reference, killed, resumed, args.save_every)
    if wrong:
        sys.exit("FAILED\n" + "\n".join(wrong))
    print("(a) is bit-identical to the uninterrupted run; (b) and (c) are equal up to rounding.")
    samples, first, reached = sum(map(len, reference.samples.values())), min(resumed[0].losses), max(killed.losses) + 1
    print(f"(a), (b) and (c) were fed each of the {samples} samples of {args.steps} steps once: 0 lost, 0 fed twice.")
    print(f"The killed run had trained {reached} steps. Steps {first} to {reached - 1} died with it and were repeated.")


if __name__ == "__main__":
    main()
