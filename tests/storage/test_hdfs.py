"""HDFS, on a real NameNode and two real DataNodes in one JVM."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, cast

import anyio
import anyio.abc
import anyio.from_thread
import fsspec
import hdfs_native
import pytest
import torch
from forked import Forked
from servers.hdfs import MiniHdfs
from servers.hdfs_clients import backend_of, names

import bcp
from bcp.backends.hdfs import conditional, open_hdfs, register
from bcp.backends.hdfs.client import Hdfs, Stream, in_parallel
from bcp.backends.hdfs.cluster import NameNodes, find_cluster
from bcp.backends.hdfs.faults import HdfsError, from_java
from bcp.backends.hdfs.subfiles import SubFiles
from bcp.backends.hdfs.wire import Call, Connection
from bcp.backends.objects import ObjectBackend
from bcp.errors import InputError, MissingExtraError, StorageError
from bcp.protocols import Backend, RetryPolicy
from bcp.testing.backend_suite import BackendSuite

pytest_plugins = ["servers.hdfs_fixtures"]
pytestmark = pytest.mark.anyio
MIB = 1 << 20


class TestSuite(BackendSuite):
    many = 150  # more than a page, which has 100 on this server

    @pytest.fixture
    def backend(self, url: str) -> Backend:
        return open_hdfs(url, {})

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ObjectBackend)
        return open_hdfs(backend.store.name, {})


async def upload(backend: ObjectBackend, key: str, data: bytes, part: int, after: dict[int, Callable[[], Any]]) -> None:
    """Write an object part by part; after some parts call what may fail the next ones."""
    async with backend.open_write(key, len(data)) as writer:
        for index, first in enumerate(range(0, len(data), part)):
            await writer.write_part(index, first, data[first : first + part])
            if index in after:
                await anyio.to_thread.run_sync(after[index])


def job(name: str, url: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return Forked(
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
        with anyio.fail_after(60):
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


async def test_concat_of_64_sub_files(url: str, hdfs: MiniHdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, client = backend_of(url)
    requests: list[str] = []
    rpc = NameNodes._rpc

    async def counted(self: NameNodes, method: str, request: bytes, call: Call) -> bytes:
        requests.append(method)
        return await rpc(self, method, request, call)

    monkeypatch.setattr(NameNodes, "_rpc", counted)
    root = url.removeprefix(hdfs.url)
    pieces = [Random(index).randbytes(1000 + index) for index in range(64)]  # noqa: S311 -- no secret
    offsets = [0, *itertools.accumulate(map(len, pieces))]
    lasted = []
    for name in ("whole0", "whole1", "whole2"):
        files = SubFiles(client, f"{root}/{name}")
        await in_parallel(
            lambda index, files=files: files.write(index, offsets[index], memoryview(pieces[index])), range(64)
        )
        requests.clear()
        began = time.perf_counter()
        await files.join()
        lasted.append(time.perf_counter() - began)
        assert requests == ["concat", "getFileInfo"]  # of all sub-files, however many; then a rename
        assert await backend.get(name) == b"".join(pieces)
    print(f"concat of 64 sub-files, with rename: {min(lasted) * 1000:.1f} ms")  # noqa: T201 -- a figure
    assert await names(backend) == ["whole0", "whole1", "whole2"]


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


# -- event loops, threads and processes


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The threads in which hdfs-native has read and written."""
    found: dict[str, set[str]] = {"read_range": set(), "write": set()}

    def watch(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def seen(self: Any, *args: Any) -> Any:
            found[name].add(threading.current_thread().name)
            return real(self, *args)

        monkeypatch.setattr(kind, name, seen)

    watch(hdfs_native.AsyncFileReader, "read_range")
    watch(hdfs_native.FileWriter, "write")
    return found


async def test_large_data_does_not_pass_the_callers_event_loop(url: str, threads: dict[str, set[str]]) -> None:
    backend, _ = backend_of(url)
    data = Random(7).randbytes(20 * MIB)  # noqa: S311 -- no secret
    await upload(backend, "large", data, 10 * MIB, {})
    assert bytes(await backend.get("large")) == data
    assert threads == {"read_range": {"bcp-hdfs"}, "write": {"AnyIO worker thread"}}
    await backend.put("small", b"1")
    await backend.get("small")
    here = threading.current_thread().name
    assert threads == {"read_range": {"bcp-hdfs", here}, "write": {"AnyIO worker thread"}}


async def test_a_write_that_hangs_in_hdfs_native_ends_at_its_deadline_and_holds_up_no_thread(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty, _ = backend_of(url, RetryPolicy(deadline_seconds=1.0, longest_pause_seconds=0.1), seconds=0.5)
    goes_on = threading.Event()
    write = hdfs_native.FileWriter.write

    def hang(self: Any, data: bytes) -> int:
        goes_on.wait()  # the end of the put does not wait for this
        return int(write(self, data))

    monkeypatch.setattr(hdfs_native.FileWriter, "write", hang)
    with pytest.raises(StorageError, match="no answer in time"):
        await hasty.put("key", b"1" * MIB)
    goes_on.set()
    monkeypatch.undo()
    backend, _ = backend_of(url)
    await backend.put("key", b"2")
    assert bytes(await backend.get("key")) == b"2"


async def test_a_cancelled_read_leaves_its_buffer_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = backend_of(url)
    await backend.put("key", bytes(8 * MIB))
    read, under_way, ended = hdfs_native.AsyncFileReader.read_range, threading.Event(), []

    async def slow(self: Any, first: int, count: int) -> bytes:
        under_way.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(first)
        return bytes(await read(self, first, count))

    monkeypatch.setattr(hdfs_native.AsyncFileReader, "read_range", slow)
    out = bytearray(b"1" * 8 * MIB)
    async with anyio.create_task_group() as group:
        group.start_soon(backend.read_into, "key", 0, memoryview(out))
        assert await anyio.to_thread.run_sync(under_way.wait, 60)
        group.cancel_scope.cancel()
    assert ended
    assert out == b"1" * 8 * MIB
    monkeypatch.undo()
    await backend.read_into("key", 0, memoryview(out))
    assert out == bytes(8 * MIB)


async def test_a_part_that_is_cancelled_leaves_no_sub_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = backend_of(url)
    write, left = Stream.write, []

    async def cancelling(self: Stream, data: memoryview) -> None:
        await write(self, data[:MIB])
        left.extend(await backend.unfinished())
        scope.cancel()
        await write(self, data[MIB:])

    monkeypatch.setattr(Stream, "write", cancelling)
    with anyio.CancelScope() as scope:
        await upload(backend, "a/large", bytes(20 * MIB), 10 * MIB, {})
    assert scope.cancelled_caught
    assert [one.key for one in left] == ["a/large"]
    assert await names(backend) == []


def test_two_event_loops_at_once(url: str) -> None:
    backend, _ = backend_of(url)
    together = threading.Barrier(2, timeout=60)

    async def use(number: int) -> bool:
        data = bytes([number]) * (20 * MIB)
        await anyio.to_thread.run_sync(together.wait)
        await upload(backend, f"large{number}", data, 10 * MIB, {})
        await anyio.to_thread.run_sync(together.wait)
        return await backend.get(f"large{1 - number}") == bytes([1 - number]) * (20 * MIB)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda number: asyncio.run(use(number)), range(2))) == [True, True]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_moves_large_data(url: str) -> None:
    backend, _ = backend_of(url)
    data = Random(8).randbytes(20 * MIB)  # noqa: S311 -- no secret

    async def use(key: str) -> None:
        await upload(backend, key, data, 10 * MIB, {})
        assert bytes(await backend.get(key)) == data

    with asyncio.Runner() as runner:
        runner.run(use("before"))
        pid = os.fork()
        if not pid:
            asyncio._set_running_loop(None)
            try:
                asyncio.new_event_loop().run_until_complete(use("in-child"))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        runner.run(use("after"))
        assert sorted(runner.run(names(backend))) == ["after", "before", "in-child"]


async def test_a_dropped_backend_closes_its_connection(hdfs: MiniHdfs) -> None:
    host, _, port = hdfs.url.removeprefix("hdfs://").partition(":")

    async def use() -> Connection:
        backend, client = backend_of(hdfs.url)
        await backend.version("none")
        connection = (await client._sessions.here()).names._connections[0]
        assert connection._writer.get_extra_info("peername") == (host, int(port))
        return connection

    connection = await use()
    gc.collect()
    with anyio.fail_after(60):
        await asyncio.wait([connection._task])
    assert connection.closed


# -- writers that are stopped


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
        with anyio.fail_after(60), pytest.raises(OSError, match=r"no NameNode of|no setting dfs.namenode.http-address"):
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


async def test_a_writer_that_is_dropped_is_not_closed_by_the_collector() -> None:
    calls: list[str] = []

    class Writer(io.RawIOBase):
        """Closes its file when it is collected, as hdfs-native's does."""

        def close(self) -> None:
            calls.append("closed")

    Writer()
    gc.collect()
    assert calls == ["closed"]
    stream = Stream(cast("Any", None), "/key", Writer(), anyio.CapacityLimiter(1))
    del stream
    gc.collect()
    assert calls == ["closed"]
