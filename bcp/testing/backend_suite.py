"""The conformance suite that every storage backend has to pass.

::

    class TestMine(BackendSuite):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path)

Needs pytest and anyio's pytest plugin, which comes with anyio.
"""
# ruff: noqa: S101, PT012 -- a suite is made of assertions, and a context manager is tested by its whole block

from __future__ import annotations

import asyncio
import hashlib
import os
import traceback
from collections.abc import Coroutine, Sequence
from typing import Any

import anyio
import pytest

from bcp.errors import CorruptError, InputError, StorageError
from bcp.protocols import Backend, Buffer, FolderLister, PartWriter, ScatterReader, Sweeper, Unfinished, folders_of

__all__ = ["BackendSuite"]

_OLD = b"what was there before"
_BAD_KEYS = ["", "/a", "a/", "a//b", ".", "./a", "a/./b", "..", "../a", "a/../b", "a\0b", "a\\b"]


class BackendSuite:
    """Subclass it and give a ``backend`` fixture: a new, empty backend for every test."""

    pytestmark = pytest.mark.anyio
    large_part_nbytes = 9 << 20
    """Size of a "large" part in bytes; more than one system call or request of the backend takes."""

    many = 2000
    """How many objects there are at once in one test; more than one page of a list has."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run on asyncio."""
        return "asyncio"

    @pytest.fixture
    def backend(self) -> Backend:
        """Return a new, empty backend; every suite overrides this."""
        raise NotImplementedError("override the fixture `backend`")

    def reopen(self, backend: Backend) -> Backend:
        """Return another backend over the same objects, as another process would; by default the same one."""
        return backend

    # -- small objects ------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"bytes", bytearray(b"bytearray"), memoryview(b"a memoryview")[2:], b""])
    async def test_put_and_get(self, backend: Backend, data: Buffer) -> None:
        """Stored bytes come back, in another process too."""
        await backend.put("folder/of/a key", data)
        assert bytes(await self.reopen(backend).get("folder/of/a key")) == bytes(data)

    async def test_put_takes_any_shape_of_memoryview(self, backend: Backend) -> None:
        """Items of more than a byte and more than one dimension are taken as bytes."""
        view = memoryview(bytes(range(24))).cast("I", (2, 3))
        await backend.put("key", view)
        assert bytes(await backend.get("key")) == bytes(range(24))

    async def test_put_replaces(self, backend: Backend) -> None:
        """The later object counts, also where it is shorter."""
        await backend.put("key", b"a longer first value")
        await backend.put("key", b"second")
        assert bytes(await backend.get("key")) == b"second"

    async def test_missing_key(self, backend: Backend) -> None:
        """Reading a missing key raises FileNotFoundError, nothing else."""
        await backend.put("there/is", b"one")
        for key in ("absent", "there", "there/is/below", "there/not"):
            with pytest.raises(FileNotFoundError):
                await backend.get(key)
            with pytest.raises(FileNotFoundError):
                await backend.read_into(key, 0, memoryview(bytearray(1)))

    @pytest.mark.parametrize("key", _BAD_KEYS)
    async def test_bad_keys(self, backend: Backend, key: str) -> None:
        """No method takes a key that could leave the root."""
        with pytest.raises(InputError):
            await backend.put(key, b"")
        with pytest.raises(InputError):
            await backend.get(key)
        with pytest.raises(InputError):
            await backend.read_into(key, 0, memoryview(bytearray(1)))
        with pytest.raises(InputError):
            await backend.delete([key])
        with pytest.raises(InputError):
            await backend.version(key)
        with pytest.raises(InputError):
            await backend.put_if(key, b"", None)
        with pytest.raises(InputError):
            async with backend.open_write(key):
                pass
        assert await backend.list() == []

    # -- conditional replacement --------------------------------------------------------------

    async def test_put_if_creates_what_is_not_there(self, backend: Backend) -> None:
        """With None an object is made if there is none; the version that comes back is the object's."""
        assert await backend.version("a/key") is None
        await backend.put("a/neighbour", b"")  # a backend with directories makes none for put_if
        made = await backend.put_if("a/key", b"first", None)
        assert made
        assert await self.reopen(backend).version("a/key") == made
        assert await backend.put_if("a/key", b"second", None) is None
        assert bytes(await self.reopen(backend).get("a/key")) == b"first"
        assert [info.key for info in await backend.list()] == ["a/key", "a/neighbour"]

    async def test_put_if_replaces_what_was_found(self, backend: Backend) -> None:
        """An object is replaced if it has the version that was found, whoever has written it, and not otherwise."""
        await backend.put("key", _OLD)
        old_version = await self.reopen(backend).version("key")
        assert old_version
        assert await backend.put_if("key", b"never", "no such version") is None
        assert await backend.put_if("key", b"never", None) is None
        assert bytes(await backend.get("key")) == _OLD
        new = await backend.put_if("key", b"new", old_version)
        assert new == await backend.version("key") != old_version
        assert await backend.put_if("key", b"late", old_version) is None
        assert bytes(await self.reopen(backend).get("key")) == b"new"
        assert await backend.put_if("key", b"newer", new)
        assert [info.key for info in await backend.list()] == ["key"]

    async def test_put_if_notices_every_other_change(self, backend: Backend) -> None:
        """An object that was put, written in parts or deleted meanwhile is not the one that was found."""
        await backend.put("key", b"0")
        old_version = await backend.version("key")
        await backend.put("key", b"1")
        assert await backend.put_if("key", b"never", old_version) is None
        old_version = await backend.version("key")
        async with backend.open_write("key", 1) as writer:
            await writer.write_part(0, 0, b"2")
        assert await backend.put_if("key", b"never", old_version) is None
        old_version = await backend.version("key")
        await backend.delete(["key"])
        assert await backend.version("key") is None
        assert await backend.put_if("key", b"never", old_version) is None
        assert await backend.list() == []

    @pytest.mark.parametrize("there", [True, False])
    async def test_put_if_of_many_at_once(self, backend: Backend, there: bool) -> None:  # noqa: FBT001 -- a parameter
        """One of sixteen calls with the same found version succeeds, and its bytes are there."""
        await backend.put("neighbour", b"")
        if there:
            await backend.put("key", _OLD)
        old_version = await backend.version("key")
        done: list[tuple[bytes, str]] = []

        async def replace(data: bytes) -> None:
            version = await self.reopen(backend).put_if("key", data, old_version)
            if version is not None:
                done.append((data, version))

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(replace, b"%d" % number)
        ((data, version),) = done
        assert bytes(await backend.get("key")) == data
        assert await backend.version("key") == version
        assert [info.key for info in await backend.list()] == ["key", "neighbour"]

    # -- unfinished writes --------------------------------------------------------------------

    async def test_unfinished_writes_are_listed_and_discarded(self, backend: Backend) -> None:
        """A backend that lists unfinished writes lists no finished one; who is discarded fails, and leaves nothing."""
        if not isinstance(backend, Sweeper):
            return
        await backend.put("key", _OLD)
        listed: Sequence[Unfinished] = []
        try:
            async with backend.open_write("a/new", 3) as writer:
                await writer.write_part(0, 0, b"abc")
                listed = await backend.unfinished()
                await backend.discard(listed)
                await backend.discard(listed)
        except StorageError:
            assert {write.key for write in listed} == {"a/new"}
        else:
            assert list(listed) == []
            await backend.delete(["a/new"])
        await self._only_the_old(backend)

    # -- objects in parts ---------------------------------------------------------------------

    @pytest.mark.parametrize("announced", [True, False])
    async def test_parts_in_any_order(self, backend: Backend, announced: bool) -> None:  # noqa: FBT001 -- a parameter
        """Parts of different sizes, last one first."""
        parts = [b"first", b"", b"the third", b"4"]
        offsets = [0, 5, 5, 14]
        async with backend.open_write("key", 15 if announced else None) as writer:
            for index in (3, 1, 0, 2):
                await writer.write_part(index, offsets[index], parts[index])
        assert bytes(await self.reopen(backend).get("key")) == b"".join(parts)

    async def test_large_parts_at_once(self, backend: Backend) -> None:
        """Large parts, concurrently; the buffer of each is overwritten as soon as it was taken."""
        size = self.large_part_nbytes
        expected = hashlib.sha256()

        async def write(writer: PartWriter, index: int, buffer: bytearray) -> None:
            await writer.write_part(index, index * size, memoryview(buffer))
            buffer[:] = bytes(size)

        buffers = [bytearray(bytes([index + 1, 7, index + 3]) * (size // 3 + 1))[:size] for index in range(3)]
        for buffer in buffers:
            expected.update(buffer)
        async with backend.open_write("large", 3 * size) as writer, anyio.create_task_group() as group:
            for index in (2, 0, 1):
                group.start_soon(write, writer, index, buffers[index])
        data = bytearray(3 * size)
        await backend.read_into("large", 0, memoryview(data))
        assert hashlib.sha256(data).digest() == expected.digest()

    async def test_no_parts(self, backend: Backend) -> None:
        """An object without a part is empty, and there."""
        async with backend.open_write("empty", 0):
            pass
        assert bytes(await backend.get("empty")) == b""
        assert [(info.key, info.nbytes) for info in await backend.list()] == [("empty", 0)]

    @pytest.mark.parametrize(
        ("nbytes", "parts"),
        [
            pytest.param(None, [(0, 0, b"ab"), (1, 3, b"d")], id="gap"),
            pytest.param(None, [(0, 0, b"ab"), (1, 1, b"c")], id="overlap"),
            pytest.param(None, [(0, 1, b"ab")], id="does not start at 0"),
            pytest.param(None, [(0, 0, b"ab"), (2, 2, b"c")], id="part missing"),
            pytest.param(None, [(0, 0, b"ab"), (0, 0, b"ab")], id="part twice"),
            pytest.param(4, [(0, 0, b"ab")], id="too short"),
            pytest.param(1, [(0, 0, b"ab")], id="too long"),
        ],
    )
    async def test_wrong_tiling(
        self, backend: Backend, nbytes: int | None, parts: list[tuple[int, int, bytes]]
    ) -> None:
        """Parts that do not tile the object are refused, and the object does not appear."""
        await backend.put("key", _OLD)
        with pytest.raises(StorageError):
            async with backend.open_write("key", nbytes) as writer:
                for part in parts:
                    await writer.write_part(*part)
        await self._only_the_old(backend)

    async def test_appears_at_the_end(self, backend: Backend) -> None:
        """While it is being written no reader sees the object or a temporary one."""
        async with backend.open_write("a/key", 2) as writer:
            await writer.write_part(0, 0, b"xy")
            assert await self.reopen(backend).list() == []
            with pytest.raises(FileNotFoundError):
                await backend.get("a/key")
        assert bytes(await backend.get("a/key")) == b"xy"

    async def test_failure_leaves_nothing(self, backend: Backend) -> None:
        """An error in the context comes out as it is; the old object stays, and nothing new."""
        await backend.put("key", _OLD)
        for key in ("key", "new/key"):
            with pytest.raises(ZeroDivisionError):
                async with backend.open_write(key, 3) as writer:
                    await writer.write_part(0, 0, b"abc")
                    raise ZeroDivisionError
        await self._only_the_old(backend)

    async def test_cancellation_leaves_nothing(self, backend: Backend) -> None:
        """A cancelled context leaves nothing either."""
        await backend.put("key", _OLD)
        for key in ("key", "new/key"):
            with anyio.CancelScope() as scope:
                async with backend.open_write(key, 3) as writer:
                    await writer.write_part(0, 0, b"abc")
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
            assert scope.cancelled_caught
        await self._only_the_old(backend)

    async def test_cancellation_within_a_part(self, backend: Backend) -> None:
        """A part that is cancelled on its way leaves nothing, and its buffer alone from then on."""
        await backend.put("key", _OLD)
        data = bytearray(self.large_part_nbytes)
        for seconds in (0.0, 0.001, 0.01):
            with anyio.move_on_after(seconds):
                async with backend.open_write("new/key", 2 * len(data)) as writer:
                    await writer.write_part(0, 0, data)
                    await writer.write_part(1, len(data), data)
                    await anyio.sleep_forever()
            data[:] = bytes(len(data))
        await self._only_the_old(backend)

    async def test_two_writers_of_one_key(self, backend: Backend) -> None:
        """The object is one of both, never a mixture; the later end counts."""
        async with backend.open_write("key", 4) as first, backend.open_write("key", 4) as second:
            await first.write_part(0, 0, b"1111")
            await second.write_part(0, 0, b"2222")
        assert bytes(await backend.get("key")) == b"1111"

    # -- reading ------------------------------------------------------------------------------

    async def test_ranges(self, backend: Backend) -> None:
        """Any range, into a part of a larger buffer, which is not touched elsewhere."""
        data = bytes(range(256)) * 4
        await backend.put("key", data)
        for start, nbytes in ((0, 1024), (0, 1), (1023, 1), (100, 777), (1024, 0), (5, 0)):
            buffer = bytearray(b"\xee" * (nbytes + 2))
            await backend.read_into("key", start, memoryview(buffer)[1:-1])
            assert bytes(buffer) == b"\xee" + data[start : start + nbytes] + b"\xee"

    @pytest.mark.parametrize(("start", "nbytes"), [(0, 11), (9, 2), (10, 1), (500, 3)])
    async def test_too_short(self, backend: Backend, start: int, nbytes: int) -> None:
        """Fewer bytes than wanted is CorruptError, and the message names the key."""
        await backend.put("the-key", b"0123456789")
        with pytest.raises(CorruptError, match="the-key"):
            await backend.read_into("the-key", start, memoryview(bytearray(nbytes)))

    async def test_scattered(self, backend: Backend) -> None:
        """A backend that fills many buffers with one read fills each with its own bytes, and touches nothing else."""
        data = bytes(range(256)) * 20
        await backend.put("key", data)
        for start, lengths in ((0, []), (5, [0]), (0, [5120]), (7, [1, 0, 2, 4000, 0, 100]), (1000, [1] * 3000)):
            buffers = [bytearray(b"\xee" * (length + 2)) for length in lengths]
            await _scattered(backend, "key", start, [memoryview(buffer)[1:-1] for buffer in buffers])
            assert all(buffer[0] == buffer[-1] == 0xEE for buffer in buffers)  # noqa: PLR2004 -- as above
            contents = b"".join(bytes(buffer[1:-1]) for buffer in buffers)
            assert contents == data[start : start + sum(lengths)]

    async def test_scattered_wrong(self, backend: Backend) -> None:
        """Errors are those of read_into."""
        await backend.put("the-key", b"0123456789")
        outs = [memoryview(bytearray(4)), memoryview(bytearray(4))]
        for start in (3, 9, 10, 500):
            with pytest.raises(CorruptError, match="the-key"):
                await _scattered(backend, "the-key", start, outs)
        with pytest.raises(FileNotFoundError):
            await _scattered(backend, "absent", 0, outs)
        with pytest.raises(InputError):
            await _scattered(backend, "../a", 0, outs)

    # -- lists and deletion -------------------------------------------------------------------

    async def test_list(self, backend: Backend) -> None:
        """Keys come in order, with sizes; a prefix is a prefix of the key, not a folder."""
        assert await backend.list() == []
        assert await backend.list("a/") == []
        for nbytes, key in enumerate(["b", "a/z", "a/b/c", "ab", "a/b-"]):
            await backend.put(key, bytes(nbytes))
        everything = [("a/b-", 4), ("a/b/c", 2), ("a/z", 1), ("ab", 3), ("b", 0)]
        for prefix in ("", "a", "a/", "a/b", "a/b/", "b", "c", "a/z"):
            pairs = [(info.key, info.nbytes) for info in await self.reopen(backend).list(prefix)]
            assert pairs == [pair for pair in everything if pair[0].startswith(prefix)], prefix

    async def test_folders(self, backend: Backend) -> None:
        """Folders come in order, each once; objects and deeper folders are not among them."""
        assert await folders_of(backend) == await folders_of(backend, "step-1/") == []
        for key in ("step-2/a", "step-10/a", "step-1/a/b/c", "step-1/b", "step-1/a/d", "step", "run.json", "z/a"):
            await backend.put(key, b"x")
        other = self.reopen(backend)
        for prefix, expected in (
            ("", ["step-1", "step-10", "step-2", "z"]),
            ("step-1/", ["a"]),
            ("step-1/a/", ["b"]),
            ("step-2/", []),
            ("step/", []),
            ("absent/", []),
            ("run.json/below/", []),
        ):
            assert await folders_of(other, prefix) == expected, prefix
            derived = (info.key[len(prefix) :].partition("/") for info in await other.list(prefix))
            assert sorted({name for name, slash, _ in derived if slash}) == expected, prefix
        await backend.delete(["step-1/a/b/c", "step-2/a"])
        assert await folders_of(other) == ["step-1", "step-10", "z"]
        assert await folders_of(other, "step-1/a/") == []
        await backend.delete(["z/a", "z/absent"])
        assert await folders_of(other) == ["step-1", "step-10"]

    @pytest.mark.parametrize("prefix", ["step-1", "/", "../", "a//", "./", "a/../b/"])
    async def test_bad_prefixes_of_folders(self, backend: Backend, prefix: str) -> None:
        """A backend that lists folders takes the prefix of a folder only, below the root."""
        if isinstance(backend, FolderLister):
            with pytest.raises(InputError):
                await backend.folders(prefix)

    async def test_delete(self, backend: Backend) -> None:
        """Deleted objects are gone, others stay, absent ones are no error."""
        for key in ("a/1", "a/2", "b"):
            await backend.put(key, b"x")
        await backend.delete(["a/1", "absent", "a/absent", "nowhere/at/all"])
        await backend.delete([])
        await backend.delete(["a/1"])
        assert [info.key for info in await self.reopen(backend).list()] == ["a/2", "b"]
        with pytest.raises(FileNotFoundError):
            await backend.get("a/1")

    async def test_sixteen_tasks(self, backend: Backend) -> None:
        """Sixteen tasks write, read, list and delete below one folder at once."""

        async def work(number: int) -> None:
            own_key, whole = f"shared/{number}/mine", f"shared/{number % 4}-{number}"
            for round_ in range(4):
                await backend.put(own_key, bytes([number, round_]))
                async with backend.open_write(whole, 2) as writer:
                    await writer.write_part(1, 1, bytes([round_]))
                    await writer.write_part(0, 0, bytes([number]))
                assert bytes(await backend.get(own_key)) == bytes(await backend.get(whole)) == bytes([number, round_])
                assert own_key in [info.key for info in await backend.list(f"shared/{number}/")]
                await backend.delete([own_key])

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(work, number)
        assert len(await backend.list("shared/")) == 16  # noqa: PLR2004 -- as many as tasks

    async def test_many_objects(self, backend: Backend) -> None:
        """A list has all objects, however many pages it takes; so many can be deleted at once."""
        keys = [f"many/{number:05}" for number in range(self.many)]
        limit = anyio.CapacityLimiter(64)

        async def put(key: str) -> None:
            async with limit:
                await backend.put(key, key.encode())

        async with anyio.create_task_group() as group:
            for key in keys:
                group.start_soon(put, key)
        infos = await self.reopen(backend).list("many/")
        assert [(info.key, info.nbytes) for info in infos] == [(key, len(key)) for key in keys]
        await backend.delete(keys[1:])
        assert [info.key for info in await self.reopen(backend).list()] == keys[:1]

    def test_two_event_loops(self, backend: Backend) -> None:
        """A backend serves one event loop after the other."""

        async def use(number: int) -> bytes:
            await backend.put(f"key{number}", b"1")
            async with backend.open_write(f"large{number}") as writer:
                await writer.write_part(0, 0, bytes([number]) * 10)
            return bytes(await backend.get("key0"))

        assert [asyncio.run(use(number)) for number in range(3)] == [b"1"] * 3
        asyncio.run(backend.aclose())

    @pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
    def test_fork(self, backend: Backend) -> None:
        """A forked child uses its parent's backend, and the parent goes on with it."""

        async def use(key: str) -> int:
            await backend.put(key, b"1")
            return len(await backend.get(key))

        with asyncio.Runner() as runner:
            runner.run(use("before"))
            pid = os.fork()
            if not pid:
                os._exit(_exit_code(use("in-child")))
            assert os.waitpid(pid, 0)[1] == 0
            runner.run(use("after"))
            runner.run(backend.aclose())

    async def test_aclose_twice(self, backend: Backend) -> None:
        """Closing is idempotent, and stored objects stay."""
        await backend.put("key", b"x")
        other = self.reopen(backend)
        if other is not backend:
            await backend.aclose()
            await backend.aclose()
        assert bytes(await other.get("key")) == b"x"
        await other.aclose()
        await other.aclose()

    async def _only_the_old(self, backend: Backend) -> None:
        """Check that nothing is there but the object of before, and that its key can still be written."""
        assert [info.key for info in await self.reopen(backend).list()] == ["key"]
        assert bytes(await backend.get("key")) == _OLD
        async with backend.open_write("key") as writer:
            await writer.write_part(0, 0, b"later")
        assert bytes(await backend.get("key")) == b"later"


def _exit_code(work: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on a new event loop of a forked child, whose inherited one counts as running."""
    asyncio._set_running_loop(None)  # noqa: SLF001 -- there is no other way
    try:
        return 0 if asyncio.new_event_loop().run_until_complete(work) else 1
    except BaseException:  # noqa: BLE001 -- the parent tells of it
        traceback.print_exc()
        return 2


async def _scattered(backend: Backend, key: str, start: int, outs: Sequence[memoryview]) -> None:
    """Read as a caller does: scattered where the backend offers that, else one buffer after the other."""
    if isinstance(backend, ScatterReader):
        await backend.read_scattered(key, start, outs)
        return
    for out in outs:
        await backend.read_into(key, start, out)
        start += len(out)
