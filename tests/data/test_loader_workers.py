"""Worker processes: they start, read ahead, prepare states, fail, die, and leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from feeding import Fed, alike, drain, everything, load, save, step
from forked import run_forked
from ranks import ended, started
from samples import sample
from slow_sources import Exiting, Failing, Growing, Locked, Noted, Silent, Verbose, Wide

from bcp._messages.reading import StatesRequest
from bcp.data import Source, TokenLoader
from bcp.data.worker import Job, Line
from bcp.data.workers import Workers, _pickled
from bcp.errors import InputError, StageError


def loader(samples: Any, **changes: Any) -> TokenLoader:
    given = {"context": 8, "batch": 6, "shards": 6, "epochs": 1, "workers": 2} | changes
    return TokenLoader([Source("pages", samples)], **given)


def children() -> set[int]:
    """Processes below this one, but for the two that multiprocessing keeps."""
    own = psutil.Process()
    kept = {child.pid for child in own.children() if {"resource_tracker", "forkserver"} & set(_words(child))}
    return {child.pid for child in own.children(recursive=True)} - kept


def _words(process: psutil.Process) -> list[str]:
    return " ".join(process.cmdline()).replace(".", " ").split()


def workers_of(reader: TokenLoader) -> set[int]:
    """Return the processes of a loader that runs."""
    assert isinstance(reader._engine, Workers)
    return {worker.process.pid for worker in reader._engine._workers if worker.process.pid}


@contextmanager
def no_child_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_workers_give_the_batches_of_one_process(workers: int) -> None:
    alone = loader(Growing(), workers=0)
    with no_child_is_left(), loader(Growing(), workers=workers) as reader:
        for batch in reader:
            expected = next(alone)
            assert torch.equal(batch.tokens, expected.tokens)
            assert torch.equal(batch.documents, expected.documents)
            assert (batch.samples, batch.windows) == (expected.samples, expected.windows)
        assert next(alone, None) is None


def feed_by_processes(method: str | None) -> None:
    with no_child_is_left():
        with loader(Growing(), start_method=method, workers=1) as reader:
            fed = Fed()
            for number in range(4):
                assert step([reader], fed)
                reader.prepare(number)
            checkpoint = save([reader])
        load([alone := loader(Growing(), workers=0)], checkpoint)
        drain(alone, fed)
        assert (fed.ids, fed.tokens) == everything([Source("pages", Growing())], 1)


def run_script(source: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, with the modules of this folder."""
    script = folder / "job.py"
    script.write_text(source)
    path = os.pathsep.join(str(Path(__file__).parents[up]) for up in (0, 1, 2))
    return run_forked([sys.executable, script, *args], env=os.environ | {"PYTHONPATH": path})


def test_processes_may_be_spawned() -> None:
    feed_by_processes("spawn")


def _feed_by_forked_processes(_rank: int) -> None:
    feed_by_processes("fork")


def test_processes_may_be_forked() -> None:
    """By a process without the threads that other tests have left in this one."""
    assert ended(started(1, _feed_by_forked_processes), 120) == [0]


def test_no_process_is_forked_out_of_the_training_process() -> None:
    with loader(Growing(), workers=1) as reader:
        next(reader)
        (worker,) = reader._engine._workers
        assert psutil.Process(worker.process.pid).ppid() != os.getpid()


def test_samples_that_cannot_be_pickled_are_refused() -> None:
    class Local(Growing):
        pass

    sources = [Source("pages", Growing()), Source("local", Local())]
    remedy = r"source 'local' cannot be pickled.* at the top level of a module, or pass start_method='fork'"
    with no_child_is_left(), TokenLoader(sources, 8, 6, shards=6, workers=2) as reader:
        for _ in range(2):
            with pytest.raises(InputError, match=remedy):
                next(reader)
        assert len(reader.unit_states()) == 6


def test_sources_that_a_worker_cannot_unpickle_are_named() -> None:
    with no_child_is_left(), loader(Locked()) as reader:
        with pytest.raises(
            StageError, match=r"could not be unpickled \(worker 0 of reader 0\).*the key is lost"
        ) as caught:
            next(reader)
        assert "__setstate__" in caught.value.__notes__[0]


SLICES = list(torch.arange(4_000_000).reshape(1000, 4000))


def test_tensors_are_pickled_without_the_rest_of_their_storage() -> None:
    with loader([piece[:5] for piece in SLICES]) as reader, loader([piece[:5] for piece in SLICES], workers=0) as alone:
        assert torch.equal(next(reader).tokens, next(alone).tokens)
        assert len(_pickled(Job(reader._recipe, None, 2))) < 1_000_000  # type: ignore[arg-type]


EARLY = """
import multiprocessing, multiprocessing.forkserver

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["bcp.data", "slow_sources"])
    multiprocessing.forkserver.ensure_running()  # imports beside this process
"""
UNGUARDED = f"""
{EARLY}
from slow_sources import Growing
from bcp._messages.reading import StatesRequest
from bcp.data import Source, TokenLoader
next(TokenLoader([Source("pages", Growing())], 8, 6, shards=6, workers=1))
"""


def test_a_script_whose_work_is_not_guarded_is_told_so(tmp_path: Path) -> None:
    done = run_script(UNGUARDED, tmp_path)
    assert done.returncode == 1
    assert 'the script\'s own work belongs below `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_it_works_while_other_threads_hold_locks_and_torch_has_threads() -> None:
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    with no_child_is_left(), loader(Growing()) as reader:
        thread = threading.Thread(target=lambda: next(reader))
        thread.start()
        thread.join()
        assert next(reader).windows[0] == 6


def test_a_state_has_nothing_of_what_was_only_prefetched(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with loader(Noted(str(notes)), prefetch=5) as reader:
        next(reader)
        consumed = save([reader])
    with loader(Growing(), workers=0) as reference:
        next(reference)
        fed = Fed()
        while step([reference], fed):
            pass
    with loader(Growing(), workers=0) as resumed:
        load([resumed], consumed)
        again = Fed()
        while step([resumed], again):
            pass
    assert again == fed
    assert all(len(line.split()) == 2 for line in notes.read_text().splitlines())


def test_states_are_those_of_one_process_whether_prepared_or_not() -> None:
    for prepared_before in (None, 0, 1, 2, 3, 5):
        with loader(Growing(), prefetch=3) as reader, loader(Growing(), workers=0) as other:
            for number in range(7):
                if prepared_before is not None and number == 7 - prepared_before:
                    reader.prepare(7)
                assert torch.equal(next(reader).tokens, next(other).tokens)
            if prepared_before == 0:
                reader.prepare(7)
            load([left := loader(Growing(), workers=0)], save([reader]))
            rest, expected = Fed(), Fed()
            while step([left], rest):
                pass
            while step([other], expected):
                pass
            assert rest == expected, prepared_before
            assert next(reader).windows[0] == 42


def test_a_prepared_state_needs_no_worker() -> None:
    with loader(Growing(), prefetch=2) as reader:
        next(reader)
        reader.prepare(2)
        next(reader)
        for worker in reader._engine._workers:
            while worker.answer is None:
                worker.receive()
            worker.process.kill()
            worker.process.join()
        prepared = save([reader])
        with pytest.raises(StageError, match="SIGKILL"):
            reader.unit_states()
    with loader(Growing(), workers=0) as other:
        next(other)
        next(other)
        expected, fed = Fed(), Fed()
        while step([other], expected):
            pass
    load([again := loader(Growing(), workers=0)], prepared)
    while step([again], fed):
        pass
    assert fed == expected


def test_each_request_for_states_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to an earlier request may arrive after a later one was made."""
    numbers: list[int] = []
    send = Line.send

    def note(line: Line, message: Any) -> None:
        if isinstance(message, StatesRequest):
            numbers.append(message.number)
        send(line, message)

    monkeypatch.setattr(Line, "send", note)
    with loader(Growing(), workers=1) as reader:
        next(reader)
        for _ in range(3):
            reader.prepare(0)
    assert len(numbers) == len(set(numbers)) == 3


def test_reader_and_worker_never_wait_for_each_other_to_receive() -> None:
    """The state comes behind all batches that were read ahead, which the reader then consumes without receiving."""
    with (
        loader(Growing(), workers=1, epochs=None, prefetch=100) as reader,
        loader(Growing(), workers=0, epochs=None) as alone,
    ):
        for _ in range(3):
            reader.unit_states()
            for _ in range(150):
                assert torch.equal(next(reader).tokens, next(alone).tokens)


def test_a_state_that_was_returned_does_not_change() -> None:
    with loader(Growing()) as reader:
        next(reader)
        reader.prepare(1)
        checkpoint = save([reader])
        copied = checkpoint.copied()
        for _ in range(6):
            next(reader)
            reader.prepare(2)
            save([reader])
        assert all(alike(unit, copied.units[name]) for name, unit in checkpoint.units.items())


def test_megabytes_of_batches_and_states_do_not_block_a_worker() -> None:
    with loader(Wide(12), context=100_000, workers=2, prefetch=3) as reader:
        fed = Fed()
        batch = next(reader)
        assert batch.tokens.shape == (6, 100_000)
        reader.prepare(1)
        checkpoint = save([reader])
        tokens = sum(unit["tokens"].numel() for unit in checkpoint.units.values())
        assert tokens == 12 * 131_072 - int((batch.documents >= 0).sum())
        del batch
        while (batch := next(reader, None)) is not None:
            fed.ids.update(sample for window in batch.samples for sample in window)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_a_worker_has_its_source_sample_and_traceback(workers: int) -> None:
    fed = Fed()
    with no_child_is_left(), loader(Failing(), workers=workers) as reader:
        with pytest.raises(StageError, match=r"sample 13 of source 'pages' in epoch 0 \(worker \d") as caught:
            drain(reader, fed)
        assert "KeyError: 'no such page'" in str(caught.value)
        assert 'raise KeyError("no such page")' in caught.value.__notes__[0]
        with pytest.raises(StageError, match="sample 13"):
            next(reader)
        load([again := loader(Growing(), workers=0)], save([reader]))
    while step([again], fed):
        pass
    assert (fed.ids, fed.tokens) == everything([Source("pages", Growing())], 1)


def test_a_long_error_of_any_characters_is_clipped() -> None:
    with (
        loader(Verbose(), workers=1) as reader,
        pytest.raises(StageError, match="OSError: \U0001f4be\U0001f4be") as caught,
    ):
        next(reader)
    assert len(str(caught.value)) < 2000
    assert caught.value.__notes__[0].endswith("\U0001f4be\n")


@pytest.mark.parametrize(("how", "message"), [("killed", "was killed by SIGKILL"), ("exit", "ended with exit code 3")])
def test_the_death_of_a_worker_is_an_error(how: str, message: str) -> None:
    with no_child_is_left(), loader(Exiting(how)) as reader:
        with pytest.raises(StageError, match=rf"worker \d of reader 0.*{message}"):
            list(reader)
        with pytest.raises(StageError, match=message):
            next(reader)
        with pytest.raises(StageError, match=message):
            reader.unit_states()


def test_a_worker_that_is_killed_while_the_loop_waits_for_it() -> None:
    with no_child_is_left(), loader(Silent()) as reader:
        engine = reader._running()
        pid = engine._workers[0].process.pid
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(StageError, match=f"process {pid} was killed by SIGKILL"):
            next(reader)


def test_a_loader_that_nobody_holds_ends_its_workers() -> None:
    with no_child_is_left():
        reader = loader(Growing())
        next(reader)
        assert children()
        del reader
        gc.collect()


def test_loading_into_a_running_loader_replaces_its_workers() -> None:
    with no_child_is_left(), loader(Growing()) as reader:
        next(reader)
        checkpoint = save([reader])
        expected = [next(reader).tokens for _ in range(3)]
        before = workers_of(reader)
        load([reader], checkpoint)
        assert all(torch.equal(next(reader).tokens, tokens) for tokens in expected)
        assert not workers_of(reader) & before
        assert not children() & before


SCRIPT = f"""
{EARLY}
import json, os, signal, sys
from slow_sources import Growing
from bcp._messages.reading import StatesRequest
from bcp.data import Source, TokenLoader

if __name__ == "__main__":
    loaders = [TokenLoader([Source("pages", Growing())], 8, 6, shards=6, workers=2, prefetch=2) for _ in range(2)]
    for loader in loaders:
        next(loader)
    workers = [worker.process.pid for loader in loaders for worker in loader._engine._workers]
    print(json.dumps(workers), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", sample(["killed", "returns"], "killed"))
def test_workers_die_with_the_process_that_started_them(how: str, tmp_path: Path) -> None:
    job = run_script(SCRIPT, tmp_path, how)
    assert job.returncode == (-signal.SIGKILL if how == "killed" else 0)
    workers = json.loads(job.stdout)
    assert len(workers) == 4
    for worker in workers:
        _wait_for_end(worker)


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended. It is no child of this one; one that lives runs into the test's timeout."""
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait()
    except psutil.NoSuchProcess:
        pass


def test_descriptors_and_memory_are_given_back() -> None:
    process = psutil.Process()
    with loader(Growing(), epochs=None) as reader:
        next(reader)
        before, kept = process.num_fds(), []
        for number in range(50):
            kept.append(next(reader))
            reader.prepare(number)
            kept.append(reader.unit_states())
        assert process.num_fds() <= before
