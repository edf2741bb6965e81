"""What one process saves comes back as it was, whatever it is made of; and strangers can read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peer_defects
import pytest
import torch
from checkpoints import MIB, entries, equal, files, metadata, model, tensors, train, training
from ranks import Ranks
from safetensors import safe_open
from stranger import read_checkpoint, read_others
from torch import nn

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.format.layout_file import encode_layout


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of random bits; bools are true or false."""
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits[..., 0] > 127 if dtype is torch.bool else bits.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def supported(dtype: torch.dtype) -> bool:
    """Say whether torch can copy that dtype; of some it has only the name."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of complex32
            torch.empty(1, dtype=dtype).clone().view(torch.uint8)
    except RuntimeError:
        return False
    return True


DTYPES = {
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
DTYPES = sorted(filter(supported, DTYPES), key=str)


# -- tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes: dict[str, tuple[int, ...]] = {"0-d": (), "empty": (3, 0), "one": (1,), "some": (5, 7)}
    state = {name: random(shape, dtype) for name, shape in shapes.items()}
    bcp.save(tmp_path, {"model": state})
    blank = torch.zeros(64 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    target = {name: blank[: tensor.numel()].clone().view(tensor.shape) for name, tensor in state.items()}
    bcp.load(tmp_path, {"model": target})
    assert {name: bits(tensor) for name, tensor in target.items()} == {name: bits(t) for name, t in state.items()}


def test_nested_containers_with_tied_and_strided_leaves_of_every_sort(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)

    def state(tensor: torch.Tensor, *, blank: bool) -> dict[str, Any]:
        lists: list[Any] = [
            tensor[:, 1],
            {"x": (0,) * 6 if blank else (1, 2.5, None, "text", b"bytes", torch.bfloat16)},
        ]
        return {
            "a": {"w": tensor, "tied": tensor},
            "list": lists,
            3: tensor.t()[1:],
            "deep": {"er": {"still": 1 - blank}},
        }

    bcp.save(tmp_path, {"model": state(weight, blank=False)})
    blank = torch.zeros(6, 4)
    target = state(blank, blank=True)
    bcp.load(tmp_path, {"model": target})
    assert torch.equal(blank, weight)
    assert target["a"]["tied"] is blank
    assert target["list"][1]["x"] == (1, 2.5, None, "text", b"bytes", torch.bfloat16)
    assert target["deep"] == {"er": {"still": 1}}


def test_modules_that_share_and_buffers(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.ModuleDict({"embed": nn.Embedding(10, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 10)})
        net["head"].weight = net["embed"].weight
        net["norm"](torch.randn(8, 4))
        return net

    saved, target = build(0), build(1)
    bcp.save(tmp_path, {"model": saved})
    bcp.load(tmp_path, {"model": target})
    assert equal(dict(target.state_dict()), dict(saved.state_dict()))
    assert target["head"].weight is target["embed"].weight


# -- optimizers and the rest -------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def groups(seed: int, scale: float) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    parts: list[dict[str, Any]] = [{"params": net[0].parameters(), "lr": 0.01 * scale}]
    return net, [*parts, {"params": [*net[1].parameters(), *net[2].parameters()], "weight_decay": 0.2 * scale}]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, make: Any, steps: int) -> None:
    runs = []
    for seed, scale, own in [(0, 1.0, 3), (1, 3.0, steps)]:
        net, parts = groups(seed, scale)
        run = {"model": net, "optimizer": make(parts)}
        for _ in range(own):
            train(net, run["optimizer"])
        runs.append(run)
    saved, target = runs
    bcp.save(tmp_path, saved)
    bcp.load(tmp_path, target)
    for _ in range(2):
        assert equal(tensors(target), tensors(saved))
        found = [{key: group[key] for key in group if key != "params"} for group in target["optimizer"].param_groups]
        assert found == [{key: group[key] for key in found[0]} for group in saved["optimizer"].param_groups]
        for run in runs:
            train(run["model"], run["optimizer"])


def test_schedulers_dataloaders_and_random_states(tmp_path: Path) -> None:
    class Loader:
        position = 0

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    def build(ahead: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        loader = Loader()
        for _ in range(ahead):
            optimizer.step()
            scheduler.step()
        loader.position = ahead
        generator = torch.Generator().manual_seed(ahead)
        extra = {"scheduler": scheduler, "step": ahead, "rng": generator.get_state(), "list": [np.float32(ahead)]}
        return {"extra_states": extra, "dataloader": loader}

    saved, target = build(5), build(0)
    bcp.save(tmp_path, saved)
    bcp.load(tmp_path, target)
    found, wanted = target["extra_states"], saved["extra_states"]
    assert found["scheduler"].state_dict() == wanted["scheduler"].state_dict()
    assert (found["step"], found["list"], target["dataloader"].position) == (5, [np.float32(5)], 5)
    assert torch.equal(found["rng"], wanted["rng"])


# -- parts and budgets -------------------------------------------------------------------------------


def big() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"huge": torch.randn(5 * MIB // 4 + 3), "many": torch.randn(700, 900).t(), "odd": torch.randn(17).bfloat16()}


def test_tensors_larger_than_parts_and_a_budget_smaller_than_the_state(tmp_path: Path) -> None:
    states = {"model": big()}
    options = bcp.SaveOptions(part_bytes=MIB, budget_bytes=2 * MIB, io_workers=1)
    report = bcp.save(tmp_path, states, options=options)
    assert report.budget_wait_seconds > 0
    assert bcp.save(tmp_path / "free", states).budget_wait_seconds == 0
    for reading in (bcp.LoadOptions(), bcp.LoadOptions(read_bytes=MIB, budget_bytes=MIB, io_workers=1, copy_workers=1)):
        target = {name: torch.zeros_like(tensor) for name, tensor in states["model"].items()}
        assert bcp.load(tmp_path, {"model": target}, options=reading).nbytes == report.state_nbytes
        assert equal(target, states["model"])


def test_the_report_counts_every_byte_that_was_placed(tmp_path: Path) -> None:
    weight = torch.randn(2 * MIB)
    bcp.save(tmp_path, {"model": {"w": weight}})
    target = {"w": torch.zeros(2 * MIB)}
    report = bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(read_bytes=MIB, copy_workers=4))
    assert torch.equal(target["w"], weight)
    assert report.nbytes == weight.nbytes


# -- places ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [None, "actor"])
def test_a_backend_as_the_path(tmp_path: Path, role: str | None) -> None:
    try:
        for backend in (MemoryBackend("the path"), LocalBackend(tmp_path / "objects")):
            report = bcp.save(backend, model(4), role=role)
            target = model(0)
            assert bcp.load(backend, target, role=role).operation == report.operation
            assert target["model"]["w"].eq(4).all()
    finally:
        MemoryBackend.forget("the path")
    assert entries(tmp_path / "objects")[0] == (role or "metadata.arrow")


@pytest.mark.parametrize("path", ["memory://here/run", "file://{}", "{}/", "{}/a/../b"])
def test_paths_and_urls(tmp_path: Path, path: str) -> None:
    where = path.format(tmp_path)
    try:
        bcp.save(where, model(4))
        target = model(0)
        bcp.load(where, target)
        assert target["model"]["w"].eq(4).all()
    finally:
        MemoryBackend.forget("here")


def test_partial_loads(tmp_path: Path) -> None:
    states = {**training(), "extra_states": {"step": 9}}
    bcp.save(tmp_path, states)
    target = training(seed=1)
    before = tensors(target)
    bcp.load(tmp_path, {"model": target["model"]})
    after = tensors(target)
    assert all(torch.equal(after[name], tensors(states)[name]) for name in after if name.startswith("model."))
    assert all(torch.equal(after[name], before[name]) for name in after if name.startswith("optimizer."))
    extra: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": extra})
    assert extra == {"step": 9}
    weight = torch.zeros(4, 16)
    report = bcp.load(tmp_path, {"model": {"2.weight": weight}}, strict=False)
    assert torch.equal(weight, states["model"][2].weight)
    assert report.unexpected == tuple(
        f"model: {name}" for name in sorted(states["model"].state_dict()) if name != "2.weight"
    )


def test_a_second_save_of_one_layout_has_the_same_layout_bytes(tmp_path: Path) -> None:
    states = training()
    bcp.save(tmp_path / "0", states)
    train(states["model"], states["optimizer"])
    assert bcp.save(tmp_path / "1", states).plan_cached
    layouts = [encode_layout(metadata(tmp_path / step).layout) for step in ("0", "1")]
    assert layouts[0] == layouts[1]
    for step in ("0", "1"):
        assert layouts[0] in (tmp_path / step / "metadata.arrow").read_bytes()


# -- strangers ---------------------------------------------------------------------------------------


def test_safetensors_opens_every_data_file_and_agrees(tmp_path: Path) -> None:
    states = training()
    bcp.save(tmp_path, {**states, "extra_states": {"step": 1}})
    found: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*/*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {f"{file.parent.name}.{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- no mapping
    assert found.pop("extra_states.state").dtype == torch.uint8
    weights = {f"model.{name}": tensor for name, tensor in states["model"].state_dict().items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    moments = states["optimizer"].state[states["model"][2].weight]
    assert all(torch.equal(found[f"optimizer.state.2.weight.{key}"], value) for key, value in moments.items())
    assert len(found) == len(tensors(states))


def test_a_stranger_reads_a_real_checkpoint(tmp_path: Path) -> None:
    states = {**training(), "extra_states": {"step": 1}}
    states["optimizer"].param_groups[0]["betas"] = (0.8, 0.9)
    bcp.save(tmp_path, states, options=bcp.SaveOptions(part_bytes=MIB))
    found = read_checkpoint(tmp_path)
    for name, tensor in states["model"].state_dict().items():
        assert found["model", name].dtype == "float32"
        assert found["model", name].data.tobytes() == bits(tensor)
    assert len(found) == len(tensors(states))
    objects, extras = read_others(tmp_path)
    assert objects["optimizer", "param_groups.0.weight.betas"] == {"tuple": [0.8, 0.9]}
    assert list(extras) == [("extra_states", 0)]


def test_a_stranger_reads_big_tensors_and_all_dtypes(tmp_path: Path) -> None:
    odd = {str(dtype): random((3, 5), dtype) for dtype in DTYPES}
    states = {**big(), **odd, "0-d": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    bcp.save(tmp_path, {"model": states}, options=bcp.SaveOptions(part_bytes=MIB))
    found = read_checkpoint(tmp_path)
    assert {fqn: tensor.data.tobytes() for (_, fqn), tensor in found.items()} == {
        fqn: bits(tensor) for fqn, tensor in states.items()
    }
    assert {found["model", fqn].shape for fqn in ("0-d", "empty")} == {(), (0, 4)}


@pytest.mark.dist
@pytest.mark.parametrize("placements", [("S0",), ("S1",), ("R",), ("T0", "S0")])
def test_a_stranger_reads_what_four_ranks_wrote(ranks4: Ranks, tmp_path: Path, placements: tuple[str, ...]) -> None:
    ranks4.run(peer_defects.save_sharded, tmp_path, placements)
    (tensor,) = read_checkpoint(tmp_path).values()
    assert tensor.shape == (peer_defects.ROWS, peer_defects.COLUMNS)
    assert tensor.data.tobytes() == bits(peer_defects.whole())
    assert read_others(tmp_path)[0] == {("model", "epoch"): 7}
    assert len([name for name in files(tmp_path) if name.startswith("model/")]) == 4


@pytest.mark.parametrize("lazily", [torch.Tensor.conj, lambda z: z.conj().imag])
def test_other_values_of_the_same_memory_are_not_tied(
    tmp_path: Path, lazily: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    z = torch.randn(4, dtype=torch.complex64)
    first, second = (z.imag, lazily(z)) if not lazily(z).is_complex() else (z, lazily(z))
    for states in ({"a": first, "b": second}, {"b": first, "a": second}):
        bcp.save(tmp_path, {"model": states}, overwrite=True)
        target = {name: torch.zeros(4, dtype=tensor.dtype) for name, tensor in states.items()}
        bcp.load(tmp_path, {"model": target})
        assert all(torch.equal(target[name], tensor) for name, tensor in states.items())
