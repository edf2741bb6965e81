"""The memories of the hosts, looked at from outside, and their agents."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bcp.errors import CheckpointError
from bcp.format.metadata import METADATA_KEY, receipt_key
from bcp.plan.shards import KINDS
from bcp.tiers.folder import INTENTS
from bcp.tiers.intent import decode_intent
from bcp.tiers.notes import COPIED, ENDED, LEFT, Mark

__all__ = ["Marked", "agents_of", "committed", "flip", "is_copied", "kill", "marked", "used"]


@dataclass(frozen=True, slots=True)
class Marked:
    """Marked files of one rank on one host."""

    mark: Mark
    step: int
    host: Path


def marked(host: Path) -> list[Marked]:
    """List the marked files of a host which are no given-up ones."""
    found = []
    with suppress(FileNotFoundError):
        for path in (host / INTENTS).iterdir():
            mark = Mark.of(path.name)
            with suppress(FileNotFoundError, CheckpointError):
                if mark is not None and _ended(host, mark.operation) != LEFT:
                    found.append(Marked(mark, decode_intent(path.read_bytes(), str(path))[0].step, host))
    return found


def _ended(host: Path, operation: str) -> str:
    try:
        return (host / ENDED / operation).read_text()
    except FileNotFoundError:
        return ""


def is_copied(hosts: Sequence[Path], operation: str) -> bool:
    """Whether each of these hosts knows that another one has copied its files of a snapshot."""
    return all((host / COPIED / f"{operation}-1").exists() for host in hosts)


def committed(run: Path) -> dict[int, Path]:
    """Return the checkpoints in storage whose metadata are there, by step, in order; bcp has no part in this look."""
    found = {
        int(path.parent.name.split("-")[1].split("_")[0]): path.parent for path in run.glob(f"step-*/{METADATA_KEY}")
    }
    return dict(sorted(found.items()))


def used(host: Path) -> tuple[int, int]:
    """Return the bytes of data files of a host, and the number of all files."""
    nbytes = count = 0
    for path in host.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                count += 1
                nbytes += path.stat().st_size if path.parent.name in KINDS else 0
    return nbytes, count


def flip(found: Sequence[Marked], drawn: random.Random) -> Marked | None:
    """Flip a bit of a data file of the newest snapshot that was digested; return whose; None if there is none."""
    digested = [each for each in found if (each.host / receipt_key(each.mark.rank, each.mark.operation)).exists()]
    newest = max((each.step for each in digested), default=0)
    files = [
        (each, path)
        for each in digested
        if each.step == newest
        for kind in KINDS
        for path in (each.host / kind).glob(f"{each.mark.rank:05d}-{each.mark.operation}.*")
        if path.stat().st_size
    ]
    if not files:
        return None
    each, path = drawn.choice(sorted(files, key=lambda one: str(one[1])))
    with path.open("r+b") as file:
        place = drawn.randrange(path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << drawn.randrange(8)]))
    return each


def agents_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of agents of one host, or of all hosts below a directory; parents first."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "bcp.agent" in words and any(word == str(folder) or word.startswith(f"{folder}/") for word in words):
            found.append(process)
    return sorted(found, key=lambda process: "--child" in process.info["cmdline"])


def kill(processes: Sequence[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes that may have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
