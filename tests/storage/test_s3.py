"""The S3 backend, over moto's server and behind a front that fails."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from fsspec.config import conf
from left_over import without_recordings
from patience import more_patient
from servers.faults import Front, front_of
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

import bcp
from bcp.backends.objects import ObjectBackend, RequestError
from bcp.backends.objects.s3 import open_s3
from bcp.errors import CorruptError, InputError, MissingExtraError, StorageError
from bcp.protocols import Backend, Codec, RetryPolicy, Unfinished, folders_of
from bcp.testing.backend_suite import BackendSuite

pytest_plugins = ["servers.s3_fixtures"]
pytestmark = pytest.mark.anyio
MIB = 1 << 20
QUICK = RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3)


@pytest.fixture(scope="module")
def front_there(server: S3Server) -> Iterator[Front]:
    with front_of(server.url) as running:
        yield running


@pytest.fixture
def front(front_there: Front) -> Front:
    front_there.clear()
    return front_there


@pytest.fixture
def faulty(server: S3Server, front: Front) -> ObjectBackend:
    """A backend behind the front, which does not fail yet."""
    return S3Server(front.url).backend(server.place(), QUICK)


def with_pages(backend: ObjectBackend, size: int) -> ObjectBackend:
    """Let lists of objects, and deletions of many, have so many names at once."""
    call = backend.store.call

    async def limited(operation: str, data: memoryview | None = None, **params: Any) -> dict[str, Any]:
        more = {"MaxKeys": size} if operation == "list_objects_v2" else {}
        answer: dict[str, Any] = await call(operation, data, **params, **more)
        return answer

    backend.store.call = limited
    backend.store.most_keys = size
    return backend


class TestOnMoto(BackendSuite):
    many, page = 150, 100
    """Objects of a test, and names on a page; S3 has 1,000, as RGW has in its tests."""

    @pytest.fixture
    def backend(self, server: S3Server) -> Backend:
        return self.opened(server, server.url, QUICK)

    def opened(self, server: S3Server, endpoint: str, policy: RetryPolicy) -> Backend:
        url = server.place()
        self.open: Callable[[], ObjectBackend] = lambda: with_pages(S3Server(endpoint).backend(url, policy), self.page)
        return self.open()

    def reopen(self, backend: Backend) -> Backend:  # noqa: ARG002 -- the suite's
        return self.open()


class TestBehindFaults(TestOnMoto):
    """A share of the requests fails before it reaches the server, after it, or in the middle of the answer."""

    @pytest.fixture
    def backend(self, server: S3Server, front: Front) -> Backend:
        front.fail("", None, share=0.1, status=503, code="SlowDown")
        front.fail("", None, share=0.1, refuse=True)
        front.fail("", None, share=0.1, lose=True)
        front.fail("GET ", None, share=0.1, cut=3)
        return self.opened(
            server, front.url, RetryPolicy(first_pause_seconds=1e-5, longest_pause_seconds=1e-4, allowance=100_000)
        )


# -- conditions


@pytest.mark.parametrize("holds", [True, False])
async def test_a_server_that_ignores_conditions_is_noticed(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, holds: bool
) -> None:
    backend = server.backend(server.place(), QUICK)
    store, call = backend.store, backend.store.call
    puts: list[str] = []

    async def forgetful(operation: str, data: memoryview | None = None, **params: Any) -> dict[str, Any]:
        puts.extend([params["Key"]] if operation == "put_object" else [])
        if not holds:
            params.pop("IfNoneMatch", None)
        answer: dict[str, Any] = await call(operation, data, **params)
        return answer

    monkeypatch.setattr(store, "call", forgetful)
    version = await backend.put_if("metadata", b"1", None)
    assert version is not None
    assert await backend.version("metadata") == version
    assert await backend.put_if("other", b"2", None)
    assert [key.rpartition("/")[2] for key in puts] == ["metadata", "metadata", "other"]
    assert ("the server ignores If-None-Match" in caplog.text) is not holds


# -- uploads


def parts_of(count: int, nbytes: int = 9 * MIB) -> list[bytes]:
    return [bytes([number + 1]) * nbytes for number in range(count)]


async def write(backend: Backend, key: str, parts: list[bytes]) -> None:
    async with backend.open_write(key, sum(map(len, parts))) as writer, anyio.create_task_group() as group:
        at = 0
        for index, part in enumerate(parts):
            group.start_soon(writer.write_part, index, at, part)
            at += len(part)


async def read(backend: Backend, key: str, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    await backend.read_into(key, 0, memoryview(out))
    return bytes(out)


async def test_the_server_compares_the_object_with_a_combined_checksum(faulty: ObjectBackend, front: Front) -> None:
    parts = [*parts_of(2), b"the rest"]
    await write(faulty, "a", parts)
    answer = await faulty.store.call_for("head_object", "a", ChecksumMode="ENABLED")
    assert answer["ChecksumType"] == "FULL_OBJECT"
    assert answer["ETag"].endswith('-3"')
    assert await read(faulty, "a", sum(map(len, parts))) == b"".join(parts)
    assert front.count("POST .*uploads") == front.count("POST .*uploadId") == 1


async def test_an_upload_whose_last_answer_is_lost_was_finished(faulty: ObjectBackend, front: Front) -> None:
    front.fail("POST .*uploadId", lose=True)
    front.fail("POST .*uploadId", status=404, code="NoSuchUpload")  # of the second request, as AWS answers
    await write(faulty, "a", parts_of(2))
    assert front.count("POST .*uploadId") == 2
    assert await faulty.unfinished() == []


async def test_an_upload_that_somebody_discarded_fails(faulty: ObjectBackend) -> None:
    await write(faulty, "a", parts_of(2))

    async def discarded() -> None:
        async with faulty.open_write("a", 18 * MIB) as writer:
            await writer.write_part(0, 0, bytes(9 * MIB))
            await writer.write_part(1, 9 * MIB, bytes(9 * MIB))
            await faulty.discard(await faulty.unfinished())

    with pytest.raises(StorageError, match="NoSuchUpload"):
        await discarded()
    assert await read(faulty, "a", 18 * MIB) == b"".join(parts_of(2))


async def test_a_finished_object_goes_if_its_writer_fails(faulty: ObjectBackend, front: Front) -> None:
    front.fail("POST .*uploadId", lose=True)
    front.fail("POST .*uploadId", status=403, code="AccessDenied")
    with pytest.raises(StorageError, match="AccessDenied"):
        await write(faulty, "a", parts_of(2))
    assert await faulty.list() == []


async def test_bytes_that_change_on_their_way_are_noticed(faulty: ObjectBackend, front: Front) -> None:
    front.fail("PUT .*partNumber=1", status=400, code="BadDigest")
    await write(faulty, "a", parts_of(2))  # the part is sent again
    front.fail("POST .*uploadId", status=400, code="BadDigest")
    with pytest.raises(CorruptError, match="changed on its way"):
        await write(faulty, "b", parts_of(2))
    assert await faulty.unfinished() == []


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument"])
async def test_a_server_without_checksums_is_used_without(faulty: ObjectBackend, front: Front, code: str) -> None:
    front.fail(r"POST .*\?uploads", status=501 if code == "NotImplemented" else 400, code=code)
    await write(faulty, "a", parts_of(2))
    await write(faulty, "b", parts_of(2))
    assert front.count("POST .*uploads") == 3
    assert "ChecksumCRC32C" not in await faulty.store.call_for("head_object", "a", ChecksumMode="ENABLED")


async def test_a_cancelled_upload_leaves_nothing(faulty: ObjectBackend, front: Front) -> None:
    front.fail("PUT .*partNumber=2", hang=True)
    data = bytearray(9 * MIB)
    with anyio.move_on_after(1):
        async with faulty.open_write("a", 18 * MIB) as writer:
            await writer.write_part(0, 0, data)
            await writer.write_part(1, 9 * MIB, data)
    assert await faulty.unfinished() == []
    assert await faulty.list() == []


async def test_an_early_refusal_lets_go_of_the_buffer(faulty: ObjectBackend, front: Front) -> None:
    front.fail("PUT .*partNumber", status=503, code="SlowDown", early=True, headers={"Retry-After": "0"})
    await write(faulty, "a", parts_of(2, 30 * MIB))
    assert await read(faulty, "a", 60 * MIB) == b"".join(parts_of(2, 30 * MIB))


KILLED = """
import asyncio, os, sys
from bcp.backends.objects.s3 import open_s3
async def main():
    async with open_s3(sys.argv[1], {"region": "us-east-1"}).open_write("a/b", 30 << 20) as writer:
        await writer.write_part(0, 0, bytes(10 << 20))
        print("written", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_what_a_killed_writer_leaves_is_listed_and_discarded(server: S3Server) -> None:
    url = f"{server.place()}-killed"
    environ = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_ENDPOINT_URL": server.url}
    process = await anyio.open_process([sys.executable, "-c", KILLED, url], env={**_environ(), **environ})
    assert process.stdout is not None
    assert (await process.stdout.receive()).strip() == b"written"
    process.send_signal(signal.SIGKILL)
    await process.aclose()
    backend = server.backend(url, QUICK)
    (left,) = await backend.unfinished()
    assert left.key == "a/b"
    assert await server.backend(f"{url}/a", QUICK).unfinished() == [Unfinished("b", left.name)]
    assert await server.backend(f"{url[:-1]}", QUICK).unfinished() == []  # a prefix of the name is no root of it
    await backend.discard([left, left])
    assert await backend.unfinished() == []


async def test_uploads_are_listed_by_pages(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = server.backend("s3://bucket/root").store
    asked: list[dict[str, Any]] = []

    async def call(operation: str, data: None = None, **params: Any) -> dict[str, Any]:  # noqa: ARG001 -- the store's
        asked.append(params)
        upload = {"Key": f"root/{len(asked)}", "UploadId": "u"}
        more = {"IsTruncated": True, "NextKeyMarker": "k", "NextUploadIdMarker": "i"} if len(asked) < 3 else {}
        return {"Uploads": [upload], **more}

    monkeypatch.setattr(store, "call", call)
    assert [one.key for one in await ObjectBackend(store).unfinished()] == ["1", "2", "3"]
    assert asked == [{"Prefix": "root/"}, *[{"Prefix": "root/", "KeyMarker": "k", "UploadIdMarker": "i"}] * 2]


async def test_folders_are_listed_by_pages(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"step-{number:08d}" for number in range(60)]
    backend = server.backend(server.place(), QUICK)
    limit = anyio.CapacityLimiter(64)

    async def put(key: str) -> None:
        async with limit:
            await backend.put(key, b"1")

    async with anyio.create_task_group() as group:
        for key in ("run.json", *(f"{name}/metadata.arrow" for name in names)):
            group.start_soon(put, key)
        for number in range(30):  # one folder is one name, whatever it holds
            group.start_soon(put, f"{names[0]}/model/{number}")
    asked: list[dict[str, Any]] = []
    call = backend.store.call

    async def counted(operation: str, data: memoryview | None = None, **params: Any) -> dict[str, Any]:
        asked.append(params)
        answer: dict[str, Any] = await call(operation, data, **params, MaxKeys=40)  # S3 has 1,000 on a page
        return answer

    monkeypatch.setattr(backend.store, "call", counted)
    assert await folders_of(backend) == names
    assert [params["Delimiter"] for params in asked] == ["/", "/"]


async def test_an_upload_whose_beginning_was_not_answered_goes_with_the_commit(server: S3Server, front: Front) -> None:
    """Nobody knows its id, so only the list of open uploads has it."""
    front.fail(r"POST .*\?uploads", lose=True)
    url, options = server.place(), S3Server(front.url).options
    states = {"model": {"w": torch.arange(3_000_000)}}
    await bcp.asave(url, states, options=bcp.SaveOptions(storage_options=options, retries=QUICK))
    assert front.count("POST .*uploads") == 2
    names = server.names(url)
    assert [name for name in names if name.startswith("upload of")] == []
    assert len(without_recordings(names)) == 3


async def test_many_uploads_are_discarded_although_some_requests_fail(faulty: ObjectBackend, front: Front) -> None:
    for number in range(100):
        await faulty.store.begin(f"k{number}", None)
    front.fail("DELETE .*uploadId", None, share=0.1, status=500)
    await faulty.discard(await faulty.unfinished())
    assert faulty.retry_count > 0
    assert await faulty.unfinished() == []


@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
async def test_an_error_in_an_answer_of_200(faulty: ObjectBackend, front: Front, code: str) -> None:
    """S3 begins its answer to CompleteMultipartUpload before it knows whether that succeeds."""
    front.fail("POST .*uploadId", status=200, code=code)
    await write(faulty, "a", parts_of(2))
    assert front.count("POST .*uploadId") == 2
    assert await read(faulty, "a", 18 * MIB) == b"".join(parts_of(2))


# -- commits


async def test_one_of_two_jobs_that_race_commits(server: S3Server) -> None:
    url = server.place()
    jobs = [server.backend(url, QUICK) for _ in range(2)]
    for number in range(50):
        found = await jobs[0].version("metadata") if number % 2 else None
        key = "metadata" if number % 2 else f"metadata-{number}"
        done: list[str | None] = []

        async def commit(job: int, key: str = key, found: str | None = found, done: list[Any] = done) -> None:
            done.append(await jobs[job].put_if(key, b"job %d, %d" % (job, number), found))  # noqa: B023 -- awaited here

        async with anyio.create_task_group() as group:
            group.start_soon(commit, number % 2)
            group.start_soon(commit, 1 - number % 2)
        assert sum(version is not None for version in done) == 1, number


async def test_a_conflict_is_no_answer(faulty: ObjectBackend, front: Front) -> None:
    front.fail("PUT ", 2, status=409, code="ConditionalRequestConflict")
    assert await faulty.put_if("a", b"1", None)
    assert front.count("PUT ") == 4  # two refused, one carried out, and one that looks whether conditions hold


async def test_a_request_that_aiohttp_sends_twice_is_no_lost_commit(faulty: ObjectBackend, front: Front) -> None:
    await faulty.put("warm", b"")  # a kept connection, on which aiohttp sends a PUT again
    front.fail("PUT .*/a$", lose=True)
    assert await faulty.put_if("a", b"1", None)


# -- reads


async def test_an_overwrite_during_a_read_is_an_error(faulty: ObjectBackend, front: Front, server: S3Server) -> None:
    await write(faulty, "a", parts_of(5))
    other = server.backend(faulty.store.name, QUICK)
    front.fail("GET ", 1, cut=10**9)
    await read(faulty, "a", 20)
    fault = front.fail("GET ", 2)
    fault.then = lambda: asyncio.run(write(other, "a", parts_of(6))) if fault.hits == 2 else None
    with pytest.raises(StorageError, match="was replaced while it was being read"):
        await read(faulty, "a", 45 * MIB)


@pytest.mark.parametrize("cut", [0, 1, 5 * MIB])
async def test_a_connection_that_breaks_in_an_answer(faulty: ObjectBackend, front: Front, cut: int) -> None:
    await write(faulty, "a", parts_of(2))
    front.fail("GET ", 2, cut=cut)
    assert await read(faulty, "a", 18 * MIB) == b"".join(parts_of(2))
    assert faulty.retries.retries == 2


async def test_a_cancelled_read_writes_no_more(faulty: ObjectBackend) -> None:
    await write(faulty, "a", parts_of(3))
    await faulty.version("a")
    out = bytearray(27 * MIB)
    with anyio.move_on_after(0.02):
        await faulty.read_into("a", 0, memoryview(out))
    before = bytes(out)
    await anyio.sleep(0.3)
    assert out == before


async def test_a_server_that_is_silent_is_asked_again(server: S3Server, front: Front) -> None:
    policy = RetryPolicy(attempt_seconds=0.5, first_pause_seconds=1e-3)
    backend = more_patient(S3Server(front.url).backend(server.place(), policy))
    await backend.put("a", b"1")
    front.fail("GET ", hang=True)
    assert await backend.get("a") == b"1"


# -- lists and deletion


async def test_deletes_fall_back_to_single_ones(faulty: ObjectBackend, front: Front) -> None:
    for number in range(5):
        await faulty.put(f"k{number}", b"")
    front.fail("POST .*delete", status=400, code="MissingContentMD5")
    await faulty.delete([f"k{number}" for number in range(3)])
    await faulty.delete(["k3", "k4", "absent"])
    assert await faulty.list() == []
    assert front.count("POST .*delete") == 1


async def test_errors_within_an_answer_are_raised(faulty: ObjectBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"Key": "a", "Code": "AccessDenied", "Message": "no"}

    async def call(*_: Any, **__: Any) -> dict[str, Any]:
        return {"Errors": [{"Key": "b", "Code": "InternalError"}, error]}

    monkeypatch.setattr(faulty.store, "call", call)
    with pytest.raises(StorageError, match=r"AccessDenied no \(of 'a', and 1 more\)"):
        await faulty.delete(["a", "b"])


async def test_folders_of_consoles_are_not_listed(server: S3Server) -> None:
    backend = server.backend(server.place(), QUICK)
    for key in ("", "folder/", "folder/a"):
        await backend.store.put(key, memoryview(b""))
    assert [info.key for info in await backend.list()] == ["folder/a"]


# -- credentials, options, errors


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


async def test_credentials_of_the_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.place()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    backend = open_s3(url)
    await backend.put("a", b"1")
    assert await backend.get("a") == b"1"


async def test_credentials_of_a_profile_and_options_of_fsspec(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setitem(conf, "s3", {"profile": "team", "endpoint_url": "http://127.0.0.1:1"})
    backend = open_s3(server.place(), {"client_kwargs": {"endpoint_url": server.url, "region_name": "us-east-1"}})
    with pytest.raises(StorageError):  # endpoint_url of fsspec's files comes before client_kwargs'
        await ObjectBackend(backend.store, RetryPolicy(deadline_seconds=0.01)).put("a", b"1")  # type: ignore[attr-defined]
    backend = open_s3(server.place(), {"endpoint_url": server.url, "region": "us-east-1"})
    await backend.put("a", b"1")


async def test_no_bucket(server: S3Server) -> None:
    backend = server.backend("s3://no-such-bucket/run", QUICK)
    for call in (backend.list, lambda: backend.put("a", b""), lambda: backend.version("a"), lambda: backend.get("a")):
        with pytest.raises(StorageError, match=r"NoSuchBucket.*create the bucket"):
            await call()
    assert backend.retries.retries == 0


async def test_wrong_credentials(server: S3Server) -> None:
    wrong = server.backend(server.place(), QUICK, key="AKIDSOMEBODYELSE0000")
    with pytest.raises(StorageError, match=r"403 InvalidAccessKeyId.*check the credentials"):
        await wrong.put("a", b"")
    with pytest.raises(StorageError, match=r"403.*check the credentials"):
        await wrong.version("a")
    assert wrong.retries.retries == 0


async def test_no_credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    backend = open_s3(server.place(), {"endpoint_url": server.url})
    with pytest.raises(StorageError, match="set AWS_ACCESS_KEY_ID"):
        await backend.list()


async def test_secrets_are_shown_nowhere(server: S3Server, front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bcp")
    token = "a/session+token-0123456789"  # noqa: S105 -- a made up one
    message = f"{ACCESS_KEY} {SECRET_KEY} {token} http://me:{SECRET_KEY}@host/x?X-Amz-Signature=0123"
    place = server.place()
    texts = []
    for how in ({"status": 500, "code": message}, {"refuse": True}, {"lose": True}, {"cut": 1}, {"hang": True}):
        front.clear()
        front.fail("", None, **how)
        attempt = 0.3 if "hang" in how else 20.0
        policy = RetryPolicy(first_pause_seconds=1e-3, longest_pause_seconds=1e-3, attempt_seconds=attempt, allowance=2)
        backend = S3Server(front.url).backend(place, policy, token=token)
        texts += [repr(backend), repr(backend.store), repr(backend.retries)]
        for call in (backend.get("a"), backend.put("a", b"1"), backend.list()):
            try:
                await call
            except StorageError as error:
                texts += ["".join(traceback.format_exception(error)), repr(error), repr(error.__cause__)]
                texts += [repr(vars(error.__cause__)), repr(error.__cause__.__context__)]
    texts += [record.getMessage() for record in caplog.records] + [repr(vars(record)) for record in caplog.records]
    assert len(texts) > 50
    everything = "\n".join(texts)
    assert "***" in everything
    for secret in (ACCESS_KEY, SECRET_KEY, token, "X-Amz-Signature", "me:"):
        assert secret not in everything


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///a", "s3://key:secret@bucket/a", "s3://bucket/a/../b", "s3://bucket/a//b"]
)
def test_urls_that_name_no_place(url: str) -> None:
    with pytest.raises(InputError) as caught:
        open_s3(url)
    assert "secret" not in str(caught.value)


def test_unknown_options_are_named_without_their_values() -> None:
    with pytest.raises(InputError, match="unknown options for s3://: secrett, tokne;") as caught:
        open_s3("s3://bucket", {"secrett": "hidden", "tokne": "hidden", "default_block_size": 5})
    assert "hidden" not in str(caught.value)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiobotocore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bcp-checkpoint\[s3\]'"):
        open_s3("s3://bucket")


async def test_a_root_may_be_the_bucket(server: S3Server) -> None:
    bucket = await asyncio.to_thread(server.bucket)
    backend = server.backend(f"s3://{bucket}", QUICK)
    await backend.put("a", b"1")
    assert [info.key for info in await backend.list()] == ["a"]
    assert await backend.unfinished() == []


async def test_a_retry_after_is_heard(front: Front, faulty: ObjectBackend) -> None:
    front.fail("GET ", status=429, code="TooManyRequests", headers={"Retry-After": "7"})
    with pytest.raises(RequestError) as caught:
        await faulty.store.get("a")
    assert (caught.value.after, caught.value.slow_down) == (7.0, True)


# -- a save and a load


class Doubled:
    """A codec that makes every part longer, and no part of one size."""

    @staticmethod
    def encode(data: Any) -> bytes:
        return bytes(data) + bytes(len(data) % 7)

    @staticmethod
    def decode(data: Any) -> bytes:
        raw = bytes(data)
        return next(raw[: len(raw) - extra] for extra in range(7) if (len(raw) - extra) % 7 == extra)


@pytest.mark.parametrize(
    "codecs", [pytest.param((), marks=pytest.mark.long), (Codec("longer", Doubled.encode, Doubled.decode),)]
)
def test_save_and_load(server: S3Server, codecs: tuple[Codec, ...]) -> None:
    url = server.place()
    model = {f"w{number}": torch.randn(900, 1000 + number) for number in range(12)}
    options = bcp.SaveOptions(codecs=codecs, part_bytes=MIB)
    bcp.save(server.backend(f"{url}/1", QUICK), {"model": model}, options=options)
    bcp.save(server.backend(f"{url}/2", QUICK), {"model": model}, async_checkpoint=True, options=options).wait()
    for number in (1, 2):
        target = {name: torch.zeros_like(value) for name, value in model.items()}
        backend = server.backend(f"{url}/{number}", QUICK)
        bcp.load(backend, {"model": target}, options=bcp.LoadOptions(codecs=codecs))
        assert all(torch.equal(target[name], value) for name, value in model.items())
        assert asyncio.run(backend.unfinished()) == []


def test_save_and_load_by_url(server: S3Server) -> None:
    url, weight = server.place(), torch.randn(3000)
    bcp.save(url, {"model": {"w": weight}}, options=bcp.SaveOptions(storage_options=server.options))
    target = torch.zeros(3000)
    bcp.load(url, {"model": {"w": target}}, options=bcp.LoadOptions(storage_options=server.options))
    assert torch.equal(target, weight)
