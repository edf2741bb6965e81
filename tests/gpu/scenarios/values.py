"""Values of any layout and dtype come back, whatever the device does meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from gpu.scenarios.scale import Scale, alike, assert_alike, assert_loads, busy, copied, loaded, trained

import bcp


def model_and_optimizer(path: Path, scale: Scale) -> None:
    states = trained(scale)
    wanted = copied(states)
    bcp.save(path, states)
    assert_loads(path, wanted, scale)


def layouts_and_dtypes(path: Path, scale: Scale) -> None:
    base = torch.randn(512, 768).to("cuda")
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 3:700:3],
        "expanded": base[:1].expand(4, 768),
        "float8": base.to(torch.float8_e4m3fn),
        "complex": torch.randn(33, dtype=torch.complex64).to("cuda"),
        "bool": base > 0,
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "host": torch.randn(100),
        **{f"small{n}": torch.randn(n + 1).to("cuda") for n in range(min(scale.small, 500))},
    }
    bcp.save(path, {"model": tensors})
    targets = {name: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for name, t in tensors.items()}
    targets["transposed"] = torch.zeros(512, 768, device="cuda").t()
    bcp.load(path, {"model": targets})
    assert_alike(targets, tensors)


def from_host_to_device_and_back(path: Path, scale: Scale) -> None:
    tensors = {"a": torch.randn(1000, scale.numel // 1000), "b": torch.randn(7)}
    bcp.save(path / "host", {"model": tensors})
    device = {name: torch.zeros(t.shape, device="cuda") for name, t in tensors.items()}
    bcp.load(path / "host", {"model": device})
    bcp.save(path / "device", {"model": device})
    assert_alike(loaded(path / "device", tensors), tensors)


def work_of_two_streams(path: Path, scale: Scale) -> None:
    """The caller's stream waits for two others, which are late."""
    model = {f"w{n}": torch.zeros(scale.numel, device="cuda") for n in range(2)}
    bcp.prepare({"model": model}).wait()  # the save comes to its copies at once
    torch.cuda.synchronize()
    for tensor in model.values():
        with torch.cuda.stream(stream := torch.cuda.Stream()):
            busy(scale.seconds)
            tensor.fill_(5)
        torch.cuda.current_stream().wait_stream(stream)
    pending = bcp.save(path, {"model": model}, async_checkpoint=True)
    for tensor in model.values():
        tensor.fill_(9)
    pending.wait()
    wanted = {name: torch.full((scale.numel,), 5.0) for name in model}
    assert_alike(loaded(path, wanted), wanted)


def work_of_another_device(path: Path, scale: Scale) -> None:
    """The current device is the first; the last one is late."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    assert last.index > 0
    model = {"here": torch.zeros(scale.numel, device="cuda:0"), "there": torch.zeros(scale.numel, device=last)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    bcp.prepare({"model": model}).wait()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(last)
    with torch.cuda.device(last):
        busy(scale.seconds)
        model["there"].fill_(5)
    pending = bcp.save(path, {"model": model}, async_checkpoint=True)
    with torch.cuda.device(last):
        model["there"].fill_(9)
    pending.wait()
    assert torch.cuda.current_device() == 0
    bcp.load(path, {"model": targets})
    assert torch.cuda.current_device() == 0
    assert alike(targets["here"], torch.zeros(scale.numel))
    assert alike(targets["there"], torch.full((scale.numel,), 5.0))


class Asked:
    """A Stateful that notes the current device of the thread that calls it."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.threads: set[int] = set()

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.note()
        return {"rng": torch.cuda.get_rng_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.note()
        torch.cuda.set_rng_state(state["rng"])

    def note(self) -> None:
        self.seen.add(torch.cuda.current_device())
        self.threads.add(threading.get_ident())


def current_device_of_a_stateful(path: Path, scale: Scale) -> None:
    last = torch.cuda.device_count() - 1
    assert last > 0
    asked = Asked()
    first, before = torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(last)
    other = before.clone()
    other[0] ^= 1  # another seed
    torch.cuda.set_device(last)
    try:
        states = {"model": {"w": torch.ones(scale.numel, device="cuda")}, "extra_states": {"asked": asked}}
        bcp.save(path, states)
        torch.cuda.set_rng_state(other)
        bcp.load(path, states)
        assert asked.seen == {last}
        assert torch.cuda.current_device() == last
        assert torch.equal(torch.cuda.get_rng_state(last), before)
        assert torch.equal(torch.cuda.get_rng_state(0), first)
    finally:
        torch.cuda.set_device(0)
