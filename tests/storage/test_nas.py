"""Shared file systems: the local backend over NFS' semantics, from one client and from two."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import torch
from disks import memory, names, noise
from left_over import without_recordings
from servers.nfs import Mount

import bcp
from bcp._written import check_written, decode_written, encode_written
from bcp.backends import LocalBackend, local, probe
from bcp.backends import files as shared
from bcp.coordinators import SoloCoordinator, memory_coordinators
from bcp.errors import ExistsError, StorageError
from bcp.format.metadata import METADATA_KEY, data_key, receipt_key
from bcp.options import SaveOptions
from bcp.protocols import Backend
from bcp.testing.backend_suite import BackendSuite
from bcp.testing.storage_fakes import FaultyBackend

pytestmark = pytest.mark.anyio

MIB = 1 << 20
ROUNDS = 20
_numbers = count()


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, Mount]]:
    """Two clients of one server, which keep what they know for a minute."""
    here = tmp_path_factory.mktemp("nas")
    with Mount(here / "server", here / "a") as a, Mount(here / "server", here / "b") as b:
        yield a, b


@dataclass
class Place:
    """One directory of the server, as two clients see it."""

    a: LocalBackend
    b: LocalBackend
    client_a: Mount
    client_b: Mount
    server: Path


@pytest.fixture
def place(mounts: tuple[Mount, Mount]) -> Iterator[Place]:
    a, b = mounts
    name = f"test{next(_numbers)}"
    found = Place(LocalBackend(a.path / name), LocalBackend(b.path / name), a, b, a.path.parent / "server" / name)
    found.server.mkdir()
    a.calls()
    yield found
    a.release()
    b.release()


class TestOneClient(BackendSuite):
    many = 200

    @pytest.fixture
    def backend(self, mounts: tuple[Mount, Mount]) -> Backend:
        return LocalBackend(mounts[0].path / f"suite{next(_numbers)}")


class TestTwoClients(BackendSuite):
    many = 200

    @pytest.fixture
    def backend(self, mounts: tuple[Mount, Mount]) -> Backend:
        self.other = mounts[1].path
        return LocalBackend(mounts[0].path / f"suite{next(_numbers)}")

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, LocalBackend)
        return LocalBackend(self.other / backend.root.name)


async def store(backend: LocalBackend, key: str, data: bytes, how: str = "open_write") -> None:
    """Store an object, by ``put``, by ``put_if``, or in two parts of 1 MiB at most."""
    if how == "put":
        await backend.put(key, data)
    elif how == "put_if":
        assert await backend.put_if(key, data, await backend.version(key))
    else:
        async with backend.open_write(key, len(data)) as writer:
            await writer.write_part(0, 0, memory(data[:MIB]))
            await writer.write_part(1, len(data[:MIB]), memory(data[MIB:]))


def on_server(place: Place) -> list[str]:
    return sorted(path.relative_to(place.server).as_posix() for path in place.server.rglob("*") if not path.is_dir())


# -- how bytes are moved -------------------------------------------------------------------------


@pytest.fixture
def direct_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of files that are opened for direct I/O."""
    seen: list[str] = []
    real = os.open

    def noting(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if flags & os.O_DIRECT:
            seen.append(str(path))
        return real(path, flags, *args, **how)

    monkeypatch.setattr(os, "open", noting)
    return seen


async def test_the_page_cache_is_used_on_shared_file_systems(
    place: Place, tmp_path: Path, direct_opens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_compare", lambda _: pytest.fail("it was measured"))
    data, found = noise(3 * MIB), bytearray(3 * MIB)
    await store(place.a, "object", data)
    await place.b.read_into("object", 0, memoryview(found))
    assert found == data
    assert probe.quickest(place.a.root / "large", 1 << 30) == "early"
    assert direct_opens == []
    await store(LocalBackend(tmp_path), "object", data)
    assert len(direct_opens) == 1, "a local disk is written past it"


@pytest.mark.parametrize(
    ("kind", "mounted", "found"),
    [
        (0x6969, "nfs4", True),
        (0xFF534D42, "cifs", True),
        (0xFE534D42, "smb3", True),
        (0x65735546, "fuse.sshfs", True),
        (0x65735546, "fuseblk", False),
        (0xEF53, "ext4", False),
        (0x0BD00BD0, "lustre", False),
        (0, "", False),
    ],
)
def test_which_file_systems_are_shared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: int,
    mounted: str,
    found: bool,  # noqa: FBT001 -- a parameter
) -> None:
    monkeypatch.setattr(shared, "_known", {})
    monkeypatch.setattr(shared, "file_system_type", lambda _: kind)
    monkeypatch.setattr(shared, "_mounted_as", lambda _: mounted)
    assert shared.is_shared(tmp_path) == found


def test_the_type_of_a_mount_is_found(place: Place, tmp_path: Path) -> None:
    assert shared.file_system_type(place.a.root) == 0x65735546
    assert shared._mounted_as(place.a.root.stat().st_dev) == "fuse.nas"
    assert shared.file_system_type(tmp_path / "absent") == 0
    assert shared._mounted_as(os.makedev(4000, 1)) == ""


async def test_direct_io_can_be_asked_for(place: Place, tmp_path: Path, direct_opens: list[str]) -> None:
    data = noise(2 * MIB)
    with Mount(place.server, tmp_path / "direct", direct=True) as mount:
        for root, times in ((place.a.root, 1), (mount.path, 1)):  # one that refuses it, and one that takes it
            backend = LocalBackend(root, writes="direct", reads="direct")
            found = memory(bytes(2 * MIB))
            await store(backend, "object", data)
            await backend.read_into("object", 0, found)
            assert found == data
            assert len(direct_opens) == 2 * times
            direct_opens.clear()


# -- answers that are lost -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["put", "put_if", "open_write"])
@pytest.mark.parametrize("call", ["rename", "link", "unlink", "symlink", "mkdir", "create"])
async def test_calls_whose_answer_was_lost(place: Place, how: str, call: str) -> None:
    await place.b.put("folder/neighbour", b"")
    for old in (False, True):  # an object is made, then replaced
        for key in ("folder/key", "new/key") if how != "put_if" else ("folder/key",):
            place.client_a.fault(call, repeat=True, times=3)
            data = noise(2 * MIB, seed=old)
            await store(place.a, key, data, how)
            place.client_a.release()
            assert bytes(await place.b.get(key)) == data
    await place.b.delete(["folder/neighbour"])
    assert on_server(place) == sorted({"folder/key", "new/key" if how != "put_if" else "folder/key"})


async def test_deletions_whose_answer_was_lost(place: Place) -> None:
    await place.a.put("folder/key", b"1")
    place.client_a.fault("unlink", repeat=True)
    place.client_a.fault("rmdir", repeat=True)
    await place.a.delete(["folder/key"])
    assert names(place.server) == []


@pytest.mark.parametrize("how", ["put", "open_write"])
async def test_a_rename_that_was_not_done(place: Place, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file is gone, and what has the name is not it."""
    await place.b.put("key", noise(2 * MIB, seed=1))

    def swept(*_: object) -> None:
        for path in place.server.glob(".*.bcp-tmp"):
            path.unlink()
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(os, "rename", swept)
    with pytest.raises(StorageError, match="deleted or moved away"):
        await store(place.a, "key", noise(2 * MIB, seed=2), how)
    assert bytes(await place.b.get("key")) == noise(2 * MIB, seed=1)


# -- what clients remember -----------------------------------------------------------------------


async def test_absent_names_are_not_believed(place: Place) -> None:
    assert await place.b.version("folder/key") is None
    for read in (lambda: place.b.get("folder/key"), lambda: place.b.read_into("folder/key", 0, memoryview(b""))):
        with pytest.raises(FileNotFoundError):
            await read()
    await place.a.put("folder/key", b"x")
    found = bytearray(1)
    await place.b.read_into("folder/key", 0, memoryview(found))
    assert found == bytes(await place.b.get("folder/key")) == b"x"


async def test_an_absent_version_is_not_believed(place: Place) -> None:
    assert await place.b.version("folder/key") is None
    await place.a.put("folder/key", b"x")
    assert await place.b.version("folder/key") == await place.a.version("folder/key")


async def test_a_version_is_that_of_the_name_not_of_the_file_that_had_it(place: Place) -> None:
    """A client knows the old file by the name, and that file lives on: it has another name, too."""
    await place.a.put("key", b"old")
    old = await place.b.version("key")
    os.link(place.server / "key", place.server / "other name")
    await place.a.put("key", b"new")
    assert await place.b.put_if("key", b"newer", old) is None
    assert bytes(await place.a.get("key")) == b"new"


async def test_an_overwriting_save_after_one_of_another_host(place: Place) -> None:
    with pytest.raises(bcp.NotACheckpointError):
        await bcp.aload(place.b, state(0), coordinator=SoloCoordinator())
    await bcp.asave(place.a, state(1), coordinator=SoloCoordinator())
    await bcp.asave(place.b, state(2), overwrite=True, coordinator=SoloCoordinator())
    await loads(place.a, 2)


async def test_directories_that_another_host_removed(place: Place) -> None:
    await place.a.put("folder/below/key", b"1")
    await place.a.list()
    await place.b.delete(["folder/below/key"])
    for how in ("put", "open_write"):
        await store(place.a, "folder/below/key", b"2", how)
        assert bytes(await place.b.get("folder/below/key")) == b"2"
        await place.b.delete(["folder/below/key"])


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_commit_does_not_believe_a_list(place: Place, tmp_path: Path, lazy: bool) -> None:  # noqa: FBT001
    """The client of rank 0 knows the list from before, or the size that a file had before."""
    operation = "0123456789abcdef"
    key = data_key(0, 1, operation, encoded=False)
    with Mount(place.server, tmp_path / "late", lazy=lazy) as mount:
        late = LocalBackend(mount.path)
        for rank in range(2):
            await place.a.put(receipt_key(rank, operation), b"receipt")
        await place.a.put(key, b"short")
        await late.list()
        with (place.server / key).open("ab") as file:
            file.truncate(2 * MIB)
        listed = await late.list()
        assert {info.key: info.nbytes for info in listed}[key] == len(b"short"), "the list is old"
        written = SimpleNamespace(kind=0, own_nbytes=2 * MIB, kept=())
        receipt = cast("Any", SimpleNamespace(files=[written], refers=()))
        nothing = cast("Any", SimpleNamespace(files=[], refers=()))
        messages = [encode_written(nothing, bytes(16), 7), encode_written(receipt, bytes(16), 7)]
        for known in (listed, [info for info in listed if info.key != key]):
            await check_written(late, "path", decode_written(messages), known, operation, encoded=False)
        for wrong in (2 * MIB - 1, 2 * MIB + 1):
            written.own_nbytes = wrong
            messages[1] = encode_written(receipt, bytes(16), 7)
            with pytest.raises(StorageError, match="not there as they were written"):
                await check_written(late, "path", decode_written(messages), listed, operation, encoded=False)


# -- handles that are stale ----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["read", "open", "getattr", "opendir", "readdir"])
async def test_a_stale_handle_is_opened_anew(place: Place, call: str) -> None:
    data = noise(2 * MIB)
    await store(place.a, "folder/key", data)
    found = bytearray(2 * MIB)
    place.client_b.fault(call, errno.ESTALE, times=2)
    await place.b.read_into("folder/key", 0, memoryview(found))
    assert found == data
    for act in (lambda: place.b.get("folder/key"), lambda: place.b.version("folder/key"), place.b.list):
        place.client_b.release()
        place.client_b.fault(call, errno.ESTALE, times=2)
        await act()
    assert [info.key for info in await place.b.list()] == ["folder/key"]


@pytest.mark.parametrize("call", ["create", "link", "lookup", "rename", "symlink", "unlink"])
async def test_a_commit_over_stale_handles(place: Place, call: str) -> None:
    place.client_a.fault(call, errno.ESTALE, times=2)  # the kernel makes the call once more by itself
    first = await place.a.put_if("key", b"0", None)
    assert first is not None
    place.client_b.fault(call, errno.ESTALE, times=2)
    second = await place.b.put_if("key", b"1", first)
    assert second is not None
    place.client_a.release()
    place.client_a.fault(call, errno.ESTALE, times=2)
    assert await place.a.put_if("key", b"2", first) is None
    place.client_a.release()
    place.client_b.release()
    assert [bytes(await backend.get("key")) for backend in (place.a, place.b)] == [b"1"] * 2
    assert on_server(place) == ["key"]


@pytest.mark.parametrize("call", ["create", "fsyncdir", "lookup", "mkdir", "rename"])
async def test_a_file_is_written_over_stale_handles(place: Place, call: str) -> None:
    data = noise(2 * MIB)
    for key in ("folder/key", "folder/other"):
        place.client_a.fault(call, errno.ESTALE, times=2)
        await store(place.a, key, data)
        place.client_a.release()
        await place.a.put(key + "-small", b"1")
    assert on_server(place) == ["folder/key", "folder/key-small", "folder/other", "folder/other-small"]


async def test_a_handle_that_stays_stale(place: Place) -> None:
    await place.a.put("key", b"123")
    place.client_b.fault("read", errno.ESTALE, times=100)
    for read in (lambda: place.b.get("key"), lambda: place.b.read_into("key", 1, memoryview(bytearray(2)))):
        with pytest.raises(StorageError, match=r"'key' failed: .*Stale file handle.*the file server") as caught:
            await read()
        assert caught.value.errno == errno.ESTALE


async def test_a_file_that_is_replaced_while_it_is_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of one of both, never some of each."""
    await place.a.put("key", b"1" * 3 * MIB)
    real, replaced = os.preadv, []

    def replacing(fd: int, outs: Any, offset: int) -> int:
        if not replaced and offset:
            replaced.append(offset)
            (place.server / "new").write_bytes(b"2" * 3 * MIB)
            (place.server / "new").rename(place.server / "key")
        return real(fd, [outs[0][:MIB]], offset)

    monkeypatch.setattr(os, "preadv", replacing)
    found = bytearray(3 * MIB)
    await place.b.read_into("key", 0, memoryview(found))
    assert replaced
    assert set(found) in ({ord("1")}, {ord("2")})


async def test_a_writer_whose_file_another_host_swept(place: Place) -> None:
    with pytest.raises(StorageError, match=r"'key' failed.*Stale file handle.*deleted") as caught:  # noqa: PT012
        async with place.a.open_write("key", 2 * MIB) as writer:
            await writer.write_part(0, 0, bytes(2 * MIB))
            await place.b.discard(await place.b.unfinished())
    assert caught.value.errno == errno.ESTALE
    assert on_server(place) == []


# -- bytes that the server does not take ---------------------------------------------------------


@pytest.mark.parametrize("how", ["put", "put_if", "open_write"])
@pytest.mark.parametrize("call", ["write", "fsync", "flush"])
@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "larger quota"), (errno.EIO, "kernel's log")],
)
async def test_bytes_that_the_server_refuses(place: Place, how: str, call: str, code: int, advice: str) -> None:
    await place.b.put("folder/key", b"old")
    old = await place.a.version("folder/key")
    skip = {"write": {"open_write": 1}, "flush": {"put": 1, "open_write": 1}}.get(call, {}).get(how, 0)
    place.client_a.fault(call, code, name=".bcp-tmp", skip=skip)
    place.client_a.calls()
    with pytest.raises(StorageError) as caught:
        await store(place.a, "folder/key", noise(2 * MIB), how)
    text = str(caught.value)
    assert caught.value.errno == code
    assert all(part in text for part in (str(place.a.root), "folder/key", os.strerror(code), advice)), text
    span = f"bytes {MIB} to {2 * MIB}" if call == "write" and how == "open_write" else f"bytes 0 to {2 * MIB}"
    assert span in text
    assert sum(name == "fsync" for name, _ in place.client_a.calls()) <= 1, "a second fsync reports success"
    place.client_a.release()
    assert await place.b.version("folder/key") == old
    assert on_server(place) == ["folder/key"]


async def test_bytes_that_cannot_be_read(place: Place) -> None:
    await place.a.put("folder/key", bytes(100))
    place.client_b.fault("read", errno.EIO, times=9)
    with pytest.raises(StorageError, match=r"read 'folder/key' failed: .*bytes 10 to 30.*kernel's log") as caught:
        await place.b.read_into("folder/key", 10, memoryview(bytearray(20)))
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
async def test_directories_that_cannot_be_synced(place: Place, code: int) -> None:
    place.client_a.fault("fsyncdir", code, times=100)
    for how in ("put", "put_if", "open_write"):
        await store(place.a, f"folder/{how}" if how != "put_if" else "key", b"1", how)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
async def test_a_root_that_is_nobody_on_the_server(place: Place, code: int) -> None:
    place.client_a.fault("create", code)
    with pytest.raises(StorageError, match=r"put 'key' failed.*root_squash"):
        await place.a.put("key", b"1")


# -- files that are deleted while they are open --------------------------------------------------


async def closed_on_server(place: Place) -> None:
    """Wait until the client has heard from the kernel that files were closed, which close(2) does not wait for."""
    with anyio.fail_after(60):
        while any(".nfs" in name for name in on_server(place)):  # noqa: ASYNC110 -- the kernel tells nobody
            await anyio.sleep(0.01)


async def test_renamed_left_overs_are_no_objects(place: Place) -> None:
    await place.a.put("folder/key", b"1")
    await place.a.put("other", b"2")
    with (place.a.root / "folder/key").open("rb") as file:
        await place.a.delete(["folder/key"])
        assert [name[:4] for name in names(place.server / "folder")] == [".nfs"]
        for backend in (place.a, place.b):
            assert [info.key for info in await backend.list()] == ["other"]
            assert list(await backend.unfinished()) == []
            await backend.delete(["folder/key"])
        assert file.read() == b"1"
    await closed_on_server(place)
    await place.a.delete(["folder/key"])
    assert on_server(place) == ["other"]


async def test_a_checkpoint_that_is_replaced_while_it_is_open(place: Place) -> None:
    await bcp.asave(place.a, state(1), coordinator=SoloCoordinator())
    files = [path.open("rb") for path in place.a.root.rglob("*") if path.is_file()]
    await bcp.asave(place.a, state(2), overwrite=True, coordinator=SoloCoordinator())
    assert any(".nfs" in name for name in on_server(place))
    await loads(place.b, 2)
    for file in files:
        file.close()
    await closed_on_server(place)
    assert len(without_recordings(on_server(place))) == 4


# -- servers that do not answer ------------------------------------------------------------------


async def test_a_server_that_hangs(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop goes on, it is logged, and a cancellation waits for the thread: it still reads the buffer."""
    monkeypatch.setattr(local, "_SLOW_SECONDS", 0.05)
    caplog.set_level(logging.WARNING, "bcp")
    place.client_a.fault("fsync", hang=True, name="key")
    ended = anyio.Event()

    async def write() -> None:
        try:
            await store(place.a, "key", bytes(2 * MIB))
        finally:
            ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        while not place.client_a.hanging():  # noqa: ASYNC110 -- another process
            await anyio.sleep(0.01)
        with anyio.fail_after(60):  # a loop that stood still would not get here: only it lets the server go on
            while "does not answer" not in caplog.text:  # noqa: ASYNC110 -- a log line sets no event
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.05)
            assert not ended.is_set()
            await anyio.to_thread.run_sync(place.client_a.release)
    assert "'key'" in caplog.text
    assert on_server(place) in ([], ["key"]), "the thread finished what it was doing"


# -- whole saves ---------------------------------------------------------------------------------


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = {f"w{n}": torch.rand(300_000 + 7 * n, generator=generator) for n in range(4)}
    return {"model": model, "extra_states": {"seed": seed}}


async def loads(backend: LocalBackend, seed: int) -> None:
    """Load, and look at every element."""
    target = state(0)
    await bcp.aload(backend, target, coordinator=SoloCoordinator())
    assert target["extra_states"]["seed"] == seed
    assert all(torch.equal(target["model"][name], tensor) for name, tensor in state(seed)["model"].items())


async def test_two_ranks_on_two_hosts(place: Place) -> None:
    ranks = memory_coordinators(2)
    for seed in (1, 2):  # the second one replaces the last one
        async with asyncio.TaskGroup() as group:
            for backend, rank in zip((place.a, place.b), ranks, strict=True):
                group.create_task(bcp.asave(backend, state(seed), overwrite=True, coordinator=rank))
        assert (
            len(without_recordings(on_server(place))) == 1 + 2 * 3
        )  # metadata; a receipt, a model and extra states of each
        targets = [state(0), state(0)]
        async with asyncio.TaskGroup() as group:
            for backend, rank, target in zip((place.b, place.a), ranks, targets, strict=True):
                group.create_task(bcp.aload(backend, target, coordinator=rank))
        for target in targets:
            assert torch.equal(target["model"]["w3"], state(seed)["model"]["w3"])


async def test_hosts_that_overwrite_in_turn(place: Place) -> None:
    for seed in range(1, 5):
        backend, other = (place.a, place.b) if seed % 2 else (place.b, place.a)
        await bcp.asave(backend, state(seed), overwrite=True, coordinator=SoloCoordinator())
        await loads(other, seed)
    assert len(without_recordings(on_server(place))) == 4


@pytest.mark.parametrize("overwrite", [False, True])
async def test_jobs_of_two_hosts_that_race(place: Place, overwrite: bool) -> None:  # noqa: FBT001 -- a parameter
    for number in range(ROUNDS // 3):
        roots = [LocalBackend(backend.root / str(number)) for backend in (place.a, place.b)]
        old = await roots[0].version(METADATA_KEY)
        assert old is None
        await roots[0].put("neighbour", b"")
        won = []

        async def job(backend: LocalBackend, seed: int, won: list[int] = won) -> None:
            with suppress(ExistsError):
                await bcp.asave(backend, small(seed), overwrite=overwrite, coordinator=SoloCoordinator())
                won.append(seed)

        async with asyncio.TaskGroup() as group:
            for seed, backend in enumerate(roots, 1):
                group.create_task(job(backend, seed))
        assert len(won) == 1 if not overwrite else won
        target = small(0)
        await bcp.aload(roots[number % 2], target, coordinator=SoloCoordinator())
        assert target["extra_states"]["seed"] in won
        written = [path.as_posix() for path in (place.server / str(number)).rglob("*-*")]
        assert len(without_recordings(written)) == 3


def small(seed: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((100,), float(seed))}, "extra_states": {"seed": seed}}


async def test_commits_of_two_hosts_that_race(place: Place) -> None:
    """Threads of two clients replace one version; one of them does, and both clients see whose."""
    await place.a.put("key", b"0")
    for number in range(ROUNDS):
        found = await place.a.version("key")
        assert await place.b.version("key") == found
        won = []

        async def commit(backend: LocalBackend, data: bytes, found: Any = found, won: list[bytes] = won) -> None:
            if await backend.put_if("key", data, found):
                won.append(data)

        async with anyio.create_task_group() as group:
            for place_, backend in enumerate((place.a, place.b, place.a, place.b)):
                group.start_soon(commit, backend, b"%d %d" % (number, place_))
        assert [bytes(await backend.get("key")) for backend in (place.a, place.b)] == won * 2
    assert on_server(place) == ["key"]


def killed_in_the_upload(backend: LocalBackend) -> int:
    """Save in a forked process that kills itself before its second part; return how it ended."""

    async def kill(_: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    try:
        asyncio._set_running_loop(None)  # the parent's, in which this process began
        dying = FaultyBackend(backend, "write_part", kill, key="model", nth=2)
        options = SaveOptions(overwrite=True, part_bytes=MIB)
        asyncio.new_event_loop().run_until_complete(
            bcp.asave(dying, state(2), options=options, coordinator=SoloCoordinator())
        )
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
async def test_a_killed_save_is_swept_by_the_next_one_of_another_host(place: Place) -> None:
    await bcp.asave(place.b, state(1), coordinator=SoloCoordinator())
    assert killed_in_the_upload(place.a) == signal.SIGKILL
    assert any(name.endswith(".bcp-tmp") for name in on_server(place))
    await loads(place.b, 1)
    await bcp.asave(place.b, state(3), overwrite=True, coordinator=SoloCoordinator())
    assert len(without_recordings(on_server(place))) == 4
    await loads(place.a, 3)


# -- the file system itself ----------------------------------------------------------------------


def test_a_client_that_dies_or_is_closed_leaves_no_mount(tmp_path: Path) -> None:
    for end in ("close", "kill"):
        mount = Mount(tmp_path / "server", tmp_path / end)
        (mount.path / "file").write_bytes(b"x")
        if end == "kill":
            mount._process.kill()
        mount.close()
        assert str(mount.path) not in Path("/proc/mounts").read_text()
        assert names(mount.path) == []
