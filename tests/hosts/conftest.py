from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache

import pytest

from benchmarks.network import Network, missing

_missing = cache(missing)


@pytest.fixture
def networks() -> Iterator[Callable[..., Network]]:
    """Return what makes networks; where none can be played, skip, or fail in CI."""
    if why := _missing():
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"no network of hosts on this machine: {why}")
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(closing(Network(*args, **kwargs)))


@pytest.fixture
def network(networks: Callable[..., Network]) -> Network:
    """Four hosts."""
    return networks(4)
