"""Defects of order and lifetime on devices that bcp once had: each test failed then, by behaviour.

``A1`` to ``A10`` and ``B`` are the rows of the review that found them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import late
import pytest
import torch
from late import accelerators, launch
from torch import nn

import bcp
from bcp.backends.memory import MemoryBackend
from bcp.planners.megatron.rng import MegatronRng
from bcp.runtime.staging import _allocate, shared_pool
from bcp.runtime.threads import in_thread
from bcp.stages.memcpy import flat_to_bytes

MIB = 1 << 20
SAVES = pytest.mark.parametrize("how", ["save", "background", "asave"])


@pytest.fixture
def machine() -> Iterator[late.Machine]:
    with accelerators(devices=2, seed=1) as machine:
        yield machine


@pytest.fixture
def own_stream(machine: late.Machine) -> Iterator[torch.cuda.Stream]:  # noqa: ARG001 -- it has to be there
    """Let the test run on a stream of its own, which the default stream does not wait for."""
    with torch.cuda.stream(side := torch.cuda.Stream()):
        yield side


def saved(path: Path, states: Any, how: str = "save", **options: Any) -> None:
    """Save in one of the ways; the caller goes on and overwrites everything at once in those that let it."""
    if how == "asave":
        asyncio.run(bcp.asave(path, states, **options))
    else:
        pending = bcp.save(path, states, async_checkpoint=how == "background", **options)
        if how == "background":
            pending.wait()


def loaded(path: Path, states: Any) -> Any:
    bcp.load(path, states)
    return states


def paused(name: str, at: threading.Event, begun: threading.Event | None = None) -> Callable[[Any], Any]:
    """Let a graph wait before a stage until an event is set."""

    async def run(item: Any) -> Any:
        if begun is not None:
            begun.set()
        await in_thread(at.wait, 20.0)
        return item

    return lambda graph: graph.before(name, bcp.extend.Stage("pause", run))


# -- A1


@pytest.mark.parametrize("how", ["save", "background", "asave", "load"])
def test_a1_a_fork_after_a_save_or_load(machine: late.Machine, tmp_path: Path, how: str) -> None:
    states = {"model": {"w": torch.ones(5000, device="cuda")}}
    if how == "load":
        saved(tmp_path, states)
        loaded(tmp_path, states)
    else:
        saved(tmp_path, states, how)
    pid = os.fork()
    if not pid:
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not machine.defects


# -- A2


def test_a2_a_load_whose_workers_all_are_the_first_on_a_device(machine: late.Machine, tmp_path: Path) -> None:
    wanted = {f"w{n}": torch.full((300_000,), float(n)) for n in range(24)}
    saved(tmp_path, {"model": wanted})
    found = {name: torch.zeros(tensor.shape, device="cuda") for name, tensor in wanted.items()}
    torch.cuda.synchronize()
    together = threading.Barrier(2)

    def meet() -> None:
        """Let the first two that make a stream do so at once, if there are two."""
        try:
            together.wait(1.5)
        except threading.BrokenBarrierError:
            return

    machine.on_stream = meet
    options = bcp.LoadOptions(copy_workers=4, read_bytes=MIB)
    bcp.load(tmp_path, {"model": found}, options=options)
    machine.on_stream = int
    for tensor in found.values():
        tensor.add_(0)
    assert not machine.defects
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in wanted.items())


# -- A3


@pytest.mark.parametrize("how", ["save", "background", "asave", "lazy"])
@pytest.mark.usefixtures("own_stream")
def test_a3_extra_states_on_a_device(machine: late.Machine, tmp_path: Path, how: str) -> None:
    extra, weight = torch.zeros(10, device="cuda"), nn.Parameter(torch.zeros(10, device="cuda"))
    torch.cuda.synchronize()
    launch(lambda: (extra.fill_(5), weight.data.fill_(5)), writes=[extra, weight], late=0.02)
    states: dict[str, Any] = {"model": {"w": weight}, "extra_states": {"e": extra}}
    if how == "lazy":
        states["optimizer"] = torch.optim.SGD([weight], lr=1.0)
        bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy").wait()
    else:
        saved(tmp_path, states, how)
    target = loaded(tmp_path, {"model": {"w": torch.zeros(10)}, "extra_states": {"e": torch.zeros(10)}})
    assert not machine.defects
    assert (target["model"]["w"][0], target["extra_states"]["e"][0]) == (5, 5)


@pytest.mark.usefixtures("own_stream")
def test_a3_a_stateful_that_reads_a_device(machine: late.Machine, tmp_path: Path) -> None:
    scale = torch.zeros(1, device="cuda")

    class Scaler:
        value = 0.0

        def state_dict(self) -> dict[str, float]:
            return {"scale": scale.item()}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.value = state["scale"]

    torch.cuda.synchronize()
    launch(lambda: scale.fill_(5), writes=[scale], late=0.02)
    scaler = Scaler()
    states = {"model": {"w": torch.zeros(3, device="cuda")}, "extra_states": {"scaler": scaler}}
    saved(tmp_path, states)
    loaded(tmp_path, states)
    assert not machine.defects
    assert scaler.value == 5


@pytest.mark.parametrize("own", [False, True])
def test_a3_a_lazy_negative(machine: late.Machine, tmp_path: Path, *, own: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream() if own else None):
        numbers = torch.arange(1000, dtype=torch.float32).to(torch.complex64).mul(1j).to("cuda")
        negative = torch.conj(numbers).imag
        assert negative.is_neg()
        torch.cuda.synchronize()
        saved(tmp_path, {"model": {"x": negative}})
        found = loaded(tmp_path, {"model": {"x": torch.zeros(1000)}})["model"]["x"]
        assert not machine.defects
        assert torch.equal(found, -torch.arange(1000, dtype=torch.float32))


# -- A4


class Asked:
    """A Stateful that notes the current device of the thread that it is asked in."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def state_dict(self) -> dict[str, object]:
        self.seen.append(torch.cuda.current_device())
        return {"rng": torch.cuda.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(torch.cuda.current_device())
        torch.cuda.set_rng_state(state["rng"])


@SAVES
@pytest.mark.usefixtures("machine")
def test_a4_the_current_device_of_a_stateful(tmp_path: Path, how: str) -> None:
    torch.cuda.set_device(1)
    asked = Asked()
    states = {"model": {"w": torch.ones(10, device="cuda")}, "extra_states": {"asked": asked}}
    if how == "background":
        bcp.prepare(states).wait()
    saved(tmp_path, states, how)
    torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    loaded(tmp_path, states)
    assert set(asked.seen) == {1}
    assert torch.cuda.get_rng_state()[0] == 2
    assert torch.cuda.current_device() == 1


@pytest.mark.usefixtures("machine")
def test_a4_random_states_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        def get_states(self) -> dict[str, torch.Tensor]:
            return {}

        def set_states(self, _: object) -> None: ...

    class ShardedObject:
        def __init__(self, key: str, data: Any, *_: object, **__: object) -> None:
            self.key, self.data = key, data

    mapping, groups = ModuleType("mapping"), ModuleType("groups")
    mapping.ShardedObject = ShardedObject
    for name in ("pipeline_model", "tensor_model", "expert_model", "data"):
        setattr(groups, f"get_{name}_parallel_world_size", lambda **_: 1)
        setattr(groups, f"get_{name}_parallel_rank", lambda **_: 0)
    tensor_parallel = ModuleType("tensor_parallel")
    tensor_parallel.get_cuda_rng_tracker = Tracker
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.mapping", mapping)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", groups)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", tensor_parallel)

    class Owner:
        def state_dict(self) -> dict[str, Any]:
            return MegatronRng().sharded_state_dict()["rng_state"].data

        def load_state_dict(self, state: dict[str, Any]) -> None:
            MegatronRng().load_state_dict({"rng_state": state})

    torch.cuda.set_device(1)
    states = {"model": {"w": torch.ones(10, device="cuda")}, "extra_states": {"rng": Owner()}}
    saved(tmp_path, states)
    torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    loaded(tmp_path, states)
    assert torch.cuda.get_rng_state(1)[0] == 2
    assert torch.cuda.get_rng_state(0)[0] == 1


# -- A5


class Hooked(nn.Module):
    """A module whose state_dict makes its tensors anew."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(10, device="cuda"))
        self.register_state_dict_post_hook(lambda _, state, prefix, __: self._anew(state, prefix))

    def _anew(self, state: dict[str, Any], prefix: str) -> None:
        state[f"{prefix}w"] = state[f"{prefix}w"].detach().clone()


def test_a5_what_hooks_made_anew(machine: late.Machine, tmp_path: Path) -> None:
    module = Hooked()
    module.w.data.fill_(5)
    torch.cuda.synchronize()
    saved(tmp_path, {"model": module})
    module.w.data.zero_()
    torch.cuda.synchronize()
    machine.forgive()  # the hook's clone belongs to A3
    with torch.cuda.stream(torch.cuda.Stream()):
        loaded(tmp_path, {"model": module})
        assert module.w.add(0).tolist() == [5] * 10
    assert not machine.defects


def test_a5_a_learning_rate_on_a_device(machine: late.Machine, tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(10, device="cuda"))
    model = nn.Module()
    model.w = weight
    rate = torch.tensor(0.5, device="cuda")
    optimizer = torch.optim.AdamW([weight], lr=rate, capturable=True, foreach=False)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.cuda.synchronize()
    states = {"model": model, "optimizer": optimizer}
    saved(tmp_path, states)
    rate.zero_()
    torch.cuda.synchronize()
    machine.forgive()
    with torch.cuda.stream(torch.cuda.Stream()):
        loaded(tmp_path, states)
        current = optimizer.param_groups[0]["lr"]
        assert current.add(0).item() == 0.5
    assert not machine.defects


# -- A6


@SAVES
def test_a6_a_save_from_another_accelerator(tmp_path: Path, how: str) -> None:
    with accelerators("xpu") as machine:
        model = {f"w{n}": torch.full((300_000,), float(n), device="xpu") for n in range(4)}
        torch.accelerator.synchronize()
        saved(tmp_path, {"model": model}, how)
        found = loaded(tmp_path, {"model": {name: torch.zeros(300_000) for name in model}})["model"]
        assert not machine.defects
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in model.items())


def test_a6_a_load_to_another_accelerator(tmp_path: Path) -> None:
    wanted = {f"w{n}": torch.full((300_000,), float(n)) for n in range(4)}
    saved(tmp_path, {"model": wanted})
    with accelerators("xpu") as machine:
        found = {name: torch.zeros(300_000, device="xpu") for name in wanted}
        torch.accelerator.synchronize()
        with torch.Stream(device="xpu"):
            loaded(tmp_path, {"model": found})
            assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in wanted.items())
        assert not machine.defects


# -- A7


@SAVES
def test_a7_a_part_that_fails_behind_queued_copies(machine: late.Machine, tmp_path: Path, how: str) -> None:
    model = {f"w{n}": torch.full((100_000,), float(n), device="cuda") for n in range(4)}
    model["x"] = torch.ones(500, 300, device="cuda").t()  # goes through device memory
    torch.cuda.synchronize()
    late.memory().refuse = 1
    with pytest.raises(bcp.BcpError, match="out of memory"):
        saved(tmp_path, {"model": model}, how)
    assert not machine.defects
    saved(tmp_path, {"model": model})
    found = {name: torch.zeros(tensor.shape) for name, tensor in model.items()}
    loaded(tmp_path, {"model": found})
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in model.items())


# -- A8


def test_a8_a_lazy_snapshot_and_a_captured_optimizer(machine: late.Machine, tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(1000, device="cuda"))
    model = nn.Module()
    model.w = weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full_like(weight, -1.0)
    states = {"model": model, "optimizer": optimizer}
    torch.cuda.synchronize()
    lazy = bcp.SaveOptions(snapshot="lazy")
    bcp.prepare(states, options=lazy).wait()
    pending = bcp.save(MemoryBackend("warm"), states, async_checkpoint=True, options=lazy)
    pending.wait()  # the gate is there before the capture
    MemoryBackend.forget("warm")
    with torch.cuda.stream(torch.cuda.Stream()):
        with machine.capture("thread_local") as graph:
            optimizer.step()
        go_on = threading.Event()
        options = bcp.SaveOptions(snapshot="lazy", edit=paused("d2h", go_on))
        try:
            pending = bcp.save(tmp_path, states, async_checkpoint=True, options=options)
        except bcp.BcpError:
            return  # refused: right
        graph.replay()
        torch.cuda.current_stream().synchronize()
        go_on.set()
        try:
            pending.wait()
        except bcp.BcpError:
            return
        assert torch.equal(loaded(tmp_path, {"model": {"w": torch.ones(1000)}})["model"]["w"], torch.zeros(1000))


# -- A9


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_a9_a_capture_during_a_background_save(machine: late.Machine, tmp_path: Path, snapshot: Any) -> None:
    weight, own = nn.Parameter(torch.zeros(1000, device="cuda")), torch.zeros(10, device="cuda")
    model = nn.Module()
    model.w = weight
    states = {"model": model, "optimizer": torch.optim.SGD([weight], lr=1.0)}
    torch.cuda.synchronize()
    go_on, begun = threading.Event(), threading.Event()
    options = bcp.SaveOptions(snapshot=snapshot, edit=paused("d2h", go_on, begun))
    result: list[Any] = []
    saving = threading.Thread(
        target=lambda: result.append(bcp.save(tmp_path, states, async_checkpoint=True, options=options))
    )
    saving.start()
    assert begun.wait(60)
    with torch.cuda.stream(torch.cuda.Stream()), machine.capture():
        own.add_(1)
        go_on.set()
        saving.join()
        result[0].wait()
    assert not machine.defects


# -- A10


def big(nbytes: int) -> dict[str, torch.Tensor]:
    model = {f"w{n}": torch.ones(nbytes // 16, device="cuda").t() for n in range(4)}
    torch.cuda.synchronize()
    return model


@pytest.mark.usefixtures("machine")
def test_a10_no_more_memory_is_locked_than_the_state_has(tmp_path: Path) -> None:
    model = big(10 * MIB)
    saved(tmp_path, {"model": model}, "background", options=bcp.SaveOptions(part_bytes=3 * MIB))
    assert late.memory().locked_nbytes <= 1.05 * 10 * MIB


@pytest.mark.usefixtures("machine")
def test_a10_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    model = big(4 * MIB)
    saved(tmp_path, {"model": {name: tensor.cpu() for name, tensor in model.items()}})
    loaded(tmp_path, {"model": model})
    shared_pool(pinned=True).clear()
    gc.collect()
    assert late.memory().locked_nbytes == 0


# -- B


def test_b_devices_are_synchronised_for_no_part(machine: late.Machine, tmp_path: Path) -> None:
    model = {f"w{n}": torch.ones(300_000, device=f"cuda:{n % 2}") for n in range(16)}
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    machine.counts.clear()
    saved(tmp_path, {"model": model}, options=bcp.SaveOptions(part_bytes=MIB))
    assert machine.counts["device synchronize"] <= 1


def test_b_small_tensors_are_copied_together(machine: late.Machine, tmp_path: Path) -> None:
    with late.as_host():
        values = torch.arange(20_000, dtype=torch.float32)
    model = {f"s{n}": one for n, one in enumerate(values.to("cuda").unbind())}
    torch.cuda.synchronize()
    machine.counts.clear()
    saved(tmp_path, {"model": model})
    print("copies to the host:", machine.counts["d2h"])  # noqa: T201 -- a figure
    assert machine.counts["d2h"] <= 100


def test_b_the_event_loop_never_waits_for_a_device(machine: late.Machine, tmp_path: Path) -> None:
    model = {"w": torch.ones(1000, device="cuda")}
    saved(tmp_path, {"model": model})
    loaded(tmp_path, {"model": model})
    asyncio.run(bcp.asave(tmp_path, {"model": model}, overwrite=True))
    asyncio.run(bcp.aload(tmp_path, {"model": model}))
    assert not [what for what, on_loop in machine.waits if on_loop]
    assert not machine.on_loop


@pytest.mark.parametrize("how", ["save", "background", "lazy"])
def test_b_an_average_that_is_kept_in_pinned_memory(machine: late.Machine, tmp_path: Path, how: str) -> None:
    weight = nn.Parameter(torch.full((1000,), 5.0, device="cuda"))
    average = torch.zeros(1000, pin_memory=True)
    torch.cuda.synchronize()
    states: dict[str, Any] = {"model": {"w": weight, "ema": average}}
    if how == "lazy":
        states["optimizer"] = torch.optim.SGD([weight], lr=1.0)
    late.sleep(0.02)
    average.copy_(weight, non_blocking=True)
    options = bcp.SaveOptions(snapshot="lazy" if how == "lazy" else "eager", guard=False)
    saved(tmp_path, states, "save" if how == "save" else "background", options=options)
    assert not machine.defects
    found = loaded(tmp_path, {"model": {"w": torch.zeros(1000), "ema": torch.zeros(1000)}})["model"]
    assert torch.equal(found["ema"], found["w"])


def test_b_the_guard_and_a_copy_that_was_queued_before(machine: late.Machine, tmp_path: Path) -> None:
    weight, average = torch.full((1000,), 5.0, device="cuda"), torch.zeros(1000, pin_memory=True)
    torch.cuda.synchronize()
    launch((gate := threading.Event()).wait)
    average.copy_(weight, non_blocking=True)
    opened = threading.Timer(0.3, gate.set)
    opened.start()
    go_on = paused("d2h", gate)
    saved(tmp_path, {"model": {"w": weight, "ema": average}}, options=bcp.SaveOptions(edit=go_on))
    opened.join()
    assert not machine.defects


@pytest.mark.usefixtures("own_stream")
def test_b_new_optimizer_states_belong_to_the_callers_stream(machine: late.Machine, tmp_path: Path) -> None:
    def trained(steps: int) -> dict[str, Any]:
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(1000, device="cuda"))
        model.w.grad = torch.ones_like(model.w)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, foreach=False)
        for _ in range(steps):
            optimizer.step()
        torch.cuda.synchronize()
        return {"model": model, "optimizer": optimizer}

    saved(tmp_path, trained(2))
    states = loaded(tmp_path, trained(0))
    assert states["optimizer"].state[states["model"].w]["momentum_buffer"].is_cuda
    assert not machine.defects
    states["optimizer"].step()  # queued on the caller's stream
    states["optimizer"].state.clear()
    gc.collect()
    assert not machine.defects


def test_b_a_target_that_is_not_aligned() -> None:
    out = torch.zeros(17, dtype=torch.uint8)
    flat_to_bytes(torch.ones(2, 2).t(), 0, 4, out[1:])
    assert out[1:].tolist() == torch.ones(4).view(torch.uint8).tolist()


def test_memory_that_outlives_its_driver_ends_in_silence() -> None:
    """An error of a finalizer would be the next test's."""
    with accelerators():
        held = _allocate(1 << 20, pinned=True)
        assert late.memory().registered
    del held
    gc.collect()
