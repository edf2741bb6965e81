from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import bcp
from bcp import backends
from bcp.options import LoadOptions, SaveOptions
from bcp.testing.storage_fakes import CountingBackend

STATE = {"model": {"w": torch.arange(5.0)}}


class Closing(CountingBackend):
    """Knows how often it was closed."""

    closed = 0

    async def aclose(self) -> None:
        self.closed += 1


def test_storage_that_a_call_opened_is_closed_by_it(tmp_path: Path) -> None:
    opened: list[Closing] = []

    def factory(_: str) -> Closing:
        opened.append(Closing(backends.resolve(tmp_path)))
        return opened[-1]

    backends.register("closing", factory)
    bcp.save("closing://here", STATE)
    bcp.load("closing://here", STATE)
    with pytest.raises(bcp.ExistsError):
        bcp.save("closing://here", STATE)
    bcp.save("closing://here", STATE, role="actor")
    assert [backend.closed for backend in opened] == [1, 1, 1, 1]


def test_storage_that_the_caller_opened_stays_open(tmp_path: Path) -> None:
    backend = Closing(backends.resolve(tmp_path))
    bcp.save(backend, STATE)
    bcp.load(backend, STATE)
    assert backend.closed == 0


@pytest.mark.parametrize("call", [bcp.asave, bcp.aload])
def test_another_event_loop_than_asyncio_is_refused(tmp_path: Path, call: object) -> None:
    assert callable(call)
    coroutine = call(tmp_path, STATE)
    with pytest.raises(bcp.InputError, match="asyncio"):
        coroutine.send(None)  # as trio would begin it


def test_options_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCP_IO_WORKERS", "7")
    monkeypatch.setenv("BCP_TIMEOUT", "1.5")
    assert (SaveOptions().io_workers, LoadOptions().timeout) == (7, 1.5)
    monkeypatch.setenv("BCP_TIMEOUT", "soon")
    with pytest.raises(bcp.InputError, match=r"\$BCP_TIMEOUT is 'soon'"):
        SaveOptions()
    monkeypatch.delenv("BCP_TIMEOUT")
    for number in ("nan", "inf", "2.5"):
        monkeypatch.setenv("BCP_IO_WORKERS", number)
        with pytest.raises(bcp.InputError, match=r"\$BCP_IO_WORKERS is"):
            LoadOptions()


def test_two_saves_to_one_path_at_once_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        reached, gate = asyncio.Event(), asyncio.Event()

        async def wait(part: bcp.extend.HostPart) -> bcp.extend.HostPart:
            reached.set()
            await gate.wait()
            return part

        options = SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("gate", wait)))
        first = asyncio.create_task(bcp.asave(tmp_path, STATE, options=options))
        await reached.wait()
        with pytest.raises(bcp.InputError, match="still running"):
            await bcp.asave(tmp_path, STATE, overwrite=True)
        gate.set()
        await first

    asyncio.run(main())
    assert bcp.load(tmp_path, STATE).nbytes == 20


def test_a_backend_says_how_many_parts_and_reads_it_likes_to_have_under_way(tmp_path: Path) -> None:
    class Fond(CountingBackend):
        at_once = 6

    workers: list[int] = []

    def look(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        workers.extend(stage.workers for stage in graph.stages if stage.name in ("upload", "read"))
        return graph

    for name, kind, asked, wanted in (("a", Fond, None, 6), ("b", Fond, 2, 2), ("c", CountingBackend, None, 4)):
        backend = kind(backends.resolve(tmp_path / name))
        for role in (None, "actor"):
            bcp.save(backend, STATE, role=role, options=SaveOptions(edit=look, io_workers=asked))
            bcp.load(backend, STATE, role=role, options=LoadOptions(edit=look, io_workers=asked))
        assert workers == [wanted] * 4
        workers.clear()
