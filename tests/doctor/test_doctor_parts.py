"""The screen for many reports, and parts of the doctor in trouble that a whole job would be slow to make."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from torch.distributed import HashStore

from bcp.__main__ import main
from bcp._doctor import storage
from bcp._doctor.dial import Door, UnreachedError, answering, knock
from bcp._doctor.examination import _judge, _judged
from bcp._doctor.meeting import KeyBoard, Meeting, RankPlace
from bcp._doctor.meeting import met as meet
from bcp._doctor.report import FoundError, Report, Times, ranks_in_words
from bcp._doctor.screen import Job, screen
from bcp._messages.doctor import Finding, RankReport, Trial, Way
from bcp.coordinators.roll_call import RollCall
from bcp.coordinators.store_client import StoreClient
from bcp.errors import PeerError

pytestmark = pytest.mark.anyio

HOSTS, RANKS = 1250, 10_000
PER_HOST = RANKS // HOSTS


@pytest.fixture
def job() -> Job:
    """A job as large as they come."""
    names = [f"h{host}" for host in range(HOSTS)]
    place = RankPlace(0, RANKS, ("h0", 29500))
    return Job(place, names, [rank // PER_HOST for rank in range(RANKS)], 1.2, "/shared")


@pytest.fixture
def reports() -> list[Report]:
    """The reports of all of its ranks, which are well."""
    made = [Report(rank, store_seconds=0.0004, ways=1, slowest=0.0002) for rank in range(RANKS)]
    for host, report in enumerate(made[::PER_HOST]):
        report.address, report.interface = f"10.0.{host // 250}.{host % 250 + 1}", "eth0"
        report.ways, report.clock = HOSTS - 1, Way(0.001, 0.002) if host else None
    return made


def test_a_healthy_job_of_any_size_is_a_few_lines(job: Job, reports: list[Report]) -> None:
    shown = screen(job, reports)
    assert shown.healthy
    assert len(shown.lines) <= 8
    text = "\n".join(shown.lines)
    assert "10000 ranks on 1250 hosts (h0 .. h1249)" in text
    assert "10.0.0.1 to 10.0.4.250 (eth0)" in text
    assert f"all {HOSTS * (HOSTS - 1)} ways between hosts" in text
    assert "within 2.5 ms" in text


def test_findings_of_many_ranks_are_summed_up(job: Job, reports: list[Report]) -> None:
    for report in reports:
        report.add(Finding("storage", "cannot write to /shared: Disk quota exceeded", "free some space"))
    for report in reports[PER_HOST::PER_HOST]:
        for port in range(1, 31):
            report.add(
                Finding("reach", f"cannot reach host h0 at 10.0.0.1 port {port}: No route to host", of_host=True)
            )
    shown = screen(job, reports)
    text = "\n".join(shown.lines)
    assert not shown.healthy
    assert len(shown.lines) < 20
    assert "ranks 0-9999 (hosts h0, h1, h2, h3, h4, h5 and 1244 more) cannot write to /shared" in text
    assert "port 1: No route to host" in text
    assert "not healthy: reach, storage" in text


def test_clocks_and_versions_that_differ_are_warnings(job: Job, reports: list[Report]) -> None:
    reports[PER_HOST].clock = Way(0.001, 3.0)
    reports[2 * PER_HOST].clock = Way(0.001, -2.0)
    for report in reports[-PER_HOST:]:
        report.versions = report.versions | {"torch": "1.0"}
    shown = screen(job, reports)
    text = "\n".join(shown.lines)
    assert shown.healthy
    assert shown.lines[-1] == "healthy, but see the warnings"
    assert "host h1 is 3.0 s behind rank 0 (h0)" in text
    assert "host h2 is 2.0 s ahead of rank 0 (h0)" in text
    assert "ranks 9992-9999 (host h1249): bcp" in text
    assert "torch 1.0" in text


def test_a_report_survives_the_store(reports: list[Report]) -> None:
    reports[PER_HOST].add(Finding("storage", "cannot", "mend"))
    assert Report.of(RankReport.decode(reports[PER_HOST].message().encode())) == reports[PER_HOST]


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([9, 0, 1, 2]) == "ranks 0-2, 9"
    assert ranks_in_words(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10 and 14 more"


# -- doors ------------------------------------------------------------------------------------


async def test_the_right_door_answers_with_its_time() -> None:
    async with answering("s", 3, "127.0.0.1") as port:
        way = await knock("s", Door(3, "h3", "127.0.0.1", port), 5.0)
    assert abs(way.ahead) <= way.seconds
    with pytest.raises(UnreachedError, match=f"host h3 at 127.0.0.1 port {port}: Connection refused"):
        await knock("s", Door(3, "h3", "127.0.0.1", port), 5.0)


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "something else answers there, and says b'SSH-2.0-OpenSSH_9"),
        (b"bcp-doctor other 3 1.0\n", "something else answers there"),
        (b"bcp-doctor s 4 1.0\n", "rank 4 of this job answers there; two hosts have this address"),
        (b"x" * 100_000, "something else answers there"),
        (b"", "says nothing within 0.5 s"),
    ],
)
async def test_a_door_of_somebody_else_is_noticed(says: bytes, said: str) -> None:
    async def answer(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError):
                await stream.send(says)
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 -- not of Django
        with pytest.raises(UnreachedError) as caught:
            await knock("s", Door(3, "h3", "127.0.0.1", port), 0.5)
        group.cancel_scope.cancel()
    assert said in str(caught.value)


# -- a job without its other ranks ---------------------------------------------------------------


@pytest.fixture
def meeting() -> Meeting:
    """Rank 0 on host h0 with rank 1 on host h1, which says nothing."""
    client, place = StoreClient(HashStore()), RankPlace(0, 2, ("h0", 29500))
    board = KeyBoard(client, "session", 2)
    return Meeting(place, board, RollCall(client, "roll", 0, 2), "session", (0, 1), ("h0", "h1"), (0, 1), 0.1, 0.001)


def met(timeout: float) -> Times:
    times = Times(timeout, 0)
    times.meet()
    return times


async def test_a_report_that_does_not_come_is_named(meeting: Meeting, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(meeting.place, meeting.names, meeting.host_of)
    with anyio.fail_after(60):
        assert not await _judge(job, meeting, met(2.0), Report(0), None)
    assert "no report has come from rank 1 (host h1)" in capsys.readouterr().out


async def test_a_report_that_cannot_be_read_hides_no_other(
    meeting: Meeting, capsys: pytest.CaptureFixture[str]
) -> None:
    store, place = HashStore(), RankPlace(0, 3, ("h0", 29500))
    board = KeyBoard(StoreClient(store), "session", 3)
    job = Job(place, meeting.names, (0, 1, 1))
    mine = Report(1, findings=[Finding("storage", "cannot write to /shared: no space left", "free some")])
    await board.post(time.monotonic() + 60.0, 1, mine.message())
    await board.count(time.monotonic() + 60.0, "gone")  # as rank 1 does when it has the verdict
    store.set("session/RankReport/2", "what another version says")
    assert not await _judge(job, replace(meeting, place=place, board=board), met(20.0), Report(0), None)
    out = capsys.readouterr().out
    assert "the message RankReport of rank 2 cannot be decoded" in out
    assert "cannot write to /shared: no space left" in out


async def test_others_hear_that_rank_0_cannot_read_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    async def opened_store(*_: object) -> HashStore:
        return store

    monkeypatch.setattr("bcp._doctor.meeting.opened_store", opened_store)
    member = RollCall(StoreClient(store), "bcp-doctor", 1, 2)
    member.look()
    store.set(member._keys.name("here", 1), "what another version says")
    with pytest.raises(FoundError) as caught:
        await meet(RankPlace(0, 2, ("h0", 29500)), Times(60.0, 0))
    assert caught.value.tell is not None
    await caught.value.tell()
    member.look()
    assert member.heard is not None
    assert "MemberSign of rank 1 cannot be decoded" in member.heard.abort.message


async def test_a_rank_without_a_verdict_prints_its_own_findings(
    meeting: Meeting, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(1, findings=[Finding("storage", "cannot write to /shared: No space left on device", "free some")])
    assert not await _judged(replace(meeting, place=RankPlace(1, 2, ("h0", 29500))), met(1.0), report)
    out, err = capsys.readouterr()
    assert out == ""
    assert "rank 1 (host" in err
    assert "cannot write to /shared: No space left on device; free some" in err
    assert "no verdict of rank 0" in err


async def test_a_store_that_falls_silent_is_given_up() -> None:
    class Silent(HashStore):
        def check(self, _: list[str]) -> bool:
            awake.wait()
            return True

    awake = threading.Event()
    try:
        with anyio.fail_after(60), pytest.raises(PeerError, match="has not answered"):
            await KeyBoard(StoreClient(Silent()), "session", 2).posted(time.monotonic() + 0.5, RankReport, [1])
    finally:
        awake.set()


async def test_a_file_is_gone_when_the_doctor_is_cancelled(meeting: Meeting, tmp_path: Path) -> None:
    shelf = await storage.shelf_at(str(tmp_path / "new"), 60.0)
    async with anyio.create_task_group() as group:
        group.start_soon(storage.try_out, shelf, meeting, met(60.0), Report(0))
        wrote = await meeting.board.posted(time.monotonic() + 60.0, Trial, [0])
        there = list(tmp_path.glob("new/.bcp-doctor-session/0"))  # noqa: ASYNC240 -- quick
        group.cancel_scope.cancel()
    assert (wrote, len(there)) == ({0: Trial(wrote=True)}, 1)
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 -- quick


async def test_storage_that_hangs_is_left_alone(meeting: Meeting) -> None:
    class Hung:
        async def put(self, *_: object) -> None:
            await anyio.sleep_forever()

        delete = put

    report = Report(0)
    alone = replace(meeting, leaders=[0], names=["h0"])
    await storage.try_out(storage.TrialFolder("/hung", Hung()), alone, met(2.0), report)
    assert "cannot write to /hung: no answer within" in report.findings[0].text


# -- bad usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({"WORLD_SIZE": "4"}, [], "RANK='' is no number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, [], "RANK=4 has to be"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, [], "MASTER_ADDR=''"),
        ({}, ["what://is/this"], "unknown scheme"),
        ({}, ["--timeout=0"], "0 is no number of seconds above 0"),
        ({}, ["--timeout=soon"], "soon"),
    ],
)
def test_bad_usage_is_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    arguments: list[str],
    said: str,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        status = main(["doctor", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert said in capsys.readouterr().err
