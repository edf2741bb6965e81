"""What only a CUDA device can show; `make test ARGS='-m gpu -s'` runs it, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcp
from bcp.pipeline import in_thread
from bcp.stages.staging import shared_pool

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _device() -> None:
    assert torch.cuda.is_available(), "these tests need a CUDA device; leave out `-m gpu` where there is none"
    torch.cuda.synchronize()


def trained(width: int = 1024, depth: int = 4, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    states = {"model": model, "optimizer": optimizer}
    train(states)
    return states


def train(states: dict[str, Any], steps: int = 1) -> None:
    model, optimizer = states["model"], states["optimizer"]
    width = model[0][0].in_features
    for _ in range(steps):
        backward(model, width)
        optimizer.step()
        optimizer.zero_grad()


def backward(model: nn.Module, width: int) -> None:
    data = torch.randn(64, width, device="cuda", dtype=next(model.parameters()).dtype)
    model(data).float().square().mean().backward()


def copied(states: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = states["model"], states["optimizer"]
    tensors = [*model.state_dict().values()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone().cpu() for tensor in tensors]


def assert_loads(path: Path, wanted: list[torch.Tensor], **shape: Any) -> None:
    fresh = trained(**shape)
    train(fresh)
    bcp.load(path, fresh)
    found = copied(fresh)
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    states = trained()
    wanted = copied(states)
    bcp.save(tmp_path, states)
    assert_loads(tmp_path, wanted)


def test_tensors_of_any_layout_and_dtype_cross_the_bus(tmp_path: Path) -> None:
    base = torch.randn(512, 768, device="cuda")
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 3:700:3],
        "expanded": base[:1].expand(4, 768),
        "float8": base.to(torch.float8_e4m3fn),
        "complex": torch.randn(33, device="cuda", dtype=torch.complex64),
        "bool": base > 0,
        "scalar": torch.tensor(3.5, device="cuda"),
        "host": torch.randn(100),
        **{f"small{n}": torch.randn(n + 1, device="cuda") for n in range(500)},
    }
    bcp.save(tmp_path, {"model": tensors})
    targets = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
    targets["transposed"] = torch.zeros(512, 768, device="cuda").t()
    bcp.load(tmp_path, {"model": targets})
    for name, wanted in tensors.items():
        one, other = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (targets[name], wanted))
        assert one.equal(other), name


def test_a_device_loads_what_the_host_saved_and_back(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3000, 1000), "b": torch.randn(7)}
    bcp.save(tmp_path / "host", {"model": tensors})
    device = {name: torch.zeros_like(t, device="cuda") for name, t in tensors.items()}
    bcp.load(tmp_path / "host", {"model": device})
    bcp.save(tmp_path / "device", {"model": device})
    host = {name: torch.zeros_like(t) for name, t in tensors.items()}
    bcp.load(tmp_path / "device", {"model": host})
    assert all(host[name].equal(tensors[name]) for name in tensors)


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_snapshot_has_what_was_queued_before_and_nothing_after(tmp_path: Path, *, own_stream: bool) -> None:
    states = trained(width=4096, depth=2)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # saves after the first take no time to plan
            train(states, 20)  # queued, not finished
            pending = bcp.save(tmp_path, states, async_checkpoint=True, overwrite=True)
            wanted = copied(states)  # on the same stream: after what was queued, before what comes
            train(states, 20)
            pending.wait()
            assert_loads(tmp_path, wanted, width=4096, depth=2)


def test_a_lazy_snapshot_is_copied_beside_forward_and_backward(tmp_path: Path) -> None:
    states = trained(width=4096, depth=4)
    bcp.prepare(states).wait()
    for round_ in range(5):
        wanted = copied(states)
        path = tmp_path / str(round_)
        pending = bcp.save(path, states, async_checkpoint=True, snapshot="lazy")
        train(states, 3)
        report = pending.wait()
        print(f"lazy: {report.blocking_seconds * 1e3:.1f} ms, step waited {report.step_wait_seconds * 1e3:.1f} ms")
        assert_loads(path, wanted, width=4096, depth=4)


def test_a_step_waits_for_a_lazy_snapshot_that_is_slow(tmp_path: Path) -> None:
    states = trained()
    wanted = copied(states)
    seen: list[str] = []

    async def slow(item: Any) -> Any:
        await in_thread(torch.cuda._sleep, 50_000_000)  # on the worker's stream: some milliseconds of the device
        seen.append(item.name)
        return item

    options = bcp.SaveOptions(edit=lambda graph: graph.before("d2h", bcp.Stage("slow", slow)), part_bytes=MIB)
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", options=options)
    train(states)
    assert len(seen) > 1
    pending.wait()
    assert_loads(tmp_path, wanted)


def test_pinned_memory_stays_within_the_budget(tmp_path: Path) -> None:
    pool = shared_pool(pinned=True)
    pool.clear()
    states = {"model": {f"w{n}": torch.randn(8 * MIB, device="cuda") for n in range(12)}}
    options = bcp.SaveOptions(budget_bytes=96 * MIB)
    bcp.save(tmp_path, states, async_checkpoint=True, options=options).wait()
    assert 0 < pool.free_nbytes <= 128 * MIB
    for tensor in states["model"].values():
        tensor.zero_()
    bcp.load(tmp_path, states, options=bcp.LoadOptions(budget_bytes=96 * MIB))
    assert pool.free_nbytes <= 128 * MIB
    assert all(bool(tensor.any()) for tensor in states["model"].values())


def test_nothing_of_bcps_lands_in_a_memory_pool_of_the_caller(tmp_path: Path) -> None:
    states = trained()
    wanted = copied(states)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pending = bcp.save(tmp_path, states, async_checkpoint=True)
        pending.wait()
    assert sum(segment["total_size"] for segment in pool.snapshot()) == 0
    assert_loads(tmp_path, wanted)


def test_the_second_device_of_a_process(tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(0):
        tensors = {"here": torch.randn(1000, device="cuda:0"), "there": torch.randn(1000, device=f"cuda:{last}")}
        bcp.save(tmp_path, {"model": tensors})
        assert torch.cuda.current_device() == 0
        targets = {name: torch.zeros_like(t) for name, t in tensors.items()}
        bcp.load(tmp_path, {"model": targets})
        assert torch.cuda.current_device() == 0
    assert all(targets[name].equal(tensors[name]) for name in tensors)
