"""Compare and swap of a local file: every order of the system calls of two writers, and bounded ones of three."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from interleave import Dead, Scripted, Turns, orders

from bcp.backends import swap
from bcp.backends.keys import content_version
from bcp.runtime.threads import in_thread

NAME = "metadata.arrow"
CALLS = ("symlink", "link", "rename", "unlink", "readlink", "stat")
who: ContextVar[tuple[Turns, int, asyncio.AbstractEventLoop] | None] = ContextVar("who", default=None)


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call that sees or changes names wait for its turn."""

    def gated(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wait_and_call(*args: Any, **how: Any) -> Any:
            mine = who.get()
            if mine is not None:
                turns, me, loop = mine
                asyncio.run_coroutine_threadsafe(turns.step(me, name), loop).result()
            return call(*args, **how)

        return wait_and_call

    for name in CALLS[:5]:
        monkeypatch.setattr(os, name, gated(getattr(os, name), name))
    monkeypatch.setattr(swap, "version_of", gated(swap.version_of, "read"))
    monkeypatch.setattr(swap, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def writer(folder: Path, data: bytes) -> Callable[[Turns, int], Awaitable[tuple[str | None, str | None]]]:
    """Return a task that looks for a version and replaces it; it returns (version found, own version or None)."""

    def run() -> tuple[str | None, str | None]:
        found = swap.version_of(folder / NAME)
        return found, swap.put_if(folder / NAME, memoryview(data), found)

    async def write(turns: Turns, me: int) -> tuple[str | None, str | None]:
        who.set((turns, me, asyncio.get_running_loop()))
        return await in_thread(run)

    return write


def check(folder: Path, old: bytes | None, results: list[Any]) -> None:
    """Check that the writers that succeeded replaced each other one by one, and that the last one's data is there."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Dead):
            raise result
    done = [result for result in results if isinstance(result, tuple) and result[1] is not None]
    successor = dict(done)
    assert len(successor) == len(done), "two writers replaced the same version"
    now = None if old is None else content_version(old)
    path = []
    while now in successor:
        path.append(now)
        now = successor[now]
    alive = not any(isinstance(result, Dead) for result in results)
    assert len(path) == len(done) or not alive
    if alive:
        assert done
        assert swap.version_of(folder / NAME) == now
        assert [path.name for path in folder.iterdir()] == [NAME], "nothing else is left"
    else:
        found = swap.version_of(folder / NAME)
        assert swap.put_if(folder / NAME, memoryview(b"later"), found), "a dead writer blocks nobody"
        assert (folder / NAME).read_bytes() == b"later"


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize(
    ("old", "links", "writers", "changes", "deaths"),
    [
        pytest.param(b"old", True, 2, 3, 0, id="two replace"),
        pytest.param(b"old", True, 2, 1, 1, id="two replace, one dies"),
        pytest.param(b"old", True, 3, 1, 0, id="three replace"),
        pytest.param(None, True, 2, 2, 1, id="two create"),
        pytest.param(None, False, 2, 1, 1, id="two create without hard links"),
    ],
)
@pytest.mark.anyio
async def test_at_most_one_writer_replaces_a_version(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: bytes | None,
    links: bool,  # noqa: FBT001 -- a parameter
    writers: int,
    changes: int,
    deaths: int,
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refused)
    for number, turns in enumerate(orders(changes=changes, deaths=deaths)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if old is not None:
            (folder / NAME).write_bytes(old)

        def look(folder: Path = folder) -> None:
            assert old is None or (folder / NAME).exists(), "the old one stays until the new one is there"

        results = await turns.run([writer(folder, b"new %d" % place) for place in range(writers)], look)
        try:
            check(folder, old, results)
        except BaseException as error:
            error.add_note("\n".join(turns.taken))
            raise


@pytest.mark.anyio
@pytest.mark.usefixtures("stepped")
async def test_a_claim_that_was_ended_stays_until_its_version_is_replaced(tmp_path: Path) -> None:
    """Else the third writer would make the first claim anew, and not see that the second writer is about to rename."""
    (tmp_path / NAME).write_bytes(b"old")
    turns = Scripted([(0, "rename"), (1, "rename"), (0, ""), (2, ""), (1, "")])
    results = await turns.run([writer(tmp_path, b"new %d" % place) for place in range(3)], lambda: None)
    check(tmp_path, b"old", results)
    assert [new is not None for _, new in results] == [False, False, True]


@pytest.mark.anyio
async def test_a_claim_names_a_file_in_its_directory_or_is_not_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "ckpt", tmp_path / f".{NAME}.0.bcp-tmp"
    folder.mkdir()
    other.touch()
    (folder / NAME).write_bytes(b"old")
    found = swap.version_of(folder / NAME)
    (folder / f".{NAME}.{found}-0.bcp-tmp").symlink_to(f"../{other.name}")
    (folder / f".{NAME}.{found}-1.bcp-tmp").symlink_to(NAME)
    assert swap.put_if(folder / NAME, memoryview(b"new"), found) == content_version(b"new")
    assert other.exists()
    assert [path.name for path in folder.iterdir()] == [NAME]


def refused(*_: object) -> None:
    raise OSError(errno.EPERM, "no hard links here")
