"""Forks at any moment: a child finds every lock of bcp open, and saves and loads by itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from samples import sample

from bcp.runtime.process import cached_property, in_forked_child, process_lock, process_rlock

ROOT = Path(__file__).parents[2]
LOCK = re.compile(r"(?<![\w.])(threading\.)?R?Lock\(\)|from functools import .*cached_property")

FORKS = """\
import faulthandler, itertools, os, random, signal, sys, threading
import torch
import bcp

torch.set_num_threads(1)
random.seed(int(sys.argv[2]))
folder, forks = sys.argv[1], 8
ended = threading.Event()


def make_states():
    return {"model": {f"w{n}": torch.full((64,), float(n)) for n in range(50)}, "extra_states": {"rng": bcp.RngState()}}


def save_again_and_again(name, states):
    for number in itertools.count():
        pending = bcp.save(f"{folder}/{name}", states, overwrite=True, async_checkpoint=True)
        bcp.save(f"memory://{name}", states, overwrite=True)
        pending.wait()
        if number % 3 == 0:
            bcp.load(f"{folder}/{name}", states)
        if ended.is_set():
            return


def work_in_child(number):
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(60)  # a child that hangs says where, and is killed
    for path in (f"{folder}/child-{number}", f"memory://child-{number}"):
        bcp.save(path, states)
        fresh = {"model": {name: torch.zeros(64) for name in states["model"]}}
        bcp.load(path, fresh)
        assert all(torch.equal(fresh["model"][name], states["model"][name]) for name in fresh["model"])


# each thread has its own, made before: a state is not saved while it is loaded, and torch's first calls are made once
states, *others = [make_states() for _ in range(3)]
threads = [threading.Thread(target=save_again_and_again, args=(f"parent-{n}", others[n])) for n in range(2)]
for thread in threads:
    thread.start()
outcomes = []
for number in range(forks):
    for _ in range(random.randrange(20_000)):  # a moment that no clock chooses
        pass
    if (child := os.fork()) == 0:
        try:
            work_in_child(number)
        except BaseException as error:
            print(f"child {number}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    outcomes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended.set()
for thread in threads:
    thread.join()
assert outcomes == [0] * forks, outcomes
"""


@pytest.mark.parametrize("seed", sample([1, 2], 1))
def test_children_of_forks_at_random_moments_save_and_load(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, str(tmp_path), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603 -- our own code
    assert done.returncode == 0, done.stderr


IMPORTS = """\
import sys
import torch
import bcp

path, first = sys.argv[1:]
exec(first)
before = set(sys.modules)
states = {"model": {f"w{n}": torch.ones(n + 1) for n in range(5)}, "extra_states": {"rng": bcp.RngState(), "a": [1]}}
for url in (path, f"memory://{path}"):
    bcp.save(f"{url}/one", states, async_checkpoint=True).wait()
    bcp.save(f"{url}/one", states, overwrite=True)
    bcp.load(f"{url}/one", states)
with bcp.Run(f"{path}/run", states, save=1, keep=1) as run:
    for step in range(run.resume() + 1, 4):
        run.maybe_save(step)
        run.should_stop(step)
print(*sorted(set(sys.modules) - before))
"""


FIRST = ["bcp.load", "bcp.Run", "bcp.prepare({'model': {'w': torch.ones(1)}}).wait()"]


@pytest.mark.parametrize("first", sample(FIRST, "bcp.Run"))
def test_saves_and_loads_import_nothing(first: str, tmp_path: Path) -> None:
    """All imports are made with the first name.

    A process that is forked in an import cannot make the same import: it waits for the thread that did not come.
    """
    command = [sys.executable, "-c", IMPORTS, str(tmp_path), first]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)  # noqa: S603 -- our own code
    assert done.stdout.split() == []


@pytest.mark.parametrize("make", [process_lock, process_rlock])
def test_a_lock_that_another_thread_holds_is_open_in_a_child(make: type) -> None:
    lock, is_held, may_end = make(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    if (child := os.fork()) == 0:
        os._exit(0 if lock.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not lock.acquire(blocking=False)
    may_end.set()
    holder.join()


class Slow:
    """Has an attribute whose first computation takes as long as another thread wants."""

    def __init__(self, compute: Callable[[], object]) -> None:
        self.compute = compute

    @cached_property
    def value(self) -> object:
        return self.compute()


def test_a_child_forked_while_another_thread_computes_an_attribute_computes_its_own() -> None:
    is_inside, may_end = threading.Event(), threading.Event()
    slow = Slow(lambda: is_inside.set() or may_end.wait())
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    is_inside.wait()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        os._exit(0 if Slow(lambda: 7).value == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_end.set()
    thread.join()


def test_an_attribute_is_computed_once() -> None:
    counted = Slow(object)
    assert counted.value is counted.value
    assert Slow(object).value is not counted.value
    assert type(Slow.value) is cached_property


def test_threads_that_compute_an_attribute_at_once_read_one_object() -> None:
    begin = threading.Barrier(2)
    slow = Slow(lambda: (begin.wait(), object())[1])
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: slow.value, range(2))
    assert one is other


def test_hooks_run_in_the_child_alone() -> None:
    calls: list[int] = []
    in_forked_child(lambda: calls.append(os.getpid()))
    if (child := os.fork()) == 0:
        os._exit(0 if calls == [os.getpid()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not calls


def test_every_lock_of_bcp_is_one_that_opens_in_a_child() -> None:
    found = {
        str(path.relative_to(ROOT)): LOCK.findall(path.read_text())
        for path in (ROOT / "bcp").rglob("*.py")
        if path.name != "process.py" and LOCK.search(path.read_text())
    }
    assert found == {}
