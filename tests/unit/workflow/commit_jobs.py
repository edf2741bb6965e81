"""Jobs that save to and load from one store, request by request, in an order and with answers that a test chooses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import bcp
from bcp.errors import StorageError
from bcp.format.metadata import METADATA_KEY, decode_metadata, operation_of
from bcp.protocols import Backend, Buffer, ObjectInfo, PartWriter, Sweeper, Unfinished, Version

Answer = Literal["true", "lost", "failed", "refused", "absent", "stale"]
"""The truth; an error after and before the request is carried out; a failed precondition of a request that is carried
out; a false "there is none"; and what was true when the job began."""

OPTIONS = {"io_workers": 1, "record": False}  # one request at a time, so that all runs are alike


@dataclass
class World:
    """What really happened in a store.

    Attributes:
        store: the backend, whose every answer is true.
        values: the value that each operation saves.
        commits: operations in the order of their commits; None for a removal.
    """

    store: Backend
    values: dict[str, int] = field(default_factory=dict)
    commits: list[str | None] = field(default_factory=lambda: [None])

    @property
    def current(self) -> int | None:
        """The value of the committed checkpoint, or None."""
        return None if self.commits[-1] is None else self.values[self.commits[-1]]

    def note_commit(self, metadata: Buffer) -> None:
        self.commits.append(decode_metadata(metadata, "").commit.operation)


class Job:
    """A job, which runs until its next request and waits there; it is a backend for its own save or load."""

    def __init__(self, world: World, value: int) -> None:
        self.world, self.value = world, value
        self.operation = ""
        self.began = len(world.commits) - 1
        self.dead = False
        self.waiting: list[tuple[str, asyncio.Future[Answer]]] = []
        self.task: asyncio.Task[Any]
        self._arrived = asyncio.Event()
        self._old: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<job {self.value}>"

    @property
    def request(self) -> str:
        """The operation of the request that is waiting."""
        return self.waiting[0][0]

    async def begin(self, run: Callable[[], Awaitable[Any]]) -> None:
        """Run until the first request."""
        store = self.world.store
        self._old = {"list": await store.list(), "version": await store.version(METADATA_KEY)}
        if self._old["version"] is not None:
            self._old["get"] = await store.get(METADATA_KEY)
        self.task = asyncio.ensure_future(run())
        self.task.add_done_callback(lambda _: self._arrived.set())
        await self._until_next()

    async def go_on(self, answer: Answer) -> None:
        """Answer the waiting request, and run until the next one or the end."""
        _, future = self.waiting.pop(0)
        future.set_result(answer)
        await self._until_next()

    async def die(self, answer: Answer) -> None:
        """Let the waiting request be the last one."""
        self.dead = True
        if self.waiting:
            self.waiting.pop(0)[1].set_result(answer)
        await asyncio.wait([self.task])
        self.task.exception()  # nobody hears it

    async def _until_next(self) -> None:
        while not self.waiting and not self.task.done():
            self._arrived.clear()
            await self._arrived.wait()

    async def _ask(
        self,
        operation: str,
        key: str,
        call: Callable[[], Awaitable[Any]],
        falsely: Callable[[Answer], Any] | None = None,
    ) -> Any:
        """Wait for an answer, make the request if it is to be made, and answer."""
        if self.dead and not self.waiting:
            raise StorageError("the job is dead")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting.append((operation, future))
        self._arrived.set()
        answer = await future
        if answer in ("absent", "stale") and falsely is not None:
            return falsely(answer)
        if answer == "failed":
            raise StorageError(f"{operation} {key} failed")
        found = await call()
        if answer == "lost" or self.dead:
            raise StorageError(f"the answer to {operation} {key} was lost")
        return None if answer == "refused" and operation == "put_if" else found

    # -- the backend --

    async def put(self, key: str, data: Buffer) -> None:
        self._note(key)
        await self._ask("put", key, lambda: self.world.store.put(key, data))

    async def version(self, key: str) -> Version | None:
        def falsely(answer: Answer) -> Version | None:
            return self._old["version"] if answer == "stale" else None

        found: Version | None = await self._ask("version", key, lambda: self.world.store.version(key), falsely)
        return found

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        async def call() -> Version | None:
            version = await self.world.store.put_if(key, data, expected)
            if version is not None:
                self.world.note_commit(data)
            return version

        found: Version | None = await self._ask("put_if", key, call)
        return found

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        self._note(key)
        stack = self.world.store.open_write(key, nbytes)
        parts = await stack.__aenter__()
        try:
            yield parts
        except BaseException as error:
            await stack.__aexit__(type(error), error, error.__traceback__)
            raise
        await self._ask("commit", key, lambda: stack.__aexit__(None, None, None))

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        await self._ask("read", key, lambda: self.world.store.read_into(key, start, out), self._absent)

    async def get(self, key: str) -> Buffer:
        def falsely(answer: Answer) -> Buffer:
            if answer == "stale" and key == METADATA_KEY and "get" in self._old:
                data: Buffer = self._old["get"]
                return data
            return self._absent(answer)

        data: Buffer = await self._ask("get", key, lambda: self.world.store.get(key), falsely)
        return data

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        def falsely(_: Answer) -> Sequence[ObjectInfo]:
            return [info for info in self._old["list"] if info.key.startswith(prefix)]

        found: Sequence[ObjectInfo] = await self._ask("list", prefix, lambda: self.world.store.list(prefix), falsely)
        return found

    async def delete(self, keys: Sequence[str]) -> None:
        assert METADATA_KEY not in keys, "a save deletes metadata"
        await self._ask("delete", " ".join(keys), lambda: self.world.store.delete(keys))

    async def unfinished(self) -> Sequence[Unfinished]:
        if not isinstance(self.world.store, Sweeper):
            return []
        return await self.world.store.unfinished()

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        if isinstance(self.world.store, Sweeper):
            await self.world.store.discard(unfinished)

    async def aclose(self) -> None:
        return

    def _note(self, key: str) -> None:
        operation = operation_of(key)
        if operation is not None:
            self.operation = operation
            self.world.values[operation] = self.value

    @staticmethod
    def _absent(_: Answer) -> Any:
        raise FileNotFoundError("no such object")


def states_of(value: int) -> dict[str, Any]:
    model = {f"w{number}": torch.full((40,), float(value)) for number in range(2)}
    return {"model": model, "extra_states": {"value": value}}


def values_in(states: dict[str, Any]) -> set[int]:
    numbers = {int(number) for tensor in states["model"].values() for number in tensor.tolist()}
    return {*numbers, states["extra_states"]["value"]}


async def loaded(backend: Backend) -> int:
    """Load, and return the one value that all of the checkpoint has."""
    states = states_of(-1)
    await bcp.aload(backend, states, options=bcp.LoadOptions(**OPTIONS))
    (value,) = values_in(states)
    return value


WINNER = re.compile(r"committed a checkpoint at .*, operation ([0-9a-f]{16})", re.DOTALL)
NOT_COMMITTED = re.compile(r"(?:was|is) not\s+committed")


def check_told(world: World, job: Job, error: BaseException | None) -> None:
    """Compare what a save told its caller with what happened."""
    committed = job.operation in world.commits
    if error is None:
        assert committed, "the save returned, and committed nothing"
        return
    assert isinstance(error, bcp.BcpError), repr(error)
    text = str(error)
    if NOT_COMMITTED.search(text):
        assert not committed, f"a save that committed says: {text}"
    if winner := WINNER.search(text):
        assert winner[1] in world.commits[job.began :], f"no such commit since the save began: {text}"
        assert winner[1] != job.operation, f"the save takes itself for another job: {text}"
    if isinstance(error, bcp.ExistsError):
        assert any(world.commits[job.began :]), f"no checkpoint was there: {text}"
