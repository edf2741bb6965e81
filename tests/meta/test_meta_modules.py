"""A load fills modules on the meta device, held against the same module made on the CPU and loaded there."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


class Net(nn.Module):
    """Tied and frozen parameters, buffers, a class of parameters, a transposed and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(6, 3, dtype=torch.float32)
        self.head.bias.requires_grad = False
        self.marked = Marked(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(2, 3).t())
        self.register_buffer("empty", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.tied(self.norm(self.first(x))))
        return (hidden + self.marked) @ self.turned


def on_meta(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return make()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(24.0).reshape(4, 6).sin()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = model.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert (type(found[name]), found[name].requires_grad) == (type(tensor), tensor.requires_grad), name


def assert_untouched(model: nn.Module, before: dict[str, int]) -> None:
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert all(value.is_meta for value in model.state_dict().values())


def identities(model: nn.Module) -> dict[str, int]:
    return {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    return tmp_path / "ckpt", model, optimizer


def test_a_meta_module_becomes_the_module_that_was_saved(saved: Any) -> None:
    path, expected, _ = saved
    model, on_cpu = on_meta(), Net()
    weight, marked = model.first.weight, model.marked
    weight.note = "kept"
    bcp.load(path, {"model": model})
    bcp.load(path, {"model": on_cpu})
    assert_same(model, expected)
    assert_same(model, on_cpu)
    assert model.first.weight is model.tied.weight is weight
    assert model.marked is marked
    assert weight.note == "kept"


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_made_before_the_load_trains_on(saved: Any, *, together: bool) -> None:
    path, expected, original = saved
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    if not together:
        bcp.load(path, {"model": model})
    bcp.load(path, {"model": model, "optimizer": optimizer})
    for _ in range(2):
        step(expected, original)
        step(model, optimizer)
    assert_same(model, expected)


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": False, "foreach": True}])
def test_states_are_made_where_the_new_memory_is(saved: Any, options: dict[str, Any]) -> None:
    path, expected, _ = saved
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    bcp.load(path, {"model": model, "optimizer": optimizer})
    assert_same(model, expected)
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}
    step(model, optimizer)


def test_chunks_share_a_tied_parameter(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    parts = nn.ModuleDict({"a": first}), nn.ModuleDict({"b": second})
    bcp.save(tmp_path / "ckpt", {"model": list(parts)})
    with torch.device("meta"):
        one, two = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False)}), nn.ModuleDict({"b": nn.Linear(3, 3, bias=False)})
    two["b"].weight = one["a"].weight
    bcp.load(tmp_path / "ckpt", {"model": [one, two]})
    assert torch.equal(two.get_parameter("b.weight"), first.weight)
    assert one["a"].weight is two["b"].weight


def test_parameters_of_one_memory_still_have_one_memory(tmp_path: Path) -> None:
    source = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    bcp.save(tmp_path / "ckpt", {"model": {"a.weight": source.get_parameter("a.weight").detach()}})
    model = on_meta(lambda: nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}))
    model["b"].weight = nn.Parameter(model["a"].weight.detach())
    assert not bcp.load(tmp_path / "ckpt", {"model": model}).missing
    assert torch.equal(model["b"].weight, source.get_parameter("a.weight"))
    assert model["a"].weight.data_ptr() == model["b"].weight.data_ptr()


def test_memory_is_real_where_the_default_device_is_meta(saved: Any) -> None:
    path, expected, _ = saved
    with torch.device("meta"):
        model = Net()
        bcp.load(path, {"model": model})
    assert_same(model, expected)


def test_a_failed_load_leaves_the_module_on_the_meta_device(saved: Any) -> None:
    path, _, _ = saved
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    before, reading = identities(model), CountingBackend(LocalBackend(path))
    bcp.load(reading, {"model": on_meta()})
    reads = [name for name in ("read_into", "read_scattered") if reading.calls[name]]
    assert reads
    for operation in reads:
        faulty = FaultyBackend(LocalBackend(path), operation, OSError("gone"), nth=reading.calls[operation])
        with pytest.raises(bcp.BcpError):
            bcp.load(faulty, {"model": model, "optimizer": optimizer})
        assert_untouched(model, before)
        assert not optimizer.state


def test_flipped_bits_leave_the_module_on_the_meta_device(saved: Any) -> None:
    path, _, _ = saved
    (file,) = (path / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    model = on_meta()
    before = identities(model)
    with pytest.raises(bcp.CorruptError):
        bcp.load(path, {"model": model})
    assert_untouched(model, before)


class Wider(Net):
    """The checkpoint lacks some of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))


def test_names_that_the_checkpoint_lacks_stay_on_the_meta_device(saved: Any) -> None:
    path, expected, _ = saved
    model = on_meta(Wider)
    before = identities(model)
    with pytest.raises(bcp.FqnMismatchError, match=r"model: extra\.weight"):
        bcp.load(path, {"model": model})
    assert_untouched(model, before)
    result = bcp.load(path, {"model": model}, strict=False)
    assert set(result.missing) == {"model: extra.weight", "model: extra.bias", "model: count"}
    assert {name for name, value in model.state_dict().items() if value.is_meta} == {
        "extra.weight",
        "extra.bias",
        "count",
    }
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())


def test_another_shape_leaves_the_module_on_the_meta_device(saved: Any) -> None:
    path, _, _ = saved
    model = on_meta()
    with torch.device("meta"):
        model.head = nn.Linear(6, 4)
    before = identities(model)
    with pytest.raises(bcp.ShapeMismatchError, match="head"):
        bcp.load(path, {"model": model})
    assert_untouched(model, before)


def test_dtypes_are_those_of_the_module(saved: Any) -> None:
    path, expected, _ = saved
    model = on_meta().to(torch.bfloat16)
    bcp.load(path, {"model": model}, options=bcp.LoadOptions(cast=True))
    assert torch.equal(model.head.weight, expected.head.weight.to(torch.bfloat16))


class Rotary(nn.Module):
    """A buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


def test_buffers_that_no_checkpoint_has_are_named_before_anything_is_read(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": Rotary()})
    model, backend = on_meta(Rotary), CountingBackend(LocalBackend(tmp_path / "ckpt"))
    for strict in (True, False):
        with pytest.raises(bcp.StateError, match=r"'inv_freq'; no checkpoint has their values.*to_empty"):
            bcp.load(backend, {"model": model}, strict=strict)
    assert model.proj.weight.is_meta
    assert not any(key.startswith("model/") for key in backend.read)
    model.inv_freq = torch.ones(2)
    bcp.load(tmp_path / "ckpt", {"model": model})
    assert not model.proj.weight.is_meta


def with_gradient_hook(model: Any) -> object:
    return model.head.weight.register_post_accumulate_grad_hook(lambda _: None)


def with_weak_reference(model: Any) -> object:
    return weakref.ref(model.head.weight)


def with_load_hook(model: Any) -> object:
    return model.register_load_state_dict_pre_hook(lambda *_: None)


def with_view(model: Any) -> object:
    return model.head.weight[0]


def with_part(model: Any) -> object:
    model.head.weight = nn.Parameter(model.first.weight.detach()[:3])
    return None


@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        (with_gradient_hook, "'head.weight' is on the meta device and has hooks of its gradient"),
        (with_weak_reference, "'head.weight' is on the meta device and has weak references"),
        (with_view, "'head.weight' is on the meta device and has views"),
        (with_part, "is on the meta device and shares a part of its memory"),
        (with_load_hook, "pre-hook of load_state_dict of Net loads .*on the meta device; call to_empty"),
    ],
)
def test_what_cannot_take_memory_is_refused_by_name(saved: Any, disturb: Any, words: str) -> None:
    path, _, _ = saved
    model = on_meta()
    kept = disturb(model)
    before = identities(model)
    with pytest.raises(bcp.StateError, match=words):
        bcp.load(path, {"model": model})
    assert_untouched(model, before)
    del kept


def test_post_hooks_see_the_loaded_values(saved: Any) -> None:
    path, expected, _ = saved
    model, seen = on_meta(), []
    model.register_load_state_dict_post_hook(lambda module, _: seen.append(module.head.weight.detach().clone()))
    bcp.load(path, {"model": model})
    assert_same(model, expected)
    assert [torch.equal(values, expected.head.weight) for values in seen] == [True]


def test_a_forward_pass_on_the_meta_device_does_no_harm(saved: Any) -> None:
    path, expected, _ = saved
    model = on_meta()
    model(torch.empty(4, 6, device="meta"))
    optimizer = torch.optim.AdamW(model.parameters())
    bcp.load(path, {"model": model, "optimizer": optimizer})
    assert torch.equal(model.head.weight, expected.head.weight)
    step(model, optimizer)


def test_a_state_dict_has_no_place_for_memory(saved: Any) -> None:
    path, _, _ = saved
    for state in (on_meta().state_dict(), {"deep": [on_meta().state_dict()]}, torch.empty(2, device="meta")):
        with pytest.raises(bcp.StateError, match=r"is on the meta device.*to_empty\(\).*pass the module that has it"):
            bcp.load(path, {"model": state})


def test_a_folder_of_safetensors_fills_a_meta_module(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    assert bcp.load(tmp_path, {"model": model}).unverified
    assert_same(model, source)


MEASURE = """
import json, resource, sys
import torch, bcp

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

path, small = sys.argv[1:]
with torch.device("meta"):
    tiny, model = torch.nn.Linear(4, 4), torch.nn.ModuleList(torch.nn.Linear(4096, 4096) for _ in range(6))
bcp.load(small, {"model": tiny})
before = peak()
bcp.load(path, {"model": model})
weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
print(json.dumps([peak() - before, weights]))
"""


@pytest.mark.long
def test_the_weights_are_in_memory_once(tmp_path: Path) -> None:
    small, large = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4096, 4096) for _ in range(6))
    bcp.save(tmp_path / "small", {"model": small})
    bcp.save(tmp_path / "large", {"model": large})
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large"), str(tmp_path / "small")]
    grown, weights = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603 -- our own code
    assert weights == 6 * 4 * (4096 * 4096 + 4096)
    assert grown < 1.5 * weights


def test_other_frameworks_refuse_meta_tensors_by_name(saved: Any) -> None:
    path, _, _ = saved
    model = on_meta()
    before = identities(model)
    with pytest.raises(bcp.StateError, match=r"is on the meta device and has no values; materialise it"):
        bcp.load(path, {"model": model}, framework="fsdp1")
    assert_untouched(model, before)
