"""How fast bcp's backends write and read, beside plain clients of the same storage, in turn in one run.

    python -m benchmarks.storage [--quick] [--json FILE] [--check] [--only gcs gcs-far s3 s3-far hdfs local]
                                [--folder DIR] [--latency MS] [--rounds N]

Google Cloud Storage and S3 are loopback servers that only count, so that every figure is the client's; HDFS is a real
one in a JVM of this machine. docs/storage.md explains how, and shows a run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figures import Figures, parser
from benchmarks.speed.tables import plain
from benchmarks.storage.clients import missing
from benchmarks.storage.goals import beside, judge, table
from benchmarks.storage.payload import MIB
from benchmarks.storage.section import Samples, Section, counting, hdfs, local

LATENCY_MS = 20.0
"""Of far servers: a round number, for no store was measured."""

AT_ONCE = frozenset({"cpu", "rate"})
"""Goals beside a server that answers at once, where every client comes to the limit of one core."""

AFTER_A_WHILE = frozenset({"cpu", "faster"})


@dataclass(frozen=True, slots=True)
class Storage:
    """A kind of storage.

    Attributes:
        name: in words.
        ours: bcp's client.
        plain: clients that bcp has goals beside.
        others: clients without goals.
        opened: opens some clients, of a payload of so many bytes.
        goals: figures that have goals, beside the stall. Where both sides share the cores, or the disk decides, none.
    """

    name: str
    ours: str
    plain: Sequence[str]
    others: Sequence[str]
    opened: Callable[[Sequence[str], int], AbstractContextManager[Section]]
    goals: Collection[str] = ()


@contextmanager
def gcs(clients: Sequence[str], nbytes: int, latency: float = 0.0) -> Iterator[Section]:
    """Open clients of Google Cloud Storage."""
    from benchmarks.storage.counting_gcs import CountingGcs  # noqa: PLC0415 -- a package of extras

    with counting(clients, CountingGcs, nbytes, latency) as section:
        yield section


@contextmanager
def s3(clients: Sequence[str], nbytes: int, latency: float = 0.0) -> Iterator[Section]:
    """Open clients of S3."""
    from benchmarks.storage.counting_s3 import CountingS3  # noqa: PLC0415 -- a package of extras

    with counting(clients, CountingS3, nbytes, latency) as section:
        yield section


def storages(folder: Path, latency: float = LATENCY_MS / 1000) -> dict[str, Storage]:
    """Return all kinds of storage: a folder for files, and seconds that far servers wait with an answer."""
    disk = partial(local, folder=folder)
    google: tuple[str, Sequence[str], Sequence[str]] = ("bcp gs://", ["gcsfs"], ["gcsfs, tuned"])
    amazon: tuple[str, Sequence[str], Sequence[str]] = ("bcp s3://", ["s3fs"], ["s3fs, tuned", "obstore"])
    after = f", answers after {latency * 1000:.0f} ms"
    return {
        "gcs": Storage("GCS", *google, gcs, AT_ONCE),
        "gcs-far": Storage(f"GCS{after}", *google, partial(gcs, latency=latency), AFTER_A_WHILE),
        "s3": Storage("S3", *amazon, s3, AT_ONCE | AFTER_A_WHILE),
        "s3-far": Storage(f"S3{after}", *amazon, partial(s3, latency=latency), AFTER_A_WHILE),
        "hdfs": Storage("HDFS", "bcp hdfs://", ["hdfs-native"], [], hdfs),
        "local": Storage("disk", "bcp, directory", ["Python"], ["bcp local://"], disk),
    }


def measure(storage: Storage, nbytes: int, rounds: int, figures: Figures) -> Samples:
    """Measure a kind of storage, and missed goals once more, while its server runs."""
    wanted = [storage.ours, *storage.plain, *storage.others]
    clients = []
    for client in wanted:
        if lacks := missing(client):
            print(f"{client} is not measured: {', '.join(lacks)} is not installed", flush=True)
        else:
            clients.append(client)
    if storage.ours not in clients:
        return Samples()
    figures.head(f"{storage.name}: {nbytes // MIB} MiB, {rounds} rounds")
    with storage.opened(clients, nbytes) as section:
        work = partial(section.rounds, count=rounds)
        judge(storage.name, storage.ours, storage.plain, work, figures, goals=storage.goals)
        beside(storage.name, storage.ours, storage.others, section.samples, figures)
        figures.look_again()
        figures.again.clear()
    print(plain(table(storage.name, section.samples)), flush=True)
    return section.samples


def write(path: Path, found: dict[str, Samples], figures: Figures) -> None:
    """Write samples and figures as JSON."""
    samples = [
        {"storage": name, **way._asdict(), **sample._asdict()}
        for name, some in found.items()
        for way, each in some.taken.items()
        for sample in each
    ]
    path.write_text(json.dumps({"figures": figures.rows(), "samples": samples}, indent=1), "utf-8")


def arguments() -> argparse.Namespace:
    """Read the options."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=storages(Path()), help="kinds of storage")
    options.add_argument("--folder", type=Path, default="bench-out", help="where files of the local disk go")
    options.add_argument("--latency", type=float, default=LATENCY_MS, metavar="MS", help="of the far servers' answers")
    options.add_argument("--rounds", type=int, help="5, with --quick 3")
    return options.parse_args()


def main() -> int:
    """Measure everything that was asked for."""
    options = arguments()
    nbytes = (512 if options.quick else 1024) * MIB
    rounds = options.rounds or (3 if options.quick else 5)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    figures, found = Figures(), {}
    for name, storage in storages(options.folder, options.latency / 1000).items():
        if not options.only or name in options.only:
            found[name] = measure(storage, nbytes, rounds, figures)
    if options.json:
        write(Path(options.json), found, figures)
    return figures.verdict(check=options.check)


if __name__ == "__main__":
    sys.exit(main())
