from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from forked import run_forked

import bcp
from bcp._log import log
from bcp.coordinators.local import memory_coordinators
from bcp.runtime.threads import in_thread
from bcp.telemetry.settings import COARSE, settings

STATE = {"model": {"w": torch.ones(1000)}}


@pytest.fixture(autouse=True)
def configured_no_more() -> Iterator[None]:
    yield
    bcp.telemetry.configure()


def configured(**options: Any) -> io.StringIO:
    stream = io.StringIO()
    bcp.telemetry.configure(logs="json", stream=stream, **options)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def failing(error: Exception) -> bcp.SaveOptions:
    async def fail(_: object) -> object:
        raise error

    return bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", fail)))


def test_a_save_and_a_load_are_a_line_each(tmp_path: Path) -> None:
    stream = configured(run="gpt")
    saved = bcp.save(tmp_path / "step-12", STATE)
    loaded = bcp.load(tmp_path / "step-12", STATE)
    first, second = lines(stream)
    common = {"run": "gpt", "step": 12, "operation": saved.operation, "rank": 0, "path": str(tmp_path / "step-12")}
    assert common.items() <= first.items()
    assert common.items() <= second.items()
    assert (first["event"], first["level"]) == ("saved", "info")
    assert (second["event"], second["level"]) == ("loaded", "info")
    assert first["nbytes"] == first["rank_nbytes"] == saved.nbytes
    assert first["seconds"] == first["blocking_seconds"] == round(saved.seconds, 3)
    assert first["throughput"] == round(saved.throughput)
    assert (first["retries"], first["plan_cached"]) == (0, saved.plan_cached)
    assert (second["rank_nbytes"], second["read_nbytes"]) == (loaded.nbytes, loaded.read_nbytes)


def test_rank_0_tells_the_bytes_of_all_ranks(tmp_path: Path) -> None:
    stream = configured()

    async def save_all() -> list[bcp.SaveResult]:
        states = [{"model": {f"w{rank}": torch.ones(1000 * (rank + 1))}} for rank in range(2)]
        calls = zip(states, memory_coordinators(2), strict=True)
        return await asyncio.gather(*(bcp.asave(tmp_path, state, coordinator=rank) for state, rank in calls))

    reports = asyncio.run(save_all())
    (line,) = lines(stream)
    assert (line["rank"], line["nbytes"]) == (0, sum(report.nbytes for report in reports))
    assert line["rank_nbytes"] == reports[0].nbytes < line["nbytes"]


def test_a_failure_that_is_handled_is_one_error_line(tmp_path: Path) -> None:
    stream = configured()
    with pytest.raises(bcp.StageError):
        bcp.save(tmp_path / "7", STATE, options=failing(ValueError("no")))
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["rank"], line["step"]) == ("save failed", "error", 0, 7)
    assert (line["stage"], line["phase"]) == ("mine", "write")
    assert line["item"]
    assert line["host"]
    assert line["error"].startswith("StageError: stage 'mine' failed")
    assert [each["type"] for each in line["errors"]] == ["StageError", "ValueError"]


def test_a_failed_load_names_the_file(tmp_path: Path) -> None:
    report = bcp.save(tmp_path, STATE)
    (key,) = (file for file in report.files if file.startswith("model"))
    (tmp_path / key).write_bytes(b"")
    stream = configured()
    with pytest.raises(bcp.BcpError):
        bcp.load(tmp_path, STATE)
    (line,) = lines(stream)
    assert (line["event"], line["level"]) == ("load failed", "error")
    assert any(key in each["message"] for each in line["errors"])


def test_a_failure_that_nobody_waited_for_is_one_error_line(tmp_path: Path) -> None:
    stream = configured()
    pending = bcp.save(tmp_path, STATE, options=failing(ValueError("no")), async_checkpoint=True)
    pending._background.wait_ended()
    del pending
    levels = {line["event"]: line["level"] for line in lines(stream)}
    assert levels == {"save failed": "error", f"save to {tmp_path} failed, and nobody waited for it": "warning"}
    assert "ValueError: no" in lines(stream)[1]["exception"]


def test_without_configured_logs_it_is_one_error_line_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bcp")
    pending = bcp.save(tmp_path, STATE, options=failing(ValueError("no")), async_checkpoint=True)
    pending._background.wait_ended()
    del pending
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "nobody waited for it" in record.getMessage()


def test_a_cancelled_save_is_a_warning(tmp_path: Path) -> None:
    stream = configured()
    entered = threading.Event()

    async def hang(_: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", hang)))
    pending = bcp.save(tmp_path, STATE, options=options, async_checkpoint=True)
    entered.wait()
    pending.cancel()
    pending._background.wait_ended()
    del pending
    (line,) = lines(stream)
    assert (line["event"], line["level"]) == ("save was cancelled", "warning")


def test_lines_in_a_stage_and_its_threads_have_run_step_operation_rank_path_and_stage(tmp_path: Path) -> None:
    def tell(text: str) -> None:
        log.warning(text)

    async def stage(item: Any) -> Any:
        tell("in the stage")
        await in_thread(tell, "in a thread")
        return item

    stream = configured(run="gpt")
    edit = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", stage)))
    saved = bcp.save(tmp_path / "12", STATE, options=edit)
    log.warning("outside")
    told = {line.pop("event"): line for line in lines(stream)}
    known = {"run": "gpt", "step": 12, "operation": saved.operation, "rank": 0, "path": str(tmp_path / "12")}
    assert (known | {"stage": "mine"}).items() <= told["in the stage"].items()
    assert (known | {"stage": "mine"}).items() <= told["in a thread"].items()
    assert known.items() <= told["saved"].items()
    assert "stage" not in told["saved"]
    assert told["outside"].keys() == {"timestamp", "level"}


def test_lines_of_two_operations_at_once_keep_their_values_apart(tmp_path: Path) -> None:
    stream = configured(level="debug")
    both = threading.Barrier(2)

    def meet() -> None:
        both.wait()
        log.warning("met")

    async def stage(item: Any) -> Any:
        await in_thread(meet)
        return item

    edit = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", stage)))
    pending = [bcp.save(tmp_path / name, STATE, options=edit, async_checkpoint=True) for name in ("1", "2")]
    reports = [each.wait() for each in pending]
    met = {(line["path"], line["operation"], line["step"]) for line in lines(stream) if line["event"] == "met"}
    assert met == {(str(tmp_path / str(step)), report.operation, step) for step, report in enumerate(reports, 1)}


def test_a_call_states_the_whole_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCP_RUN", "from the environment")
    stream = configured(run="mine", spans=("stage",))
    configured_again = configured()
    assert (settings.run, settings.spans) == ("from the environment", COARSE)
    bcp.telemetry.configure(logs="json", stream=configured_again)
    bcp.save(tmp_path / "a", STATE)
    assert stream.getvalue() == ""
    assert len(lines(configured_again)) == 1
    bcp.telemetry.configure()
    bcp.save(tmp_path / "b", STATE)
    assert len(lines(configured_again)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"logs": "xml"},
        {"logs": "json", "level": "loud"},
        {"spans": ("operation", "everything")},
        {"spans": "operation"},
        {"stream": io.StringIO()},
        {"logs": "json", "stream": "a name"},
        {"alerts": 3},
        {"most_spans": -1},
        {"most_spans": 1.5},
    ],
    ids="-".join,
)
def test_wrong_arguments_are_refused_and_change_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    stream = configured(run="mine")
    with pytest.raises(bcp.InputError):
        bcp.telemetry.configure(**wrong)
    bcp.save(tmp_path, STATE)
    assert [line["run"] for line in lines(stream)] == ["mine"]


def test_the_level_counts(tmp_path: Path) -> None:
    quiet = configured(level="warning")
    bcp.save(tmp_path / "a", STATE)
    assert quiet.getvalue() == ""
    loud = configured(level="debug")
    bcp.save(tmp_path / "b", STATE)
    assert [line["event"] for line in lines(loud)][:: len(lines(loud)) - 1] == ["save begins", "saved"]


def test_what_the_application_has_configured_stays_as_it_is(tmp_path: Path) -> None:
    root, own = logging.getLogger(), logging.getLogger("bcp")
    before = (root.level, list(root.handlers), own.level, list(own.handlers), own.propagate, structlog.get_config())
    stream = configured(level="debug")
    bcp.save(tmp_path, STATE)
    assert stream.getvalue()
    after = (root.level, list(root.handlers), own.level, list(own.handlers), own.propagate, structlog.get_config())
    assert after == before


def test_the_applications_handlers_get_the_lines_that_their_levels_let_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bcp")
    bcp.telemetry.configure(logs="logging")
    report = bcp.save(tmp_path / "3", STATE)
    (record,) = caplog.records
    assert record.getMessage().startswith("saved nbytes=")
    assert record.__dict__["bcp"]["operation"] == report.operation
    assert f"operation='{report.operation}' rank=0" in record.getMessage()


def test_a_stream_that_breaks_loses_lines_only(tmp_path: Path) -> None:
    stream = configured()
    stream.close()
    assert bcp.save(tmp_path, STATE).nbytes


def test_lines_of_many_threads_are_whole() -> None:
    stream = configured()

    def tell(number: int) -> None:
        for index in range(50):
            log.warning("x" * 1000, number=number, index=index)

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(line["number"], line["index"]) for line in lines(stream)} == {(n, i) for n in range(4) for i in range(50)}


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # 3.12: with threads
def test_a_forked_child_logs_although_a_thread_held_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "log"
    inside, leave = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            inside.set()
            leave.wait()
            return super().write(text)

    stream = Slow()
    bcp.telemetry.configure(logs="json", stream=stream)
    thread = threading.Thread(target=log.warning, args=("in the parent",))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        leave.set()
        log.warning("in the child")
        file.write_text(stream.getvalue())
        os._exit(0)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert json.loads(file.read_text())["event"] == "in the child"


CONSOLE = """
import logging, sys, torch, bcp
bcp.telemetry.configure(logs="console", run="gpt")
bcp.save("12", {"model": {"w": torch.ones(3)}})
try:
    bcp.save("12", {"model": {"w": torch.ones(3)}})
except bcp.ExistsError:
    pass
"""


def test_console_lines_go_to_standard_error_once(tmp_path: Path) -> None:
    done = run_forked([sys.executable, "-c", CONSOLE], cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    saved, failed = done.stderr.splitlines()
    assert "[info     ] saved " in saved
    assert "run=gpt step=12" in saved
    assert "[error    ] save failed " in failed
    assert "error='ExistsError: " in failed
    assert "\x1b" not in done.stderr


def test_import_bcp_makes_telemetry_reachable_and_needs_no_extra() -> None:
    program = """
import sys
for name in ("rich", "opentelemetry.sdk", "opentelemetry.exporter"):
    sys.modules[name] = None
import bcp
bcp.telemetry.configure(logs="console", alerts=bcp.telemetry.Alerts(max_stall=1))
"""
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603 -- our own program
