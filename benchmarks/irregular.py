"""Irregular tensors: stating flat intervals against gathering them (paper sec. 4.4, Table 7).

    python -m benchmarks.irregular [--quick] [--json FILE] [--check]

Four gloo ranks hold a model and its AdamW states in flat shards: FSDP1's, and those of Megatron-LM's distributed
optimizer (needs megatron-core). Before such a state can be saved so that another parallelism can load it, training
stands still for what is measured here, on the same objects, in turn, in one run:

- the framework's own way: FSDP's SHARDED_STATE_DICT and ``optim_state_dict``, Megatron's ``fully_reshardable``;
- bcp's planner: ``local_shards``;
- and, for comparison, all that training waits for in ``bcp.save(async_checkpoint=True)``: the same, agreement between
  ranks, and the copy of the state. The framework's own way would have the copy and the planning still before it.

Times are wall clock of the slowest rank, the least of some runs. docs/frameworks.md shows a run.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed as dist

import bcp
from bcp import Pending
from benchmarks.figures import Figures, arguments
from benchmarks.irregular_states import Ways, fsdp1_ways, megatron_ways, megatron_without_cuda

RANKS = 4
SPEEDUP = 20.0
"""The paper's Table 7 has 19.8 and 30.5."""

Context = Callable[[], AbstractContextManager[None]]

JOBS: dict[str, tuple[str, Context, Callable[[int], Ways]]] = {
    "FSDP1, use_orig_params=True": ("SHARDED_STATE_DICT", nullcontext, partial(fsdp1_ways, use_orig_params=True)),
    "FSDP1, use_orig_params=False": ("SHARDED_STATE_DICT", nullcontext, partial(fsdp1_ways, use_orig_params=False)),
    "Megatron-LM, distributed optimizer": ("fully_reshardable", megatron_without_cuda, megatron_ways),
}
"""By name: the framework's own way, what it has to run in, and both ways."""


def main() -> int:
    """Run everything."""
    options = arguments(__doc__)
    if find_spec("megatron") is None:
        raise SystemExit("benchmarks.irregular needs megatron-core: pip install 'bcp-checkpoint[frameworks]'")
    figures = Figures()
    for job, (official, *_) in JOBS.items():
        measured = measure(job, options)
        figures.head(f"{job}: {measured['elements'] / 1e6:.1f} M parameters and their AdamW states on {RANKS} ranks")
        figures.add(f"{official}, model and optimizer", measured["official"] * 1e3, "ms")
        figures.add("bcp: local_shards, model and optimizer", measured["bcp"] * 1e3, "ms")
        figures.add("bcp: all of an asynchronous save that training waits for", measured["save"] * 1e3, "ms")
        ratio = measured["bcp"] / measured["official"]
        figures.add(f"bcp takes a part of it that is at most 1/{SPEEDUP:g}: 1/{1 / ratio:.0f}", ratio, "", 1 / SPEEDUP)
    return figures.close(options)


def measure(job: str, options: argparse.Namespace) -> Mapping[str, float]:
    """Measure one job on ranks of its own."""
    context = get_context("spawn")
    results: SimpleQueue[Mapping[str, float]] = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    layers, runs = (2, 2) if options.quick else (16, 4)
    with TemporaryDirectory() as folder:
        given = (store.port, job, layers, runs, Path(folder), results)
        ranks = [context.Process(target=be_rank, args=(rank, *given)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(f"{job}: ranks ended with {[rank.exitcode for rank in ranks]}")
    return results.get()


def be_rank(
    rank: int, port: int, job: str, layers: int, runs: int, folder: Path, results: SimpleQueue[Mapping[str, float]]
) -> None:
    """Be one rank: train a step, then time the ways in turn."""
    warnings.simplefilter("ignore")  # FSDP1 is deprecated, Megatron misses Apex: not what is measured
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    _, context, ways_of = JOBS[job]
    with context():
        ways = ways_of(layers)
        least = dict.fromkeys(("official", "bcp", "save"), float("inf"))
        for run in range(runs):
            least["official"] = min(least["official"], slowest(ways.official))
            least["bcp"] = min(least["bcp"], slowest(ways.bcp))
            save = partial(bcp.save, folder / f"run-{run}", ways.states, async_checkpoint=True)
            least["save"] = min(least["save"], slowest(save, Pending.wait))
    if rank == 0:
        results.put({**least, "elements": ways.elements})
    dist.barrier()
    dist.destroy_process_group()


def slowest(work: Callable[[], Any], then: Callable[[Any], object] = id) -> float:
    """Return the seconds that the slowest rank takes for it; ``then`` is called with what came of it."""
    dist.barrier()
    begin = time.perf_counter()
    kept = work()  # freed after the clock has stopped
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    then(kept)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())
