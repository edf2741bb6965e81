"""The command line: ``python -m bcp COMMAND``. Each command imports its own needs: the doctor needs torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from bcp.runtime.imports import importing
from bcp.runtime.process import leave

__all__ = ["main"]

_DOCTOR = """\
Check the job's store, network, clocks, storage and versions, and say on rank 0 how they are.
Run it on every rank, the way the job is run, as in

  torchrun --nnodes=4 --nproc-per-node=8 ... -m bcp doctor /shared/run

The exit status is 0 if all is well, 1 if not, and 2 if the call or the environment is wrong."""

_REPORT = """\
Show what was recorded of saves and loads: failures first, then bottlenecks, stragglers, storage and trends.

  python -m bcp report /ckpt/run/step-300 -o report.html

The exit status is 0, or 1 if there is no recording or storage failed, and 2 if the call is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bcp", description="Commands of bcp.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_report(commands)
    parsed = vars(parser.parse_args(arguments))
    run = parsed.pop("run")
    status: int = run(**parsed)
    return status


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check what a job needs, from every rank",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", nargs="?", help="folder or URL for checkpoints, which is tried out")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="how long all of it may take, 30 by default; more for ranks that start far apart",
    )
    parser.set_defaults(run=_doctor)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="show which rank, stage and file made saves and loads slow, or fail",
        description=_REPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a folder or URL with checkpoints below it")
    parser.add_argument("-o", "--html", metavar="FILE", help="also write one HTML page, which needs no network")
    parser.add_argument("--perfetto", metavar="FILE", help="also write a trace of the newest one for ui.perfetto.dev")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--last", metavar="N", type=int, default=100, help="read the newest N files, 100 by default")
    parser.set_defaults(run=_report)


def _doctor(path: str | None, timeout: float) -> int:
    with importing:
        from bcp._doctor import doctor  # noqa: PLC0415 -- imports torch

    return doctor(path, timeout)


def _report(path: str, html: str | None, perfetto: str | None, last: int, *, as_json: bool) -> int:
    with importing:
        from bcp._report import show  # noqa: PLC0415 -- the help does not need it

    return show(path, html, perfetto, last, as_json=as_json)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


if __name__ == "__main__":
    leave(main())
