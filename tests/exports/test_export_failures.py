"""Failures of exports: nothing of the export is left on any rank, and older files come back where they can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from exported import assert_same
from tasks import on_ranks

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.coordinators import memory_coordinators
from bcp.errors import BcpError, CorruptError, InputError, PeerError, StorageError
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

STATES = {f"layer.{n}": torch.full((100,), n, dtype=torch.float32) for n in range(7)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint."""
    bcp.save(tmp_path / "ckpt", {"model": STATES})
    return tmp_path / "ckpt"


@pytest.fixture
def store(tmp_path: Path) -> MemoryBackend:
    """Return an empty folder."""
    return MemoryBackend(str(tmp_path))


def contents(store: MemoryBackend) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        return {info.key: bytes(await store.get(info.key)) for info in await store.list()}

    return asyncio.run(read())


# -- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "nth"), [("open_write", 1), ("open_write", 3), ("write_part", 4), ("commit", 7), ("put", 1)]
)
@pytest.mark.parametrize(
    "export", [partial(bcp.tools.export_hf, shard_bytes=400), partial(bcp.tools.export_dcp, file_bytes=400)]
)
def test_a_failure_leaves_nothing(
    export: Callable[..., Any], operation: str, nth: int, path: Path, store: MemoryBackend
) -> None:
    with pytest.raises(StorageError, match="full"):
        export(path, FaultyBackend(store, operation, StorageError("full"), nth=nth))
    assert contents(store) == {}


def test_a_damaged_checkpoint_is_not_exported(path: Path, tmp_path: Path) -> None:
    file = next((path / "model").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = {"old": torch.ones(3)}
    torch.save(before, tmp_path / "model.pt")
    with pytest.raises(CorruptError, match="checksum"):
        bcp.tools.export_torch(path, tmp_path / "model.pt", overwrite=True)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), before)
    with pytest.raises(CorruptError, match="checksum"):
        bcp.tools.export_hf(path, tmp_path / "hf", shard_bytes=400)
    assert not any((tmp_path / "hf").glob("*")), "the sound files in front of it are deleted"
    file.unlink()
    with pytest.raises(CorruptError, match="missing"):
        bcp.tools.export_dcp(path, tmp_path / "dcp")
    assert not any((tmp_path / "dcp").glob("*"))


def test_no_checkpoint_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(bcp.NotACheckpointError):
        bcp.tools.export_hf(tmp_path / "nothing", tmp_path / "hf")
    with pytest.raises(InputError, match="role= and options= are for a path"):
        bcp.tools.export_hf(bcp.Checkpoint(tmp_path), tmp_path / "hf", role="actor")
    with pytest.raises(InputError, match="options is a"):
        bcp.tools.export_hf(tmp_path, tmp_path / "hf", options=bcp.SaveOptions())  # type: ignore[typeddict-item]  # wrong


@pytest.mark.parametrize("is_open", [False, True])
def test_a_cancelled_export_leaves_nothing(is_open: bool, path: Path, store: MemoryBackend) -> None:  # noqa: FBT001 -- a parameter
    async def run() -> None:
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        async def stop(_: str) -> None:
            loop.call_soon_threadsafe(reached.set)
            await anyio.sleep_forever()

        target = FaultyBackend(store, "write_part", stop, nth=5)
        async with bcp.AsyncCheckpoint(path) as ckpt:
            source = ckpt if is_open else path
            exporting = asyncio.ensure_future(bcp.tools.aexport_hf(source, target, shard_bytes=400))
            await reached.wait()
            exporting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await exporting

    asyncio.run(run())
    assert contents(store) == {}


@pytest.mark.parametrize("operation", ["open_write", "write_part", "commit"])
@pytest.mark.parametrize("rank_at_fault", range(3))
def test_a_rank_that_cannot_write_ends_the_export_of_all(
    operation: str, rank_at_fault: int, path: Path, store: MemoryBackend
) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        target = FaultyBackend(store, operation, StorageError("full"), nth=1 if rank == rank_at_fault else 1000)
        return await bcp.tools.aexport_hf(path, target, shard_bytes=400, coordinator=ranks)

    errors = on_ranks(3, call)
    assert all(isinstance(error, BcpError) and "full" in str(error) for error in errors)
    assert [isinstance(error, PeerError) for error in errors] == [rank != rank_at_fault for rank in range(3)]
    assert contents(store) == {}


def test_the_other_ranks_do_not_write_on(path: Path) -> None:
    store = MemoryBackend("ended at once")

    async def hang(_: str) -> None:
        await anyio.sleep_forever()

    async def call(rank: int, ranks: Any) -> Any:
        target = FaultyBackend(store, "write_part", StorageError("full") if rank == 1 else hang)
        return await bcp.tools.aexport_hf(path, target, shard_bytes=400, coordinator=ranks)

    assert [type(error) for error in on_ranks(3, call)] == [PeerError, StorageError, PeerError]
    assert contents(store) == {}


# -- ranks that part -----------------------------------------------------------------------------------


class Gone(CountingBackend):
    """Calls back after each deletion."""

    def __init__(self, inner: MemoryBackend, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self.then = then

    async def delete(self, keys: Any) -> None:
        await super().delete(keys)
        await self.then()


@pytest.mark.parametrize("ending", ["cancelled", "raised"])
def test_a_file_that_appears_after_rank_0_has_left_is_deleted(ending: str, path: Path, store: MemoryBackend) -> None:
    deleted = asyncio.Event()  # of the loop on which all ranks write

    async def run() -> list[Any]:
        loop, exports = asyncio.get_running_loop(), []

        async def end(_: str) -> None:
            if ending == "raised":
                raise ZeroDivisionError("no error of bcp")
            loop.call_soon_threadsafe(exports[0].cancel)
            await anyio.sleep_forever()

        async def wait_for_a_file() -> None:
            deleted.set()
            while not await store.list():  # noqa: ASYNC110 -- nothing tells of a file
                await anyio.sleep(0.001)

        leaving = FaultyBackend(Gone(store, wait_for_a_file), "open_write", end)  # type: ignore[arg-type]  # a fake
        late = FaultyBackend(store, "commit", lambda _: deleted.wait())
        for rank, ranks in enumerate(memory_coordinators(2)):
            call = bcp.tools.aexport_hf(path, late if rank else leaving, shard_bytes=1600, coordinator=ranks)
            exports.append(asyncio.ensure_future(call))
        return await asyncio.gather(*exports, return_exceptions=True)

    errors = asyncio.run(run())
    assert isinstance(errors[0], asyncio.CancelledError if ending == "cancelled" else ZeroDivisionError)
    assert isinstance(errors[1], PeerError)
    assert contents(store) == {}


def test_rank_0_deletes_for_a_rank_that_cannot(path: Path, store: MemoryBackend) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        nth = 1 if rank == 1 else 1000  # its second file fails, and so does the deletion of the first one
        stuck = FaultyBackend(store, "delete", StorageError("not allowed"), nth=nth)
        target = FaultyBackend(stuck, "open_write", StorageError("full"), nth=2 * nth)
        return await bcp.tools.aexport_hf(path, target, shard_bytes=400, coordinator=ranks)

    errors = on_ranks(3, call)
    assert [type(error) for error in errors] == [PeerError, StorageError, PeerError]
    assert "not allowed" in errors[1].__notes__[0]
    assert contents(store) == {}


class Leaving:
    """A coordinator whose rank raises in place of a step, once a condition holds."""

    def __init__(self, inner: Any, step: str, condition: Callable[[], bool]) -> None:
        self.inner, self.step, self.condition = inner, step, condition
        self.rank, self.world_size = inner.rank, inner.world_size

    @asynccontextmanager
    async def begin(self, operation: str, timeout: float) -> AsyncIterator[Any]:  # noqa: ASYNC109 -- the protocol's
        async with self.inner.begin(operation, timeout) as self.agreement:
            yield self

    async def gather_broadcast(self, step: str, *args: Any) -> bytes:
        if step == self.step:
            while not self.condition():  # noqa: ASYNC110 -- nothing tells of a file
                await anyio.sleep(0.001)
            raise ZeroDivisionError("a rank leaves")
        answer: bytes = await self.agreement.gather_broadcast(step, *args)
        return answer


@pytest.mark.parametrize("step", ["done", "finish"])
def test_a_rank_that_leaves_at_a_step_leaves_no_files(step: str, path: Path, store: MemoryBackend) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        coordinator = Leaving(ranks, step, lambda: True) if rank == 2 else ranks
        return await bcp.tools.aexport_hf(path, store, shard_bytes=400, coordinator=coordinator)

    assert [type(error) for error in on_ranks(3, call)] == [PeerError, PeerError, ZeroDivisionError]
    assert contents(store) == {}


@pytest.mark.parametrize("export", [bcp.tools.aexport_torch, bcp.tools.aexport_safetensors])
def test_a_single_file_is_the_new_one_if_another_rank_leaves_late(export: Any, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.write_bytes(b"old")

    async def call(rank: int, ranks: Any) -> Any:
        coordinator = Leaving(ranks, "done", lambda: target.read_bytes() != b"old") if rank else ranks
        return await export(path, target, kind="model", overwrite=True, coordinator=coordinator)

    assert [type(error) for error in on_ranks(2, call)] == [PeerError, ZeroDivisionError]
    bcp.load(target, {"model": (found := {name: torch.zeros(100) for name in STATES})})
    assert_same(found, STATES)


def test_a_single_file_is_the_old_one_if_another_rank_leaves_early(path: Path, tmp_path: Path) -> None:
    target, begun = tmp_path / "model.pt", asyncio.Event()
    target.write_bytes(b"old")

    async def call(rank: int, ranks: Any) -> Any:
        source = FaultyBackend(LocalBackend(path), "read_scattered", wait, nth=1000 if rank else 1)
        coordinator = Leaving(ranks, "done", begun.is_set) if rank else ranks
        return await bcp.tools.aexport_torch(source, target, overwrite=True, coordinator=coordinator)

    async def wait(_: str) -> None:
        begun.set()
        await anyio.sleep_forever()

    assert [type(error) for error in on_ranks(2, call)] == [PeerError, ZeroDivisionError]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == {"model.pt": b"old"}


# -- files beside the weights --------------------------------------------------------------------------

COMPANIONS = {"config.json": b'{"dtype": "float32"}', "merges.txt": b"new merges", "tokenizer.json": b"new tokenizer"}
OLDER = {"config.json": b"old config", "notes.txt": b"not of the export", "tokenizer.json": b"old tokenizer"}
WEIGHTS = {"model-00001-of-00002.safetensors": b"old weights", "model.safetensors.index.json": b"old index"}


@pytest.fixture
def like(tmp_path: Path) -> Path:
    (tmp_path / "like").mkdir()
    for name, data in COMPANIONS.items():
        (tmp_path / "like" / name).write_bytes(data)
    return tmp_path / "like"


@pytest.mark.parametrize(("operation", "nth"), [("commit", 7), ("put", 1), ("put", 2), ("put", 3), ("put", 4)])
def test_older_files_beside_the_weights_come_back(
    operation: str, nth: int, path: Path, like: Path, store: MemoryBackend
) -> None:
    for name, data in {**OLDER, **WEIGHTS}.items():
        asyncio.run(store.put(name, data))
    target = FaultyBackend(store, operation, StorageError("full"), nth=nth)
    with pytest.raises(StorageError, match="full"):
        bcp.tools.export_hf(path, target, like=like, shard_bytes=400, overwrite=True)
    assert contents(store) == OLDER


def test_files_beside_the_weights_are_replaced_once_all_weights_are_there(
    path: Path, like: Path, store: MemoryBackend
) -> None:
    for name, data in {**OLDER, **WEIGHTS}.items():
        asyncio.run(store.put(name, data))
    seen = []

    async def look(_: str) -> None:
        seen.append({info.key for info in await store.list()})

    target = FaultyBackend(store, "put", look)
    result = bcp.tools.export_hf(path, target, like=like, shard_bytes=400, overwrite=True)
    assert seen == [{*OLDER, *(f"model-{n:05d}-of-00007.safetensors" for n in range(1, 8))}]
    found = contents(store)
    assert {name: found[name] for name in (*COMPANIONS, "notes.txt")} == {**OLDER, **COMPANIONS}
    assert set(found) == {*result.files, "notes.txt"}


def test_a_clean_up_that_fails_is_told_and_goes_on(path: Path, like: Path, store: MemoryBackend) -> None:
    for name, data in OLDER.items():
        asyncio.run(store.put(name, data))
    target = FaultyBackend(FaultyBackend(store, "delete", StorageError("gone")), "put", StorageError("full"), nth=3)
    with pytest.raises(StorageError, match="full") as caught:
        bcp.tools.export_hf(path, target, like=like, overwrite=True)
    assert [note.rpartition(": ")[2] for note in caught.value.__notes__] == ["gone"]
    found = contents(store)
    assert found.pop("model.safetensors")
    assert found == OLDER


def test_rank_0_alone_reads_the_folder_to_copy_from(path: Path, like: Path, tmp_path: Path) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        folder = tmp_path / "only on rank 0" if rank else like
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", like=folder, shard_bytes=1600, coordinator=ranks)

    weights = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for result in on_ranks(3, call):
        assert result.files == (*weights, *COMPANIONS, "model.safetensors.index.json")
    assert json.loads((tmp_path / "hf" / "config.json").read_bytes()) == {"dtype": "float32"}
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == COMPANIONS["tokenizer.json"]


def test_a_folder_that_rank_0_cannot_copy_from_ends_the_export_of_all(path: Path, tmp_path: Path) -> None:
    async def call(_: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", like=tmp_path / "nothing", coordinator=ranks)

    errors = on_ranks(2, call)
    assert [type(error) for error in errors] == [InputError, PeerError]
    assert all("nothing' cannot be read" in str(error) for error in errors)
    assert not (tmp_path / "hf").exists()
