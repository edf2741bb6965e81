"""Callbacks of a run, interrupts of one that waits for its save, and options that are refused before training."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forked import Forked
from torch import nn

import bcp
from bcp.runs.calls import once
from bcp.runs.ending import CTRL_C, await_save
from bcp.runs.folder import step_name
from bcp.runtime.threads import in_thread


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(4)}}


# -- callbacks


@pytest.mark.parametrize("ends", ["close", "exit", "should_stop"])
def test_callbacks_of_the_last_checkpoint_may_mark_and_pin_it(tmp_path: Path, ends: str) -> None:
    closing = threading.Event()
    errors: list[BaseException] = []

    def mark(step: int, _report: bcp.SaveResult) -> None:
        if ends != "should_stop":  # which begins the save itself
            closing.wait(60)
        try:
            run.mark(step, "verified", "evaluated")
            run.pin(step)
        except BaseException as error:  # noqa: BLE001 -- the test looks at it
            errors.append(error)

    async def wait(part: Any) -> Any:
        if ends != "should_stop":
            await in_thread(closing.wait, 60)
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.before("upload", bcp.extend.Stage("wait", wait)))
    run = bcp.Run(str(tmp_path), states(), save=1, on_commit=mark, save_options=options)
    run.resume()
    if ends == "should_stop":
        run.stop()
        assert run.should_stop(1)
        run.close()
    else:
        run.maybe_save(1)
        original = run._saves.ended_at_last  # the run is closing once it waits here

        async def told(again: str) -> None:
            closing.set()
            await original(again)

        run._saves.ended_at_last = told  # type: ignore[method-assign]  # see above
        run.close() if ends == "close" else run.__exit__(None, None, None)
    assert errors == []
    assert bcp.latest(tmp_path, trust="verified") == f"{tmp_path}/{step_name(1)}"
    with pytest.raises(bcp.InputError, match="closed"):
        run.pin(1)


CALLS: dict[str, Callable[[bcp.Run, Any], object]] = {
    "close": lambda run, _: run.close(),
    "aclose": lambda run, _: asyncio.run(run.aclose()),
    "exit": lambda run, _: run.__exit__(None, None, None),
    "maybe_save": lambda run, _: run.maybe_save(2),
    "amaybe_save": lambda run, _: asyncio.run(run.amaybe_save(2)),
    "should_stop": lambda run, _: run.should_stop(2),
    "resume": lambda run, _: run.resume(),
    "wait": lambda _, pending: pending().wait(),
    "await": lambda _, pending: asyncio.run(pending()._result()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fails", [False, True])
def test_calls_that_would_wait_for_themselves_are_errors_at_once(tmp_path: Path, call: str, *, fails: bool) -> None:
    errors: list[BaseException] = []
    called, begun = threading.Event(), threading.Event()
    pendings: list[Any] = []

    def callback(_step: int, _outcome: object) -> None:
        begun.wait(60)
        try:
            CALLS[call](run, pendings.pop)
        except bcp.BcpError as error:
            errors.append(error)
        called.set()

    async def fail(part: Any) -> Any:
        if fails:
            raise OSError("the disk is gone")
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.before("checksum", bcp.extend.Stage("fail", fail)))
    run = bcp.Run(str(tmp_path), states(), save=1, on_commit=callback, on_failure=callback, save_options=options)
    run.resume()
    pendings.append(run.maybe_save(1))
    begun.set()
    assert called.wait(60)
    (error,) = errors
    assert isinstance(error, bcp.InputError)
    assert "return from the callback" in str(error)
    if fails:
        with pytest.raises(bcp.StageError):
            run.close()
    else:
        run.close()
        assert bcp.latest(tmp_path) == f"{tmp_path}/{step_name(1)}"


def test_a_callback_may_save_elsewhere_and_stop_the_run(tmp_path: Path) -> None:
    def copy(step: int, _report: bcp.SaveResult) -> None:
        bcp.save(tmp_path / "copy" / str(step), states())
        run.stop("enough")

    run = bcp.Run(str(tmp_path / "run"), states(), save=1, on_commit=copy)
    with run:
        run.resume()
        pending = run.maybe_save(1)
        assert pending is not None
        pending.wait()
        assert run.should_stop(2)
    assert (tmp_path / "copy" / "2" / "metadata.arrow").exists()


# -- options


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": {"a": 1}}])
def test_lazy_snapshots_without_an_optimizer_are_refused_before_training(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    options = bcp.SaveOptions(snapshot="lazy")
    with pytest.raises(bcp.InputError, match="snapshot='lazy'"):
        bcp.Run(str(tmp_path / "run"), {**states(), **optimizer}, save_options=options)
    model = nn.Linear(2, 2)
    bcp.Run(
        str(tmp_path / "run"),
        {"model": model, "optimizer": torch.optim.SGD(model.parameters())},
        save_options=options,
    ).close()


@pytest.mark.parametrize("wrong", [{"modle": {}}, {"model": {}, "extra": {}}])
def test_states_of_unknown_kinds_are_refused_before_training(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(bcp.InputError, match="its keys are"):
        bcp.Run(str(tmp_path / "run"), wrong)


# -- interrupts

HEAD = """
import asyncio, sys
import torch
import bcp

def hang_if(hangs):
    async def wait(part):
        if hangs():
            while not returned:  # a signal before would interrupt the call that begins the save
                await asyncio.sleep(0.001)
            print("saving", flush=True)
            await asyncio.sleep(3600)
        return part
    return bcp.SaveOptions(edit=lambda graph: graph.before("checksum", bcp.extend.Stage("wait", wait)))

states = {"model": {"w": torch.ones(4)}}
begun, returned = [], []
options = hang_if(lambda: 2 in begun)
"""

SCRIPT = f"""{HEAD}
if sys.argv[2] == "exit":
    import bcp.runs.saves
    bcp.runs.saves.TELL_SECONDS = 0.1  # the first line that the test waits for comes after it
with bcp.Run(sys.argv[1], states, save=1, save_options=options) as run:
    run.resume()
    run.maybe_save(1).wait()
    begun.append(2)
    run.maybe_save(2)
    returned.append(2)
    if sys.argv[2] == "next":
        run.maybe_save(3)
"""

COROUTINE = f"""{HEAD}
async def train(run):
    await run.aresume()
    await (await run.amaybe_save(1))
    begun.append(2)
    await run.amaybe_save(2)
    returned.append(2)
    if sys.argv[2] != "exit":
        await asyncio.sleep(3600)

async def wake_up_again_and_again():
    while True:  # a loop that falls asleep just then does not learn of a signal
        await asyncio.sleep(0.1)

async def main():
    naps = asyncio.create_task(wake_up_again_and_again())
    run = bcp.Run(sys.argv[1], states, save=1, save_options=options)
    if sys.argv[2] == "with":
        with run:
            await train(run)
    else:
        async with run:
            await train(run)

asyncio.run(main())
"""

PENDING = f"""{HEAD}
returned.append(bcp.save_async(sys.argv[1], states, options=hang_if(lambda: True)))
returned[0].wait()
"""


@contextmanager
def started(script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process of its own, from the save that hangs to the end of the block."""
    job = Forked(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        line_with(job.stdout, "saving")
        yield job
    finally:
        job.kill()
        job.communicate()


def pressed(job: subprocess.Popen[str], words: str) -> str:
    """Press Ctrl-C; return the line about it."""
    job.send_signal(signal.SIGINT)
    return line_with(job.stderr, words)


def line_with(stream: Any, words: str) -> str:
    """Read lines until one has the words."""
    for line in stream:
        if words in line:
            return str(line)
    raise AssertionError(f"{words!r} was never said")


def assert_given_up(job: subprocess.Popen[str], folder: Path) -> None:
    """Check that the job ends by itself, after an interrupt, without the files of step 2."""
    _, errors = job.communicate(timeout=120)
    assert "waiting for" not in errors
    # 1 with tabulate, as the packages of `make sweep` bring it: torch calls it at the end, and Python then forgets why
    assert job.returncode in (130, -signal.SIGINT, 1)
    assert bcp.latest(folder) == f"{folder}/{step_name(1)}"
    assert not list((folder / step_name(2)).rglob("*.*"))


@pytest.mark.parametrize(
    ("script", "where"),
    [(SCRIPT, "next"), (SCRIPT, "exit"), (COROUTINE, "with")],
    ids=["next", "exit", "in a coroutine"],
)
def test_a_second_interrupt_gives_the_running_save_up(tmp_path: Path, script: str, where: str) -> None:
    """The first one says so. It ends the loop, and the call that waits for the save before it."""
    with started(script, str(tmp_path), where) as job:
        if where == "exit":
            line_with(job.stderr, "waiting until step 2 is durable")  # an interrupt before would end the exit
        told = pressed(job, ". Ctrl-C again gives it up")
        assert "waiting until step 2 is durable" in told
        assert "written on rank 0" in told
        assert job.poll() is None
        pressed(job, "step 2 is given up")
        assert_given_up(job, tmp_path)


def test_an_interrupt_while_a_standby_is_dropped_is_the_first_one() -> None:
    saves = Mock()
    body = await_save(saves, lambda: once(saves.drop), "")
    assert next(body) is saves.drop
    assert body.throw(KeyboardInterrupt("first")) is saves.drop
    wait: Any = body.send(None)
    assert (wait.func, wait.args) == (saves.ended_at_last, (CTRL_C,))
    assert body.throw(KeyboardInterrupt("second")) is saves.give_up
    with pytest.raises(StopIteration) as end:
        body.send(None)
    assert end.value.value.args == ("second",)


@pytest.mark.parametrize("where", ["body", "exit"])
def test_in_a_coroutine_it_takes_one_more_interrupt(tmp_path: Path, where: str) -> None:
    """Each line says what the next one does. One that comes in a regular exit is the first that nobody was told of."""
    with started(COROUTINE, str(tmp_path), where) as job:
        if where == "body":
            assert ". Two more Ctrl-C give it up" in pressed(job, "waiting until step 2 is durable")
            assert job.poll() is None
        told = pressed(job, "before the process ends")
        assert f"step-{2:08d}" in told
        assert "Ctrl-C cancels them" in told
        assert job.poll() is None
        pressed(job, "interrupted; cancelling")
        assert_given_up(job, tmp_path)


def test_the_end_of_a_process_says_what_it_waits_for_and_what_an_interrupt_does(tmp_path: Path) -> None:
    with started(PENDING, str(tmp_path / "1")) as job:
        told = pressed(job, "waiting for 1 operation before the process ends")
        assert "written on rank 0" in told
        assert "Ctrl-C cancels them" in told
        pressed(job, "interrupted; cancelling 1 operation.")
        job.communicate(timeout=120)
    assert not list((tmp_path / "1").rglob("*.*"))
