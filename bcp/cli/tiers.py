"""``bcp tiers FOLDER``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, print_json, table, when
from bcp.runtime.imports import importing

if TYPE_CHECKING:
    from bcp.tiers.status import HostMemory

__all__ = ["command"]


@click.command("tiers")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@with_json
def command(folder: Path, *, as_json: bool) -> int:
    """Show the snapshots in the memory of this host.

    FOLDER is the directory of a run's tiers on a tmpfs of this host, as /dev/shm/bcp-0-1a2b3c4d5e6f. A job may train
    meanwhile.
    """
    with importing:
        from bcp.telemetry.amounts import bytes_words, duration_words  # noqa: PLC0415 -- the help does not need it
        from bcp.tiers.status import look  # noqa: PLC0415 -- same

    memory = look(folder)
    if as_json:
        data = asdict(memory)
        data["snapshots"] = [each | {"marked": each["marked"].isoformat()} for each in data["snapshots"]]
        for name in ("kept", "copied", "committed"):
            data[name] = None if data[name] is None else data[name].isoformat()
        data["queue"] = {"snapshots": len(memory.queue), "nbytes": sum(each.nbytes for each in memory.queue)}
        data["seconds"] = {name: _age(moment) for name, moment in _tiers(memory).items()}
        print_json(data)
        return 0
    agent = f"serves other hosts at {memory.address}" if memory.address else "serves no other host"
    if not memory.is_served:
        start = f"start python -m bcp.agent {folder} {memory.run}"
        agent = f"none: start the job again, or {start}" if memory.needs_agent else "none, and none is needed"
    click.echo(clean(f"run     {memory.run or 'none yet'}"))
    click.echo(clean(f"ranks   {_numbers(memory.ranks) or 'none lives here'}"))
    click.echo(clean(f"agent   {agent}"))
    others = ", ".join(memory.copies) or "of no other host"
    click.echo(clean(f"copies  {f'parity with {others}' if memory.has_parity else others}"))
    if memory.by_twins:
        click.echo(f"twins   {bytes_words(memory.by_twins)} written here, {bytes_words(memory.fetched)} fetched")
    ages = {name: _age(moment) for name, moment in _tiers(memory).items()}
    words = [f"{name} {duration_words(age)}" for name, age in ages.items() if age is not None]
    click.echo(f"newest  {', '.join(words) or 'nothing'}")
    queued = f"{len(memory.queue)} on their way to storage, {bytes_words(sum(each.nbytes for each in memory.queue))}"
    click.echo(f"queue   {queued if memory.queue else 'empty'}")
    for trouble in memory.troubles if memory.is_served or memory.needs_agent else ():
        click.echo(clean(f"fails   {trouble}"))
    for drift in memory.drifts:
        click.echo(clean(f"drift   {drift}"))
    columns = ["step", "marked", "size", "ranks", "copied from", "state"]
    rows = [
        [
            each.step,
            when(each.marked),
            bytes_words(each.nbytes),
            f"{_numbers(each.ranks)} of {each.world_size}",
            f"parity of {', '.join(each.parity_of)}" if each.parity_of else each.copied_from,
            each.state,
        ]
        for each in memory.snapshots
    ]
    if rows:
        click.echo()
        table(columns, rows, right=["step", "size"])
    return 0


def _tiers(memory: HostMemory) -> dict[str, datetime | None]:
    """Return the moment of the newest state in each tier."""
    return {"memory": memory.kept, "copies": memory.copied, "storage": memory.committed}


def _age(moment: datetime | None) -> float | None:
    """Return the seconds since a moment."""
    return None if moment is None else max((datetime.now(UTC) - moment).total_seconds(), 0.0)


def _numbers(ranks: tuple[int, ...]) -> str:
    """Return ranks in few words: neighbours as a range."""
    words: list[str] = []
    first = last = None
    for rank in (*ranks, None):
        if last is not None and rank == last + 1:
            last = rank
            continue
        if first is not None:
            words.append(str(first) if first == last else f"{first}-{last}")
        first = last = rank
    return ", ".join(words)
