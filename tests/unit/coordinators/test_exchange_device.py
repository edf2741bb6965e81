"""What a load says of an exchange that this process cannot take part in, before anything is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

import bcp
from bcp.coordinators import SoloCoordinator
from bcp.coordinators.process_group import exchange_device


def ranks(**more: Any) -> Any:
    return SimpleNamespace(rank=1, world_size=4, **more)


@pytest.fixture
def initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


@pytest.mark.parametrize("exchange", ["sockets", "gloo", "nccl"])
def test_one_rank_needs_nothing(tmp_path: Path, exchange: Any) -> None:
    assert exchange_device(exchange, SoloCoordinator()) is None
    bcp.save(tmp_path, {"model": {"w": torch.arange(9)}})
    target = torch.zeros(9, dtype=torch.int64)
    bcp.load(tmp_path, {"model": {"w": target}}, options=bcp.LoadOptions(exchange=exchange))
    assert target.tolist() == list(range(9))


def test_sockets_need_no_process_group() -> None:
    assert exchange_device("sockets", ranks()) is None


@pytest.mark.parametrize("exchange", ["gloo", "nccl"])
def test_without_a_process_group_the_error_says_what_to_call(exchange: str) -> None:
    with pytest.raises(bcp.InputError, match=r"call torch\.distributed\.init_process_group on every rank before"):
        exchange_device(exchange, ranks())


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("exchange", ["gloo", "nccl"])
def test_certificates_are_not_passed_over(exchange: str) -> None:
    with pytest.raises(bcp.InputError, match="sends bytes unencrypted, and the coordinator has certificates"):
        exchange_device(exchange, ranks(tls=object()))


@pytest.mark.usefixtures("initialised")
def test_gloo_exchanges_host_memory() -> None:
    assert exchange_device("gloo", ranks(tls=None)) is None


@pytest.mark.usefixtures("initialised")
def test_nccl_exchanges_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(bcp.InputError, match=r"rank 1 .* lacks an accelerator"):
        exchange_device("nccl", ranks())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert exchange_device("nccl", ranks()) == torch.device("cuda:3")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    with pytest.raises(bcp.InputError, match="unset it"):
        exchange_device("nccl", ranks())


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(bcp.InputError, match="exchange='mpi' is unknown; use 'sockets' or 'gloo' or 'nccl'"):
        bcp.LoadOptions(exchange="mpi")  # type: ignore[arg-type]  # what the test is about
