from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from forked import run_forked
from logs import captured_logs

from bcp._log import log

SILENT = """
import warnings, torch, bcp
from bcp._log import log
warnings.simplefilter("error")
states = {"model": torch.nn.Linear(4, 4), "extra_states": {"step": 1}}
for path in ("one", "one"):
    bcp.save(path, states, overwrite=True)
bcp.save("two", states, async_checkpoint=True).wait()
bcp.load("one", states)
log.debug("a line")
log.info("a line", path="x")
"""

LOST = """
import torch, bcp
from bcp._log import log
log.error("%s failed, and nobody waited for it", "save to x", exc_info=RuntimeError("the disk is full"))
"""


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = run_forked([sys.executable, "-c", program], cwd=cwd)
    done.check_returncode()
    return done


def test_an_application_without_logging_sees_no_line(tmp_path: Path) -> None:
    done = run(SILENT, tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_an_application_without_logging_sees_errors_on_stderr(tmp_path: Path) -> None:
    done = run(LOST, tmp_path)
    assert done.stdout == ""
    assert done.stderr.startswith("save to x failed, and nobody waited for it\n")
    assert "RuntimeError: the disk is full" in done.stderr


RESUMED = """
import pathlib, structlog, torch, bcp
structlog.configure()  # takes no lines of bcp, and hides none
states = {{"model": torch.nn.Linear(4, 4)}}
with bcp.Run("run", states, save=1) as run:
    run.resume()
    for step in (1, 2):
        run.maybe_save(step).wait()
next(pathlib.Path("run/step-00000002/model").iterdir()).write_bytes(b"")
pathlib.Path("run/run.json").unlink()
{configured}
with bcp.Run("run", states, save=1, tolerate=2) as run:
    run.resume()
    pathlib.Path("run/step-00000003").write_text("in the way")
    for step in (3, 4, 5):
        run.maybe_save(step)
"""
WARNINGS = (
    "step 2 passed over: CorruptError: ",
    "all of them are pinned",
    "the save of step 3 failed, 1 of 2 tolerated in a row; training goes on",
)


@pytest.mark.parametrize(
    "configured", ["", "import logging; logging.basicConfig()", "bcp.telemetry.configure(logs='json', level='warning')"]
)
def test_what_a_run_warns_of_is_on_stderr_once(tmp_path: Path, configured: str) -> None:
    done = run(RESUMED.format(configured=configured), tmp_path)
    assert done.stdout == ""
    assert [done.stderr.count(words) for words in WARNINGS] == [1, 1, 1]


def test_texts_for_people_have_escapes_and_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("bcp")
    root, kept = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers[:] = []  # as in an application without logging; pytest has some
    try:
        with captured_logs() as lines:
            log.warning("at %s", "ckpt\x1b[31m", url="see http://a:b@host/run?sig=abc now")
        error = RuntimeError("GET http://host/run?sig=abc of ckpt\x1b[31m")
        logger.handlers[0].handle(logging.LogRecord("bcp", 40, "", 0, "lost", None, (type(error), error, None)))
    finally:
        root.handlers[:] = kept
    (line,) = lines
    assert line["event"] == r"at ckpt\x1b[31m url='see http://a:***@host/run?*** now'"
    assert line["url"] == "see http://a:***@host/run?*** now"
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "sig" not in err
    assert r"GET http://host/run?*** of ckpt\x1b[31m" in err


@pytest.mark.parametrize("where", ["root", "bcp"])
def test_an_application_with_logging_receives_every_line_once(tmp_path: Path, where: str) -> None:
    name = "" if where == "root" else "bcp"
    program = f"""
import logging, sys
logger = logging.getLogger({name!r})
logger.setLevel(logging.DEBUG)
logger.addHandler(logging.StreamHandler(sys.stdout))
from bcp._log import log
log.debug("a line", path="x", numbers=[1, 2])
log.error("a worse one")
"""
    done = run(program, tmp_path)
    assert done.stdout == "a line path='x' numbers=[1, 2]\na worse one\n"
    assert done.stderr == ""


def test_the_applications_own_structlog_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.configure(processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.PrintLoggerFactory())
    try:
        with captured_logs() as lines:
            log.warning("100% of it is left", path="x")
    finally:
        structlog.reset_defaults()
    assert lines == [{"event": "100% of it is left path='x'", "log_level": "warning", "path": "x"}]
    assert capsys.readouterr().out == ""


def test_lines_below_the_loggers_level_cost_no_formatting() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError

    logging.getLogger("bcp").setLevel(logging.ERROR)
    try:
        log.warning("a line", value=Loud())
    finally:
        logging.getLogger("bcp").setLevel(logging.NOTSET)


def test_a_line_says_where_it_was_logged(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("a line")
    log.error("another", exc_info=ValueError("x"))
    assert [Path(record.pathname).name for record in caplog.records] == ["test_log.py"] * 2
