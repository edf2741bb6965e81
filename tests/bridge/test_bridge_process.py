"""Ctrl-C, fork and the end of the process: each in a process of its own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from programs import KILLED_BY_CTRL_C, program

# -- Ctrl-C ----------------------------------------------------------------------------------------

INTERRUPTED = """
    async def operation(started=None):
        try:
            await say_when_main_waits("now")
            await asyncio.sleep(100)
        finally:
            await in_thread(time.sleep, 0.01)  # clean-up takes a while
            (folder / "cleaned").touch()
"""


def test_ctrl_c_cancels_cleans_up_and_goes_on_its_way(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        INTERRUPTED
        + """
    try:
        _bridge.run(operation)
    except KeyboardInterrupt:
        say(f"cleaned: {(folder / 'cleaned').exists()}")
        raise
    """,
        interrupt=signal.SIGINT,
    )
    assert ended.out.split("\n")[1] == "cleaned: True"
    assert ended.code == KILLED_BY_CTRL_C
    assert "waiting for" not in ended.err


def test_ctrl_c_in_wait_started_cancels(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        INTERRUPTED
        + """
    background = _bridge.start(operation, name="save")
    try:
        background.wait_started()
    except KeyboardInterrupt:
        say(f"{background.done()} {(folder / 'cleaned').exists()}")
    """,
        interrupt=signal.SIGINT,
    )
    assert (ended.out, ended.code, ended.err) == ("now\nTrue True\n", 0, "")


def test_ctrl_c_in_wait_leaves_it_running(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation(started):
        started()
        await say_when_main_waits("now")
        await in_thread(go.wait, 10)
        return "result"
    go = threading.Event()
    background = _bridge.start(operation, name="save")
    try:
        background.wait()
    except KeyboardInterrupt:
        say(background.done())
        go.set()
        say(background.wait())
    """,
        interrupt=signal.SIGINT,
    )
    assert (ended.out, ended.code, ended.err) == ("now\nFalse\nresult\n", 0, "")


def test_under_asyncio_run_the_second_ctrl_c_interrupts(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation():
        try:
            await say_when_main_waits("now")
            while not main_task.cancelling():  # what asyncio.run makes of the first
                await asyncio.sleep(0.001)
            say("now")
            await asyncio.sleep(100)
        finally:
            (folder / "cleaned").touch()
    async def main():
        global main_task
        main_task = asyncio.current_task()
        _bridge.run(operation)
    asyncio.run(main())
    """,
        interrupt=signal.SIGINT,
        times=2,
    )
    assert (ended.out, ended.code) == ("now\nnow\n", KILLED_BY_CTRL_C)
    assert (tmp_path / "cleaned").exists()


def test_a_signal_handler_that_raises_and_one_that_saves(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        INTERRUPTED
        + """
    import signal
    async def rescue():
        return await in_thread(lambda: "rescued")
    def preempted(number, frame):
        say(_bridge.run(rescue))  # while the main thread waits for another operation
        sys.exit(3)
    signal.signal(signal.SIGTERM, preempted)
    _bridge.run(operation)
    """,
        interrupt=signal.SIGTERM,
    )
    assert (ended.out, ended.code) == ("now\nrescued\n", 3)
    assert (tmp_path / "cleaned").exists()


# -- fork ------------------------------------------------------------------------------------------

FORK = """
    async def operation(started):
        try:
            started()
            await in_thread(go.wait, 60)
        finally:
            with open(folder / "clean-ups", "a") as file:
                file.write(f"{os.getpid()}\\n")
        return "result"
    go = threading.Event()
    background = _bridge.start(operation, name="save to /ckpt")
    background.wait_started()
    async def seven():
        return await in_thread(int, 7)
"""


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_has_a_loop_of_its_own_and_leaves_the_parents_alone(tmp_path: Path, leave: str) -> None:
    ended = program(
        tmp_path,
        FORK
        + f"""
    if (child := os.fork()) == 0:
        assert _bridge.run(seven) == 7
        assert _bridge.start(lambda started: seven(), name="own").wait() == 7
        result = lambda: asyncio.run(background.result())
        for ask in (background.wait, background.wait_started, background.cancel, result):
            try:
                ask()
            except RuntimeError as error:
                assert f"was begun by process {{os.getppid()}}" in str(error), error
            else:
                raise AssertionError(ask)
        assert not background.done()
        say(repr(background).replace(str(os.getppid()), "PARENT"))
        {leave}
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    go.set()
    say(background.wait())
    say((folder / "clean-ups").read_text() == f"{{os.getpid()}}\\n")
    """,
        before="import warnings; warnings.simplefilter('ignore', DeprecationWarning)  # 3.12: fork with threads",
    )
    assert ended.err == ""
    assert ended.out.splitlines() == [
        "<Background save to /ckpt: belongs to process PARENT>",
        "0",
        "result",
        "True",
    ]


def test_a_fork_while_the_lock_is_held(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        FORK
        + """
    held, done = threading.Event(), threading.Event()
    def hold():
        with _loop.lock, background._finished._condition:
            held.set()
            done.wait(60)
    threading.Thread(target=hold).start()
    held.wait()
    if (child := os.fork()) == 0:
        assert _bridge.run(seven) == 7
        assert not background.done()
        os._exit(0)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    done.set()
    go.set()
    """,
        before="import warnings; warnings.simplefilter('ignore', DeprecationWarning)  # 3.12: fork with threads",
    )
    assert (ended.out, ended.code) == ("0\n", 0)


def test_dataloader_workers_right_after_start(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        FORK
        + """
    class Numbers(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return _bridge.run(seven) + index
    batches = list(DataLoader(Numbers(), batch_size=4, num_workers=2))
    say([batch.tolist() for batch in batches])
    go.set()
    say(background.wait())
    """,
        before="""
        import warnings; warnings.simplefilter('ignore')
        from torch.utils.data import DataLoader, Dataset
        """,
    )
    assert ended.out == "[[7, 8, 9, 10], [11, 12, 13, 14]]\nresult\n", ended.err
    assert (ended.code, ended.err) == (0, "")


# -- the end of the process ------------------------------------------------------------------------

needs_late_threads = pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info < (3, 12, 2),
    reason="these two Pythons start no thread once the main program has ended",
)

SLOW = """
    import aiofiles
    async def operation(started):
        started()
        while threading.main_thread().is_alive() and not threading._SHUTTING_DOWN:
            await asyncio.sleep(0.001)  # nothing but the end of the main program lets it go on
        for number in range(3):
            await in_thread((folder / f"part{number}").touch)
        async with aiofiles.open(folder / "metadata", "w") as file:
            await file.write("committed")
    background = _bridge.start(operation, name="save to /ckpt/9")
    background.wait_started()
"""


@needs_late_threads
@pytest.mark.parametrize(
    ("last_words", "code"), [("", 0), ("sys.exit(4)", 4), ("raise RuntimeError('training diverged')", 1)]
)
def test_the_end_of_the_program_waits_for_what_is_running(tmp_path: Path, last_words: str, code: int) -> None:
    ended = program(tmp_path, SLOW + f"\n    {last_words}\n", before="import logging; logging.basicConfig()")
    assert ended.code == code
    assert (tmp_path / "metadata").read_text() == "committed"
    assert len(list(tmp_path.glob("part*"))) == 3
    assert "waiting for 1 operation before the process ends: save to /ckpt/9" in ended.err
    assert ("training diverged" in ended.err) == (code == 1)


@needs_late_threads
def test_the_end_waits_for_what_another_thread_starts_meanwhile(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation(started):
        await in_thread(time.sleep, 0.01)
        await in_thread((folder / "second").touch)
    async def first(started):
        started()
        await in_thread(over.wait, 60)
    over = threading.Event()
    def main_asks_for_the_lock():
        return sys._current_frames()[threading.main_thread().ident].f_code.co_name == "_finish_at_exit"
    def other():
        with _loop.lock:
            while not threading._SHUTTING_DOWN:
                time.sleep(0.001)
            over.set()
            while not (background.done() and main_asks_for_the_lock()):
                time.sleep(0.001)
            _bridge.start(operation, name="second")  # at the last moment
    background = _bridge.start(first, name="first")
    background.wait_started()
    threading.Thread(target=other).start()
    """,
    )
    assert ended.code == 0
    assert (tmp_path / "second").exists(), ended.err


def test_an_idle_loop_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def seven():
        return await in_thread(int, 7)
    say(_bridge.run(seven))
    """,
    )
    assert (ended.out, ended.code, ended.err) == ("7\n", 0, "")


def test_a_failure_that_nobody_waited_for_is_told_at_the_end(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation(started):
        started()
        raise OSError("disk full")
    background = _bridge.start(operation, name="save to /ckpt/9")
    while not background.done():
        time.sleep(0.001)
    # a daemon thread still has it at the very end, so that it is never collected
    threading.Thread(target=lambda background: time.sleep(100), args=(background,), daemon=True).start()
    say("end")
    """,
    )
    assert (ended.out, ended.code) == ("end\n", 0)
    assert "save to /ckpt/9 failed, and nobody waited for it\nTraceback" in ended.err
    assert "OSError: disk full" in ended.err


ENDED = """
    async def operation(started):
        started()
        return await in_thread(int, 7)
    async def failing(started):
        raise OSError("disk full")
    kept = [_bridge.start(operation, name="save")]
    assert kept[0].wait() == 7
"""

OUTLIVING = {  # what keeps a module alive has it cleared: its globals are None when the last things are deleted
    "a global": "",
    "an extension": "import ctypes; signal.kept = kept; [ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))"
    " for module in (_bridge, _loop, signal)]",  # modules are cleared last in, first out
    "a cycle": "kept.append((kept, _bridge)); sys.kept = kept; del kept",
    "a daemon thread": "threading.Thread(target=lambda kept: time.sleep(100), args=(kept,), daemon=True).start()",
    "an error": "sys.last_value = ValueError(kept, _bridge)",
    "nothing": "del kept",
}


@pytest.mark.parametrize("keeper", OUTLIVING)
def test_what_outlives_the_modules_says_nothing(tmp_path: Path, keeper: str) -> None:
    ended = program(tmp_path, ENDED + f"\n    {OUTLIVING[keeper]}\n")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_what_is_forgotten_after_the_modules_were_cleared_says_what_it_has_to(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        ENDED
        + """
    unseen = _bridge.start(failing, name="save to /ckpt/9")
    unseen.wait_ended()
    broken = _bridge.Background.__new__(_bridge.Background)  # its making was interrupted
    _loop._current.failed.clear()
    import gc
    for module in (_bridge, _loop):
        for name in vars(module):
            vars(module)[name] = None
    del kept, broken
    gc.collect()
    say("quiet")
    del unseen
    gc.collect()
    os._exit(0)
    """,
    )
    assert ended.out == "quiet\n"
    assert ended.err.startswith("save to /ckpt/9 failed, and nobody waited for it\nTraceback")
    assert "Exception ignored" not in ended.err


@needs_late_threads
def test_ctrl_c_at_the_end_cancels_what_is_running(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation(started):
        started()
        try:
            while not threading._SHUTTING_DOWN:
                await asyncio.sleep(0.001)
            say("now")
            await asyncio.sleep(100)
        finally:
            await in_thread((folder / "cleaned").touch)
    background = _bridge.start(operation, name="save")
    background.wait_started()
    """,
        interrupt=signal.SIGINT,
    )
    assert "interrupted; cancelling 1 operation." in ended.err
    assert (tmp_path / "cleaned").exists()


def test_another_ctrl_c_at_the_end_leaves_at_once(tmp_path: Path) -> None:
    """An operation that does not end holds the process no longer, in neither of the two hooks."""
    ended = program(
        tmp_path,
        """
    async def operation(started):
        while True:
            try:
                await say_when_main_waits("now")
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                pass
    background = _bridge.start(operation, name="save")
    """,
        interrupt=signal.SIGINT,
        times=2,
    )
    assert ended.err.count("waiting for 1 operation before the process ends") == 1
    assert "interrupted; cancelling 1 operation." in ended.err


def test_without_the_private_hook_what_would_be_lost_is_told(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation(started):
        started()
        while not ending.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        (folder / "from the loop").touch()
        await in_thread((folder / "from a thread").touch)
    import atexit
    ending = threading.Event()
    atexit.register(ending.set)  # runs before the bridge's own
    background = _bridge.start(operation, name="save to /ckpt/9")
    background.wait_started()
    """,
        before="import concurrent.futures.thread; del threading._register_atexit",
    )
    assert ended.code == 0
    assert (tmp_path / "from the loop").exists()
    assert not (tmp_path / "from a thread").exists()
    assert "waiting for 1 operation before the process ends: save to /ckpt/9" in ended.err
    assert "what they still need worker threads for is lost" in ended.err
    assert "save to /ckpt/9 failed, and nobody waited for it" in ended.err
    assert "RuntimeError: cannot schedule new futures after" in ended.err


@needs_late_threads
def test_a_lost_failure_is_the_last_word_of_the_program(tmp_path: Path) -> None:
    ended = program(
        tmp_path,
        """
    async def operation(started):
        started()
        while threading.main_thread().is_alive() and not threading._SHUTTING_DOWN:
            await asyncio.sleep(0.001)
        raise OSError("the disk is full")
    background = _bridge.start(operation, name="save to /ckpt/9")
    background.wait_started()
    """,
    )
    assert ended.code == 0
    assert "OSError: the disk is full" in ended.err
    assert ended.err.splitlines()[-1].startswith(
        "save to /ckpt/9 failed, and the exit status of the process does not tell of it: call wait() on the handle"
    )
