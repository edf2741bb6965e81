from __future__ import annotations

import asyncio
import os
import sys
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import fsspec.config
import pytest
from gcsfs.core import GCSFileSystem
from google.oauth2.credentials import Credentials

from bcp.backends.objects import gcs_http
from bcp.backends.objects.gcs import open_gcs
from bcp.errors import InputError, MissingExtraError, StorageError
from bcp.protocols import Backend, folders_of
from bcp.testing.backend_suite import BackendSuite

if TYPE_CHECKING:
    from servers.gcs import GcsServer
    from servers.gcs_fixtures import Gcs

pytest_plugins = ["servers.gcs_fixtures"]
pytestmark = pytest.mark.anyio
MIB = 1 << 20


class TestGcs(BackendSuite):
    many = 1100  # more than a page, which has 1,000

    @pytest.fixture
    def backend(self, gcs: Gcs) -> Backend:
        self.gcs = gcs
        return gcs()

    def reopen(self, backend: Backend) -> Backend:  # noqa: ARG002 -- the suite's
        return self.gcs()


class TestWithFaults(TestGcs):
    """One request of twenty is answered by 503, and some connections are lost before, within and after a request."""

    many = 200  # a page is a matter of the class above

    @pytest.fixture
    def backend(self, gcs: Gcs) -> Backend:
        self.gcs = gcs
        gcs.server.faults(
            {"match": ".", "rate": 0.05, "status": 503},
            {"match": ".", "rate": 0.02, "drop": "before"},
            {"match": ".", "rate": 0.02, "drop": "after"},
            {"match": "alt=media", "rate": 0.05, "cut": 3},
            {"match": "uploadType=media", "rate": 0.05, "cut_upload": 0},
        )
        return gcs()


# -- commits and lists


async def test_one_of_two_jobs_wins_each_of_50_commits(gcs: Gcs) -> None:
    jobs = [gcs(), gcs()]
    for number in range(50):
        key = f"{number % 7}/metadata.arrow"
        found = await jobs[0].version(key)
        versions: list[str | None] = [None, None]

        async def commit(job: int, key: str = key, found: str | None = found, versions: list = versions) -> None:
            versions[job] = await jobs[job].put_if(key, b"of job %d" % job, found)

        async with anyio.create_task_group() as group:
            group.start_soon(commit, 0)
            group.start_soon(commit, 1)
        (winner,) = (job for job in (0, 1) if versions[job] is not None)
        assert await jobs[0].version(key) == versions[winner]
        assert bytes(await jobs[1 - winner].get(key)) == b"of job %d" % winner


async def test_a_list_has_pages(gcs: Gcs) -> None:
    keys = [f"folder/{number:04d}" for number in range(1200)]
    fast, backend = gcs(endpoint_url=gcs.server.direct), gcs()
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(fast.put, key, b"12")
    gcs.server.log()
    found = await backend.list("folder/")
    assert [info.key for info in found] == keys
    assert {info.nbytes for info in found} == {2}
    assert sum("prefix=" in request for request in gcs.server.requests()) == 2
    await backend.delete(keys[:100])
    assert len(await backend.list()) == 1100


async def test_folders_are_listed_without_their_objects(gcs: Gcs) -> None:
    names = [f"step-{number:08d}" for number in range(1001)]
    fast, backend = gcs(endpoint_url=gcs.server.direct), gcs()
    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(fast.put, f"{name}/metadata.arrow", b"1")
        group.start_soon(fast.put, "run.json", b"{}")
        for number in range(30):  # one folder is one name, whatever it holds
            group.start_soon(fast.put, f"{names[0]}/model/{number}", b"1")
    gcs.server.log()
    assert await folders_of(backend) == names
    assert sum("delimiter=" in request for request in gcs.server.requests()) in (1, 2)  # this server has larger pages
    assert not sum("prefix=" in request and "delimiter=" not in request for request in gcs.server.requests())


async def test_markers_of_folders_are_not_listed(gcs: Gcs) -> None:
    backend = gcs()
    await backend.put("a/b", b"1")
    await gcs.store()._api.insert(f"{gcs.root}/a/", memoryview(b""), None)
    assert [info.key for info in await backend.list()] == ["a/b"]


# -- large objects


@pytest.mark.parametrize("count", [1, 2, 32, 33, 70])
async def test_parts_are_composed(gcs: Gcs, count: int) -> None:
    rng = Random(count)  # noqa: S311 -- no secret
    store = gcs.store()
    parts = [rng.randbytes(rng.randrange(1, 400)) for _ in range(count)]
    starts = [0, *accumulate(map(len, parts))]
    upload = await store.begin("object", None)
    async with anyio.create_task_group() as group:
        for index in rng.sample(range(count), count):
            group.start_soon(upload.part, index, starts[index], memoryview(parts[index]))
    assert await store.list("", None) == ([], None)
    await upload.finish()
    assert await gcs.names() == [f"{gcs.root}/object"]
    assert (await store.get("object"))[0] == b"".join(parts)
    await upload.finish()
    await upload.abort()
    assert await gcs.names() == [f"{gcs.root}/object"]


async def test_a_large_object_through_the_backend(gcs: Gcs) -> None:
    backend, data = gcs(), Random(1).randbytes(20 * MIB)  # noqa: S311 -- no secret
    gcs.server.log()
    async with backend.open_write("large", len(data)) as writer, anyio.create_task_group() as group:
        for index in (2, 0, 1):
            part = memoryview(data)[index * 8 * MIB : (index + 1) * 8 * MIB]
            group.start_soon(writer.write_part, index, index * 8 * MIB, part)
    requests = gcs.server.requests()
    assert sum("uploadType=media" in request for request in requests) == 3
    assert sum("/compose" in request for request in requests) == 1
    assert sum(request.startswith("DELETE") for request in requests) == 3
    out = bytearray(len(data) - 5)
    await backend.read_into("large", 5, memoryview(out))
    assert out == data[5:]


async def test_parts_of_a_killed_writer_are_swept_and_those_of_a_live_one_stay(gcs: Gcs) -> None:
    ready, is_ready = os.pipe()
    pid = os.fork()
    if not pid:
        asyncio.run(_write_and_hang(gcs, is_ready))
    assert os.read(ready, 1) == b"1"
    os.kill(pid, 9)
    os.waitpid(pid, 0)  # noqa: ASYNC222 -- it is dead
    backend = gcs()
    async with backend.open_write("run/live", 20 * MIB) as writer:
        await writer.write_part(0, 0, bytes(12 * MIB))
        listed = await backend.unfinished()
        assert sorted(one.key for one in listed) == ["run/dead", "run/live"]
        assert await backend.list() == []
        await backend.discard([one for one in listed if one.key == "run/dead"])
        assert [one.key for one in await backend.unfinished()] == ["run/live"]
        await writer.write_part(1, 12 * MIB, bytes(8 * MIB))
    assert await backend.unfinished() == []
    assert await gcs.names() == [f"{gcs.root}/run/live"]


async def _write_and_hang(gcs: Gcs, is_ready: int) -> None:
    try:
        async with gcs().open_write("run/dead", 30 * MIB) as writer:
            for index in range(2):
                await writer.write_part(index, index * 10 * MIB, bytes(10 * MIB))
            os.write(is_ready, b"1")
            await asyncio.sleep(60)
    finally:
        os._exit(1)


async def test_a_live_writer_whose_parts_were_swept_fails(gcs: Gcs) -> None:
    backend = gcs()
    await backend.put("key", b"old")

    async def write() -> None:
        async with backend.open_write("key", 20 * MIB) as writer:
            await writer.write_part(0, 0, bytes(10 * MIB))
            await backend.discard(await backend.unfinished())
            await writer.write_part(1, 10 * MIB, bytes(10 * MIB))

    with pytest.raises(StorageError, match="has another save to the same path"):
        await write()
    assert await gcs.names() == [f"{gcs.root}/key"]
    assert bytes(await backend.get("key")) == b"old"


# -- processes, event loops, settings


def test_two_event_loops_and_a_fork(gcs_server: GcsServer) -> None:
    options = {"token": "anon", "endpoint_url": gcs_server.url}
    backend = open_gcs("gcs://bcp-test/loops", options, None)

    async def put(data: bytes) -> None:
        await backend.put("key", data)
        assert bytes(await backend.get("key")) == data

    async def put_and_close(data: bytes) -> None:
        await put(data)
        await backend.aclose()

    asyncio.run(put_and_close(b"1"))
    asyncio.run(put_and_close(b"2"))
    with asyncio.Runner() as runner:
        runner.run(put(b"3"))
        pid = os.fork()
        if not pid:
            try:
                asyncio.new_event_loop().run_until_complete(put(b"4"))
            except BaseException:  # noqa: BLE001 -- the parent tells
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        runner.run(put(b"5"))
        runner.run(backend.aclose())


async def test_the_emulator_of_the_environment(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.server.url.removeprefix("http://"))
    backend = gcs(endpoint_url=None)
    await backend.put("key", b"1")
    assert bytes(await gcs().get("key")) == b"1"


async def test_settings_of_fsspec_count(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": gcs.server.url, "token": "anon"})
    backend = gcs(endpoint_url=None, token=None)
    await backend.put("key", b"1")
    assert bytes(await gcs().get("key")) == b"1"


async def test_credentials_are_sent_and_anonymous_requests_have_none(gcs: Gcs) -> None:
    gcs.server.log()
    await gcs(token="anon").put("key", b"1")  # noqa: S106 -- no secret
    assert {request["authorization"] for request in gcs.server.log()} == {""}
    await gcs(token=Credentials("a-secret-token")).put("key", b"1")
    assert {request["authorization"] for request in gcs.server.log()} == {"Bearer a-secret-token"}


async def test_credentials_are_asked_for_once_a_minute_and_after_a_401(
    gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [1000.0], 0
    get = GCSFileSystem._get_headers

    def count(system: GCSFileSystem, headers: Any) -> Any:
        nonlocal asked
        asked += 1
        return get(system, headers)

    monkeypatch.setattr(GCSFileSystem, "_get_headers", count)
    monkeypatch.setattr(gcs_http, "time", SimpleNamespace(monotonic=lambda: now[0]))
    backend = gcs()
    for later, expected in ((0.0, 1), (0.0, 1), (gcs_http.HEADERS_SECONDS - 1, 1), (1.0, 2), (0.0, 2)):
        now[0] += later
        await backend.put("key", b"1")
        assert asked == expected
    gcs.server.faults({"match": "uploadType=media", "times": 1, "status": 401})
    with pytest.raises(StorageError, match="401"):
        await backend.put("key", b"1")
    await backend.put("key", b"1")
    assert asked == 3


async def test_requester_pays(gcs: Gcs) -> None:
    await gcs(requester_pays="my-project").put("key", b"1")
    assert any("uploadType=media" in one and "userProject=my-project" in one for one in gcs.server.requests())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    monkeypatch.delitem(sys.modules, "bcp.backends.objects.gcs_http", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'bcp-checkpoint\[gcs\]'"):
        open_gcs("gs://bucket/run", {}, None)


@pytest.mark.parametrize("url", ["gs://", "gs:///run", "gs://bucket/a/../b", "gs://bucket/a//b", "s3://bucket/run"])
def test_urls_that_cannot_be_any(url: str) -> None:
    with pytest.raises(InputError):
        open_gcs(url, {}, None)


def test_options_that_are_not_the_callers() -> None:
    with pytest.raises(InputError, match="asynchronous"):
        open_gcs("gs://bucket/run", {"asynchronous": False}, None)


async def test_a_bucket_is_a_root_too(gcs: Gcs) -> None:
    backend = gcs("gs://bcp-test")
    assert repr(backend) == "ObjectBackend(gs://bcp-test)"
    await backend.put(f"{gcs.root}/a b/ü%2F?x#y+z", b"1")
    assert [info.key for info in await backend.list(f"{gcs.root}/")] == [f"{gcs.root}/a b/ü%2F?x#y+z"]
    assert bytes(await gcs().get("a b/ü%2F?x#y+z")) == b"1"
    await backend.delete([f"{gcs.root}/a b/ü%2F?x#y+z"])
    assert await gcs.names() == []
