"""Writes that autograd does not count, while a snapshot is being taken: no torn checkpoint comes of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import SECONDS, Gate, files
from logical import logical
from samples import sample_of
from torch import nn

import bcp

Write = Callable[[torch.Tensor], object]


def index(target: torch.Tensor, value: float) -> None:
    target[...] = value


WRITES: dict[str, Write] = {
    "data.add_": lambda p: p.data.add_(1),
    "data.mul_": lambda p: p.data.mul_(0.5),
    "data.copy_": lambda p: p.data.copy_(torch.full_like(p, 7.0)),
    "data[...] =": lambda p: index(p.data, 3.0),
    "a view of data": lambda p: p.data.view(-1)[:].zero_(),
    "the last row": lambda p: p.data[-1].zero_(),
    "every other column": lambda p: p.data[:, ::2].zero_(),
    "numpy": lambda p: index(p.detach().numpy(), 5.0),
    "a view in numpy": lambda p: index(p.detach().numpy().T, 6.0),
    "the storage": lambda p: p.untyped_storage().fill_(1),
    "ctypes.memset": lambda p: ctypes.memset(p.data_ptr(), 1, p.nbytes),
    "one byte": lambda p: ctypes.memset(p.data_ptr(), 127, 1),
}
NOT_COUNTED = "changed on rank 0 while its snapshot was being taken, by a write that torch does not count"


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network with a parameter of more bytes than a sample has, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 3))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    return model, optimizer


@contextmanager
def saving(path: Path, states: dict[str, Any], snapshot: str) -> Iterator[None]:
    """Begin to save; nothing is copied while the block runs. Raises behind it what the save raises."""
    gate = Gate("d2h")
    options, errors = replace(gate.options, overwrite=True, snapshot=snapshot), list[BaseException]()

    def save() -> None:
        try:
            bcp.save(path, states, async_checkpoint=True, options=options).wait()
        except BaseException as error:  # noqa: BLE001 -- raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert gate.reached.wait(SECONDS), errors
    try:
        yield
    finally:
        gate.opened.set()
        thread.join(SECONDS)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


both = pytest.mark.parametrize("snapshot", ["lazy", "eager"])


@both
@pytest.mark.parametrize("write", sample_of(WRITES, *list(WRITES)[::3]))
def test_a_write_to_a_parameter_is_refused_and_the_older_checkpoint_stays(
    tmp_path: Path, write: Write, snapshot: str
) -> None:
    model, optimizer = network()
    states = {"model": model, "optimizer": optimizer}
    bcp.save(tmp_path, states)
    before = files(tmp_path)
    with (
        pytest.raises(bcp.StateChangedError, match=rf"model tensor '0\.weight' {NOT_COUNTED}"),
        saving(tmp_path, states, snapshot),
    ):
        write(model[0].weight)
    assert files(tmp_path) == before
    optimizer.step()  # is not held back any more
    bcp.save(tmp_path, states, overwrite=True)


@both
def test_a_write_to_a_moment_is_refused_and_no_checkpoint_is_made(tmp_path: Path, snapshot: str) -> None:
    model, optimizer = network()
    with (
        pytest.raises(bcp.StateChangedError, match=rf"optimizer tensor 'state\.1\.bias\.exp_avg' {NOT_COUNTED}"),
        saving(tmp_path, {"model": model, "optimizer": optimizer}, snapshot),
    ):
        optimizer.state[model[1].bias]["exp_avg"].data.mul_(2)
    assert not (tmp_path / "metadata.arrow").exists()


class OldStyle:
    """Steps as optimizers did before torch counted writes."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.mul_(0.9).add_(parameter.grad.data, alpha=-0.1)


@both
def test_the_step_of_an_optimizer_that_was_not_passed_is_refused_with_the_remedy(tmp_path: Path, snapshot: str) -> None:
    model, optimizer = network()
    with (
        pytest.raises(bcp.StateChangedError, match=NOT_COUNTED) as caught,
        saving(tmp_path, {"model": model, "optimizer": optimizer}, snapshot),
    ):
        OldStyle(model.parameters()).step()
    for name, _ in model.named_parameters():
        assert repr(name) in str(caught.value)
    for remedy in ("pass every optimizer in states['optimizer']", "snapshot='eager'", "guard=False"):
        assert remedy in str(caught.value)


def test_of_many_tensors_a_few_are_named(tmp_path: Path) -> None:
    model = {f"layer{number}": torch.zeros(3) for number in range(9)}
    with (
        pytest.raises(bcp.StateChangedError, match=r"'layer4' and 4 more changed on rank 0"),
        saving(tmp_path, {"model": model}, "eager"),
    ):
        torch._foreach_add_([tensor.data for tensor in model.values()], 1)


def test_without_the_guard_it_is_saved_as_it_is(tmp_path: Path) -> None:
    state, gate = {"w": torch.zeros(3)}, Gate("d2h")
    thread = threading.Thread(
        target=bcp.save, args=(tmp_path, {"model": state}), kwargs={"options": bcp.SaveOptions(edit=gate, guard=False)}
    )
    thread.start()
    assert gate.reached.wait(SECONDS)
    state["w"].data.add_(1)
    gate.opened.set()
    thread.join(SECONDS)
    assert logical(tmp_path)["model", "w"].tolist() == [1, 1, 1]


# -- memory of every kind ----------------------------------------------------------------------------


def of_bytes(dtype: torch.dtype, shift: int) -> torch.Tensor:
    """Return 300 elements that begin ``shift`` bytes behind an aligned address."""
    memory = torch.arange(300 * dtype.itemsize + shift, dtype=torch.int64).to(torch.uint8).numpy()[shift:]
    return torch.frombuffer(memory, dtype=dtype)


MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "a scalar": lambda: torch.tensor(2.0),
    "bf16": lambda: torch.randn(40, 30).bfloat16(),
    "float8": lambda: torch.randn(40, 30).to(torch.float8_e4m3fn),
    "bool": lambda: torch.zeros(40, 30, dtype=torch.bool),
    "complex": lambda: torch.randn(40, 30, dtype=torch.complex64),
    "NaN": lambda: torch.full((2000,), torch.nan),
    "unaligned": lambda: of_bytes(torch.uint8, 3),
    "unaligned for its dtype": lambda: of_bytes(torch.float32, 1),
    "transposed": lambda: torch.randn(40, 30).t(),
    "columns": lambda: torch.randn(40, 30)[:, 3:7],
    "every other element": lambda: torch.randn(4000)[1::2],
    "channels last": lambda: torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1).expand(5),
    "a view of five dimensions": lambda: torch.randn(3, 4, 5, 6, 7)[:, 1:3, :, ::2, 1:],
}


def flip(tensor: torch.Tensor) -> None:
    """Change one bit of every element, by a raw pointer."""
    places = torch.arange(tensor.untyped_storage().nbytes()).as_strided(tensor.shape, tensor.stride(), 0)
    for place in places.flatten().tolist():
        byte = ctypes.c_uint8.from_address(tensor.data_ptr() + place * tensor.itemsize)
        byte.value ^= 1


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_writes_to_memory_of_every_kind_are_seen(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    state = {"model": {"before": torch.zeros(5), "w": make()}}
    with (
        pytest.raises(bcp.StateChangedError, match=rf"^model tensor 'w' {NOT_COUNTED}"),
        saving(tmp_path, state, "eager"),
    ):
        flip(state["model"]["w"])
    assert not (tmp_path / "metadata.arrow").exists()


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_the_same_bits_are_no_change(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    state = {"model": {"w": make(), "empty": torch.zeros(0, 3)}}
    memory = state["model"]["w"].untyped_storage()
    with saving(tmp_path, state, "eager"):
        memory.copy_(memory.clone())
    assert (tmp_path / "metadata.arrow").exists()


def test_what_lies_between_the_elements_is_not_theirs(tmp_path: Path) -> None:
    whole = torch.randn(40, 30)
    state = {"left": whole[:, :10], "right": whole[:, 20:], "every": torch.zeros(99)[::3]}
    with saving(tmp_path, {"model": state}, "eager"):
        whole.data[:, 10:20].zero_()
        torch.as_strided(state["every"].data, (32, 2), (3, 1), 1).fill_(1)
    assert torch.equal(logical(tmp_path)["model", "right"], whole[:, 20:])


def test_what_a_step_changes_later_is_no_change(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in (model[0].weight, model[0].bias):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = threading.Thread(target=optimizer.step)
    with saving(tmp_path, {"model": model, "optimizer": optimizer}, "lazy"):
        model[1].bias.data.add_(1)  # frozen ones are copied at once
        step.start()
    step.join(SECONDS)
    assert not step.is_alive()
    saved = logical(tmp_path)
    for name, value in before.items():
        torch.testing.assert_close(saved["model", name], value, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(model[0].weight, before["0.weight"])


# -- memory that is given back -----------------------------------------------------------------------


def test_memory_that_is_given_back_before_it_is_copied(tmp_path: Path) -> None:
    model, optimizer = network()
    with (
        pytest.raises(bcp.StateChangedError, match=r"memory of model tensor '0\.weight' was replaced"),
        saving(tmp_path, {"model": model, "optimizer": optimizer}, "lazy"),
    ):
        model[0].weight.untyped_storage().resize_(0)


def test_memory_that_is_given_back_after_it_is_copied(tmp_path: Path) -> None:
    state, copied = {name: torch.ones(200_000) for name in "abc"}, anyio.Event()

    async def wait(item: Any) -> Any:
        if item.part.index:
            await copied.wait()
        return item

    async def give_back(part: Any) -> Any:
        if "a" in part.tensors:
            state["a"].untyped_storage().resize_(0)
            copied.set()
        return part

    def edit(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        return graph.before("d2h", bcp.extend.Stage("wait", wait)).after(
            "d2h", bcp.extend.Stage("give back", give_back)
        )

    with pytest.raises(bcp.StateChangedError, match=r"memory of model tensor 'a' was replaced on rank 0"):
        bcp.save(tmp_path, {"model": state}, options=bcp.SaveOptions(part_bytes=1 << 20, edit=edit))
    assert not (tmp_path / "metadata.arrow").exists()
