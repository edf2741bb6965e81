"""torch_checkpointing: one file for each kind of state, four written at once.

Its defaults cannot save on ext4 (O_DIRECT writes that are not aligned), so ``use_direct_io`` is off; the rest of the
asynchronous saver is as it comes without CUDA: staging into shared memory in a thread, writing in a process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.speed.libraries import Library
from benchmarks.speed.state import State
from benchmarks.speed.train import Background

__all__ = ["open_library"]


def open_library(state: State) -> Library:
    """Open it; the process that writes is started by the first asynchronous save."""
    opened: dict[type, Any] = {}

    def manager(kind: Any) -> Any:
        if kind not in opened:
            saver = kind(writer_config=CheckpointWriterConfig(file_write_max_threads=4))
            storage = LocalFileSystemStorageConfig(use_direct_io=False)
            opened[kind] = CheckpointManager.Config(save=saver, storage_config=storage).build()
        return opened[kind]

    def save(path: Path) -> None:
        manager(SyncCheckpointSaverConfig).save(str(path), state.tensors)

    def background(path: Path) -> Background:
        saver = manager(AsyncCheckpointSaverConfig)
        return Background(saver.save(str(path), state.tensors).result, saver.lock)

    def load(path: Path) -> None:
        manager(SyncCheckpointSaverConfig).load(str(path), into=state.tensors)

    def close() -> None:
        for one in opened.values():
            one.close()

    return Library(saves={"save": save}, backgrounds={"async": background}, loads={"load": load}, close=close)
