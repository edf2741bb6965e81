"""Memory that copies use is neither freed nor given to others, and goes back in the end."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch
from gpu.scenarios.scale import (
    MIB,
    Scale,
    assert_alike,
    assert_loads,
    busy,
    copied,
    cycles_per_second,
    forget_pinned,
    loaded,
    no_room,
    pinned_nbytes,
    trained,
)
from torch.utils.data import DataLoader

import bcp
from bcp.runtime.staging import shared_pool


def forked_workers(path: Path, scale: Scale) -> None:
    """DataLoader workers are forked after a save and a load, which leave page-locked buffers in the pool."""
    model = {f"w{n}": torch.full((scale.numel,), float(n)).to("cuda") for n in range(2)}
    for how in ("save", "load"):
        if how == "save":
            bcp.save(path, {"model": model})
        else:
            bcp.load(path, {"model": model})
        gc.collect()  # a child must not free tensors of the device either: that is torch's
        loader = DataLoader([*range(8)], batch_size=2, num_workers=2, multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        del loader
    wanted = {name: tensor.cpu() for name, tensor in model.items()}
    bcp.save(path, {"model": model}, overwrite=True)
    assert_alike(loaded(path, wanted), wanted)


def a_part_that_fails_behind_queued_copies(path: Path, scale: Scale) -> None:
    """Copies of a part are queued and late, the next one has no memory. Another save uses the buffers at once."""
    model = {f"w{n}": torch.full((scale.numel,), float(n)).to("cuda") for n in range(4)}
    model["x"] = torch.ones(scale.numel // 500, 500, device="cuda").t()  # is copied through device memory
    host = {f"h{n}": torch.arange(scale.numel, dtype=torch.float32) + n for n in range(4)}
    host["d"] = torch.ones(3)
    wanted = {name: tensor.cpu() for name, tensor in model.items()}
    options = bcp.SaveOptions(part_bytes=128 * MIB)  # all in one part
    other = host | {"d": host["d"].to("cuda")}
    cycles_per_second()
    forget_pinned()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    busy(5 * scale.seconds)  # longer than a save takes to fail
    with no_room(), pytest.raises(bcp.BcpError, match="out of memory"):
        bcp.save(path / "failed", {"model": model}, options=options)
    bcp.save(path / "other", {"model": other}, options=options)
    torch.cuda.synchronize()
    assert_alike(loaded(path / "other", host), host)
    bcp.save(path / "again", {"model": model})
    assert_alike(loaded(path / "again", wanted), wanted)


def a_load_without_device_memory(path: Path, scale: Scale) -> None:
    rows = scale.numel // 500
    wanted = {f"x{n}": torch.arange(rows * 500, dtype=torch.float32).view(rows, 500).t() for n in range(2)}
    bcp.save(path, {"model": wanted})
    found = {name: torch.zeros(rows, 500, device="cuda").t() for name in wanted}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with no_room(), pytest.raises(bcp.BcpError, match="out of memory"):
        bcp.load(path, {"model": found})
    bcp.load(path, {"model": found})
    assert_alike(found, wanted)


def a_memory_pool_of_the_caller(path: Path, scale: Scale) -> None:
    """The caller's pool is active in its thread; transposed tensors are copied through device memory."""
    states = trained(scale)
    wanted = copied(states)
    model = {f"x{n}": torch.randn(500, scale.numel // 500).to("cuda").t() for n in range(2)}
    targets = {name: torch.zeros(500, scale.numel // 500, device="cuda").t() for name in model}
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        bcp.save(path / "trained", states, async_checkpoint=True).wait()
        bcp.save(path / "transposed", {"model": model}, async_checkpoint=True).wait()
        bcp.load(path / "transposed", {"model": targets})
    assert sum(segment["total_size"] for segment in pool.snapshot()) == 0
    assert_alike(targets, model)
    assert_loads(path / "trained", wanted, scale)


# -- page-locked memory


def within_the_budget(path: Path, scale: Scale) -> None:
    forget_pinned()
    before = pinned_nbytes()
    part = max(2 * scale.numel // MIB, 1) * MIB
    budget = 4 * part
    count = 3 * budget // (4 * scale.numel)
    states = {"model": {f"w{n}": torch.randn(scale.numel).to("cuda") for n in range(count)}}
    wanted = {name: tensor.cpu() for name, tensor in states["model"].items()}
    options = bcp.SaveOptions(budget_bytes=budget, part_bytes=part)
    bcp.save(path, states, async_checkpoint=True, options=options).wait()
    print(f"pinned for a budget of {budget / MIB:.1f} MiB: {(pinned_nbytes() - before) / MIB:.1f} MiB")
    assert 0 < pinned_nbytes() - before <= 1.1 * budget + part
    for tensor in states["model"].values():
        tensor.zero_()
    bcp.load(path, states, options=bcp.LoadOptions(budget_bytes=budget, read_bytes=part))
    assert pinned_nbytes() - before <= 1.1 * budget + part
    assert_alike(states["model"], wanted)


def given_back(path: Path, scale: Scale) -> None:
    """No more memory is locked than the state has; the operating system gets it back."""
    model = {f"w{n}": torch.full((5 * scale.numel // 4,), float(n)).to("cuda") for n in range(24)}
    nbytes = sum(tensor.nbytes for tensor in model.values())
    part = bcp.SaveOptions(part_bytes=max(nbytes // 4 // MIB, 1) * MIB)  # no power of two
    bcp.save(path / "first", {"model": model}, async_checkpoint=True, options=part).wait()
    forget_pinned()
    before, resident = pinned_nbytes(), psutil.Process().memory_info().rss
    bcp.save(path / "saved", {"model": model}, async_checkpoint=True, options=part).wait()
    locked = pinned_nbytes() - before
    bcp.load(path / "saved", {"model": model})
    kept = pinned_nbytes() - before
    shared_pool(pinned=True).clear()
    gc.collect()
    left, more = pinned_nbytes() - before, psutil.Process().memory_info().rss - resident
    print(
        f"\npinned for {nbytes / MIB:.1f} MiB: {locked / MIB:.1f} MiB after a save, {kept / MIB:.1f} after a load, "
        f"{left / MIB:.1f} after clear()"
    )
    assert 0 < locked <= 1.05 * nbytes + MIB
    assert kept <= 1.05 * nbytes + MIB
    assert left == 0
    assert more <= nbytes / 2 + 64 * MIB
