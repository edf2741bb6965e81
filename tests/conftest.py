from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
from ranks import Ranks, forkserver
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("gpu.scenarios")  # shared by tests/gpu and tests/device
hypothesis.settings.register_profile("bcp", deadline=None)  # how long an example takes is the machine's business
hypothesis.settings.load_profile("bcp")


class _ByFile(LoadScopeScheduling):
    """Shares the tests between the processes of ``make test``: by file, or by folder where all need many ranks.

    Starting ranks takes seconds and gigabytes, so that each process does it once at most.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder = Path(path).parent.name
        return folder if folder in ("distributed", "frameworks") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByFile:
    """Let xdist use it, in the order of collection. By itself xdist puts files with few tests last, long ones too."""
    config.option.loadscopereorder = False
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that spawn ranks first: one of them at the end would keep one process busy and the other one idle."""
    long = {item.path for item in items if item.get_closest_marker("dist")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Make ready what all tests share.

    Garbage collections spare the imported modules: a failed operation makes one, of 0.15 s with torch alone. Reader
    workers start as ranks do, whichever test comes first.
    """
    gc.freeze()
    forkserver()


@pytest.fixture(scope="module", autouse=True)
def _spare_older_objects() -> None:
    """Let garbage collections of a file spare the objects of the files before it: a failed operation makes one."""
    gc.collect()
    gc.freeze()


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
