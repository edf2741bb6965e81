"""What all object stores have in common, over one in memory that fails as it is told to."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from random import Random

import anyio
import anyio.lowlevel
import pytest
import torch
from fake_store import LEAST, FakeStore

import bcp
from bcp.backends import child
from bcp.backends.objects import ObjectBackend, RequestError, RetryPolicy
from bcp.backends.objects.retry import Limiter, Retries
from bcp.errors import CorruptError, InputError, StorageError
from bcp.events import RetryEvent
from bcp.protocols import Backend
from bcp.testing.backend_suite import BackendSuite

pytestmark = pytest.mark.anyio
MIB = 1 << 20
QUICK = RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3)


class TestOnMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return ObjectBackend(FakeStore(), QUICK)

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ObjectBackend)
        other = FakeStore()
        other.objects, other.uploads = backend.store.objects, backend.store.uploads
        other.numbers = backend.store.numbers
        return ObjectBackend(other, QUICK)


class TestWithTransientFaults(TestOnMemory):
    """Every third request fails; of those that do not, every fifth is carried out and its answer is lost."""

    @pytest.fixture
    def backend(self) -> Backend:
        store, rng = FakeStore(), Random(5)  # noqa: S311 -- no secret

        def fail(_: str) -> None:
            if rng.random() < 0.3:
                raise RequestError("503 try later", transient=True)

        def lose(_: str) -> None:
            if rng.random() < 0.2:
                raise ConnectionResetError("reset by peer")

        store.fail, store.lose = fail, lose
        return ObjectBackend(
            store, RetryPolicy(first_pause_seconds=1e-5, longest_pause_seconds=1e-4, allowance=100_000)
        )


def backend_that(fail: Callable[[str], None], **policy: float) -> tuple[ObjectBackend, FakeStore]:
    store = FakeStore()
    store.fail = fail
    return ObjectBackend(
        store, RetryPolicy(**{"first_pause_seconds": 1e-4, "longest_pause_seconds": 1e-3, **policy})
    ), store


def failing(count: int, error: Exception, *whats: str) -> Callable[[str], None]:
    left = [count]

    def fail(what: str) -> None:
        if what in whats and left[0]:
            left[0] -= 1
            raise error

    return fail


# -- requests that fail


async def test_a_request_that_may_succeed_later_is_made_again() -> None:
    backend, store = backend_that(failing(3, RequestError("503 slow down", slow_down=True), "put"))
    await backend.put("a", b"1")
    assert store.requests == ["put"] * 4
    assert backend.retries.retries == 3
    assert backend.retries.limiter.limit < 32


async def test_each_retry_is_an_event() -> None:
    seen: list[RetryEvent] = []
    store = FakeStore()
    store.fail = failing(2, RequestError("503 slow down", slow_down=True), "put")
    backend = ObjectBackend(store, RetryPolicy(first_pause_seconds=1e-4, on_retry=seen.append))
    await backend.put("a", b"1")
    assert [(event.attempt, event.said, event.slow_down) for event in seen] == [
        (1, "503 slow down", True),
        (2, "503 slow down", True),
    ]
    assert "storing 'a'" in seen[0].request
    assert backend.retry_count == child(backend, "x").retry_count == 2  # type: ignore[attr-defined]
    report = await bcp.asave(child(backend, "step"), {"model": {"w": torch.ones(3)}})
    assert report.retries == 2


@pytest.mark.parametrize(
    "error",
    [
        KeyError("ETag"),
        IndexError("list index out of range"),
        TypeError("int() of None"),
        AttributeError("'str' has no get"),
        RecursionError("nested"),
        struct.error("unpack requires 8 bytes"),
        UnicodeEncodeError("ascii", "\ud800", 0, 1, "no"),
        ValueError("Exceeds the limit (4300 digits)"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_answers_without_sense_are_asked_for_again_and_named_at_last(error: Exception) -> None:
    backend, store = backend_that(failing(2, error, "get"))
    store.store("key", b"data")
    assert await backend.get("key") == b"data"
    backend, _ = backend_that(failing(100, error, "get"))
    with pytest.raises(StorageError, match=rf"fake.*'key' failed, tried 4 times.*{type(error).__name__}"):
        await backend.get("key")


async def test_one_that_will_not_is_not() -> None:
    backend, store = backend_that(failing(9, RequestError("403 denied"), "put"))
    with pytest.raises(StorageError, match=r"fake://bucket/root.*storing 'a' failed, tried once: 403 denied"):
        await backend.put("a", b"1")
    assert store.requests == ["put"]


async def test_after_the_deadline_the_error_says_how_often_it_was_tried() -> None:
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    retries = Retries(
        RetryPolicy(deadline_seconds=60, first_pause_seconds=1, longest_pause_seconds=8),
        sleep=sleep,
        clock=lambda: now[0],
    )

    async def attempt() -> None:
        now[0] += 1
        raise RequestError("500 internal", transient=True)

    with pytest.raises(
        StorageError, match=r"reading x failed, tried \d+ times in [456]\d\.\d s: 500 internal"
    ) as caught:
        await retries("reading x", attempt)
    assert isinstance(caught.value.__cause__, RequestError)
    assert now[0] <= 61


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_server_that_nobody_reaches_is_given_up_early_unless_it_was_reached_before(*, is_known: bool) -> None:
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def refused() -> None:
        raise RequestError("connection refused", transient=True, unreachable=True)

    async def answered() -> None:
        return

    retries = Retries(RetryPolicy(deadline_seconds=1000, allowance=10**6), sleep=sleep, clock=lambda: now[0])
    if is_known:
        await retries("asking", answered)
    with pytest.raises(StorageError, match="connection refused") as caught:
        await retries("asking", refused)
    assert ("check its endpoint" in str(caught.value)) is not is_known
    assert (980 if is_known else 10) < now[0] <= (1000 if is_known else 30)


async def test_the_server_says_how_long_to_wait() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    retries, left = Retries(RetryPolicy(first_pause_seconds=0.1), sleep=sleep), [1]

    async def attempt() -> int:
        if left:
            left.pop()
            raise RequestError("429", slow_down=True, after=7.0)
        return 5

    assert await retries("x", attempt) == 5
    assert pauses == [7.0]


async def test_a_store_that_always_fails_is_given_up_early() -> None:
    backend, store = backend_that(failing(10**6, ConnectionResetError("gone"), "stat"), allowance=20)
    with pytest.raises(StorageError, match="so many requests fail that no more is made again"):
        await backend.version("a")
    assert len(store.requests) == 21


async def test_an_attempt_without_an_answer_is_given_up() -> None:
    backend, store = backend_that(lambda _: None, attempt_seconds=0.05)
    hung = [True]

    async def hang(what: str) -> None:
        store.requests.append(what)
        if hung and hung.pop():
            await anyio.sleep_forever()

    store.request = hang  # type: ignore[method-assign]
    with anyio.fail_after(60):
        await backend.put("a", b"1")
    assert store.requests == ["put", "put"]


async def test_a_cancelled_write_leaves_nothing() -> None:
    backend, store = backend_that(lambda _: None)
    with anyio.CancelScope() as scope:
        async with backend.open_write("a", 20 * MIB) as writer:
            await writer.write_part(0, 0, bytes(10 * MIB))
            assert len(store.uploads) == 1
            scope.cancel()
            await anyio.sleep(1)
    assert not store.uploads
    assert not store.objects


async def test_each_of_many_deletions_is_made_again_for_itself() -> None:
    backend, store = backend_that(lambda _: None)
    keys = [f"k{number}" for number in range(250)]
    for key in keys:
        store.store(key, b"1")
    for key in keys[:3]:
        await store.begin(key, None)
    store.fail = failing(1, RequestError("500 try later", transient=True), "delete")
    await backend.delete(keys)
    store.fail = failing(1, RequestError("500 try later", transient=True), "discard")
    await backend.discard(await backend.unfinished())
    assert store.requests.count("delete") == -(-len(keys) // store.most_keys) + 1
    assert store.requests.count("discard") == 3 + 1
    assert not store.objects
    assert not store.uploads


async def test_an_upload_whose_beginning_was_not_answered_goes_with_the_commit() -> None:
    backend, store = backend_that(lambda _: None)
    begin, lost = store.begin, ["the answer"]

    async def begin_unheard(key: str, nbytes: int | None) -> object:
        upload = await begin(key, nbytes)
        if lost:
            raise ConnectionResetError(lost.pop())
        return upload

    store.begin = begin_unheard
    other = await begin("model/of-another-role", None)
    await bcp.asave(backend, {"model": {"w": torch.zeros(5 * MIB)}})
    assert store.requests.count("begin") == 3
    assert list(store.uploads.values()) == [other]


async def test_parts_that_cannot_be_removed_are_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    backend, store = backend_that(failing(10**6, RequestError("403 denied"), "abort"))

    async def fail() -> None:
        async with backend.open_write("a", 20 * MIB) as writer:
            await writer.write_part(0, 0, bytes(10 * MIB))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert "parts of a failed write were not removed" in caplog.text
    assert [one.key for one in await backend.unfinished()] == ["a"]
    await backend.discard(await backend.unfinished())
    assert not store.uploads


# -- conditions


async def test_a_commit_whose_answer_was_lost_knows_itself() -> None:
    backend, store = backend_that(lambda _: None)
    store.lose = failing(1, ConnectionResetError("reset"), "put")
    version = await backend.put_if("metadata.arrow", b"mine", None)
    assert version == await backend.version("metadata.arrow")
    assert store.requests.count("put") == 2


async def test_a_commit_that_lost_against_another_knows_that_too() -> None:
    backend, store = backend_that(failing(1, ConnectionResetError("reset"), "put"))
    store.objects["metadata.arrow"] = b"theirs", "v0"
    assert await backend.put_if("metadata.arrow", b"mine", None) is None
    assert store.objects["metadata.arrow"] == (b"theirs", "v0")


# -- reads


async def test_a_racing_overwrite_is_an_error_and_never_a_mix() -> None:
    backend, store = backend_that(lambda _: None)
    old, new = bytes(40 * MIB), bytes([1]) * (40 * MIB)
    store.store("a", old)
    out = memoryview(bytearray(40 * MIB))
    count = [0]

    def replaced(what: str) -> None:
        count[0] += what == "read"
        if count[0] == 2:
            store.store("a", new)

    store.fail = replaced
    with pytest.raises(StorageError, match="was replaced while it was being read"):
        await backend.read_into("a", 0, out)


async def test_large_reads_are_ranges_and_small_ones_are_not() -> None:
    backend, store = backend_that(lambda _: None)
    data = Random(1).randbytes(50 * MIB)  # noqa: S311 -- no secret
    store.store("a", data)
    out = bytearray(50 * MIB - 7)
    await backend.read_into("a", 3, memoryview(out))
    assert out == data[3 : 50 * MIB - 4]
    assert store.requests == ["read"] * 4
    with pytest.raises(CorruptError, match="too short"):
        await backend.read_into("a", 40 * MIB, memoryview(bytearray(11 * MIB)))


async def test_many_small_buffers_are_filled_by_few_reads() -> None:
    backend, store = backend_that(lambda _: None)
    data = Random(3).randbytes(60 * MIB)  # noqa: S311 -- no secret
    store.store("a", data)
    lengths = [1000] * 20_000 + [3 * MIB, 0, 17 * MIB] + [7] * 500
    outs = [bytearray(length) for length in lengths]
    await backend.read_scattered("a", 5, [memoryview(out) for out in outs])
    assert b"".join(outs) == data[5 : 5 + sum(lengths)]
    assert len(store.requests) == 2 + 1 + 2 + 1


async def test_a_slow_read_is_asked_for_twice() -> None:
    backend, store = backend_that(lambda _: None, hedge_seconds=0.05)
    store.store("a", b"12345")
    slow = [True]

    async def request(what: str) -> None:
        store.requests.append(what)
        if slow and slow.pop():
            await anyio.sleep_forever()

    store.request = request  # type: ignore[method-assign]
    out = bytearray(5)
    with anyio.fail_after(60):
        await backend.read_into("a", 0, memoryview(out))
    assert out == b"12345"
    assert store.requests == ["read", "read"]


# -- many objects


async def test_a_failed_page_or_deletion_repeats_itself_alone() -> None:
    """With so many failures no list of all pages would ever succeed at once, and no deletion of all keys."""
    store, rng = FakeStore(), Random(3)  # noqa: S311 -- no secret

    def fail(what: str) -> None:
        if what in ("list", "delete", "discard") and rng.random() < 0.5:
            raise RequestError("503", transient=True)

    keys = [f"{number:04}" for number in range(1000)]
    for key in keys:
        store.store(key, b"")
    for number in range(100):
        await store.begin(f"half{number}", None)
    store.fail = fail
    backend = ObjectBackend(store, RetryPolicy(first_pause_seconds=1e-5, longest_pause_seconds=1e-4, allowance=2000))
    assert [info.key for info in await backend.list()] == keys
    await backend.delete(keys)
    await backend.discard(await backend.unfinished())
    assert (store.objects, store.uploads) == ({}, {})
    assert backend.retry_count < 1000


# -- sizes of parts


@pytest.mark.parametrize("last_comes", ["first", "somewhere"])
@pytest.mark.parametrize("announced", [False, True])
async def test_parts_of_any_size_reach_a_store_that_refuses_small_ones(*, announced: bool, last_comes: str) -> None:
    backend, store = backend_that(lambda _: None)
    rng = Random(2)  # noqa: S311 -- no secret
    pieces = [rng.randbytes(MIB) for _ in range(18)] + [rng.randbytes(17)]
    if not announced:
        pieces = [piece[: rng.randrange(1, MIB)] for piece in pieces]
    whole = b"".join(pieces)
    order = list(range(len(pieces)))
    rng.shuffle(order)
    if last_comes == "first":
        order.sort(key=lambda index: index != len(pieces) - 1)
    starts = [sum(map(len, pieces[:index])) for index in order]
    async with backend.open_write("a", len(whole) if announced else None) as writer:
        for index, start in zip(order, starts, strict=True):
            await writer.write_part(index, start, pieces[index])
    assert store.objects["a"][0] == whole


@pytest.mark.parametrize("size", [LEAST, 4 * LEAST, LEAST - 1, 100], ids=str)
@pytest.mark.parametrize("header", [0, 100, LEAST])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_the_first_part_may_be_larger_and_the_last_one_smaller(
    order: Sequence[int], header: int, size: int
) -> None:
    backend, store = backend_that(lambda _: None)
    pieces = [b"h" * header + b"a" * size, b"b" * size, b"c" * 7]
    async with backend.open_write("a", sum(map(len, pieces))) as writer:
        for index in order:
            await writer.write_part(index, sum(map(len, pieces[:index])), pieces[index])
    assert store.objects["a"][0] == b"".join(pieces)


async def test_a_small_part_among_large_ones_is_refused() -> None:
    backend, store = backend_that(lambda _: None)

    async def write() -> None:
        async with backend.open_write("a", 5 * LEAST) as writer:
            await writer.write_part(0, 0, bytes(4 * LEAST))
            await writer.write_part(1, 4 * LEAST, bytes(9))

    with pytest.raises(StorageError, match=r"part 1 has 9 bytes after a larger one, .* no part below 5242880; ch"):
        await write()
    assert not store.uploads


async def test_an_object_has_no_more_parts_than_the_store_takes() -> None:
    backend, store = backend_that(lambda _: None)
    store.most_parts = 3
    pieces = [bytes([index]) * LEAST for index in range(7)]
    async with backend.open_write("a", 7 * LEAST) as writer:
        for index, piece in enumerate(pieces):
            await writer.write_part(index, index * LEAST, piece)
    assert store.requests == ["begin", "part", "part", "part", "finish"]
    assert store.objects["a"][0] == b"".join(pieces)


async def test_large_parts_are_not_copied_and_small_objects_take_one_request() -> None:
    backend, store = backend_that(lambda _: None)
    async with backend.open_write("large", 12 * LEAST) as writer:
        for index in range(3):
            await writer.write_part(index, index * 4 * LEAST, bytes(4 * LEAST))
    assert store.requests == ["begin", "part", "part", "part", "finish"]
    store.requests.clear()
    async with backend.open_write("small", MIB) as writer:
        await writer.write_part(0, 0, bytes(MIB))
        assert "small" not in store.objects
    async with backend.open_write("empty") as writer:
        pass
    assert store.requests == ["put", "put"]
    assert store.objects["empty"][0] == b""


# -- the limiter


async def test_a_busy_server_gets_fewer_requests_at_a_time() -> None:
    now = [0.0]
    limiter = Limiter(16, clock=lambda: now[0])
    for _ in range(5):
        limiter.slow_down()  # of one moment
    assert limiter.limit == 8
    now[0] = 10
    limiter.slow_down()
    assert limiter.limit == 4
    for _ in range(4):
        limiter.succeeded()
    assert 4.9 < limiter.limit < 5.1
    for _ in range(1000):
        limiter.succeeded()
    assert limiter.limit == 16


async def test_no_more_requests_are_under_way_than_may_be() -> None:
    backend, store = backend_that(lambda _: None, requests=3)
    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(backend.put, f"k{number}", b"1")
        await anyio.lowlevel.checkpoint()
        group.start_soon(backend.put, "late", b"1")
    assert store.most_under_way == 3
    assert len(store.objects) == 51


async def test_a_waiter_that_is_cancelled_gives_its_turn_away() -> None:
    limiter = Limiter(1)
    inside: list[str] = []

    async def one(name: str) -> None:
        async with limiter.one():
            inside.append(name)

    async with limiter.one(), anyio.create_task_group() as group:
        group.start_soon(one, "cancelled")
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    with anyio.fail_after(60):
        await one("next")
    assert inside == ["next"]


@pytest.mark.parametrize(
    "wrong", [{"deadline_seconds": 0}, {"requests": 0}, {"allowance": -1}, {"hedge_seconds": -1.0}]
)
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        RetryPolicy(**wrong)


def test_a_load_lists_nothing() -> None:
    """Keys follow from the metadata: a thousand ranks that list a prefix at once would be throttled."""
    store = FakeStore()
    weights = torch.arange(1000.0)
    bcp.save(ObjectBackend(store), {"model": {"weights": weights.clone()}, "extra_states": {"step": 3}})
    store.requests.clear()
    found = {"model": {"weights": torch.zeros(1000)}, "extra_states": {"step": 0}}
    bcp.load(ObjectBackend(store), found, options=bcp.LoadOptions(record=False))
    assert torch.equal(found["model"]["weights"], weights)
    assert set(store.requests) == {"get", "read"}
