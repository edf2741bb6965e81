"""Google Cloud Storage when a request fails, an answer is lost, or bytes are damaged."""

from __future__ import annotations

import traceback
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest
from google.auth.exceptions import RefreshError
from google.oauth2.credentials import Credentials
from patience import more_patient

from bcp.backends.objects import ConditionError, If, RequestError
from bcp.errors import CorruptError, InputError, StorageError
from bcp.protocols import RetryPolicy

if TYPE_CHECKING:
    from servers.gcs_fixtures import Gcs

pytest_plugins = ["servers.gcs_fixtures"]
pytestmark = pytest.mark.anyio
MIB = 1 << 20
WRONG = "AAAAAQ=="
MEDIA = "uploadType=media"


async def write(gcs: Gcs, key: str, data: bytes, part: int = 8 * MIB) -> None:
    backend = gcs()
    async with backend.open_write(key, len(data)) as writer, anyio.create_task_group() as group:
        for index, start in enumerate(range(0, len(data), part)):
            group.start_soon(writer.write_part, index, start, data[start : start + part])


# -- damaged bytes


async def test_a_composed_object_with_another_crc_is_deleted(gcs: Gcs) -> None:
    await gcs().put("key", b"old")
    gcs.server.faults({"match": "/compose", "crc32c": WRONG})
    with pytest.raises(CorruptError, match="another CRC; the object was deleted"):
        await write(gcs, "key", bytes(20 * MIB))
    assert await gcs.names() == []


async def test_a_small_object_with_another_crc_is_deleted(gcs: Gcs) -> None:
    gcs.server.faults({"match": MEDIA, "crc32c": WRONG})
    for condition in (None, If(None)):
        with pytest.raises(CorruptError, match="other bytes than were sent for 'key'"):
            await gcs.store().put("key", memoryview(b"123"), condition)
        assert await gcs.names() == []


async def test_a_damaged_part_is_sent_again(gcs: Gcs) -> None:
    data = Random(1).randbytes(20 * MIB)  # noqa: S311 -- no secret
    gcs.server.faults({"match": MEDIA, "times": 2, "crc32c": WRONG})
    await write(gcs, "key", data)
    assert bytes(await gcs().get("key")) == data
    assert await gcs.names() == [f"{gcs.root}/key"]


# -- answers that are lost


@pytest.mark.parametrize("what", [MEDIA, "c0-0/compose", "key/compose", "DELETE"])
async def test_a_request_whose_answer_is_lost_is_recognized(gcs: Gcs, what: str) -> None:
    """The object of a lost answer has one generation: it is not made a second time."""
    store = gcs.store()
    data = Random(2).randbytes(40)  # noqa: S311 -- no secret
    upload = await store.begin("key", 40)
    gcs.server.faults({"match": what, "times": 1, "drop": "after"})
    for index in range(40):
        await again(lambda index=index: upload.part(index, index, memoryview(data)[index : index + 1]))
    gcs.server.log()
    await again(upload.finish)
    assert (await store.get("key"))[0] == data
    assert await gcs.names() == [f"{gcs.root}/key"]
    made = sum("key/compose" in request for request in gcs.server.requests())
    assert made == (2 if what == "key/compose" else 1)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fault", [{"drop": "after"}, {"status": 500, "acted": True}, {"mute": True}], ids=str)
async def test_a_commit_whose_answer_is_lost_is_no_lost_race(gcs: Gcs, fault: dict[str, object], times: int) -> None:
    backend = more_patient(gcs(policy=RetryPolicy(attempt_seconds=0.5, first_pause_seconds=0.01)))
    found = None
    for data in (b"1", b"2"):
        gcs.server.faults({"match": MEDIA, "times": times, **fault})
        made = await backend.put_if("key", data, found)
        assert made is not None
        assert made == await backend.version("key") != found
        assert bytes(await backend.get("key")) == data
        assert await gcs().put_if("key", b"of another job", found) is None
        found = made


async def again(call) -> None:
    """Make a call a second time if its first answer was lost."""
    try:
        await call()
    except RequestError as error:
        if not error.transient:
            raise
        await call()


async def test_a_composition_replaces_what_is_there(gcs: Gcs) -> None:
    backend = gcs()
    for data in (bytes(20 * MIB), b"1" * (20 * MIB)):
        old = await backend.version("key")
        await write(gcs, "key", data)
        assert await backend.version("key") != old
        assert bytes(await backend.get("key")) == data


async def test_parts_that_may_not_be_deleted_do_not_fail_the_write(gcs: Gcs, caplog: pytest.LogCaptureFixture) -> None:
    gcs.server.faults({"match": "DELETE", "status": 403})
    await write(gcs, "key", bytes(20 * MIB))
    assert "parts of a finished object were not removed" in caplog.text
    gcs.server.faults()
    backend = gcs()
    (left,) = await backend.unfinished()
    assert left.key == "key"
    await backend.discard([left])
    assert await gcs.names() == [f"{gcs.root}/key"]


async def test_parts_are_deleted_after_a_failed_composition(gcs: Gcs) -> None:
    gcs.server.faults({"match": "/compose", "status": 400, "message": "no"})
    with pytest.raises(StorageError, match="400 no"):
        await write(gcs, "key", bytes(20 * MIB))
    assert await gcs.names() == []


async def test_many_deletions_end_although_some_requests_fail(gcs: Gcs) -> None:
    """Each failed request is made again for itself: all 300 at once would not succeed in a hundred attempts."""
    keys = [f"k{number}" for number in range(300)]
    fast = gcs(endpoint_url=gcs.server.direct)
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(fast.put, key, b"1")
    gcs.server.faults({"match": "DELETE", "rate": 0.05, "status": 500}, seed=1)
    backend = gcs(policy=RetryPolicy(first_pause_seconds=1e-3, longest_pause_seconds=1e-2, allowance=100))
    await backend.delete(keys)
    assert backend.retry_count > 0
    assert await gcs.names() == []


# -- reads


async def test_a_racing_overwrite_is_an_error_and_never_a_mix(gcs: Gcs) -> None:
    backend, other, out = gcs(), gcs(), memoryview(bytearray(40 * MIB))
    await other.put("key", bytes(40 * MIB))
    await backend.read_into("key", 0, out[: 16 * MIB])  # its version counts for later reads
    await other.put("key", b"1" * (40 * MIB))
    with pytest.raises(StorageError, match="was replaced while it was being read"):
        await backend.read_into("key", 16 * MIB, out[16 * MIB :])
    await backend.read_into("key", 0, out)
    assert out == b"1" * (40 * MIB)


async def test_an_overwrite_between_two_ranges_of_one_read(gcs: Gcs) -> None:
    """The object is replaced after the first range and before the others."""
    backend, other, out = gcs(), gcs(), memoryview(bytearray(40 * MIB))
    await other.put("key", bytes(40 * MIB))
    read, put = backend.store.read, []

    async def replacing(key: str, start: int, out: memoryview, version: str | None) -> tuple[int, str]:
        found = await read(key, start, out, version)
        if not put:
            put.append(await other.put("key", b"1" * (40 * MIB)))
        return found

    backend.store.read = replacing
    with pytest.raises(StorageError, match="was replaced while it was being read"):
        await backend.read_into("key", 0, out)


async def test_an_object_that_vanished_while_it_was_read(gcs: Gcs) -> None:
    store, out = gcs.store(), memoryview(bytearray(2))
    version = await store.put("key", memoryview(b"12345"))
    assert await store.read("key", 3, out, version) == (2, version)
    assert await store.read("key", 4, out, version) == (1, version)
    assert await store.read("key", 5, out, version) == (0, version)
    await store.delete(["key"])
    with pytest.raises(ConditionError):
        await store.read("key", 0, out, version)
    with pytest.raises(FileNotFoundError):
        await store.read("key", 0, out, None)


async def test_a_connection_lost_within_an_answer_is_made_again(gcs: Gcs) -> None:
    data = Random(3).randbytes(5 * MIB)  # noqa: S311 -- no secret
    store, backend = gcs.store(), gcs()
    await backend.put("key", data)
    gcs.server.faults({"match": "alt=media", "times": 2, "cut": 3 * MIB})
    out = bytearray(len(data))
    with pytest.raises(RequestError) as caught:
        await store.read("key", 0, memoryview(out), None)
    assert caught.value.transient
    await backend.read_into("key", 0, memoryview(out))
    assert out == data


async def test_nothing_is_written_to_the_buffer_after_a_cancelled_read(gcs: Gcs) -> None:
    store = gcs.store(endpoint_url=gcs.server.direct)
    await store.put("key", memoryview(b"1" * (64 * MIB)))
    for delay in (0.002, 0.01, 0.03):
        out = bytearray(64 * MIB)
        with anyio.move_on_after(delay):
            await store.read("key", 0, memoryview(out), None)
        filled = len(out.rstrip(b"\0"))
        await anyio.sleep(0.05)
        assert len(out.rstrip(b"\0")) == filled


async def test_a_cancelled_upload_does_not_send_what_the_buffer_has_later(gcs: Gcs) -> None:
    store = gcs.store()
    for delay in (0.001, 0.005, 0.02):
        data = bytearray(b"1" * (32 * MIB))
        upload = await store.begin("key", None)
        with anyio.move_on_after(delay):
            await upload.part(0, 0, memoryview(data))
        data[:] = b"2" * len(data)
        await anyio.sleep(0.1)
        for name in await gcs.names():
            stored, _ = await store._api.get(name)
            assert stored == b"1" * (32 * MIB)
        await upload.abort()


# -- words


async def test_a_missing_bucket_is_named(gcs: Gcs) -> None:
    backend = gcs("gs://no-such-bucket/run")
    out = memoryview(bytearray(1))
    calls = [
        lambda: backend.put("key", b"1"),
        lambda: backend.put_if("key", b"1", None),
        lambda: backend.get("key"),
        lambda: backend.version("key"),
        lambda: backend.read_into("key", 0, out),
        backend.list,
        backend.unfinished,
    ]
    for call in calls:
        with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'") as caught:
            await call()
        assert "tried once" in str(caught.value)


@pytest.mark.parametrize(("status", "hint"), [(401, "GOOGLE_APPLICATION_CREDENTIALS"), (403, "Storage Object User")])
async def test_credentials_that_do_not_suffice(gcs: Gcs, status: int, hint: str) -> None:
    gcs.server.faults({"match": MEDIA, "status": status, "message": "Access denied."})
    with pytest.raises(StorageError, match=f"tried once: {status} Access denied.*{hint}"):
        await gcs().put("key", b"1")


async def test_a_busy_server_says_how_long_to_wait(gcs: Gcs) -> None:
    store = gcs.store()
    for status, busy in ((429, True), (503, True), (500, False), (408, False)):
        gcs.server.faults({"match": MEDIA, "status": status, "headers": {"Retry-After": "7"}, "early": True})
        with pytest.raises(RequestError) as caught:
            await store.put("key", memoryview(bytes(MIB)))
        assert (caught.value.transient, caught.value.slow_down, caught.value.after) == (True, busy, 7.0)


async def test_a_server_that_is_not_there(gcs: Gcs) -> None:
    store = gcs("gs://bucket/run", endpoint_url="http://127.0.0.1:9").store
    with pytest.raises(RequestError, match="ClientConnectorError") as caught:
        await store.stat("key")
    assert caught.value.transient


async def test_a_server_that_hangs_is_given_up(gcs: Gcs) -> None:
    backend = more_patient(gcs(policy=RetryPolicy(attempt_seconds=0.3, first_pause_seconds=0.01)))
    await backend.version("key")
    gcs.server.faults({"match": MEDIA, "times": 1, "delay": 60})
    await backend.put("key", b"1")
    assert bytes(await backend.get("key")) == b"1"
    assert backend.retries.retries >= 1


def test_a_token_whose_file_is_absent_is_refused(gcs: Gcs) -> None:
    with pytest.raises(InputError, match=r"token '/no/such/key.json', and there is no such file"):
        gcs(token="/no/such/key.json")  # noqa: S106 -- a path


async def test_a_rapid_bucket_is_refused(gcs: Gcs) -> None:
    backend = gcs("gs://zonal-bucket/run")
    with pytest.raises(StorageError, match=r"Rapid \(zonal\) bucket.*Use a regional"):
        await backend.put("key", b"1")


async def test_no_token_is_in_any_text(gcs: Gcs, caplog: pytest.LogCaptureFixture) -> None:
    """Servers and clients repeat tokens in their errors."""
    caplog.set_level("DEBUG", logger="bcp")
    secret = "ya29.not-for-logs"  # noqa: S105 -- not one
    backend = gcs(token=Credentials(secret), policy=RetryPolicy(deadline_seconds=0.2, first_pause_seconds=0.01))
    texts = [repr(backend), repr(backend.store), repr(backend.store._api), repr(backend.store._api.http)]
    for status in (400, 401, 403, 500):
        gcs.server.faults({"match": MEDIA, "status": status, "message": f"I do not like {secret}, dear"})
        with pytest.raises(StorageError) as caught:
            await backend.put("key", b"1")
        texts += traceback.format_exception(caught.value)
    shown = "".join(texts) + caplog.text
    assert "I do not like ***" in shown
    assert secret not in shown


async def test_no_token_is_in_the_error_of_an_unanswered_check(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs asks a server of Google's for how long a token counts, by a URL that has the token."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    secret = "ya29.not-for-logs"  # noqa: S105 -- not one
    backend = gcs(token=secret, policy=RetryPolicy(deadline_seconds=0.2, first_pause_seconds=0.01))
    with pytest.raises(StorageError, match="gcsfs did not start") as caught:
        await backend.put("key", b"1")
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert secret not in _chain(caught.value)


async def test_credentials_that_cannot_be_refreshed(gcs: Gcs) -> None:
    class Expired(Credentials):
        def refresh(self, request: object) -> None:  # noqa: ARG002 -- google-auth's
            raise RefreshError(f"refresh_token={self.refresh_token} is no good")

    token = Expired(None, refresh_token="not-for-logs")  # noqa: S106 -- not one
    with pytest.raises(StorageError, match=r"no credentials: .*; check the credentials") as caught:
        await gcs(token=token).put("key", b"1")
    assert "not-for-logs" not in _chain(caught.value)


def _chain(error: BaseException | None) -> str:
    """Return all that an error refers to, shown or not."""
    text = ""
    while error is not None:
        text += repr(error)
        error = error.__cause__ or error.__context__
    return text
