from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path

import anyio
import pytest
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import FaultyBackend


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(("operation", "key"), [("write_part", "model"), ("put", "receipts"), ("put", "metadata")])
def test_a_cancelled_save_leaves_nothing_behind(tmp_path: Path, operation: str, key: str) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(100)}})
    before = files(tmp_path)
    there = threading.Event()

    async def hang(_: str) -> None:
        there.set()
        await anyio.sleep_forever()

    backend = FaultyBackend(LocalBackend(tmp_path), operation, hang, key=key)
    pending = bcp.save(backend, {"model": {"w": torch.zeros(100)}}, overwrite=True, async_checkpoint=True)
    assert there.wait(30)
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.wait(30)
    assert files(tmp_path) == before
    target = {"w": torch.zeros(100)}
    bcp.load(tmp_path, {"model": target})
    assert torch.equal(target["w"], torch.ones(100))
