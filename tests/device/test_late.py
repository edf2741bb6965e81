"""Tests of the emulation itself."""

from __future__ import annotations

import copy
import gc
import os
import threading
from pathlib import Path

import late
import numpy as np
import pytest
import torch
from late import accelerators, launch, sleep
from torch import nn

import bcp
from bcp.runtime import accelerator as _accelerator
from bcp.runtime.staging import shared_pool
from bcp.stages import gather

KINDS = pytest.mark.parametrize("kind", ["cuda", "xpu"])
POISONED = torch.full((4,), late.POISON, dtype=torch.uint8).view(torch.float32).item()


def in_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@KINDS
def test_tensors_pose_as_device_memory(kind: str) -> None:
    with accelerators(kind) as machine:
        tensor = torch.ones(2, 3, device=f"{kind}:1")
        view = nn.Parameter(tensor.t()[1:])
        assert view.device == torch.device(kind, 1)
        assert (view.is_cpu, view.is_cuda, view.is_xpu) == (False, kind == "cuda", kind == "xpu")
        assert type(view.data) is torch.Tensor
        assert torch.empty(3).is_cpu
        assert torch.cuda.is_available() == (kind == "cuda")
        assert torch.accelerator.current_accelerator() == torch.device(kind)
        with pytest.raises(TypeError, match="cpu"):
            tensor.numpy()
        assert torch.equal(tensor.cpu(), torch.ones(2, 3))
    assert not machine.final
    assert tensor.is_cpu
    assert not torch.accelerator.is_available()
    assert "device" not in vars(torch.Tensor)


@KINDS
def test_computing_on_a_device(kind: str) -> None:
    with accelerators(kind, seed=3) as machine:
        a = torch.arange(6, dtype=torch.float32).to(kind).view(2, 3)
        b = (a * 2 + 1).t().contiguous()
        b[0] = 7
        b[1, 1].zero_()
        torch._foreach_add_([b], 1)
        c = torch.cat([b, b.clone()]).to(torch.bfloat16)
        assert c.device == a.device
        assert c.tolist() == [[8, 8], [4, 1], [6, 12]] * 2
        assert ((a * (a > 3)).sum().item(), bool((a >= 0).all())) == (9, True)
        assert torch.equal(copy.deepcopy({"b": b})["b"], b)
        assert repr(b).endswith(f"on {kind}:0")
        with pytest.raises(RuntimeError, match="CPU"):
            a + torch.ones(2, 3)
    assert not machine.final


def test_an_optimizer_steps_on_a_device() -> None:
    results = []
    for kind in ("cuda", "cpu"):
        with accelerators("cuda"):
            torch.manual_seed(0)
            model = nn.Linear(3, 3).to(kind)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            results.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.allclose(one, other) for one, other in zip(*results, strict=True))


@KINDS
def test_an_unsynchronised_read_sees_poison_and_is_a_defect(kind: str) -> None:
    with accelerators(kind) as machine:
        source = torch.ones(4, device=kind)
        host = torch.empty(4, pin_memory=True)
        launch((gate := threading.Event()).wait)
        host.copy_(source, non_blocking=True)
        with late.as_host():
            assert host.tolist() == [POISONED] * 4
        assert not machine.defects
        assert host.sum() != 4  # a read by the host
        gate.set()
        assert machine.forgive()[0].startswith("host: sum while a copy to the host")
        torch.accelerator.synchronize()
        assert host.tolist() == [1] * 4
        assert not machine.defects


def test_a_copy_reads_its_source_when_the_stream_comes_to_it() -> None:
    with accelerators() as machine:
        source, host = torch.zeros(4, device="cuda"), torch.empty(4, pin_memory=True)
        sleep(0.01)
        launch(lambda: source.fill_(5), writes=[source])
        host.copy_(source, non_blocking=True)
        source.fill_(6)
        torch.cuda.current_stream().synchronize()
        assert host.tolist() == [5] * 4
        assert source.tolist() == [6] * 4
        assert not machine.defects


def test_pageable_memory_is_copied_at_once_on_cuda_alone() -> None:
    for kind in ("cuda", "xpu"):
        with accelerators(kind) as machine:
            host, device = torch.ones(4), torch.zeros(4, device=kind)
            torch.accelerator.synchronize()
            sleep(0.02)
            device.copy_(host, non_blocking=True)
            host.fill_(9)
            assert bool(machine.forgive()) == (kind == "xpu")
            host.copy_(device, non_blocking=True)
            host.tolist()
            assert bool(machine.forgive()) == (kind == "xpu")


@KINDS
def test_streams_are_ordered_by_events_alone(kind: str) -> None:
    with accelerators(kind) as machine:
        data = torch.zeros(4, device=kind)
        side = torch.Stream(device=kind)
        torch.accelerator.synchronize()
        data.fill_(1)
        with side:
            assert torch.accelerator.current_stream() == side
            data.fill_(2)
        assert [found.partition(" on")[0] for found in machine.forgive()] == ["race: fill_"]
        event = torch.Event(device=kind)
        side.record_event(event)
        torch.accelerator.current_stream().wait_event(event)
        data.fill_(3)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            data.fill_(4)
        side.synchronize()
        assert data.tolist() == [4] * 4
        assert not machine.defects


def test_events_and_queries() -> None:
    with accelerators() as machine:
        event = torch.cuda.Event(blocking=True)
        assert event.query()
        launch((gate := threading.Event()).wait)
        event.record()
        assert not event.query()
        gate.set()
        event.synchronize()
        assert event.query()
        assert torch.cuda.current_stream().query()
        assert machine.counts["event synchronize"] == 1


def test_device_and_stream_belong_to_the_thread() -> None:
    with accelerators(devices=3):
        torch.cuda.set_device(2)
        side = torch.cuda.Stream(1)
        found = []
        in_thread(lambda: found.append((torch.cuda.current_device(), torch.cuda.current_stream(1) == side)))
        torch.cuda.set_stream(side)
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() == side
        assert found == [(0, False)]
        with torch.cuda.stream(torch.cuda.default_stream(0)):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").get_device() == 1
        torch.accelerator.set_device_index(0)
        assert torch.accelerator.current_device_index() == 0
        with pytest.raises(RuntimeError, match="ordinal"):
            torch.cuda.set_device(3)


def test_side_streams_come_in_turn_from_a_pool() -> None:
    with accelerators(devices=1):
        first = torch.cuda.Stream()
        assert len({torch.cuda.Stream() for _ in range(31)} | {first}) == 32
        assert torch.cuda.Stream() == first


def test_freed_memory_is_used_again_at_once() -> None:
    with accelerators() as machine:
        first = torch.ones(64, device="cuda")
        where = first.data_ptr()
        del first
        assert torch.empty(64, device="cuda").data_ptr() == where
        side = torch.cuda.Stream()
        data, out = torch.ones(64, device="cuda"), torch.empty(64, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch((gate := threading.Event()).wait)
            out.copy_(data, non_blocking=True)
        del data
        assert torch.empty(64, device="cuda").is_cuda  # the same memory
        torch.cuda.current_stream().synchronize()
        gate.set()
        assert [found[:8] for found in machine.forgive()] == ["lifetime"]
        side.synchronize()
        assert out[0] == POISONED


def test_record_stream_and_waiting_let_memory_be_freed() -> None:
    with accelerators() as machine:
        side = torch.cuda.Stream()
        for how in ("record", "wait"):
            data, out = torch.ones(64, device="cuda"), torch.empty(64, pin_memory=True)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out.copy_(data, non_blocking=True)
            if how == "record":
                data.record_stream(side)
            else:
                torch.cuda.current_stream().wait_stream(side)
            del data
            assert not machine.defects
            side.synchronize()


def test_copies_between_devices() -> None:
    with accelerators(devices=2, seed=5) as machine:
        one = torch.zeros(8, device="cuda:0")
        sleep(0.01)
        one.fill_(3)
        other = one.to("cuda:1")
        one.fill_(4)
        assert other.tolist() == [3] * 8
        assert machine.counts["d2d"] == 1
        assert not machine.defects


def test_small_tensors_are_copied_by_one_kernel_on_a_device_only() -> None:
    with accelerators() as machine:
        sources = [torch.full((n,), float(n), device="cuda") for n in range(1, 9)]
        there, here = torch.empty(36, device="cuda"), torch.empty(36, pin_memory=True)
        sizes = [len(each) for each in sources]
        torch._foreach_copy_(torch.split(there, sizes), sources)
        assert (machine.counts["d2d"], machine.counts["d2h"]) == (1, 0)
        torch._foreach_copy_(torch.split(here, sizes), sources, non_blocking=True)
        assert (machine.counts["d2d"], machine.counts["d2h"]) == (1, 8)
        torch.cuda.synchronize()
        assert torch.equal(here, there.cpu())
        assert not machine.defects


def test_writes_count_when_they_are_queued() -> None:
    with accelerators():
        data = torch.zeros(4, device="cuda")
        before = data._version
        sleep(0.01)
        data[1:].fill_(1)
        data.copy_(torch.ones(4), non_blocking=True)
        assert data._version == before + 2
        torch.cuda.synchronize()
        assert data._version == before + 2


def forked(work) -> None:
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_must_not_free_what_copies_used() -> None:
    with accelerators() as machine:
        held = [torch.empty(4, pin_memory=True)]
        forked(held.clear)
        assert not machine.defects
        held[0].copy_(torch.ones(4, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        forked(held.clear)
        assert machine.forgive() == ["A forked child freed page-locked memory of torch: CUDA aborts there"]
        forked(lambda: torch.cuda.cudart().cudaHostUnregister(1))
        assert "unregistered" in machine.forgive()[0]


def test_a_forked_child_has_no_device() -> None:
    with accelerators() as machine:

        def child() -> None:
            assert not torch.cuda.is_initialized()
            with pytest.raises(RuntimeError, match="forked"):
                torch.cuda.synchronize()
            with pytest.raises(RuntimeError, match="forked"):
                torch.zeros(1, device="cuda")

        forked(child)
        assert not machine.final


def test_registered_memory() -> None:
    import mmap  # noqa: PLC0415 -- that of the emulation

    with accelerators() as machine:
        runtime = torch.cuda.cudart()
        area = mmap.mmap(-1, 1 << 16)
        buffer = torch.frombuffer(area, dtype=torch.uint8)
        assert not buffer.is_pinned()
        assert runtime.cudaHostRegister(buffer.data_ptr(), 1 << 16, 0) == runtime.cudaError.success
        assert runtime.cudaHostRegister(buffer.data_ptr(), 1 << 16, 0) == 712
        assert buffer.is_pinned()
        assert late.memory().locked_nbytes == 1 << 16
        source = torch.ones(1 << 16, dtype=torch.uint8, device="cuda")
        buffer.copy_(source, non_blocking=True)
        assert runtime.cudaHostUnregister(buffer.data_ptr()) == 0
        assert "unregister while a copy to the host" in machine.forgive()[0]
        torch.cuda.synchronize()
        assert runtime.cudaHostUnregister(buffer.data_ptr()) == 713
        assert runtime.cudaHostRegister(buffer.data_ptr(), 1 << 16, 0) == 0
        del buffer, area
        gc.collect()
        assert machine.forgive() == ["memory was unmapped while it was registered"]


def test_pinned_memory_is_rounded_and_cached() -> None:
    with accelerators() as machine:
        memory = late.memory()
        buffer = torch.empty((1 << 16) + 1, dtype=torch.uint8, pin_memory=True)
        assert buffer.is_pinned()
        assert memory.locked_nbytes == 1 << 17
        del buffer
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0
        assert memory.locked_nbytes == 1 << 17
        assert torch.empty(1 << 17, dtype=torch.uint8, pin_memory=True).is_pinned()
        assert machine.counts["pin"] == 1
        torch._C._host_emptyCache()
        assert memory.locked_nbytes == 0


def test_what_is_forbidden_while_a_stream_captures() -> None:
    with accelerators() as machine:
        data, event = torch.zeros(4, device="cuda"), torch.cuda.Event()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            with machine.capture() as graph:
                assert torch.cuda.is_current_stream_capturing()
                data.add_(1)
                in_thread(event.query)
                in_thread(lambda: torch.empty(4, pin_memory=True))
                in_thread(torch.cuda.synchronize)
            assert [found.partition(" while")[0] for found in machine.forgive()] == [
                "event query",
                "allocation of page-locked memory",
                "device synchronize",
            ]
            assert data.tolist() == [0] * 4
            graph.replay()
            graph.replay()
            assert data.tolist() == [2] * 4
            with machine.capture("thread_local"):
                in_thread(event.query)

            def relaxed() -> None:
                _accelerator.enter_thread(0)
                event.query()

            with machine.capture():
                in_thread(relaxed)
        assert not machine.defects


def test_no_room_on_a_device() -> None:
    with accelerators():
        late.memory().refuse = 2
        torch.empty(4, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4, device="cuda")
        torch.empty(4, device="cuda")


def test_random_states_are_those_of_the_current_device() -> None:
    with accelerators(devices=2):
        torch.cuda.set_device(1)
        assert torch.cuda.get_rng_state()[0] == 2
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
        assert torch.cuda.get_rng_state(0)[0] == 1
        assert torch.cuda.get_rng_state_all()[1][0] == 0


@pytest.mark.parametrize("seed", range(3))
def test_plain_saves_and_loads_run(tmp_path: Path, seed: int) -> None:
    with accelerators(devices=1, seed=seed) as machine:
        model = {f"w{n}": torch.randn(60_000).cuda() for n in range(6)}
        model |= {f"s{n}": torch.randn(n + 1).cuda() for n in range(50)} | {"t": torch.randn(30, 50).cuda().t()}
        wanted = {name: tensor.cpu() for name, tensor in model.items()}
        bcp.prepare({"model": model}).wait()
        pending = bcp.save(tmp_path, {"model": model}, async_checkpoint=True)
        for tensor in model.values():
            tensor.fill_(7)
        pending.wait()
        found = {name: torch.zeros(tensor.shape) for name, tensor in model.items()}
        bcp.load(tmp_path, {"model": found})
        bcp.load(tmp_path, {"model": model})
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
            assert torch.equal(model[name].cpu(), tensor), name
    assert not machine.final


def test_a_staging_buffer_that_is_given_back_too_early() -> None:
    with accelerators() as machine:
        pool, source = shared_pool(pinned=True), torch.ones(100, dtype=torch.uint8, device="cuda")
        with pool.lease() as lease:
            buffer = lease.take(100)
            buffer[:100].copy_(source, non_blocking=True)
            lease.give(buffer)
            assert "is given back while a copy to the host" in machine.forgive()[0]
            lease.take(100)
        assert "is given back while a copy to the host" in machine.forgive()[0]
        torch.cuda.synchronize()
        with pool.lease() as lease:
            lease.give(lease.take(100))
        assert not machine.defects
        del buffer, lease
        pool.clear()  # memory goes before the machine does


def test_plain_copies_of_bcp_are_watched() -> None:
    with accelerators() as machine:
        host = torch.empty(8, dtype=torch.uint8, pin_memory=True)
        host.copy_(torch.ones(8, dtype=torch.uint8, device="cuda"), non_blocking=True)
        other = torch.empty(8, dtype=torch.uint8)
        columns = (np.array([pointer]) for pointer in (other.data_ptr(), host.data_ptr(), 8))
        gather.move(*columns)
        assert "bcp reads memory while a copy to the host" in machine.forgive()[0]


def test_nothing_of_it_stays_behind() -> None:
    before = {name: vars(torch.accelerator)[name] for name in torch.accelerator.__all__}

    class Own(torch.Tensor):
        """A subclass that is there before."""

    with accelerators():

        class Late(torch.Tensor):
            """A subclass that is made meanwhile."""

    for kind in (torch.Tensor, torch.nn.Parameter, Own, Late):
        parts = [part.as_subclass(kind) if kind is not torch.nn.Parameter else part for part in torch.arange(2)]
        assert torch.tensor(parts).tolist() == [0, 1]
    assert {name: vars(torch.accelerator)[name] for name in torch.accelerator.__all__} == before
    assert not torch.accelerator.is_available()
