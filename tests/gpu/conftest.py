"""Bounds the GPU tests to eight minutes in all, and measures the speed of the disk for the figures."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu.bounds import SECONDS, limit
from gpu.scenarios.figures import GB, disk_speed
from gpu.scenarios.scale import cycles_per_second, forget_pinned

_began: list[float] = []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Bound each GPU test by the time that is left; torch's warnings are no errors, they depend on the machine."""
    if item.get_closest_marker("gpu"):
        _began.append(time.monotonic())
        item.add_marker(pytest.mark.timeout(limit(_began[-1] - _began[0])), append=False)
        item.add_marker(pytest.mark.filterwarnings("default", "error:::bcp"))
    return (yield)


@pytest.fixture(scope="session")
def speed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the measured speed of the disk, in bytes a second."""
    found = disk_speed(tmp_path_factory.mktemp("speed"))
    print(f"\ndisk: {found / GB:.2f} GB/s; the sizes of the figures depend on it")
    return found


@pytest.fixture
def device(tmp_path: Path) -> Iterator[None]:
    """Have an idle CUDA device, and time left. Memory and files are given back after the test."""
    assert torch.cuda.is_available(), "these tests need a CUDA device; leave out `-m gpu` where there is none"
    assert time.monotonic() - _began[0] < SECONDS, f"the {SECONDS} s of all GPU tests are over"
    torch.cuda.set_device(0)
    cycles_per_second()
    yield
    torch.cuda.synchronize()
    gc.collect()
    forget_pinned()
    torch.cuda.empty_cache()
    shutil.rmtree(tmp_path)
