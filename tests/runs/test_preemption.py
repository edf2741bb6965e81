"""Signals and notices: in Python, in long calls of C, beside event loops, in forked children, and back."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
from forked import run_forked
from logs import captured_logs
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset

from bcp.errors import InputError
from bcp.runs.preemption import Preemption

LONG = 60.0
"""Seconds after which a test has failed."""


class Heard(queue.Queue[str]):
    """What a run was told; waits for it."""

    def next(self) -> str:
        return self.get(timeout=LONG)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Leave handlers, wake-up descriptor and threads as they were."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    yield
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [each.name for each in threading.enumerate() if each.name.startswith(("bcp-preemption", "bcp-notice"))]


@pytest.fixture
def heard() -> Heard:
    return Heard()


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def installed(heard: Heard) -> Iterator[Preemption]:
    preemption = Preemption()
    preemption.install(heard.put)
    yield preemption
    preemption.close()


# -- signals ---------------------------------------------------------------------------------------


def test_making_one_changes_nothing() -> None:
    preemption = Preemption()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert (preemption.reason, preemption.deadline, preemption.seconds_left()) == (None, None, math.inf)
    preemption.close()
    assert repr(preemption) == "<Preemption by SIGTERM, SIGUSR1: not installed>"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_told_in_a_thread_with_the_seconds_that_are_left(number: signal.Signals) -> None:
    told: queue.Queue[tuple[str, threading.Thread]] = queue.Queue()
    preemption = Preemption(grace_seconds=600.0)
    preemption.install(lambda reason: told.put((reason, threading.current_thread())))
    before = time.monotonic()
    send(number)
    reason, thread = told.get(timeout=LONG)
    assert reason == preemption.reason == number.name
    assert thread.daemon
    assert preemption.deadline is not None
    assert before + 600.0 <= preemption.deadline <= time.monotonic() + 600.0
    assert 0.0 < preemption.seconds_left() <= 600.0
    preemption.close()


def test_a_second_signal_is_not_told(installed: Preemption, heard: Heard) -> None:
    send()
    assert heard.next() == "SIGTERM"
    deadline = installed.deadline
    send(signal.SIGUSR1)
    installed.close()  # ends the thread that would tell it
    assert heard.empty()
    assert (installed.reason, installed.deadline) == ("SIGTERM", deadline)


def test_a_long_call_of_c_in_the_main_thread_does_not_delay_it() -> None:
    store = HashStore()  # its wait is no system call that a signal interrupts, and ends when the run is told
    preemption = Preemption()
    preemption.install(lambda reason: store.set("told", reason))
    sender = threading.Timer(0.05, send)
    sender.start()
    store.wait(["told"], timedelta(seconds=LONG))
    sender.join()
    assert store.get("told") == b"SIGTERM"
    preemption.close()


def test_a_matrix_product_does_not_delay_it(installed: Preemption) -> None:
    matrix = torch.rand(256, 256)
    send()
    deadline = time.monotonic() + LONG
    while installed.reason is None:
        assert time.monotonic() < deadline
        matrix = matrix @ matrix / 256


def test_other_signals_are_let_pass(installed: Preemption, heard: Heard) -> None:
    seen = list[int]()
    earlier = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    send(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, earlier)
    installed.close()
    assert seen == [signal.SIGUSR2]
    assert heard.empty()
    assert installed.reason is None


def test_a_pipe_full_of_other_signals_loses_none(heard: Heard) -> None:
    preemption, release = Preemption(signals=[signal.SIGTERM, signal.SIGUSR1]), threading.Event()

    def asked(reason: str) -> None:
        heard.put(reason)
        release.wait(LONG)

    preemption.install(asked)
    send(signal.SIGUSR1)
    assert heard.next() == "SIGUSR1"
    first = preemption.deadline
    assert preemption._pipe is not None
    with suppress(BlockingIOError):
        while True:
            os.write(preemption._pipe[1], b"\x11" * (1 << 12))
    preemption._grace = 0.0
    send()
    release.set()
    while preemption.deadline == first:
        time.sleep(0.001)
    preemption.close()


# -- earlier handlers ------------------------------------------------------------------------------


def test_an_earlier_handler_is_called_and_comes_back(heard: Heard) -> None:
    seen = list[tuple[int, bool]]()

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append((number, frame is not None))

    earlier = signal.signal(signal.SIGTERM, mine)
    try:
        preemption = Preemption()
        preemption.install(heard.put)
        send()
        assert heard.next() == "SIGTERM"
        assert seen == [(signal.SIGTERM, True)]
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_the_error_of_an_earlier_handler_is_raised_as_before(heard: Heard) -> None:
    def mine(number: int, _: FrameType | None) -> None:
        raise SystemExit(number)

    earlier = signal.signal(signal.SIGTERM, mine)
    preemption = Preemption()
    try:
        preemption.install(heard.put)
        with pytest.raises(SystemExit):
            send()
        assert heard.next() == "SIGTERM"
    finally:
        preemption.close()
        signal.signal(signal.SIGTERM, earlier)


def test_the_handlers_of_ignored_signals_and_of_ctrl_c_are_not_called(heard: Heard) -> None:
    earlier = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    preemption = Preemption(signals=[signal.SIGINT, signal.SIGUSR1])
    preemption.install(heard.put)
    send(signal.SIGINT)  # default_int_handler would raise KeyboardInterrupt
    assert heard.next() == "SIGINT"
    send(signal.SIGUSR1)
    preemption.close()
    assert signal.signal(signal.SIGUSR1, earlier) == signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_handler_that_was_installed_over_ours_stays(installed: Preemption) -> None:
    seen = list[int]()
    ours = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    installed.close()
    send()
    assert seen == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert callable(ours)


def test_handlers_that_call_each_other_end(heard: Heard) -> None:
    preemption, seen = Preemption(), list[int]()
    preemption.install(heard.put)
    ours: Any = signal.getsignal(signal.SIGTERM)

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        ours(number, frame)

    signal.signal(signal.SIGTERM, mine)
    preemption.close()
    preemption.install(heard.put)  # over the one that calls ours
    send()
    assert heard.next() == "SIGTERM"
    assert seen == [signal.SIGTERM]
    preemption.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_closed_in_another_thread_the_handlers_pass_on(heard: Heard) -> None:
    preemption = Preemption(signals=[signal.SIGINT])
    preemption.install(heard.put)
    closer = threading.Thread(target=preemption.close)
    closer.start()
    closer.join()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert heard.empty()
    preemption.install(heard.put)
    preemption.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_the_main_thread_the_notice_alone_is_left(heard: Heard) -> None:
    preemption = Preemption(notice=lambda: 7)
    installer = threading.Thread(target=preemption.install, args=(heard.put,))
    with captured_logs() as lines:
        installer.start()
        installer.join()
    assert [line["log_level"] for line in lines] == ["warning"]
    assert "SIGTERM" in lines[0]["event"]
    assert heard.next() == "spot notice: 7 s left"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    preemption.close()


def test_an_installed_one_is_not_installed_again(installed: Preemption, heard: Heard) -> None:
    with pytest.raises(InputError, match="in use; close the other run first"):
        installed.install(heard.put)


def test_who_installs_it_after_a_signal_is_told_at_once(installed: Preemption, heard: Heard) -> None:
    send()
    assert heard.next() == "SIGTERM"
    installed.close()
    installed.close()
    installed.install(heard.put)
    assert heard.next() == "SIGTERM"


def test_a_run_that_fails_when_it_is_told_is_logged() -> None:
    def asked(_: str) -> None:
        raise RuntimeError("no run")

    preemption = Preemption()
    preemption.install(asked)
    with captured_logs() as lines:
        send()
        preemption.close()
    assert "no run" in lines[0]["event"]


# -- event loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_first", [True, False])
def test_beside_an_event_loop_both_hear_their_signals(loop_first: bool) -> None:  # noqa: FBT001 -- parametrized
    told = list[str]()

    async def train() -> None:
        loop, usr2, term = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def asked(reason: str) -> None:
            told.append(reason)
            loop.call_soon_threadsafe(term.set)

        preemption = Preemption()
        if not loop_first:
            preemption.install(asked)
        loop.add_signal_handler(signal.SIGUSR2, usr2.set)
        if loop_first:
            preemption.install(asked)
        send(signal.SIGUSR2)
        send(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(usr2.wait(), term.wait()), LONG)
        preemption.close()
        usr2.clear()
        send(signal.SIGUSR2)  # the loop's way is still the loop's
        await asyncio.wait_for(usr2.wait(), LONG)
        loop.remove_signal_handler(signal.SIGUSR2)

    asyncio.run(train())
    assert told == ["SIGTERM"]


def test_an_event_loops_own_handler_of_the_signal_is_called_too(heard: Heard) -> None:
    async def train() -> None:
        loop, term = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, term.set)
        preemption = Preemption()
        preemption.install(heard.put)
        send()
        await asyncio.wait_for(term.wait(), LONG)
        assert await asyncio.to_thread(heard.next) == "SIGTERM"
        preemption.close()
        loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(train())


# -- forks -----------------------------------------------------------------------------------------


def forked(function: Callable[[], int]) -> int:
    """Run a function in a forked child; return the child's process id."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(function())
        finally:
            os._exit(99)
    return child


def how(child: int) -> int:
    """Return how a child ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sleep() -> int:
    time.sleep(LONG)
    return 98


def test_a_forked_child_dies_of_the_signal_from_its_first_moment_and_the_parent_does_not_hear_it(
    installed: Preemption, heard: Heard
) -> None:
    for _ in range(20):
        child = forked(sleep)
        os.kill(child, signal.SIGTERM)
        assert how(child) == -signal.SIGTERM
    send(signal.SIGUSR1)
    assert heard.next() == "SIGUSR1"
    installed.close()
    assert heard.empty()


def test_a_forked_child_has_the_earlier_handler(heard: Heard) -> None:
    def mine(_: int, __: FrameType | None) -> None:
        os._exit(7)

    earlier = signal.signal(signal.SIGTERM, mine)
    preemption = Preemption()
    preemption.install(heard.put)
    try:
        child = forked(lambda: 5 if signal.getsignal(signal.SIGTERM) != mine else sleep())
        os.kill(child, signal.SIGTERM)
        assert how(child) == 7
    finally:
        preemption.close()
        signal.signal(signal.SIGTERM, earlier)


def test_a_forked_child_can_close_it_and_make_its_own(installed: Preemption) -> None:
    def child() -> int:
        installed.close()
        mine, told = Preemption(), Heard()
        mine.install(told.put)
        send()
        return 0 if told.next() == "SIGTERM" and installed.reason is None else 1

    assert how(forked(child)) == 0
    assert installed.reason is None


FORK_IN_THREAD = """\
import os, signal, threading, time
from bcp.runs.preemption import Preemption

def fork():
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(98)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

preemption = Preemption()
preemption.install(print)
for _ in range(20):
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
preemption.close()
"""


def test_a_fork_from_another_thread_is_the_same() -> None:
    """In a process of its own. Such a fork destroys the main thread's objects, and those of other tests may crash."""
    command = [sys.executable, "-c", FORK_IN_THREAD]
    done = run_forked(command, timeout=4 * LONG)
    done.check_returncode()
    assert done.stdout.split() == [str(-signal.SIGTERM)] * 20


def test_a_started_program_dies_of_the_signal(installed: Preemption) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as program:
        program.terminate()
        assert program.wait(LONG) == -signal.SIGTERM
    assert installed.reason is None


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.usefixtures("installed")
def test_workers_of_a_dataloader_work_and_are_terminated(heard: Heard) -> None:
    loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    batches: Any = iter(loader)
    assert [int(each) for each in batches] == list(range(64))
    workers = batches._workers
    assert all(worker.is_alive() for worker in workers)
    send()
    assert heard.next() == "SIGTERM"
    batches._shutdown_workers()
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.usefixtures("installed")
def test_workers_of_a_dataloader_outlive_the_signals_of_others() -> None:
    loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    batches: Any = iter(loader)  # its workers have just been forked
    numbers = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        pids = [str(worker.pid) for worker in batches._workers]
        subprocess.run(["/bin/kill", f"-{int(number)}", *pids], check=True)  # noqa: S603 -- not the parent
        numbers.append(int(next(batches)))
    numbers += [int(each) for each in batches]
    assert numbers == list(range(64))


def test_a_dataloader_still_hears_of_a_worker_that_was_killed(installed: Preemption) -> None:
    loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    batches: Any = iter(loader)
    next(batches)
    before = signal.getsignal(signal.SIGCHLD)
    batches._workers[1].terminate()

    def rest(batches: Any) -> None:
        batches._workers[1].join()  # torch raises as it dies, or else at the next batch
        list(batches)

    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)"):
        rest(batches)
    assert signal.getsignal(signal.SIGCHLD) == before
    assert installed.reason is None
    del batches


# -- notices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "seconds"), [(True, 20.0), (120, 120.0), (90.5, 90.5), (0.0, 0.0), (-3, 0.0)])
def test_a_notice_is_told_with_its_seconds(heard: Heard, answer: float, seconds: float) -> None:
    answers: Iterator[float | bool | None] = iter([None, False, answer])
    preemption = Preemption(signals=(), grace_seconds=20.0, notice=lambda: next(answers), poll_seconds=0.001)
    before = time.monotonic()
    preemption.install(heard.put)
    assert heard.next() == f"spot notice: {seconds:.0f} s left"
    assert preemption.deadline is not None
    assert before + seconds <= preemption.deadline <= time.monotonic() + seconds
    preemption.close()


def test_errors_of_a_notice_are_logged_once_and_it_is_asked_again(heard: Heard) -> None:
    answers: Iterator[Any] = iter([OSError("no route"), OSError("no route"), "soon", math.nan, 5])

    def notice() -> Any:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    preemption = Preemption(notice=notice, poll_seconds=0.001)
    with captured_logs() as lines:
        preemption.install(heard.put)
        assert heard.next() == "spot notice: 5 s left"
    assert len(lines) == 1
    assert "no route" in lines[0]["event"]
    preemption.close()


def test_a_signal_shortens_the_time_of_a_notice(heard: Heard) -> None:
    preemption = Preemption(grace_seconds=30.0, notice=lambda: 120)
    preemption.install(heard.put)
    assert heard.next() == "spot notice: 120 s left"
    send()
    while preemption.seconds_left() > 30.0:
        time.sleep(0.001)
    assert preemption.reason == "spot notice: 120 s left"
    preemption.close()


def test_a_notice_that_hangs_does_not_hold_up_a_signal(heard: Heard) -> None:
    let_on = threading.Event()
    preemption = Preemption(notice=lambda: not let_on.wait(LONG))
    preemption.install(heard.put)
    send()
    assert heard.next() == "SIGTERM"
    let_on.set()
    preemption.close()


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": [signal.SIGKILL]}, "SIGKILL of .* cannot be caught"),
        ({"signals": [999]}, "signal 999 of .* cannot be caught"),
        ({"signals": ["SIGTERM"]}, "are no signals"),
        ({"signals": 15}, "are no signals"),
        ({"grace_seconds": -1}, "grace_seconds=-1; pass a number of seconds, 0 or more"),
        ({"grace_seconds": math.nan}, "grace_seconds=nan"),
        ({"grace_seconds": "30"}, "grace_seconds='30'"),
        ({"grace_seconds": True}, "grace_seconds=True"),
        ({"poll_seconds": 0}, "poll_seconds=0; pass a number of seconds, 0.001 or more"),
        ({"notice": 5}, "notice=5 cannot be called"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Preemption(**arguments)
