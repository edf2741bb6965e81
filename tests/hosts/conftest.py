from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest
from left_networks import remove_left_networks

from benchmarks.network import Network, missing


@cache
def _missing() -> str:
    """Say why this machine cannot play a network, or nothing. What killed runs have left is removed first."""
    remove_left_networks()
    return missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of this folder wait for as long as they want: each of their waits has an end."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(5000))


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
