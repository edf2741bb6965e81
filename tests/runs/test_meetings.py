"""All ranks stop at one step: the rules in every order of events, threads over stores, and real jobs."""

from __future__ import annotations

import gc
import math
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import meeting_jobs
import pytest
from by_torchrun import END_SECONDS
from by_torchrun import started as torchrun
from forked import Forked
from logs import captured_logs
from patience import patiently
from ranks import HOST, Ranks
from samples import sample
from servers.ports import held_ports
from torch.distributed import HashStore, Store, TCPStore
from waiting import wait_until

from bcp._messages.running import Standing
from bcp.coordinators.store_client import set_bytes
from bcp.errors import InputError, MessageError, PeerError
from bcp.runs.meetings import Meetings, Stand, meeting_place
from bcp.runs.preemption import Preemption

LONG = 400.0
"""Seconds after which a test has failed."""


# -- the rules, in every order of events -----------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """One rank of the model.

    Attributes:
        step: the step in which it is, or at whose end it stands.
        where: "in" the step, "at" its end, "waiting" there for the count, "stopped" or "done".
        stand: count, published count and stop of its :class:`Stand`.
        knows: whether its thread has learnt the agreed count.
    """

    step: int = 1
    where: str = "in"
    stand: tuple[int, int | None, int | None] = (0, None, None)
    knows: bool = False


World = tuple[bool, tuple[Rank, ...]]
"""Whether there was an alarm, and the ranks."""


class Model:
    """Ranks whose steps contain a collective: nobody ends a step that another one has not begun."""

    def __init__(self, rules: type[Stand], size: int, steps: int, *, threads: bool = True) -> None:
        self.rules, self.size, self.steps, self.threads = rules, size, steps, threads

    def ends(self) -> set[tuple[tuple[str, int], ...]]:
        """Return how the ranks may end, over all orders of events; also where nothing can happen any more."""
        first: World = (False, (Rank(),) * self.size)
        seen, left, ends = {first}, [first], set()
        while left:
            world = left.pop()
            following = list(self._following(world))
            if not [each for each in following if each[0] == world[0]]:
                ends.add(tuple((rank.where, rank.step) for rank in world[1]))
            left += [each for each in following if each not in seen]
            seen.update(following)
        return ends

    def _following(self, world: World) -> Iterator[World]:
        alarmed, ranks = world
        if not alarmed:
            yield True, ranks
        for place, rank in enumerate(ranks):
            for new in (*self._main(rank, ranks), *self._thread(rank, ranks, alarmed=alarmed)):
                yield alarmed, (*ranks[:place], new, *ranks[place + 1 :])

    def _main(self, rank: Rank, ranks: tuple[Rank, ...]) -> Iterator[Rank]:
        """Take a step of the main thread."""
        if rank.where == "in" and all(other.step >= rank.step for other in ranks):
            yield Rank(rank.step, "at", rank.stand, rank.knows)
        if rank.where == "at" or (rank.where == "waiting" and rank.knows):
            stand = self._stand(rank)
            answer = stand.arrive(rank.step)
            state = (stand.count, stand.published, stand.stop)
            if answer is None:
                yield Rank(rank.step, "waiting", state, rank.knows)
            elif answer:
                yield Rank(rank.step, "stopped", state, rank.knows)
            elif rank.step == self.steps:
                yield Rank(rank.step, "done", state, rank.knows)
            else:
                yield Rank(rank.step + 1, "in", state, rank.knows)

    def _thread(self, rank: Rank, ranks: tuple[Rank, ...], *, alarmed: bool) -> Iterator[Rank]:
        """Take a step of the other thread."""
        stand, published = self._stand(rank), [other.stand[1] for other in ranks]
        if alarmed and stand.published is None and (self.threads or rank.where != "in"):
            stand.publish()
            yield Rank(rank.step, rank.where, (stand.count, stand.published, stand.stop), rank.knows)
        if not rank.knows and None not in published:
            stop = max(each for each in published if each is not None) + 1
            yield Rank(rank.step, rank.where, (stand.count, stand.published, stop), knows=True)

    def _stand(self, rank: Rank) -> Stand:
        stand = self.rules()
        stand.count, stand.published, stand.stop = rank.stand
        stand.step = rank.step if rank.where == "waiting" else rank.step - 1
        return stand


def agreed(end: tuple[tuple[str, int], ...]) -> bool:
    """Whether all ranks have stopped at one step, or all have done all steps."""
    return len(set(end)) == 1 and end[0][0] in ("stopped", "done")


@pytest.mark.parametrize(("size", "steps"), [(1, 4), (2, 5), (3, 4), (4, 2)])
def test_in_every_order_of_events_all_ranks_stop_at_one_step(size: int, steps: int) -> None:
    ends = Model(Stand, size, steps).ends()
    assert [end for end in ends if not agreed(end)] == []
    assert {end[0] for end in ends} >= {("stopped", step) for step in range(1, steps + 1)}
    assert (("done", steps),) * size in ends


def test_the_model_finds_ranks_that_stop_at_different_steps() -> None:
    class Foremost(Stand):
        """Stop at the largest published count itself."""

        def arrive(self, step: int) -> bool | None:
            answer = super().arrive(step)
            return answer if self.stop is None else self.count >= self.stop - 1

    ends = Model(Foremost, 2, 4).ends()
    assert [end for end in ends if not agreed(end)]


def test_the_model_finds_ranks_that_wait_for_each_other() -> None:
    class Waits(Stand):
        """Wait at the end of the step in which the rank hears of the alarm, and answer only there."""

        def arrive(self, step: int) -> bool | None:
            answer = super().arrive(step)
            return None if self.published is not None and self.stop is None else answer

    ends = Model(Waits, 2, 4, threads=False).ends()
    assert [end for end in ends if {where for where, _ in end} == {"in", "waiting"}]


def test_a_step_is_counted_once_and_has_one_answer() -> None:
    stand = Stand()
    assert [stand.arrive(step) for step in (10, 10, 25, 25)] == [False] * 4
    assert stand.publish() == 2
    assert stand.arrive(25) is False
    assert [stand.arrive(26), stand.arrive(26)] == [None, None]
    stand.stop = 4
    assert [stand.arrive(step) for step in (26, 90, 90, 91)] == [False, True, True, True]
    assert stand.publish() == 2


# -- one rank --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert not [each.name for each in threading.enumerate() if each.name in ("bcp-meetings", "bcp-preemption")]


def silent() -> Preemption:
    """Return one that installs no handlers."""
    return Preemption(signals=())


def test_a_single_rank_stops_after_the_step_that_follows() -> None:
    with closing(Meetings(0, 1, None, "life", silent())) as meetings:
        assert [meetings.at(step) for step in (1, 2, 2)] == [False] * 3
        assert (meetings.reason, meetings.deadline) == (None, None)
        meetings.alarm("stop")
        assert meetings.reason == "stop"
        assert [meetings.at(step) for step in (2, 3, 3, 4)] == [False, True, True, True]


def test_a_single_rank_stops_of_a_signal() -> None:
    heard = threading.Event()
    with closing(Meetings(0, 1, None, "life", Preemption(grace_seconds=900.0), on_alarm=heard.set)) as meetings:
        signal.raise_signal(signal.SIGTERM)
        assert heard.wait(LONG)
        step = 0
        while not meetings.at(step := step + 1):
            assert step < 3
        assert meetings.reason == "SIGTERM"
        assert meetings.deadline is not None
        assert 0.0 < meetings.deadline - time.monotonic() <= 900.0


def test_an_error_of_on_alarm_is_logged_and_the_run_stops() -> None:
    def on_alarm() -> None:
        raise RuntimeError("no watchdog")

    with closing(Meetings(0, 1, None, "life", silent(), on_alarm=on_alarm)) as meetings, captured_logs() as lines:
        meetings.alarm("stop")
        assert meetings.at(1)
    assert "no watchdog" in lines[-1]["event"]


def test_a_step_without_an_alarm_costs_nothing_that_is_felt() -> None:
    called: list[str] = []

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else repr(function))

    with closing(Meetings(0, 2, HashStore(), "life", silent())) as meetings:
        meetings.at(1)
        sys.setprofile(count)
        try:
            meetings.at(2)
        finally:
            sys.setprofile(None)
    assert len(called) <= 8, called
    assert not [name for name in called if "Store" in name]


def test_several_ranks_need_a_store() -> None:
    preemption = silent()
    with pytest.raises(InputError, match=r"2 ranks have no store .*init_process_group"):
        Meetings(0, 2, None, "life", preemption)
    preemption.install(print)  # it is still free
    preemption.close()


def test_without_a_process_group_there_is_no_store() -> None:
    assert meeting_place(1) is None
    with pytest.raises(InputError, match="init_process_group"):
        meeting_place(2)


# -- several ranks in threads ----------------------------------------------------------------------


def meet(size: int, store: Store, life: str = "life", **options: Any) -> list[Meetings]:
    return connected([Meetings(rank, size, store, life, silent(), **options) for rank in range(size)])


def connected(meetings: list[Meetings]) -> list[Meetings]:
    """Wait for connections; each may take seconds where a name server is slow."""
    assert all(each._connected.wait(LONG) for each in meetings)
    return meetings


def close_all(meetings: list[Meetings]) -> None:
    for each in reversed(meetings):  # rank 0 waits for the others
        each.close()


def train(meetings: list[Meetings], one: Callable[[int, int], None], stride: int = 1) -> list[int]:
    """Train in a thread a rank until it stops; return where. ``one`` is called with rank and step in each step."""
    stops = [0] * len(meetings)

    def run(rank: int) -> None:
        for step in range(stride, 10_000_000, stride):
            one(rank, step)
            if meetings[rank].at(step):
                stops[rank] = step
                return

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), meetings
    return stops


@pytest.fixture(params=sample(["tcp", "hash"], "tcp"))
def store(request: pytest.FixtureRequest) -> Store:
    return HashStore() if request.param == "hash" else TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("seed", sample(range(10), *range(0, 10, 2)))
def test_ranks_with_a_collective_in_each_step_stop_together(store: Store, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 -- a test
    size = chance.choice([2, 3, 4])
    meetings, collective = meet(size, store), threading.Barrier(size)
    alarmed, at_step = chance.randrange(size), chance.randrange(1, 40)

    def one(rank: int, step: int) -> None:
        collective.wait(LONG)
        if (rank, step) == (alarmed, at_step):
            threading.Thread(target=meetings[rank].alarm, args=("stop",)).start()

    stops = train(meetings, one)
    close_all(meetings)
    assert len(set(stops)) == 1
    assert stops[0] >= at_step
    assert {each.reason for each in meetings} == {f"stop on rank {alarmed}"}


def test_ranks_without_collectives_stop_together_too(store: Store) -> None:
    meetings = meet(3, store)

    def one(rank: int, step: int) -> None:
        time.sleep(0.0005 * (rank + 1))  # nothing else keeps them together
        if (rank, step) == (1, 100):
            meetings[1].alarm("stop")

    stops = train(meetings, one, stride=10)
    close_all(meetings)
    assert len(set(stops)) == 1


def test_a_meeting_leaves_no_keys_and_no_threads(store: Store) -> None:
    before = store.num_keys()
    meetings = meet(3, store)
    meetings[2].alarm("stop")
    train(meetings, lambda *_: None)
    close_all(meetings)
    close_all(meetings)
    assert store.num_keys() == before
    meetings = meet(3, store, "next")
    close_all(meetings)
    assert store.num_keys() == before


def test_lives_on_one_store_do_not_hear_each_other(store: Store) -> None:
    first, second = meet(2, store, "1"), meet(2, store, "2")
    first[0].alarm("stop")
    train(first, lambda *_: None)
    assert [each.at(1) for each in second] == [False, False]
    assert [each.reason for each in second] == [None, None]
    close_all(first)
    close_all(second)


def test_the_soonest_deadline_is_told_to_all_ranks(store: Store) -> None:
    heard: queue.Queue[None] = queue.Queue()
    left = [math.inf, 500.0, 50.0]
    preemptions = [Preemption(signals=(), notice=lambda rank=rank: _due(left[rank])) for rank in range(3)]  # type: ignore[misc]  # of a default
    meetings = [
        Meetings(rank, 3, store, "life", each, on_alarm=lambda: heard.put(None))
        for rank, each in enumerate(preemptions)
    ]
    for _ in meetings:
        heard.get(timeout=LONG)
    train(meetings, lambda *_: None)
    seconds = [(each.deadline or math.inf) - time.monotonic() for each in meetings]
    close_all(meetings)
    assert all(each < 500.0 for each in seconds)
    assert seconds[2] < 50.0


def _due(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None


def until_stopped(meetings: Meetings) -> int:
    """Return the step at which a rank stops that does nothing in its steps."""
    step = 0
    while not meetings.at(step := step + 1):
        pass
    return step


def test_a_rank_that_does_not_answer_is_named_by_all_ranks(store: Store) -> None:
    def check(timeout: float) -> None:
        both = [Meetings(rank, 3, store, f"life {timeout}", silent(), timeout=timeout) for rank in (0, 2)]  # 1 is dead
        meetings = connected(both)
        meetings[1].alarm("stop")
        errors = list[PeerError]()
        for each in meetings:
            for step in (None, -1):
                with pytest.raises(PeerError) as caught:
                    until_stopped(each) if step is None else each.at(step)
                errors.append(caught.value)
        close_all(meetings)
        assert [error.rank for error in errors] == [1] * 4
        assert len({str(error) for error in errors}) == 1
        assert f"rank 1 did not answer an alarm (stop on rank 2) within {timeout} s" in str(errors[0])

    patiently(check, 3.0, 60.0)


def test_a_rank_that_dies_when_all_have_answered_holds_up_nobody(store: Store) -> None:
    (meetings,) = connected([Meetings(0, 2, store, "life", silent(), timeout=2.0)])
    set_bytes(store, "bcp/run/life/stand/1", Standing(7, None).encode())  # its words, before it could count them
    meetings.alarm("stop")
    wait_until(lambda: meetings._stand.published is not None)
    assert [step for step in range(1, 12) if meetings.at(step)] == [8, 9, 10, 11]
    meetings.close()


@pytest.mark.parametrize("key", ["alarm", "stop"])
def test_words_of_another_bcp_end_the_run_on_all_ranks(store: Store, key: str) -> None:
    meetings = connected([Meetings(rank, 2, store, "life", silent(), timeout=LONG) for rank in range(2)])
    store.set(f"bcp/run/life/{key}", '{"reason": "stop", "seconds": null}')
    if key == "stop":
        meetings[1].alarm("stop")
    for each in meetings:
        with pytest.raises(MessageError, match=r"cannot be decoded, 35 bytes: .*; run the same version of bcp"):
            until_stopped(each)
    close_all(meetings)


def test_a_rank_that_hears_late_is_waited_for_by_threads_alone() -> None:
    store = HashStore()
    late = _Shared(store)
    meetings = [Meetings(0, 2, store, "life", silent()), Meetings(1, 2, late, "life", silent())]
    meetings[0].alarm("stop")
    wait_until(lambda: store.check(["bcp/run/life/stand/0"]))
    assert [meetings[1].at(step) for step in range(1, 6)] == [False] * 5  # it has not heard
    late.let_on.set()
    assert [step for step in range(1, 9) if meetings[0].at(step)] == [6, 7, 8]
    assert meetings[1].at(6)
    close_all(meetings)


class _Shared(HashStore):
    """Another store by a connection that is slow to hear."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.let_on = threading.Event()

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]  # one form is enough
        self._store.wait(keys, timeout)
        self.let_on.wait(LONG)

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "set", "add", "check", "compare_set", "multi_get", "delete_key"):
            return getattr(self._store, name)
        return super().__getattribute__(name)


# -- ends ------------------------------------------------------------------------------------------


def test_after_one_rank_has_left_an_alarm_concerns_its_own_rank(store: Store) -> None:
    meetings = meet(3, store)
    for each in meetings:
        assert not each.at(1)
    assert not meetings[2].at(2)
    meetings[2].close()
    for each in meetings[:2]:
        wait_until(lambda each=each: each._alone_after is not None)  # type: ignore[misc]  # of a default
    meetings[1].alarm("stop")
    assert [meetings[1].at(step) for step in (2, 3, 4)] == [False, True, True]  # 2 is where the other one ended
    assert [meetings[0].at(step) for step in (2, 3, 4)] == [False] * 3
    close_all(meetings)


def test_a_store_that_goes_is_told_by_the_next_alarm_alone() -> None:
    server = TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False)
    client = TCPStore(HOST, server.port, None, is_master=False)
    (meetings,) = connected([Meetings(1, 2, client, "life", silent(), timeout=5.0)])
    with captured_logs() as lines:
        del server
        gc.collect()
        wait_until(lambda: meetings._lost)
        assert [line["log_level"] for line in lines if line["log_level"] != "debug"] == []
        assert not meetings.at(1)
        meetings.alarm("stop")
        with pytest.raises(PeerError, match="the job's store, which rank 0 serves as a rule, has gone"):
            meetings.at(2)
    meetings.close()


def test_a_program_that_ends_without_close_ends_in_silence() -> None:
    program = """
import threading
from torch.distributed import TCPStore
from bcp.runs.meetings import Meetings
from bcp.runs.preemption import Preemption
store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
both = [Meetings(rank, 2, store, "life", Preemption(signals=())) for rank in range(2)]
both[0].at(1)
"""
    done = subprocess.run(  # noqa: S603 -- our own
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- jobs ------------------------------------------------------------------------------------------


def check_rounds(results: list[list[meeting_jobs.Round]]) -> None:
    """Assert that in each round all ranks stopped together."""
    for ranks in zip(*results, strict=True):
        assert len({each.step for each in ranks}) == 1, ranks
        assert len({each.collectives for each in ranks}) == 1, ranks
        assert all("on rank" in str(each.reason) for each in ranks), ranks
        assert all(0.0 < each.seconds_left <= meeting_jobs.GRACE_SECONDS for each in ranks), ranks


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_job_stop_together_after_the_signal_of_one(size: int) -> None:
    with closing(Ranks(size)) as ranks:
        check_rounds(ranks.run(meeting_jobs.rounds, 40, size))
        deaf = ranks.run(meeting_jobs.deaf_main_thread, "deaf")
    assert len({each.step for each in deaf}) == 1
    assert {each.reason for each in deaf} == {"SIGTERM on rank 0"}


def last_words(folder: Path, size: int) -> list[str]:
    return [(folder / f"stopped-{rank}").read_text() for rank in range(size)]


@pytest.mark.dist
def test_under_torchrun_one_signal_stops_all_ranks_and_they_end_in_silence(tmp_path: Path) -> None:
    job = torchrun(4, meeting_jobs.__file__, str(tmp_path), str(meeting_jobs.STEPS))
    wait_until(lambda: job.poll() is not None or all((tmp_path / f"ready-{rank}").exists() for rank in range(4)))
    if job.poll() is None:
        os.kill(int((tmp_path / "ready-3").read_text()), signal.SIGTERM)
    out, errors = job.communicate(timeout=END_SECONDS)
    assert job.returncode == 0, out + errors
    words = last_words(tmp_path, 4)
    assert len(set(words)) == 1, words
    assert words[0].endswith(" True SIGTERM on rank 3")
    assert (out, errors) == ("", "")


@pytest.mark.dist
def test_a_torchrun_that_is_itself_told_waits_for_the_stop(tmp_path: Path) -> None:
    job = torchrun(2, meeting_jobs.__file__, str(tmp_path), str(meeting_jobs.STEPS))
    wait_until(lambda: job.poll() is not None or all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    job.terminate()
    out, errors = job.communicate(timeout=END_SECONDS)
    words = last_words(tmp_path, 2)
    assert len(set(words)) == 1, (words, out, errors)
    assert " True SIGTERM on rank " in words[0]
    assert "Sending process" in errors  # the agent's own words
    assert "Traceback" not in errors.partition("Sending process")[0]


@pytest.mark.dist
def test_ranks_that_end_one_after_another_without_an_alarm_end_in_silence(tmp_path: Path) -> None:
    job = torchrun(4, meeting_jobs.__file__, str(tmp_path), "20")
    out, errors = job.communicate(timeout=END_SECONDS)
    assert (job.returncode, out, errors) == (0, "", "")
    assert last_words(tmp_path, 4) == ["20 False None"] * 4


@pytest.mark.dist
def test_the_rank_that_serves_the_store_may_end_first() -> None:
    program = "import sys; from meeting_jobs import first_leaves; first_leaves(*map(int, sys.argv[1:]))"
    paths = [str(Path(meeting_jobs.__file__).parent), str(Path(__file__).parents[2])]
    with held_ports(1) as (port,):
        jobs = [
            Forked(
                [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {program}", str(rank), str(port), "4"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        ends = [job.communicate(timeout=LONG) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, ends
    assert ends == [("", "")] * 4
