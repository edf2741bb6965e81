from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
from ranks import Ranks, forkserver, record_patiently
from sharing import ByFile, are_long

pytest.register_assert_rewrite("gpu.scenarios")  # shared by tests/gpu and tests/device
hypothesis.settings.register_profile("bcp", deadline=None, derandomize=True)
"""How long an example takes is the machine's business. New examples are those of ``make soak``."""
hypothesis.settings.load_profile("bcp")


LONGEST = ["test_examples.py", "test_hdfs_faults.py", "test_torchrun.py", "test_commit_table.py", "test_chaos.py"]
LONGEST += ["test_run_stops.py", "test_commit_races.py"]
LONGEST += ["test_transformers.py", "test_megatron.py", "test_torchtitan.py", "test_lightning.py"]  # of make hosts
"""Files that take minutes in ``make test-all`` or ``make hosts``: they begin first, in this order."""

MOST = 8
"""Cores that a run without ``-n`` takes at most: each process imports torch, in seconds and 300 MB."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run in one process more than cores, long tests in two more, unless the command line says ``-n`` or needs one.

    One file needs one process. So does a debugger, and so do tests whose output is watched (``-s``).
    """
    option = config.option
    if hasattr(config, "workerinput") or getattr(option, "numprocesses", 0) is not None or option.tx:
        return
    paths = {Path(each.partition("::")[0]) for each in config.args}
    one_file = len(paths) == 1 and paths.pop().is_file()
    if not (one_file or option.usepdb or option.trace or option.capture == "no" or option.collectonly):
        option.numprocesses = min(len(os.sched_getaffinity(0)), MOST) + 1 + are_long(config)


@pytest.hookimpl(optionalhook=True)  # with `-p no:xdist` there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Let xdist use it, in the order of collection. By itself xdist puts files with few tests last, long ones too."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``make test-random`` choose an order, and ``make soak`` how much. Seeds of random numbers stay."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order of files, and of tests in each file")
    parser.addoption("--examples", type=int, metavar="N", default=1, help="N times as many examples of hypothesis")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how the order comes again."""
    seed = config.option.shuffle
    return None if seed is None else f"random order: --shuffle={seed}"


@pytest.hookimpl(trylast=True)  # hypothesis has marked its tests by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files and those with ranks first: one at the end would keep one process busy, the others idle."""
    if config.option.examples > 1:
        for item in items:
            if item.get_closest_marker("hypothesis"):
                _multiply(item, config.option.examples)
    if config.option.shuffle is not None:
        dice = random.Random(config.option.shuffle)  # noqa: S311 -- an order, no secret
        place = {path: dice.random() for path in dict.fromkeys(item.path for item in items)}
        dice.shuffle(items)
        items.sort(key=lambda item: place[item.path])
        return
    long = {item.path for item in items if item.get_closest_marker("dist")}
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), item.path not in long))


def _multiply(item: pytest.Item, factor: int) -> None:
    """Let a test of hypothesis try more and new examples. Machines of states have their settings at their class."""
    function = getattr(item, "obj", None)
    holder, name = getattr(function, "__func__", function), "_hypothesis_internal_use_settings"
    if not hasattr(holder, name):
        holder, name = getattr(item, "cls", None), "settings"
    own = getattr(holder, name, None)
    if not isinstance(own, hypothesis.settings):
        raise pytest.UsageError(
            f"{item.nodeid}: this hypothesis keeps its settings elsewhere; --examples has no effect"
        )
    setattr(holder, name, hypothesis.settings(own, max_examples=own.max_examples * factor, derandomize=False))


def pytest_configure() -> None:
    """Let Ctrl-C work as in a terminal where a shell has started the tests in the background, with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Make ready what all tests share.

    Garbage collections spare the imported modules: a failed operation makes one, of 0.15 s with torch alone. Reader
    workers start as ranks do, whichever test comes first.
    """
    record_patiently()
    gc.freeze()
    forkserver()


@pytest.fixture(scope="module", autouse=True)
def _spare_older_objects() -> None:
    """Let garbage collections of a file spare the objects of the files before it: a failed operation makes one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _let_ranks_rest() -> Iterator[None]:
    """End pools that three files did not use."""
    yield
    Ranks.rest()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    """Three gloo processes, whose shards differ in size."""
    with closing(Ranks(3)) as ranks:
        yield ranks


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
