"""The rest of the device path on late accelerators: memory, small tensors, devices without streams, refusals."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import late
import pytest
import torch
from late import accelerators, launch
from torch import nn

import bcp
from bcp._save import snapshot as save_memory
from bcp.runtime import device
from bcp.runtime.staging import shared_pool
from bcp.runtime.threads import thread_count

MIB = 1 << 20


@pytest.fixture
def machine() -> Iterator[late.Machine]:
    with accelerators(devices=2, seed=1) as machine:
        yield machine


def full(count: int, nbytes: int, where: str = "cuda") -> dict[str, torch.Tensor]:
    model = {f"w{n}": torch.full((nbytes // 4,), float(n), device=where) for n in range(count)}
    torch.accelerator.synchronize()
    return model


def comes_back(path: Path, model: dict[str, torch.Tensor]) -> None:
    found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.items()}
    bcp.load(path, {"model": found})
    for name, tensor in model.items():
        host = tensor.cpu().contiguous()
        assert torch.equal(found[name].view(torch.uint8), host.view(torch.uint8)), name


# -- page-locked memory


@pytest.mark.parametrize("pinned_bytes", [0, 3 * MIB, 64 * MIB])
def test_no_more_memory_is_locked_than_is_allowed(machine: late.Machine, tmp_path: Path, pinned_bytes: int) -> None:
    model = full(16, MIB)
    options = bcp.SaveOptions(pinned_bytes=pinned_bytes, part_bytes=MIB)
    pending = bcp.save(tmp_path, {"model": model}, async_checkpoint=True, options=options)
    report = pending.wait()
    locked = late.memory().locked_nbytes
    assert locked == report.pinned_nbytes
    assert locked == min(pinned_bytes, locked)
    assert locked >= min(pinned_bytes, 16 * MIB) - MIB - 65536  # a part, and the header of the first one
    assert not machine.defects
    comes_back(tmp_path, model)


def test_buffers_that_do_not_fit_give_way_to_those_that_do(machine: late.Machine, tmp_path: Path) -> None:
    options = bcp.SaveOptions(pinned_bytes=4 * MIB, part_bytes=MIB)
    bcp.save(tmp_path / "a", {"model": full(4, MIB)}, options=options)
    before = machine.counts["register"]
    large = full(1, 4 * MIB - 65536)
    bcp.save(tmp_path / "b", {"model": large}, options=bcp.SaveOptions(pinned_bytes=4 * MIB, part_bytes=8 * MIB))
    assert machine.counts["register"] == before + 1
    assert late.memory().locked_nbytes <= 4 * MIB
    comes_back(tmp_path / "b", large)


def test_a_driver_that_locks_no_memory(
    machine: late.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    model = full(3, MIB)
    report = bcp.save(tmp_path, {"model": model})
    assert report.pinned_nbytes == late.memory().locked_nbytes == 0
    assert caplog.text.count("cannot be page-locked") == 1
    comes_back(tmp_path, model)
    assert not machine.defects


def test_by_default_no_host_is_locked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    options = bcp.SaveOptions()
    monkeypatch.setattr(save_memory, "_host_nbytes", lambda: 2048 * gib)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert save_memory.pinned_nbytes(options) == 16 * gib
    monkeypatch.setattr(save_memory, "_host_nbytes", lambda: 256 * gib)
    assert save_memory.pinned_nbytes(options) == 8 * gib
    assert save_memory.pinned_nbytes(bcp.SaveOptions(pinned_bytes=480 * gib)) == 480 * gib
    assert save_memory.pinned_nbytes(bcp.SaveOptions(pinned_bytes=0)) == 0
    with pytest.raises(bcp.InputError, match="pinned_bytes=-1 must be positive"):
        bcp.SaveOptions(pinned_bytes=-1)


def test_the_report_counts_threads_streams_and_pinned_bytes(machine: late.Machine, tmp_path: Path) -> None:
    model = full(4, MIB) | {f"v{n}": tensor for n, tensor in enumerate(full(4, MIB, "cuda:1").values())}
    torch.cuda.synchronize(1)
    before = thread_count()  # those of earlier saves and loads in this process
    reports = [bcp.save(tmp_path, {"model": model}, overwrite=True) for _ in range(4)]
    loaded = bcp.load(tmp_path, {"model": model})
    assert {report.streams for report in (*reports, loaded)} == {2}
    assert 8 * MIB <= reports[0].pinned_nbytes <= 8 * MIB + 65536
    assert {report.pinned_nbytes for report in reports} == {reports[0].pinned_nbytes}
    assert all(0 < report.threads <= before + 40 for report in (*reports, loaded))
    assert not machine.defects


def test_a_child_keeps_the_addresses_that_it_inherits(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(3 * MIB)}})
    pool = shared_pool(pinned=False)
    held = pool._free[0].buffer
    address, pid = held.data_ptr(), os.fork()
    if not pid:
        os._exit(0 if _survives(held, address) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def _survives(held: torch.Tensor, address: int) -> bool:
    """Let go of inherited memory in the child: nothing may be unmapped there, where other memory may lie by now."""
    from bcp.runtime import staging  # noqa: PLC0415 -- the child's

    kept = [array.ctypes.data for array in staging._inherited if array is not None]
    del held
    gc.collect()
    return address in kept and shared_pool(pinned=False).free_nbytes == 0


# -- small tensors


def test_small_tensors_of_all_dtypes_go_together(machine: late.Machine, tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.complex128)
    with late.as_host():
        host = {f"s{n}": torch.arange(n % 7).to(dtypes[n % 6]) for n in range(600)}
    model = {name: tensor.to("cuda") for name, tensor in host.items()}
    torch.cuda.synchronize()
    machine.counts.clear()
    bcp.save(tmp_path, {"model": model})
    assert machine.counts["d2h"] <= 3
    found = {name: torch.zeros_like(tensor) for name, tensor in host.items()}
    bcp.load(tmp_path, {"model": found})
    assert all(torch.equal(found[name], tensor) for name, tensor in host.items())
    assert not machine.defects


def test_small_tensors_of_a_device_without_room(machine: late.Machine, tmp_path: Path) -> None:
    model = full(50, 400)
    late.memory().refuse = 1
    bcp.save(tmp_path, {"model": model})
    assert late.memory().refuse == 0
    comes_back(tmp_path, model)
    assert not machine.defects


def test_small_tensors_of_one_element_may_have_any_strides(machine: late.Machine, tmp_path: Path) -> None:
    def model(values: float) -> dict[str, torch.Tensor]:
        return {f"s{n}": torch.full((4, 2), values * n, device="cuda")[n % 4 :, 1:][:1] for n in range(20)}

    saved, found = model(1.0), model(0.0)
    assert {tensor.stride() for tensor in saved.values()} == {(2, 1)}
    views = {name: tensor.t() for name, tensor in found.items()}
    bcp.save(tmp_path, {"model": {name: tensor.t() for name, tensor in saved.items()}})
    bcp.load(tmp_path, {"model": views})
    assert [tensor.item() for tensor in found.values()] == [float(n) for n in range(20)]
    assert not machine.defects


def test_small_tensors_that_have_one_source_and_neighbours(machine: late.Machine, tmp_path: Path) -> None:
    class Tied(nn.Module):
        """Two names of one parameter, between others."""

        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.a, self.b, self.d = (nn.Parameter(torch.full((n + 1,), n + 5.0)) for n in range(3))
            self.c = self.b if tied else nn.Parameter(torch.zeros(2))

    bcp.save(tmp_path, {"model": Tied(tied=True)})
    found = {
        name: torch.zeros(parameter.shape, device="cuda") for name, parameter in Tied(tied=False).named_parameters()
    }
    bcp.load(tmp_path, {"model": found})
    wanted = {"a": [5.0], "b": [6.0] * 2, "c": [6.0] * 2, "d": [7.0] * 3}
    assert {name: tensor.tolist() for name, tensor in found.items()} == wanted
    assert not machine.defects


def test_buffers_of_a_lazy_snapshot_go_together(machine: late.Machine, tmp_path: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1000, device="cuda"))
    for n in range(300):
        model.register_buffer(f"b{n}", torch.full((n % 5,), float(n), device="cuda"))
    states = {"model": model, "optimizer": torch.optim.SGD([model.w], lr=1.0)}
    torch.cuda.synchronize()
    machine.counts.clear()
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy")
    for buffer in model.buffers():
        buffer.zero_()
    pending.wait()
    assert machine.counts["d2h"] <= 3
    found = {f"b{n}": torch.zeros(n % 5) for n in range(300)} | {"w": torch.zeros(1000)}
    bcp.load(tmp_path, {"model": found})
    assert all(found[f"b{n}"].tolist() == [float(n)] * (n % 5) for n in range(300))
    assert not machine.defects


# -- what the caller has queued between device and host


@pytest.mark.parametrize("own", [False, True])
def test_extra_states_in_pinned_memory(machine: late.Machine, tmp_path: Path, *, own: bool) -> None:
    weight, average = torch.full((100,), 5.0, device="cuda"), torch.zeros(100, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own else None):
        late.sleep(0.02)
        average.copy_(weight, non_blocking=True)
        bcp.save(tmp_path, {"extra_states": {"deep": [{"ema": average}]}})
    assert not machine.defects
    found: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": found})
    assert found["deep"][0]["ema"].tolist() == [5.0] * 100


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize("pinned", [False, True])
def test_hyper_parameters_that_are_tensors(
    machine: late.Machine, tmp_path: Path, snapshot: Any, *, pinned: bool
) -> None:
    model = nn.Linear(2, 2, device="cuda")
    betas = tuple(torch.zeros(1, pin_memory=True) if pinned else torch.zeros(1, device="cuda") for _ in range(2))
    source = torch.tensor([0.5], device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.param_groups[0]["betas"] = betas
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late.sleep(0.02)
        for beta in betas:
            beta.copy_(source, non_blocking=True)
        states = {"model": model, "optimizer": optimizer}
        pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot=snapshot)
        if not pinned:
            for beta in betas:
                beta.zero_()
        pending.wait()
    assert not machine.defects
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    bcp.load(tmp_path, states)
    assert [float(beta) for beta in optimizer.param_groups[0]["betas"]] == [0.5, 0.5]


@pytest.mark.parametrize("kind", ["model", "extra_states"])
def test_a_load_into_pinned_memory_that_the_caller_still_reads(
    machine: late.Machine, tmp_path: Path, kind: str
) -> None:
    bcp.save(tmp_path, {kind: {"x": torch.full((100,), 7.0)}})
    weight, average = torch.zeros(100, device="cuda"), torch.full((100,), 5.0).pin_memory()
    torch.cuda.synchronize()
    late.sleep(0.02)
    weight.copy_(average, non_blocking=True)
    bcp.load(tmp_path, {kind: {"x": average}})
    assert not machine.defects
    assert (weight.cpu()[0], average[0]) == (5, 7)


def test_a_load_waits_for_what_still_computes_with_its_targets(machine: late.Machine, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.full((100,), 7.0)}})
    weight = torch.full((100,), 5.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # which the caller's stream does not wait for
        late.sleep(0.02)
        copied = weight.clone()
    bcp.load(tmp_path, {"model": {"w": weight}})
    torch.cuda.synchronize()
    assert (copied.cpu()[0], weight.cpu()[0]) == (5, 7)
    assert not machine.defects


class Anew(nn.Module):
    """A module that gives its parameter's values to a copy, and takes a state by copies on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(10, device="cuda"))
        self.register_state_dict_post_hook(lambda module, state, prefix, _: module.anew(state, f"{prefix}w"))

    def anew(self, state: dict[str, Any], name: str) -> None:
        state[name] = state[name].detach().clone()


def test_what_a_module_takes_is_there_for_every_stream(machine: late.Machine, tmp_path: Path) -> None:
    module = Anew()
    module.w.data.fill_(5)
    bcp.save(tmp_path, {"model": module})
    module.w.data.zero_()
    bcp.load(tmp_path, {"model": module})
    with torch.cuda.stream(torch.cuda.Stream()):
        assert module.w.add(0).tolist() == [5] * 10
    assert not machine.defects


# -- captures


def test_a_step_that_is_captured_after_prepare_is_noticed(machine: late.Machine, tmp_path: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(100, device="cuda"))
    model.w.grad = torch.ones_like(model.w)
    optimizer = torch.optim.SGD([model.w], lr=1.0)
    states = {"model": model, "optimizer": optimizer}
    torch.cuda.synchronize()
    bcp.prepare(states, options=bcp.SaveOptions(snapshot="lazy")).wait()
    with torch.cuda.stream(torch.cuda.Stream()), machine.capture("thread_local"):
        optimizer.step()
    with pytest.raises(bcp.InputError, match="a step of SGD was captured into a CUDA graph"):
        bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy").wait()
    bcp.save(tmp_path, states)
    comes_back(tmp_path, {"w": model.w.detach()})


def test_what_lazily_negates_finds_no_device_memory(machine: late.Machine, tmp_path: Path) -> None:
    negative = torch.conj(torch.ones(100, dtype=torch.complex64).mul(1j).to("cuda")).imag
    torch.cuda.synchronize()
    late.memory().refuse = 1
    with pytest.raises(bcp.StateError, match="rank 0 has no device memory"):
        bcp.save(tmp_path, {"model": {"x": negative}})
    assert not machine.defects


# -- other devices


def test_an_accelerator_without_side_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerators("xpu", devices=1) as machine, monkeypatch.context() as patched:
        patched.setattr(device, "new_stream", lambda _: None)
        model = full(5, MIB, "xpu") | full(5, 400, "xpu")
        odd = torch.arange(600.0).view(20, 30).to("xpu").t()
        launch((go_on := threading.Event()).wait, writes=[])
        timer = threading.Timer(0.1, go_on.set)
        timer.start()
        bcp.save(tmp_path, {"model": {**model, "odd": odd}})
        timer.join()
        found = {name: torch.zeros(tensor.shape, device="xpu") for name, tensor in {**model, "odd": odd}.items()}
        report = bcp.load(tmp_path, {"model": found})
        assert all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in {**model, "odd": odd}.items())
        assert report.streams == 0
        assert not machine.defects


def test_a_device_that_is_no_accelerator_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerators("xpu", devices=1), monkeypatch.context() as patched:  # undone before the emulation ends
        weight = torch.ones(1, 2, 1, 3, 1, 5, device="xpu")  # a form that no other test has, which is remembered
        patched.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        with pytest.raises(bcp.StateError, match=r"w.* is on xpu:0, which is no device of torch\.accelerator \(cuda\)"):
            bcp.save(tmp_path, {"model": {"w": weight}})
    assert not list(tmp_path.iterdir())


def test_a_torch_that_raises_without_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # torch 2.6

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    bcp.save(tmp_path, {"model": {"w": torch.ones(4)}})
    bcp.load(tmp_path, {"model": {"w": torch.zeros(4)}})
