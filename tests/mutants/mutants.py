"""Measure what the tests see: change lines of bcp by chance, and count the changes that no test notices.

``make mutants`` runs it. A *map* tells which tests reach which lines. A *draw* takes mutants on reached lines. Each one
is *judged* by the tests that reach it, in a scratch copy of the tree. An --out file of the same sources and tests is
continued: mutants that ended by the time limit are judged again.

``--compare BEFORE`` judges the mutants of that file with today's tests. The exit code is 1 if a mutant survives that
was killed before.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mutant_draw import Mutant, draw
from mutant_judge import Verdict, digests, judge, make_map, read_map
from mutant_tree import Scratch, scratch_of

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = _parser().parse_args(arguments)
    with scratch_of(given.tree) as scratch, tempfile.TemporaryDirectory() as folder:
        chart = given.map or Path(folder) / "map.json"
        if not chart.exists() or read_map(chart).sources != digests(scratch):
            _say(f"running the tests for a map, in {scratch.folder}")
            make_map(scratch, chart, processes=given.processes)
        if given.map_only:
            return 0
        verdicts = _judged(given, scratch, chart)
    _say(", ".join(f"{count} {outcome}" for outcome, count in Counter(each.outcome for each in verdicts).items()))
    if not given.compare:
        return 0
    killed = {each.mutant for each in read_verdicts(given.compare) if each.outcome == "killed"}
    worse = [each.mutant for each in verdicts if each.outcome == "survived" and each.mutant in killed]
    for mutant in worse:
        _say(f"killed before, survives now: {mutant.file}, {mutant.function}\n{_difference(mutant)}")
    return 1 if worse else 0


def _judged(given: argparse.Namespace, scratch: Scratch, chart: Path) -> list[Verdict]:
    """Judge the mutants, those of the file to compare with or drawn ones; write each verdict at once."""
    reach = read_map(chart)
    if given.compare:
        mutants = [each.mutant for each in read_verdicts(given.compare)]
    else:
        reached = {file: set(at) for file, at in reach.reached.items()}
        mutants = draw(scratch.sources(), reached, seed=given.seed, count=given.count)
    known = {each.mutant: each for each in read_verdicts(given.out, reach.sources)} if given.out.exists() else {}
    verdicts: list[Verdict] = []
    for number, mutant in enumerate(mutants):
        verdict = known.get(mutant)
        if verdict is None or verdict.outcome == "time limit":
            verdict = judge(mutant, scratch, reach, limit=given.limit, say=_say)
            _say(f"{number + 1}/{len(mutants)} {verdict.outcome} in {verdict.seconds} s {verdict.by}: {mutant.file}")
            _say(_difference(mutant))
        verdicts.append(verdict)
        rest = [known[each] for each in mutants[number + 1 :] if each in known]
        write_verdicts(given.out, [*verdicts, *rest], reach.sources, seed=given.seed)
    return verdicts


def read_verdicts(path: Path, sources: Mapping[str, str] | None = None) -> list[Verdict]:
    """Read a file of verdicts; none of other sources or tests, if these are given."""
    record = json.loads(path.read_text())
    if sources is not None and record["sources"] != sources:
        return []
    return [Verdict(Mutant(**each.pop("mutant")), **each) for each in record["verdicts"]]


def write_verdicts(path: Path, verdicts: list[Verdict], sources: Mapping[str, str], *, seed: int) -> None:
    """Write a file of verdicts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = Counter(each.outcome for each in verdicts)
    record = {"seed": seed, "outcomes": counts, "verdicts": [asdict(each) for each in verdicts], "sources": sources}
    path.write_text(json.dumps(record, indent=1) + "\n")


def _difference(mutant: Mutant) -> str:
    old, new = mutant.old.split("\n"), mutant.new.split("\n")
    return "\n".join([*(f"  - {line.strip()}" for line in old), *(f"  + {line.strip()}" for line in new)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to measure; this one by default")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--count", type=int, default=40, help="mutants to draw")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for the tests of one mutant")
    parser.add_argument("--processes", type=int, default=2, help="processes that run the tests for the map")
    parser.add_argument(
        "--map", type=Path, help="a file that keeps the map; made if it is absent or of other sources or tests"
    )
    parser.add_argument("--map-only", action="store_true", help="end when the map is made")
    parser.add_argument("--out", type=Path, default=Path("mutants-out/mutants.json"))
    parser.add_argument("--compare", type=Path, metavar="BEFORE", help="judge the mutants of this file of verdicts")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
