"""torch.distributed.checkpoint; it gets a dict of tensors (or DTensors) that was made before.

In one process it runs in a gloo group of one rank, which its asynchronous saves need.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.speed.libraries import DCP_PROCESS, Library
from benchmarks.speed.state import State
from benchmarks.speed.train import Background

__all__ = ["open_library"]

THREADS = (1, 2, 4)
BEST_THREADS = 4


def open_library(state: State) -> Library:
    """Open it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors: dict[str, Any] = dict(state.tensors)

    def save(path: Path, threads: int) -> None:
        dcp.save(tensors, storage_writer=_writer(path, threads))

    def load(path: Path) -> None:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))

    def background(path: Path, threads: int, **more: Any) -> Background:
        saved = dcp.async_save(tensors, storage_writer=_writer(path, threads), **more)
        return Background(saved.result)  # type: ignore[union-attr]  # a Future, unless staging is asynchronous

    saves = {f"save, {n} thread{'s' * (n > 1)}": partial(save, threads=n) for n in THREADS}
    # What staging copies into is kept for the next save; shared memory is what a process needs.
    for_threads = DefaultStager(StagingOptions(False, False, False, False))  # noqa: FBT003 -- its only form
    for_process = DefaultStager(StagingOptions(False, True, False, False))  # noqa: FBT003 -- its only form
    process: dict[str, Any] = {"async_stager": for_process, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    return Library(
        saves=saves,
        backgrounds={
            "async, thread, as it comes": partial(background, threads=1),
            "async, thread, kept stager": partial(background, threads=BEST_THREADS, async_stager=for_threads),
            DCP_PROCESS: partial(background, threads=BEST_THREADS, **process),
        },
        loads={"load": load},
    )


def _writer(path: Path, threads: int) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)
