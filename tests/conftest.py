from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import hypothesis
import pytest
from ranks import Ranks

hypothesis.settings.register_profile("bcp", deadline=None)  # how long an example takes is the machine's business
hypothesis.settings.load_profile("bcp")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo processes; the first test that uses them waits some seconds for their start."""
    with closing(Ranks(4)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def megatron4() -> Iterator[Ranks]:
    """Four processes for Megatron alone, which keeps its groups in globals, and takes seconds to import."""
    with closing(Ranks(4)) as ranks:
        yield ranks
