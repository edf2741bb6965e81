"""HDFS, on a real NameNode and two real DataNodes in one JVM."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.abc
import anyio.from_thread
import fsspec
import pytest
import torch
from servers.hdfs import MiniHdfs

import bcp
from bcp.backends.hdfs import conditional, open_hdfs, register
from bcp.backends.hdfs.client import Hdfs, in_parallel
from bcp.backends.hdfs.cluster import NameNodes, find_cluster
from bcp.backends.hdfs.faults import HdfsError, from_java
from bcp.backends.hdfs.store import HdfsStore
from bcp.backends.hdfs.subfiles import SubFiles
from bcp.backends.objects import ObjectBackend
from bcp.errors import InputError, MissingExtraError, StorageError
from bcp.protocols import Backend, RetryPolicy
from bcp.testing.backend_suite import BackendSuite

pytestmark = pytest.mark.anyio
MIB = 1 << 20
_roots = itertools.count()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    with MiniHdfs(tmp_path_factory.mktemp("hdfs")) as servers:
        yield servers


@pytest.fixture
def url(hdfs: MiniHdfs) -> str:
    return f"{hdfs.url}/test/{next(_roots)}"


class TestSuite(BackendSuite):
    @pytest.fixture
    def backend(self, url: str) -> Backend:
        return open_hdfs(url, {})

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ObjectBackend)
        return open_hdfs(backend.store.name, {})


QUICK = RetryPolicy(deadline=30, attempt=10, first_pause=0.05, longest_pause=0.5)
IMPATIENT = RetryPolicy(deadline=1.5, attempt=1, first_pause=0.05, longest_pause=0.2)


def backend_of(url: str, policy: RetryPolicy = QUICK, **options: Any) -> tuple[ObjectBackend, Hdfs]:
    backend = open_hdfs(url, options, policy)
    store = backend.store
    assert isinstance(store, HdfsStore)
    return backend, store.hdfs


async def names(backend: ObjectBackend) -> list[str]:
    """List what is there, finished or not."""
    return [*(info.key for info in await backend.list()), *(one.name for one in await backend.unfinished())]


async def upload(backend: ObjectBackend, key: str, data: bytes, part: int, after: dict[int, Callable[[], Any]]) -> None:
    """Write an object part by part; after some parts call what may fail the next ones."""
    async with backend.open_write(key, len(data)) as writer:
        for index, first in enumerate(range(0, len(data), part)):
            await writer.write_part(index, first, data[first : first + part])
            if index in after:
                await anyio.to_thread.run_sync(after[index])


def later(seconds: float, *calls: Callable[[], Any]) -> threading.Thread:
    """Make calls one after the other in a thread, after some seconds."""

    def run() -> None:
        time.sleep(seconds)
        for call in calls:
            call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def job(name: str, url: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(  # noqa: S603 -- ours
        [sys.executable, str(root / "tests" / "jobs" / "hdfs_jobs.py"), name, url],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# -- sub-files


async def test_parts_are_written_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = backend_of(url)
    under_way, all_are = [0], anyio.Event()
    write = Hdfs.write

    async def counted(self: Hdfs, path: str, data: memoryview, *, create_parent: bool) -> None:
        under_way[0] += 1
        if under_way[0] == 4:
            all_are.set()
        with anyio.fail_after(30):
            await all_are.wait()  # none of the four is stored before all have begun
        await write(self, path, data, create_parent=create_parent)

    monkeypatch.setattr(Hdfs, "write", counted)
    data = Random(1).randbytes(36 * MIB + 5)  # noqa: S311 -- no secret
    async with backend.open_write("a/large", len(data)) as writer, anyio.create_task_group() as group:
        for index in range(4):
            first = index * 10 * MIB
            group.start_soon(writer.write_part, index, first, data[first : first + 10 * MIB])
    out = bytearray(len(data))
    await backend.read_into("a/large", 0, memoryview(out))
    assert out == data
    assert await names(backend) == ["a/large"]


async def test_concat_of_64_sub_files(url: str, hdfs: MiniHdfs) -> None:
    backend, client = backend_of(url)
    root = url.removeprefix(hdfs.url)
    pieces = [Random(index).randbytes(1000 + index) for index in range(64)]  # noqa: S311 -- no secret
    offsets = [0, *itertools.accumulate(map(len, pieces))]
    files = SubFiles(client, f"{root}/whole")
    await in_parallel(lambda index: files.write(index, offsets[index], memoryview(pieces[index])), range(64))
    began = time.perf_counter()
    await files.join()
    lasted = time.perf_counter() - began
    print(f"concat of 64 sub-files, with rename: {lasted * 1000:.1f} ms")  # noqa: T201 -- a figure
    assert lasted < 1
    assert await backend.get("whole") == b"".join(pieces)
    assert await names(backend) == ["whole"]


async def test_a_concat_that_is_sent_again_is_not_done_twice(url: str, hdfs: MiniHdfs) -> None:
    _, client = backend_of(url)
    root = url.removeprefix(hdfs.url)
    for name in ("a", "b", "c"):
        await client.write(f"{root}/{name}", memoryview(name.encode()), create_parent=True)
    call = await client.new_call()
    await client.concat(f"{root}/a", [f"{root}/b", f"{root}/c"], call)
    await client.concat(f"{root}/a", [f"{root}/b", f"{root}/c"], call)
    state = await client.state(f"{root}/a")
    assert state is not None
    assert state.nbytes == 3
    with pytest.raises(FileNotFoundError):
        await client.concat(f"{root}/a", [f"{root}/b"], await client.new_call())


@pytest.mark.parametrize("lost", ["concat", "rename"])
async def test_answers_that_are_lost(url: str, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    backend, _ = backend_of(url)
    left, real = [2], getattr(Hdfs, lost)

    async def losing(self: Hdfs, *args: Any, **kwargs: Any) -> None:
        await real(self, *args, **kwargs)
        if left[0]:
            left[0] -= 1
            raise ConnectionResetError("the answer is lost")

    monkeypatch.setattr(Hdfs, lost, losing)
    data = bytes(range(256)) * (72 << 10)
    await upload(backend, "large", data, 9 * MIB, {})
    await backend.put("small", b"1")
    assert await backend.put_if("new", b"2", None)
    assert [(info.key, info.nbytes) for info in await backend.list()] == [
        ("large", len(data)),
        ("new", 1),
        ("small", 1),
    ]
    assert await backend.unfinished() == []
    assert bytes(await backend.get("large")) == data


@pytest.mark.parametrize("channel", ["WebHDFS", "one stream", "no file ids"])
async def test_other_ways_than_our_protocol(url: str, hdfs: MiniHdfs, channel: str) -> None:
    config = {"dfs.namenode.http-address": hdfs.web} if channel == "WebHDFS" else {}
    backend, client = backend_of(url, config=config, concat=channel != "one stream")
    if channel != "one stream":
        session = await client._sessions.here()
        session.names._refused = "SIMPLE authentication is not enabled"
    data = Random(2).randbytes(70 * MIB // 2)  # noqa: S311 -- no secret
    await upload(backend, "large", data, 9 * MIB, {})
    assert bytes(await backend.get("large")) == data
    found = await backend.version("large")
    assert found is not None
    assert found.startswith("0-") == (channel == "no file ids")
    assert await backend.put_if("large", b"new", found)
    assert await backend.put_if("large", b"late", found) is None
    assert await names(backend) == ["large"]


async def test_sub_files_that_were_swept_fail_their_writer(url: str) -> None:
    backend, _ = backend_of(url)

    def sweep() -> None:
        anyio.from_thread.run(discard_all)

    async def discard_all() -> None:
        await backend.discard(await backend.unfinished())

    with pytest.raises(StorageError, match=r"is gone: another process has removed it|not found|does not exist"):
        await upload(backend, "a/large", bytes(20 * MIB), 10 * MIB, {1: sweep})
    assert await names(backend) == []


async def test_a_killed_writer(url: str) -> None:
    backend, client = backend_of(url)
    with job("upload", url) as process:
        assert line_of(process) == "ready"
        process.kill()
    left = await backend.unfinished()
    assert [one.key for one in left] == ["folder/large"] * 2
    assert await backend.list() == []
    await backend.discard(left)
    assert await names(backend) == []
    assert await client.state("/" + url.split("/", 3)[3] + "/folder") is None


# -- commits


async def test_two_processes_race(url: str) -> None:
    backend, _ = backend_of(url)
    await backend.put("neighbour", b"")
    with job("race", url) as first, job("race", url) as second:
        both = (first, second)
        assert [line_of(process) for process in both] == ["ready"] * 2
        found = "none"
        for _ in range(20):
            for process in both:
                assert process.stdin is not None
                process.stdin.write(f"key {found}\n")
                process.stdin.flush()
            answers = sorted(line_of(process) for process in both)
            assert answers[0] == "lost", answers
            assert answers[1].startswith("won "), answers
            found = answers[1].split()[1]
            assert await backend.version("key") == found
        for process in both:
            assert process.stdin is not None
            process.stdin.close()
    assert await names(backend) == ["key", "neighbour"]


async def test_a_commit_after_one_that_died(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional, "PATIENCE_SECONDS", 0.2)
    backend, _ = backend_of(url)
    await backend.put("key", b"old")
    found = await backend.version("key")
    with job("die_in_commit", url) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert len(await backend.unfinished()) == 2  # its file and its claim
    assert await backend.put_if("key", b"new", found)
    assert bytes(await backend.get("key")) == b"new"
    await backend.discard(await backend.unfinished())
    assert await names(backend) == ["key"]


async def test_a_commit_makes_no_directory(url: str) -> None:
    backend, _ = backend_of(url)
    await backend.put("neighbour", b"")
    with pytest.raises(StorageError, match="the directory is gone"):
        await backend.put_if("moved/metadata.arrow", b"1", None)
    assert await names(backend) == ["neighbour"]


# -- servers that fail


@pytest.fixture
def mended(hdfs: MiniHdfs) -> Iterator[MiniHdfs]:
    """The servers, which are as they were after the test."""
    yield hdfs
    for command in ("start-namenode 0", "start-datanode 0", "start-datanode 1"):
        hdfs.command(command)
    hdfs.command("safemode-leave")
    hdfs.command("await 0")


async def test_a_namenode_that_restarts_during_an_upload(url: str, mended: MiniHdfs) -> None:
    backend, _ = backend_of(url)
    await backend.put("previous", b"1")
    data = Random(3).randbytes(45 * MIB)  # noqa: S311 -- no secret
    threads = []

    def restart() -> None:
        mended.command("stop-namenode 0")
        threads.append(later(0.5, lambda: mended.command("start-namenode 0")))

    await upload(backend, "large", data, 9 * MIB, {1: restart})
    threads[0].join()
    assert bytes(await backend.get("large")) == data
    assert bytes(await backend.get("previous")) == b"1"
    assert await names(backend) == ["large", "previous"]


async def test_a_namenode_that_stays_away(url: str, mended: MiniHdfs) -> None:
    backend, _ = backend_of(url, IMPATIENT)
    await backend.put("previous", b"1")
    with anyio.fail_after(30), pytest.raises(StorageError, match="no NameNode"):
        await upload(backend, "a/large", bytes(20 * MIB), 10 * MIB, {0: lambda: mended.command("stop-namenode 0")})
    mended.command("start-namenode 0")
    mended.command("await 0")
    assert bytes(await backend.get("previous")) == b"1"
    await backend.discard(await backend.unfinished())
    assert await names(backend) == ["previous"]


async def test_a_datanode_that_stops_during_an_upload(url: str, mended: MiniHdfs) -> None:
    # hdfs-native may wait for the dead DataNode for a minute; the attempt's own limit comes first
    backend, _ = backend_of(url, RetryPolicy(deadline=90, attempt=1, first_pause=0.05, longest_pause=0.5))
    data = Random(4).randbytes(45 * MIB)  # noqa: S311 -- no secret
    stop = later(0.05, lambda: mended.command("stop-datanode 0"))
    await upload(backend, "large", data, 9 * MIB, {})
    stop.join()
    assert bytes(await backend.get("large")) == data
    assert await names(backend) == ["large"]


async def test_no_datanode(url: str, mended: MiniHdfs) -> None:
    backend, _ = backend_of(url, IMPATIENT)
    await backend.put("previous", b"1")
    mended.command("stop-datanode 0")
    mended.command("stop-datanode 1")
    with anyio.fail_after(30):
        with pytest.raises(StorageError, match="storing 'a' failed, tried"):
            await backend.put("a", b"1")
        with pytest.raises(StorageError, match="reading 'previous' failed, tried"):
            await backend.get("previous")


async def test_safe_mode_during_a_commit(url: str, mended: MiniHdfs) -> None:
    backend, _ = backend_of(url)
    await backend.put("key", b"old")
    found = await backend.version("key")
    mended.command("safemode-enter")
    thread = later(0.5, lambda: mended.command("safemode-leave"))
    new = await backend.put_if("key", b"new", found)
    thread.join()
    assert new == await backend.version("key")
    assert bytes(await backend.get("key")) == b"new"
    mended.command("safemode-enter")
    impatient, _ = backend_of(url, IMPATIENT)
    with pytest.raises(StorageError, match=r"SafeModeException.*in safe mode"):
        await impatient.put_if("key", b"newer", new)
    assert bytes(await backend.get("key")) == b"new"
    mended.command("safemode-leave")
    assert await names(backend) == ["key"]


async def test_a_user_who_may_not(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = backend_of(url)
    await backend.put("key", b"1")
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    other, _ = backend_of(url)
    for call in (other.put("a", b"1"), other.put_if("b", b"1", None), other.delete(["key"])):
        with pytest.raises(StorageError, match=r"tried once: .*(AccessControl|Permission denied)"):
            await call
    assert bytes(await other.get("key")) == b"1"


async def test_a_racing_overwrite_is_an_error_and_never_a_mix(url: str) -> None:
    backend, client = backend_of(url)
    await backend.put("key", bytes(100))
    out = bytearray(50)
    await backend.read_into("key", 0, memoryview(out))
    await backend_of(url)[0].put("key", b"1" * 100)
    with suppress(StorageError):  # the old file's blocks may still be there
        await backend.read_into("key", 50, memoryview(out))
        assert bytes(out) == bytes(50)
    (await client._sessions.here()).open_files.clear()
    with pytest.raises(StorageError, match="was replaced while it was being read"):
        await backend.read_into("key", 50, memoryview(out))


# -- a pair of NameNodes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    with MiniHdfs(tmp_path_factory.mktemp("pair"), pair=True) as servers:
        yield servers


def write_settings(folder: Path, settings: Mapping[str, str]) -> None:
    rows = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
    )
    (folder / "hdfs-site.xml").write_text(f"<?xml version='1.0'?><configuration>{rows}</configuration>")


async def test_failover(pair: MiniHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(tmp_path, pair.settings)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    backend, _ = backend_of("hdfs://pair/run")
    await backend.put("previous", b"1")
    data = Random(5).randbytes(36 * MIB)  # noqa: S311 -- no secret

    def switch() -> None:
        pair.command("standby 0")
        threads.append(later(0.3, lambda: pair.command("active 1")))

    threads: list[threading.Thread] = []
    await upload(backend, "large", data, 9 * MIB, {1: switch})
    assert bytes(await backend.get("large")) == data
    found = await backend.version("previous")
    pair.command("standby 1")
    threads.append(later(0.3, lambda: pair.command("active 0"), lambda: pair.command("stop-namenode 1")))
    assert await backend.put_if("previous", b"2", found)
    assert await backend.put_if("metadata", b"3", None)
    for thread in threads:
        thread.join()
    assert bytes(await backend.get("previous")) == b"2"
    assert await names(backend) == ["large", "metadata", "previous"]


# -- whole checkpoints, and fsspec


def test_save_and_load(url: str) -> None:
    backend, _ = backend_of(url)
    saved = {"model": {"w": torch.arange(5_000_000, dtype=torch.float32), "b": torch.ones(3)}}
    bcp.save(backend, saved)
    loaded = {"model": {"w": torch.zeros(5_000_000), "b": torch.zeros(3)}}
    bcp.load(backend, loaded)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in saved["model"].items())
    saved["model"]["b"] += 1
    bcp.save(backend, saved, async_checkpoint=True, overwrite=True).wait()
    bcp.load(url, loaded)
    assert torch.equal(loaded["model"]["b"], saved["model"]["b"])
    assert asyncio.run(names(backend_of(url)[0])) == [info.key for info in asyncio.run(backend_of(url)[0].list())]


def test_fsspec(url: str, tmp_path: Path) -> None:
    register()
    asyncio.run(backend_of(url)[0].put("a/object", b"0123456789"))
    with fsspec.open(f"{url}/a/object") as file:
        assert file.read(4) == b"0123"
        assert file.seek(-2, 2) == 8
        assert file.read() == b"89"
    data = Random(6).randbytes(20 * MIB)  # noqa: S311 -- no secret
    with fsspec.open(f"{url}/b/stream", "wb") as file:
        file.write(data)
    fs, root = fsspec.url_to_fs(url, block_bytes=4 * MIB)
    assert fs.cat_file(f"{root}/b/stream") == data
    fs.pipe_file(f"{root}/b/parts", data)
    assert fs.cat_file(f"{root}/b/parts", -5) == data[-5:]
    assert fs.cat_ranges([f"{root}/b/parts"] * 2, [0, 9 * MIB], [5, 10 * MIB]) == [data[:5], data[9 * MIB : 10 * MIB]]
    assert sorted(fs.find(root)) == [f"{root}/a/object", f"{root}/b/parts", f"{root}/b/stream"]
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{root}/b/parts", b"1", mode="create")
    (tmp_path / "up").write_bytes(data)
    fs.put_file(str(tmp_path / "up"), f"{root}/c/up")
    fs.get_file(f"{root}/c/up", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == data
    fs.cp_file(f"{root}/a/object", f"{root}/b/parts")
    assert fs.cat_file(f"{root}/b/parts") == b"0123456789"
    fs.mv(f"{root}/b", f"{root}/moved")
    assert fs.ls(f"{root}/moved", detail=False) == [f"{root}/moved/parts", f"{root}/moved/stream"]
    fs.rm(f"{root}/moved", recursive=True)
    assert not fs.exists(f"{root}/moved")
    with pytest.raises(FileNotFoundError):
        fs.info(f"{root}/moved")


# -- without a server


@pytest.mark.parametrize(
    ("java", "kind", "transient"),
    [
        ("java.io.FileNotFoundException", FileNotFoundError, None),
        ("org.apache.hadoop.fs.FileAlreadyExistsException", FileExistsError, None),
        ("org.apache.hadoop.security.AccessControlException", PermissionError, None),
        ("org.apache.hadoop.hdfs.server.namenode.SafeModeException", HdfsError, True),
        ("org.apache.hadoop.ipc.StandbyException", HdfsError, True),
        ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", HdfsError, False),
        ("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException", HdfsError, False),
        ("org.example.Unknown", HdfsError, False),
    ],
)
def test_java_classes(java: str, kind: type[OSError], transient: bool | None) -> None:  # noqa: FBT001 -- a parameter
    error = from_java(java, "the reason\n\tat java.lang.Stack.trace")
    assert type(error) is kind
    assert "the reason" in str(error)
    assert "trace" not in str(error)
    assert getattr(error, "transient", None) is transient


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\2\xff\xff"])
async def test_something_else_listens_there(answer: bytes) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 -- no query
        nodes = NameNodes(find_cluster(f"127.0.0.1:{port}", {}, None), "me")
        with anyio.fail_after(20), pytest.raises(OSError, match=r"no NameNode of|no setting dfs.namenode.http-address"):
            await nodes.state("/a")
        nodes.close()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("hdfs://me@host/a", {}, "HADOOP_USER_NAME"),
        ("hdfs:///a", {}, "fs.defaultFS"),
        ("hdfs://host:port/a", {}, "not the address"),
        ("hdfs://host/a/../b", {}, "write it in full"),
        ("hdfs://host/a", {"blocksize": 5}, "blocksize"),
        ("hdfs://host/a", {"block_bytes": 5}, "multiple of 1 MiB"),
        ("hdfs://host/a", {"replication": 0}, "positive"),
    ],
)
def test_what_cannot_be_opened(
    url: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(InputError, match=message):
        open_hdfs(url, options)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bcp-checkpoint\[hdfs\]'"):
        open_hdfs("hdfs://host/a", {})
