"""Saves of several jobs to one path, step by step in many orders: none harms a checkpoint, at most one replaces it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from interleave import Dead, Turns, orders

import bcp
from bcp._save.failures import not_replaced, undone_on_error
from bcp._save.leader import Opening, Planned, Target, open_save
from bcp._written import encode_written
from bcp.backends import LocalBackend, MemoryBackend, swap
from bcp.format.metadata import METADATA_KEY, data_key, decode_metadata, encode_layout, operation_of, receipt_key
from bcp.format.receipt import receipt_digest
from bcp.options import SaveOptions
from bcp.protocols import Backend
from bcp.testing.storage_fakes import CountingBackend

PRIVATE = ("write_part", "open_write", "put")
"""Operations on names that no other save has."""


class Stepped(CountingBackend):
    """A backend whose operations wait for their turn."""

    def __init__(self, inner: Backend, turns: Turns | None, me: int) -> None:
        super().__init__(inner)
        self._turns, self._me = turns, me

    async def before(self, operation: str, key: str) -> None:
        if operation not in PRIVATE and self._turns is not None:
            await self._turns.step(self._me, f"{operation} {key}")


def layout() -> bytes:
    """Return the layout of a save of one rank."""
    bcp.save(MemoryBackend("layout"), {"model": {"w": [1]}}, overwrite=True)
    data = MemoryBackend._stores["layout"][METADATA_KEY]
    return encode_layout(decode_metadata(data, "").layout)


def saver(inner: Backend, unchanging: bytes, *, overwrite: bool) -> Callable[[Turns | None, int], Awaitable[Opening]]:
    """Return a task that does what rank 0 of a save does: open, write a data file and a receipt, commit."""

    async def save(turns: Turns | None = None, me: int = 0) -> Opening:
        backend = Stepped(inner, turns, me)
        options = SaveOptions(
            overwrite=overwrite, retries=bcp.RetryPolicy(first_pause_seconds=1e-6, longest_pause_seconds=1e-6)
        )
        watch = SimpleNamespace(trace="")
        facts = {"rank": 0, "backend": backend, "path": "the path", "options": options, "watch": watch}
        job = cast("Any", SimpleNamespace(**facts, permit=None, metrics={}, names=None, earlier=None, beside=None))
        async with undone_on_error(job) as undo:
            opened, answer = await open_save(Target.of(job), "torch", [bytes(16)])
            opening = Opening.decode(answer)
            assert opening == opened.opening
            undo.begin(opening.operation, [])
            async with not_replaced(backend, job.path, opening.operation, opening.version):
                async with backend.open_write(data_key(0, 0, opening.operation, encoded=False), 4) as writer:
                    await writer.write_part(0, 0, b"data")
                await backend.put(receipt_key(0, opening.operation), b"receipt")
            files = [SimpleNamespace(kind=0, own_nbytes=4, kept=())]
            receipt = cast("Any", SimpleNamespace(files=files, refers=()))
            await Planned(opened, unchanging).commit(undo, [encode_written(receipt, receipt_digest(b"receipt"), 7)])
        return opening

    return save


def committed(files: dict[str, bytes]) -> str:
    """Return the operation that is committed, whose files have to be there."""
    operation = decode_metadata(files[METADATA_KEY], "").commit.operation
    assert files.get(data_key(0, 0, operation, encoded=False)) == b"data", "a file of the checkpoint is not there"
    assert files.get(receipt_key(0, operation)) == b"receipt", "a receipt of the checkpoint is not there"
    return operation


class InMemory:
    """A path in memory."""

    def __init__(self, name: str) -> None:
        MemoryBackend.forget(name)
        self.backend: Backend = MemoryBackend(name)

    def files(self) -> dict[str, bytes]:
        return dict(cast("MemoryBackend", self.backend)._objects)


class OnDisk:
    """A directory."""

    def __init__(self, root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.root = root
        self.backend: Backend = LocalBackend(root)

    def files(self) -> dict[str, bytes]:
        found = {}
        for path in self.root.rglob("*"):
            if path.is_file() or path.is_symlink():
                found[path.relative_to(self.root).as_posix()] = path.read_bytes() if path.exists() else b""
        return found


def check_end(results: list[Any], last: str | None, place: InMemory | OnDisk) -> None:
    """Check who said that it had saved, what is there in the end, and what the others were told."""
    openings = [result for result in results if isinstance(result, Opening)]
    versions = Counter(opening.version for opening in openings)
    assert max(versions.values()) == 1, "two saves replaced the same checkpoint"
    assert last in {opening.operation for opening in openings}
    errors = [result for result in results if not isinstance(result, Opening)]
    assert all(isinstance(error, bcp.ExistsError) and "the path" in str(error) for error in errors), errors
    everything = place.files()
    assert {operation_of(key) for key in everything} == {last, None}, "a save that lost, or was replaced, left files"
    assert len(everything) == 3


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("disk", "writers", "overwrite", "first", "changes", "deaths"),
    [
        pytest.param(False, 2, True, True, 3, 0, id="two replace", marks=pytest.mark.long),
        pytest.param(False, 2, True, True, 1, 1, id="two replace, one dies"),
        pytest.param(False, 3, True, True, 1, 0, id="three replace", marks=pytest.mark.long),
        pytest.param(False, 2, True, False, 2, 0, id="two are the first"),
        pytest.param(False, 2, True, False, 3, 0, id="two are the first, more often", marks=pytest.mark.long),
        pytest.param(False, 2, False, False, 1, 1, id="two are the first, one may die"),
        pytest.param(
            False, 2, False, False, 2, 1, id="two are the first, one may die, more often", marks=pytest.mark.long
        ),
        pytest.param(True, 2, True, True, 1, 0, id="two replace files"),
        pytest.param(True, 2, True, False, 1, 0, id="two write the first files"),
    ],
)
async def test_saves_to_one_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk: bool,  # noqa: FBT001 -- a parameter
    writers: int,
    overwrite: bool,  # noqa: FBT001 -- a parameter
    first: bool,  # noqa: FBT001 -- a parameter
    changes: int,
    deaths: int,
) -> None:
    monkeypatch.setattr(swap, "PATIENCE_SECONDS", 0.0)
    unchanging = await anyio.to_thread.run_sync(layout)
    for turns in orders(changes=changes, deaths=deaths):
        place = OnDisk(tmp_path / "ckpt") if disk else InMemory("races")
        if first:
            await saver(place.backend, unchanging, overwrite=False)()

        def look(place: InMemory | OnDisk = place) -> str | None:
            """Return the operation of the checkpoint, which is whole, and there if there was one before."""
            files = place.files()
            assert METADATA_KEY in files or not first, "the old checkpoint is gone"
            return committed(files) if METADATA_KEY in files else None

        try:
            results = await turns.run([saver(place.backend, unchanging, overwrite=overwrite)] * writers, look)
            if any(isinstance(result, Dead) for result in results):
                results = [await saver(place.backend, unchanging, overwrite=True)()]
            check_end(results, look(), place)
        except BaseException as error:
            error.add_note("\n".join(turns.taken))
            raise
