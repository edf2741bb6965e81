from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from bcp.backends import LocalBackend, MemoryBackend, child, register, resolve
from bcp.backends.cold import ColdPlace, ColdPlaces, ColdRecord
from bcp.backends.cooled import cooled_child
from bcp.errors import InputError, StorageError
from bcp.protocols import Backend
from bcp.testing.backend_suite import BackendSuite
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend


class TestLocalBackend(BackendSuite):
    many = 300  # there are no pages

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return LocalBackend(tmp_path / "not" / "there yet")

    def reopen(self, backend: Backend) -> Backend:
        return LocalBackend(repr(backend).split("'")[1])


class TestMemoryBackend(BackendSuite):
    large_part_nbytes = 1000

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        name = request.node.name
        request.addfinalizer(lambda: MemoryBackend.forget(name))  # noqa: PT021 -- fixtures above return, too
        return MemoryBackend(name)

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, MemoryBackend)
        return MemoryBackend(backend.name)


class TestChild(BackendSuite):
    large_part_nbytes = 1000

    @pytest.fixture
    def backend(self) -> Backend:
        MemoryBackend.forget("whole")
        return child(child(MemoryBackend("whole"), "some"), "where/else")

    def reopen(self, backend: Backend) -> Backend:
        assert "whole" in repr(backend)
        return child(MemoryBackend("whole"), "some/where/else")


class TestCooledBackend(BackendSuite):
    """The view of a checkpoint whose run has a cold place."""

    large_part_nbytes = 1000

    @pytest.fixture
    def backend(self) -> Backend:
        for name in ("hot", "cold"):
            MemoryBackend.forget(name)
        anyio.run(self.cool)
        return self.reopen(MemoryBackend("hot"))

    async def cool(self) -> None:
        record = ColdRecord((ColdPlace("memory://cold/run", "0" * 16),), frozenset({"step-00000001"}))
        await MemoryBackend("hot").put("cold.json", record.to_bytes())
        await MemoryBackend("cold").put("run/cold-of.json", b'{"mark": "0000000000000000", "run": "memory://hot"}')

    def reopen(self, backend: Backend) -> Backend:
        assert "hot" in repr(backend)
        places = ColdPlaces(MemoryBackend("hot"), "memory://hot")
        return cooled_child(MemoryBackend("hot"), "step-00000001", places)


class TestCountingBackend(BackendSuite):
    large_part_nbytes = 1000

    @pytest.fixture
    def backend(self) -> Backend:
        MemoryBackend.forget("counted")
        return CountingBackend(MemoryBackend("counted"))


def test_resolve(tmp_path: Path) -> None:
    assert repr(resolve(str(tmp_path))) == repr(resolve(tmp_path)) == f"LocalBackend({str(tmp_path)!r})"
    assert repr(resolve(f"file://{tmp_path}/a%20b")) == f"LocalBackend({str(tmp_path / 'a b')!r})"
    assert repr(resolve("relative")) == f"LocalBackend({str(Path.cwd() / 'relative')!r})"
    assert isinstance(resolve("memory://x"), MemoryBackend)
    backend = MemoryBackend("x")
    assert resolve(backend) is backend


@pytest.mark.anyio
async def test_memory_url_with_prefix() -> None:
    MemoryBackend.forget("box")
    await resolve("memory://box/a/b").put("c", b"1")
    assert [info.key for info in await MemoryBackend("box").list()] == ["a/b/c"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nosuch://x", "unknown scheme nosuch://; known are .*file://.*s3://.*register"),
        ("file://host/x", "three slashes"),
        ("file://x", "three slashes"),
    ],
)
def test_resolve_refuses(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(path)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcp.backends._factories", {})
    seen: list[str] = []

    def factory(url: str, **options: object) -> Backend:
        seen.append(url)
        seen.extend(options)
        return MemoryBackend("registered")

    register("Mine", factory)
    assert isinstance(resolve("mine://where/ever"), MemoryBackend)
    assert isinstance(resolve("mine://where/ever", {"colour": "blue"}), MemoryBackend)
    assert seen == ["mine://where/ever", "mine://where/ever", "colour"]
    with pytest.raises(InputError, match="scheme"):
        register("mine://", factory)


@pytest.mark.anyio
async def test_counting_backend_counts_bytes_by_key() -> None:
    backend = CountingBackend(MemoryBackend(os.urandom(8).hex()))
    await backend.put("a", b"123")
    async with backend.open_write("b") as writer:
        await writer.write_part(0, 0, b"12")
        await writer.write_part(1, 2, b"3456")
    await backend.get("a")
    await backend.read_into("b", 1, memoryview(bytearray(2)))
    assert dict(backend.written) == {"a": 3, "b": 6}
    assert dict(backend.read) == {"a": 3, "b": 2}
    assert backend.calls == {"put": 1, "open_write": 1, "write_part": 2, "commit": 1, "get": 1, "read_into": 1}


@pytest.mark.anyio
@pytest.mark.parametrize("operation", ["open_write", "write_part", "commit"])
async def test_faulty_backend_fails_once_and_leaves_nothing(operation: str) -> None:
    backend = FaultyBackend(MemoryBackend(os.urandom(8).hex()), operation, StorageError("full"), key="b")

    async def write(key: str) -> None:
        async with backend.open_write(key) as writer:
            await writer.write_part(0, 0, b"12")

    await write("a")
    with pytest.raises(StorageError, match="full"):
        await write("b")
    assert [info.key for info in await backend.list()] == ["a"]
    await write("b")
    assert [info.key for info in await backend.list()] == ["a", "b"]


@pytest.mark.anyio
async def test_faulty_backend_calls_back_at_the_nth_call() -> None:
    seen: list[str] = []

    async def hook(key: str) -> None:
        seen.append(key)

    backend = FaultyBackend(MemoryBackend(os.urandom(8).hex()), "put", hook, nth=2)
    for key in "abc":
        await backend.put(key, b"")
    assert seen == ["b"]
    with pytest.raises(InputError, match="unknown"):
        FaultyBackend(backend, "putt", hook)
