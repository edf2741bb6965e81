"""Planning and metadata of 405B parameters: rank 0's work for a save, and one rank's look-up for a load.

No rank exists; what they would say is made here, and the code that rank 0 runs in ``bcp.save``, and every
rank in ``bcp.load``, gets it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import xxhash

from bcp._save import BLOCK_BYTES
from bcp.format import metadata
from bcp.format.metadata import Commit, encode_layout, encode_metadata
from bcp.options import LoadOptions
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout, find_all
from bcp.plan.read import divide_load
from bcp.plan.read.reads import wants
from bcp.plan.read.share import BlockIndex
from bcp.plan.read.share import share_reads as share_blocks
from bcp.plan.shards import ShardTable
from bcp.plan.write import RankTable
from bcp.plan.write.divide import WriteDivision, divide_writes
from bcp.plan.write.survey import EncodedTable, Survey, encode_flat, encode_shares, gather_tables, survey_tables
from bcp.plan.write.world import factor
from bcp.runtime.cache import LruCache
from benchmarks.figures import Figures, cpu_ms
from benchmarks.llama import Job

__all__ = ["LARGE", "Planned", "look_up", "plan", "reshard", "share_reads"]

LARGE = 100_000
"""From so many ranks on, other goals hold."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A save that was planned: the division, and the contents of ``metadata.arrow``."""

    job: Job
    division: WriteDivision
    metadata: bytes


def states(job: Job) -> list[EncodedTable]:
    """Return what every rank says. Ranks of a group are factored once, and a few of them again, as a check."""
    said: list[EncodedTable | None] = [None] * job.world_size
    for tp, pp, table, start, stop in job.groups():
        factored = factor(replace(table, start=start[0], stop=stop[0]))
        alike = EncodedTable.of(factored, b"")
        first = factored.rows[factored.row_begin[:-1]]
        for dp in range(job.dp):
            low, high = start[dp][first], stop[dp][first]
            own = np.flatnonzero((factored.slots.regular == 0) & (low < high))
            flat = encode_flat(np.column_stack([own, low[own], high[own]]))
            said[job.rank(tp, dp, pp)] = replace(alike, flat=flat, table=xxhash.xxh3_128_digest(alike.slots + flat))
    everyone = [one for one in said if one is not None]
    _check(job, everyone)
    return everyone


def _check(job: Job, said: Sequence[EncodedTable]) -> None:
    """Compare what some ranks say with what they would say by themselves."""
    for rank in np.linspace(0, job.world_size - 1, 8).astype(int).tolist():
        real = RankTable.of(job.table(rank)).encoded
        if replace(real, table=said[rank].table) != said[rank]:
            raise AssertionError(f"rank {rank} would say something else")


def plan(job: Job, figures: Figures) -> Planned:
    """Plan a save as rank 0 does, in all its steps, and print what it costs."""
    large = job.world_size >= LARGE
    said = states(job)
    hellos = [one.hello for one in said]
    survey = survey_tables(hellos, balance="split", block_bytes=BLOCK_BYTES)
    received = Survey.decode(survey.encode())
    messages = [table.message(rank, received) for rank, table in enumerate(said)]
    world = gather_tables(survey, messages)
    division = divide_writes(world, block_bytes=BLOCK_BYTES)
    stored = encode_metadata(encode_layout(division.layout), _commit(job))
    steps: list[tuple[str, Callable[[], object]]] = [
        ("comparing digests", lambda: survey_tables(hellos, balance="split", block_bytes=BLOCK_BYTES)),
        ("reading what ranks hold", lambda: gather_tables(survey, messages)),
        ("merging, cover check, balance, layout", lambda: divide_writes(world, block_bytes=BLOCK_BYTES)),
        ("writing the answers", lambda: encode_shares(division)),
    ]
    case = f"{job.zero}, {job.world_size:,} ranks"
    figures.add(f"{case}: flat intervals and boxes", len(world.flat_rank) + len(division.layout.offset))
    figures.add(f"{case}: boxes and segments", len(division.layout.offset) + len(division.layout.segments))
    figures.add(f"{case}: the same with each pattern once", _entries(division))
    figures.add(f"{case}: rank 0 receives", (sum(map(len, hellos)) + sum(map(len, messages))) / 1e6, "MB")
    figures.add(f"{case}: rank 0 answers", sum(map(len, encode_shares(division))) / 1e6, "MB")
    costs: dict[str, float] = {}

    def all_steps() -> float:
        costs.update((name, cpu_ms(work)) for name, work in steps)
        return sum(costs.values())

    goal = 250.0 if large else {"A": 25.0, "B": 100.0}[job.zero]
    figures.measure(f"{case}: planning on rank 0, all of it", all_steps, "ms", goal)
    for name, cost in costs.items():
        figures.add(f"{case}: - {name}", cost, "ms")
    figures.add(f"{case}: encoding the layout", cpu_ms(lambda: encode_layout(division.layout), 3), "ms")
    _balance(job, division, figures, case)
    figures.add(f"{case}: metadata.arrow", len(stored) / 1e6, "MB", None if large else 0.25)
    return Planned(job, division, stored)


def _entries(division: WriteDivision) -> int:
    """Count boxes, patterns and segments as they are stored."""
    folded = division.layout.segments.folded()
    return len(folded.pattern) + len(folded.begin) - 1 + len(folded)


def _commit(job: Job) -> Commit:
    return Commit(
        operation=secrets.token_hex(8),
        created="2026-11-21T00:00:00.000+00:00",
        framework="megatron",
        codecs=(),
        part_bytes=32 << 20,
        version="0",
        receipts=secrets.token_bytes(16 * job.world_size),
    )


def _balance(job: Job, division: WriteDivision, figures: Figures, case: str) -> None:
    layout = division.layout
    load = np.bincount(layout.file_rank, weights=layout.file_nbytes, minlength=job.world_size)
    groups = load.reshape(job.pp, job.dp, job.tp)
    figures.add(f"{case}: balance over all ranks (max / mean)", load.max() / load.mean(), "", 1.01)
    figures.add(f"{case}: balance in a DP group", (groups.max(axis=1) / groups.mean(axis=1)).max(), "", 1.001)


def look_up(planned: Planned, figures: Figures) -> None:
    """Open the metadata and look up what one rank of the same job holds."""
    job = planned.job
    table = job.table(job.world_size // 2)

    def first() -> object:
        metadata._layouts = LruCache(1)  # noqa: SLF001 -- every run opens a checkpoint that it has not seen
        layout = metadata.decode_metadata(planned.metadata, "metadata.arrow").layout
        return wants(layout, table).ranges()

    name = f"{job.zero}, {job.world_size:,} ranks: open, and look up one rank's tensors"
    if job.world_size < LARGE:
        figures.measure(name, lambda: cpu_ms(first, 15), "ms", 5.0)
    else:
        figures.add(name, cpu_ms(first, 15), "ms")


def reshard(planned: Planned, target: Job, figures: Figures) -> None:
    """Look up what ranks of another job want."""
    layout = metadata.decode_metadata(planned.metadata, "metadata.arrow").layout
    tables = [target.table(rank) for rank in np.linspace(0, target.world_size - 1, 8).astype(int).tolist()]
    ranges = [len(_ranges(layout, table)) for table in tables]
    name = f"{planned.job.zero} -> TP={target.tp} DP={target.dp} PP={target.pp}"
    figures.measure(
        f"{name}: look-up of a rank, {min(ranges)} to {max(ranges)} ranges",
        lambda: max(cpu_ms(partial(_ranges, layout, table)) for table in tables),
        "ms",
        1.0,
    )


def _ranges(layout: Layout, table: ShardTable) -> Ints:
    return wants(layout, table).ranges()


def share_reads(planned: Planned, target: Job, figures: Figures) -> None:
    """Divide the reading of a load between all ranks of another job, as rank 0 does."""
    layout = metadata.decode_metadata(planned.metadata, "metadata.arrow").layout
    line = BlockIndex.of(layout)
    runs: list[Ints] = [np.empty((0, 2), dtype=np.int64)] * target.world_size
    for tp, pp, table, start, stop in target.groups():
        saved = find_all(layout, table.tensors)
        for dp in range(target.dp):
            mine = replace(table, start=start[dp], stop=stop[dp])
            runs[target.rank(tp, dp, pp)] = line.runs(wants(layout, mine, saved).ranges())
    options = LoadOptions()
    read_bytes, exchange_bytes = options.read_bytes, options.exchange_bytes
    divide = partial(share_blocks, line, runs, read_bytes=read_bytes, exchange_bytes=exchange_bytes)
    messages = [line.encode(rows) for rows in runs]
    shared = divide_load(line, messages, read_bytes=read_bytes, exchange_bytes=exchange_bytes)
    case = f"{planned.job.zero} -> TP={target.tp} DP={target.dp} PP={target.pp}, {target.world_size:,} ranks"
    figures.add(f"{case}: rank 0 receives", sum(map(len, messages)) / 1e6, "MB")
    figures.add(f"{case}: rank 0 tells everyone", len(shared.encode(line)) / 1e6, "MB")
    figures.add(
        f"{case}: reading what ranks want", cpu_ms(lambda: [line.decode(message) for message in messages], 1), "ms"
    )
    figures.add(f"{case}: dividing the reading", cpu_ms(divide, 1), "ms")
    figures.add(f"{case}: rounds of exchange", shared.rounds)
