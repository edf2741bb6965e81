"""Run ckpt-chaos with kill points drawn over all kinds of file events: ``chaos_points.py run ...``, as the tool itself.

The tool takes events at equal distances, and the same ones in the modes ``before``, ``unsynced`` and ``term``. A few
points then miss most kinds: 8 points of 168 events were 2 events of a save, and 2 torn files. Only the choice of the
points is replaced here. The tool kills and judges.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections import defaultdict
from collections.abc import Sequence

SEED = 1
"""Of all choices: a repeated run kills at the same events."""

Event = tuple[int, str, str, bool]
"""Number, call, name of the file, and whether the file can be torn."""


def kind(event: Event) -> str:
    """Return the call of an event and the words of its file's name: counters and random names are left out."""
    _, call, name, _ = event
    if call in {"os.mkdir", "os.rmdir"}:
        return call
    return " ".join([call, *re.findall(r"[a-z_]{3,}", re.sub(r"[0-9a-f]{16,}", "", name))])


def choose(events: Sequence[Event], most: int, modes: Sequence[str]) -> list[tuple[int, str]]:
    """Choose kill points: as many in each mode, and each kind of event once before any comes twice.

    The modes share one order of the kinds, and each goes on where the last one ended.

    Args:
        events: all events of a job.
        most: number of points; all events are taken in each mode if there are fewer.
        modes: of :data:`benchmarks.chaos.MODES`.

    Returns:
        Number of the event and mode of each point.

    """
    chance, first, points = random.Random(SEED), 0, list[tuple[int, str]]()  # noqa: S311 -- a sample
    share, more = divmod(most, len(modes))
    everywhere = _by_kind(events, chance)
    for place, mode in enumerate(modes):
        count = share + (place < more)
        if mode == "torn":
            kinds = _by_kind([event for event in events if event[3]], chance)
        else:
            kinds = everywhere[first:] + everywhere[:first]
            first = (first + count) % max(1, len(everywhere))
        points += [(number, mode) for number in sorted(_draw(kinds, count, chance))]
    return points


def _by_kind(events: Sequence[Event], chance: random.Random) -> list[list[int]]:
    """Return the numbers of the events of each kind; the kinds are in a random order."""
    found: dict[str, list[int]] = defaultdict(list)
    for event in events:
        found[kind(event)].append(event[0])
    return chance.sample(list(found.values()), len(found))


def _draw(kinds: Sequence[list[int]], count: int, chance: random.Random) -> list[int]:
    """Draw from one kind after the other, until there are enough events or no more."""
    left, drawn = [chance.sample(numbers, len(numbers)) for numbers in kinds], list[int]()
    while len(drawn) < count and any(left):
        for numbers in left:
            if numbers and len(drawn) < count:
                drawn.append(numbers.pop())
    return drawn


def main() -> int:
    """Run the command of ckpt-chaos.

    Raises:
        RuntimeError: the installed version chooses its points in another way.

    """
    from ckpt_chaos import byo, cli  # noqa: PLC0415 -- of the extra dev

    if list(inspect.signature(byo._select).parameters) != ["events", "max_points", "modes"]:  # noqa: SLF001 -- the choice
        raise RuntimeError("this ckpt-chaos chooses its points in another way; install 0.1.8")
    byo._select = choose  # noqa: SLF001 -- it has no option for it
    return int(cli.main())


if __name__ == "__main__":
    sys.exit(main())
