"""Recordings of saves and loads that never happened, made by a small simulation of the pipeline."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pyarrow as pa

from bcp.telemetry.recording import EVENTS, FailureRecord, RankRecord, Recording

MIB = 1 << 20
STAGES = {  # seconds of a part of 32 MiB, and workers
    "save": {"d2h": (0.04, 2), "serialize": (0.02, 1), "upload": (0.9, 4), "checksum": (0.06, 1)},
    "load": {"read": (0.7, 4), "deserialize": (0.03, 1), "h2d": (0.04, 1), "exchange": (0.1, 1)},
}
STORED = {"save": "upload", "load": "read"}
PHASES = {"save": ("plan", "write", "commit"), "load": ("open", "plan", "read", "finish")}


@dataclass
class Case:
    """One save or load to make up.

    Attributes:
        ranks: how many.
        parts: parts of each rank.
        local: ranks of a host.
        axes: names and sizes of the parallel topology, the slowest axis first; empty for none.
        budget: parts that may be in the pipeline at once.
        slow_ranks: how many times slower storage is for some ranks.
        slow_hosts: the same for some hosts, by number.
        flaky: the share of requests that are made again.
        failing: a rank whose upload fails.
    """

    kind: str = "save"
    ranks: int = 64
    parts: int = 9
    local: int = 8
    axes: dict[str, int] = field(default_factory=dict)
    step: int | None = 1200
    budget: int = 6
    slow_ranks: dict[int, float] = field(default_factory=dict)
    slow_hosts: dict[int, float] = field(default_factory=dict)
    flaky: float = 0.004
    failing: int | None = None
    probed: float | None = None
    background: bool = True
    path: str = "gs://training/llama-70b/step-01200"
    run: str = "llama-70b"
    time: float = 1_795_000_000.0
    seed: int = 7


def made(case: Case) -> Recording:
    """Return the recording of a case."""
    dice = random.Random(case.seed)  # noqa: S311 -- not a secret
    rows: list[tuple[object, ...]] = []
    ranks = [_rank(case, rank, dice, rows) for rank in range(case.ranks)]
    columns = zip(*rows, strict=True)
    return Recording(
        kind="save" if case.kind == "save" else "load",
        path=case.path,
        operation="5f0c2d9e71ab4c33",
        step=case.step,
        run=case.run,
        background=case.background,
        version="0.1.0",
        world_size=case.ranks,
        time=case.time,
        ranks=ranks,
        events=pa.table(
            [pa.array(column, kind.type) for column, kind in zip(columns, EVENTS, strict=True)], schema=EVENTS
        ),
        failures=_failures(case),
        probed=case.probed,
    )


def _rank(case: Case, rank: int, dice: random.Random, rows: list[tuple[object, ...]]) -> RankRecord:
    host = rank // case.local
    slow = case.slow_ranks.get(rank, 1.0) * case.slow_hosts.get(host, 1.0)
    sizes = [dice.choice([32, 32, 32, 32, 28]) * MIB for _ in range(case.parts)]
    start = 0.15 + dice.random() * 0.05
    out = [(rank, "phase", PHASES[case.kind][0], "", 0, 0.0, start, 0.0, 1, "ok", "")]
    end, copied, waited, retries = _pipeline(case, rank, slow, sizes, start, dice, out)
    if case.kind == "save":
        out.append((rank, "phase", "snapshot", "", 0, start, copied - start, 0.0, 1, "ok", ""))
    status = ("failed", "StorageError: 503") if rank == case.failing else ("ok", "")
    middle = PHASES[case.kind][1:-1]
    out += [(rank, "phase", name, "", 0, start, end - start, 0.0, 1, *status) for name in middle]
    out.append((rank, "phase", PHASES[case.kind][-1], "", 0, end, 0.3, 0.0, 1, "ok", ""))
    out += _small_requests(case, rank, start, end, dice)
    rows += out
    nbytes = float(sum(sizes))
    figures = {
        "nbytes": nbytes,
        "state_nbytes": nbytes * 2,
        "dedup_saved_bytes": nbytes,
        "seconds": end + 0.3,
        "blocking_seconds": copied,
        "budget_wait_seconds": waited,
        "retries": float(retries),
        "threads": 12.0,
    }
    if case.kind == "load":
        figures = {name: figures[name] for name in ("nbytes", "seconds", "retries", "threads")}
    return RankRecord(
        rank=rank,
        host=f"node-{host:03d}",
        local_rank=rank % case.local,
        coordinates=_place(case, rank),
        started=case.time,
        figures={} if case.failing is not None else figures,
    )


def _small_requests(case: Case, rank: int, start: float, end: float, dice: random.Random) -> list[tuple[object, ...]]:
    """Return the requests that move no part."""
    key, receipt = f"model/{rank:05d}-5f0c2d9e71ab4c33.safetensors", f"receipts/{rank:05d}-5f0c2d9e71ab4c33.arrow"
    if case.kind == "load":
        return [(rank, "request", "get", receipt, 5_000, 0.01, dice.uniform(0.02, 0.08), 0.0, 1, "ok", "")]
    return [
        (rank, "request", "begin", key, 0, start, dice.uniform(0.02, 0.05), 0.0, 1, "ok", ""),
        (rank, "request", "finish", key, 32 * MIB * case.parts, end - 0.1, dice.uniform(0.06, 0.09), 0.0, 1, "ok", ""),
        (rank, "request", "put", receipt, 5_000, end, dice.uniform(0.02, 0.2), 0.0, 1, "ok", ""),
    ]


def _place(case: Case, rank: int) -> dict[str, int]:
    place = {}
    for axis, size in reversed(case.axes.items()):
        rank, place[axis] = divmod(rank, size)
    return {axis: place[axis] for axis in case.axes}


def _pipeline(
    case: Case,
    rank: int,
    slow: float,
    sizes: list[int],
    start: float,
    dice: random.Random,
    out: list[tuple[object, ...]],
) -> tuple[float, float, float, int]:
    """Run the parts through the stages; return the end, the end of the first stage, the waits and the retries."""
    free = {stage: [start] * workers for stage, (_, workers) in STAGES[case.kind].items()}
    left: list[float] = []
    asked, copied, waited, retries = start, start, 0.0, 0
    key = f"model/{rank:05d}-5f0c2d9e71ab4c33.safetensors"
    for number, nbytes in enumerate(sizes):
        item = f"model part {number}: layers.{number}.attention.wq.weight and 11 more"
        time = max(asked, left[number - case.budget] if number >= case.budget else asked)
        out.append((rank, "budget", "", item, nbytes, asked, time - asked, 0.0, 1, "ok", ""))
        waited, asked = waited + time - asked, time + 1e-4
        for stage, (seconds, _) in STAGES[case.kind].items():
            began = max(time, heapq.heappop(free[stage]))
            lasts = seconds * nbytes / (32 * MIB) * dice.uniform(0.85, 1.25) + 0.002
            if stage == STORED[case.kind]:
                lasts, again = _request(case, rank, slow * lasts, began, nbytes, key, dice, out)
                retries += again
            broken = rank == case.failing and stage == STORED[case.kind] and number == len(sizes) - 1
            status = ("failed", "StorageError: 503 backend error") if broken else ("ok", "")
            out.append((rank, "stage", stage, item, nbytes, began, lasts, began - time, 1, *status))
            time = began + lasts
            heapq.heappush(free[stage], time)
            if stage == "d2h":
                copied = max(copied, time)
        left.append(time)
    return max(left), copied, waited, retries


def _request(
    case: Case,
    rank: int,
    lasts: float,
    began: float,
    nbytes: int,
    key: str,
    dice: random.Random,
    out: list[tuple[object, ...]],
) -> tuple[float, int]:
    verb = "part" if case.kind == "save" else "read"
    again = dice.random() < case.flaky
    first = 0.0
    if again:
        first = 0.3 + dice.random() * 0.4
        out.append((rank, "request", verb, key, nbytes, began, first, 0.0, 1, "again", "503 slow down"))
        first += 0.2
    out.append((rank, "request", verb, key, nbytes, began + first, lasts * 0.97, 0.0, 1 + again, "ok", ""))
    return first + lasts, int(again)


def _failures(case: Case) -> list[FailureRecord]:
    if case.failing is None:
        return []
    guilty = FailureRecord(
        rank=case.failing,
        host=f"node-{case.failing // case.local:03d}",
        guilty=case.failing,
        time=case.time + 3.2,
        phase="write",
        stage=STORED[case.kind],
        item=f"model part {case.parts - 1}: layers.8.attention.wq.weight and 11 more",
        tensors=["layers.8.attention.wq.weight", "layers.8.attention.wk.weight"],
        file=f"model/{case.failing:05d}-5f0c2d9e71ab4c33.safetensors",
        attempt=5,
        errors=[
            ("StageError", "stage 'upload' failed on 'model part 8'"),
            ("StorageError", "gs://training: part 'model/...' failed: 503 backend error, five times"),
        ],
        notes=["3 other parts were given up"],
    )
    others = [
        FailureRecord(
            rank=rank,
            host=f"node-{rank // case.local:03d}",
            guilty=case.failing,
            time=case.time + 3.3,
            phase="write",
            errors=[("PeerError", f"rank {case.failing} on node-{case.failing // case.local:03d} failed")],
        )
        for rank in range(case.ranks)
        if rank != case.failing
    ]
    return [guilty, *others]
