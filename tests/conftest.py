from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo processes; the first test that uses them waits some seconds for their start."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
