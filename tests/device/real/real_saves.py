"""Scenarios of saves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from real_backend import Backend
from real_support import (
    LARGE,
    MIB,
    WAYS,
    all_are,
    busy,
    each,
    like,
    loaded,
    mixed,
    own_streams,
    same,
    save,
    scenario,
    synchronize,
)
from torch import nn

import bcp
from bcp.coordinators import memory_coordinators
from bcp.runtime import device


@each(*WAYS)
def a_save_has_pending_writes_and_no_later_ones(late: Backend, path: Path, how: str) -> None:
    model = mixed()
    with own_streams():
        busy(late)
        for tensor in model.values():
            tensor.fill_(5)
        late.delay(0.003)
        save(path, {"model": model}, how, after=lambda: [tensor.fill_(9) for tensor in model.values()])
        assert all_are(loaded(path, model), 5)
        assert all_are(model, 9)


@each("SGD", "AdamW", "default AdamW")
def a_lazy_save_and_the_next_step(late: Backend, path: Path, name: str) -> None:
    model = nn.Module()
    for n in range(6):
        setattr(model, f"w{n}", nn.Parameter(torch.zeros(LARGE if n < 3 else n, device=f"late:{n % 2}")))
    model.register_buffer("b", torch.zeros(10, device="late:1"))
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    if name == "SGD":
        optimizer: Any = torch.optim.SGD(weights, lr=1.0, momentum=0.9, foreach=False)
    else:
        optimizer = torch.optim.AdamW(weights, lr=1.0, foreach=None if name.startswith("default") else False)
    optimizer.step()
    states = {"model": model, "optimizer": optimizer}
    late.delay(0.003)
    with own_streams():
        for number in range(2):
            moments = {key: value.clone().cpu() for key, value in optimizer.state[weights[1]].items()}
            target = path / str(number)
            busy(late)
            with torch.no_grad():
                for tensor in (*weights, model.b):
                    tensor.fill_(5 + number)
            pending = bcp.save(target, states, async_checkpoint=True, snapshot="lazy")
            model.b.fill_(9)
            optimizer.step()
            pending.wait()
            found = loaded(target, {key: value.detach() for key, value in model.state_dict().items()})
            assert all_are(found, 5 + number)
            assert not bool((weights[0].detach() == 5 + number).any())
            bcp.load(target, states)
            assert all(same(optimizer.state[weights[1]][key], value) for key, value in moments.items())
            assert all_are({key: value.detach() for key, value in model.state_dict().items()}, 5 + number)


@scenario
def tensors_of_any_layout_and_dtype(late: Backend, path: Path) -> None:
    torch.manual_seed(0)
    base = torch.randn(512, 768)
    phases = torch.randn(40, 30, dtype=torch.complex64)
    host = {
        "transposed": base.t(),
        "strided": base[::2, 3:700:3],
        "expanded": base[:1].expand(4, 768),
        "bfloat16": base.to(torch.bfloat16),
        "bool": base > 0,
        "complex": phases,
        "float8": base.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "int8": torch.arange(-100, 100, dtype=torch.int8),
        "odd": torch.arange(7, dtype=torch.int16)[1:],
    }
    dtypes = (torch.bfloat16, torch.bool, torch.complex64)
    host |= {f"small{n}": torch.randn(n % 5).to(dtypes[n % 3]) for n in range(99)}
    model = {name: _strided(tensor) for name, tensor in host.items()}
    model |= {"conjugated": phases.to("late:1").conj(), "negative": phases.to("late:1").conj().imag}
    host |= {"conjugated": phases.conj(), "negative": phases.conj().imag}
    assert model["conjugated"].is_conj()
    assert model["negative"].is_neg()
    assert not model["transposed"].is_contiguous()
    late.delay(0.001)
    for part_bytes in (MIB, 16 * MIB):
        bcp.save(path, {"model": model}, options=bcp.SaveOptions(part_bytes=part_bytes), overwrite=True)
        found = loaded(path, host)
        assert [name for name, tensor in host.items() if not same(found[name], tensor)] == []
    targets = like(host, "late:1") | {"transposed": torch.zeros(512, 768, device="late:0").t()}
    targets["strided"] = torch.zeros(512, 768, device="late:0")[::2, 3:700:3]
    bcp.load(path, {"model": targets})
    assert late.pending == 0
    assert [name for name, tensor in host.items() if not same(targets[name], tensor)] == []


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a device, with its strides."""
    there = tensor.to("late:0")
    span = tensor.untyped_storage().nbytes() // tensor.itemsize
    if not tensor.is_contiguous():
        flat = torch.as_strided(tensor, (span,), (1,), 0).to("late:0")
        there = torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())
    return there


@scenario
def small_tensors_are_copied_together(late: Backend, path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.complex128)
    host = {f"s{n}": torch.arange(n % 7).to(dtypes[n % 6]) for n in range(600)}
    model = {name: tensor.to("late") for name, tensor in host.items()}
    synchronize()
    late.copies()
    bcp.save(path, {"model": model})
    assert 0 < late.copies()["d2h"] <= 3
    found = like(host, "late")
    synchronize()
    late.copies()
    bcp.load(path, {"model": found})
    single = sum(tensor.is_complex() and tensor.numel() > 0 for tensor in host.values())  # these go one by one
    assert single < late.copies()["h2d"] <= single + 6
    assert [name for name, tensor in host.items() if not same(found[name], tensor)] == []


@scenario
def small_tensors_of_a_device_without_room(late: Backend, path: Path) -> None:
    model = {f"s{n}": torch.full((n + 1,), 5.0, device="late") for n in range(50)}
    synchronize()
    late.copies()
    late.refuse(1)
    bcp.save(path, {"model": model})
    assert late.copies()["d2h"] == 50
    assert all_are(loaded(path, model), 5)


@scenario
def no_room_for_a_negated_copy(late: Backend, path: Path) -> None:
    negative = torch.conj(torch.ones(100, dtype=torch.complex64).mul(1j).to("late")).imag
    late.refuse(1)
    try:
        bcp.save(path, {"model": {"x": negative}})
    except bcp.StateError as error:
        assert "rank 0 has no device memory" in str(error)  # noqa: PT017 -- no pytest here
    else:
        raise AssertionError("it was saved")


@scenario
def many_saves_use_the_same_buffers(late: Backend, path: Path) -> None:
    model = mixed()
    bcp.prepare({"model": model}).wait()
    late.delay(0.002)
    pendings = []
    with own_streams():
        for number in range(4):
            for tensor in model.values():
                tensor.fill_(number)
            pendings.append(bcp.save(path / str(number), {"model": model}, async_checkpoint=True))
    for number, pending in enumerate(pendings):
        pending.wait()
        assert all_are(loaded(path / str(number), model), number)


@scenario
def two_callers_with_devices_of_their_own(late: Backend, path: Path) -> None:
    errors: list[BaseException] = []

    def train(index: int) -> None:
        try:
            torch.accelerator.set_device_index(index)
            with torch.Stream(device=f"late:{index}"):
                tensors = {f"w{n}": torch.zeros(LARGE if n < 2 else n, device="late") for n in range(6)}
                for number in range(3):
                    for tensor in tensors.values():
                        tensor.fill_(10 * index + number)
                    target = path / f"{index}-{number}"
                    after: Callable[[], object] = lambda: [tensor.fill_(99) for tensor in tensors.values()]  # noqa: E731
                    save(target, {"model": tensors}, WAYS[number], after)
                    assert all_are(loaded(target, tensors), 10 * index + number)
        except BaseException as error:  # noqa: BLE001 -- raised by the other thread
            errors.append(error)

    late.delay(0.002)
    threads = [threading.Thread(target=train, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@each(*WAYS, "load")
def the_callers_stream_may_be_that_of_bcp(late: Backend, path: Path, how: str) -> None:
    model = mixed()
    synchronize()
    bcp.save(path, {"model": model})
    with ExitStack() as stack:
        for index in (1, 0):  # torch's pool of streams hands out each of them more than once
            stream = torch.Stream(device=f"late:{index}")
            while stream != device._side_stream(index):
                stream = torch.Stream(device=f"late:{index}")
            stack.enter_context(stream)
        for tensor in model.values():
            tensor.fill_(5)
        late.delay(0.002)
        if how == "load":
            bcp.load(path, {"model": model})
            assert late.pending == 0
            assert all_are(model, 0)
            return
        after: Callable[[], object] = lambda: [tensor.fill_(9) for tensor in model.values()]  # noqa: E731
        save(path, {"model": model}, how, after, overwrite=True)
        assert all_are(loaded(path, model), 5)


@each(*WAYS)
def extra_states_on_a_device(late: Backend, path: Path, how: str) -> None:
    extra = {f"e{n}": torch.zeros(10, device=f"late:{n}") for n in (0, 1)}
    with own_streams():
        busy(late)
        for tensor in extra.values():
            tensor.fill_(5)
        states = {"model": {"w": torch.ones(3, device="late")}, "extra_states": extra}
        save(path, states, how, after=lambda: [tensor.fill_(9) for tensor in extra.values()])
        found = {name: torch.zeros(10, device=tensor.device) for name, tensor in extra.items()}
        bcp.load(path, {"model": {"w": torch.zeros(3, device="late")}, "extra_states": found})
        assert late.pending == 0
    assert all_are(found, 5)


@each("model", "extra_states")
def pinned_memory_that_the_caller_still_copies_to(late: Backend, path: Path, kind: str) -> None:
    weight, average = torch.full((100,), 5.0, device="late:1"), torch.zeros(100, pin_memory=True)
    assert average.is_pinned()
    with own_streams():
        busy(late)
        average.copy_(weight, non_blocking=True)
        bcp.save(path, {kind: {"ema": average}})
    assert all_are(loaded(path, {"ema": average}, kind), 5)


@each("model", "extra_states")
def pinned_memory_that_the_caller_still_reads(late: Backend, path: Path, kind: str) -> None:
    bcp.save(path, {kind: {"x": torch.full((100,), 7.0)}})
    weight, average = torch.zeros(100, device="late"), torch.full((100,), 5.0).pin_memory()
    with own_streams():
        late.busy(0.1, 0.1)
        weight.copy_(average, non_blocking=True)
        bcp.load(path, {kind: {"x": average}})
    assert (weight.cpu()[0], average[0]) == (5, 7)


@each("equal", "strides differ", "values differ")
def replicas_on_a_device_are_compared(late: Backend, path: Path, how: str) -> None:
    """Two ranks in two threads; values are written late, and compared when they are there."""
    ranks, errors = memory_coordinators(2), dict[int, Exception]()
    models = [mixed() for _ in ranks]
    if how == "strides differ":
        for rank, model in enumerate(models):
            model["strided"] = torch.zeros((70, 30) if rank else (30, 70), device="late:0")
            model["strided"] = model["strided"] if rank else model["strided"].t()

    def saved(rank: int) -> None:
        try:
            options = bcp.SaveOptions(replicas="error")
            bcp.save(path, {"model": models[rank]}, coordinator=ranks[rank], options=options)
        except bcp.StateError as error:
            errors[rank] = error

    busy(late)
    for rank, model in enumerate(models):
        for tensor in model.values():
            tensor.fill_(5 + rank if how == "values differ" else 5)
    threads = [threading.Thread(target=saved, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(errors) == ([0, 1] if how == "values differ" else [])
    assert all("different values" in str(error) for error in errors.values())
