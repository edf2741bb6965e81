from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import hypothesis
import pytest
from ranks import Ranks

hypothesis.settings.register_profile("bcp", deadline=None)  # how long an example takes is the machine's business
hypothesis.settings.load_profile("bcp")


_RANKS = {"ranks4", "megatron4", "deepspeed4"}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the tests between the processes of ``make test`` by file; what needs ranks is together, and comes first.

    Starting ranks takes seconds and gigabytes, so that one process does it for all.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: groups[item] != "ranks")


def _group(item: pytest.Item) -> str:
    """Return which tests go to the same process."""
    needs = _RANKS.intersection(getattr(item, "fixturenames", ()))
    return "ranks" if needs or item.path.parent.name in ("distributed", "frameworks") else str(item.path)


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
