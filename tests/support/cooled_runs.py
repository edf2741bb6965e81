"""Runs with a cold place, in stores that count requests, die at one of them, or take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path

import torch
from fake_store import FakeStore
from interleave import Dead, Turns

import bcp
from bcp.backends import MemoryBackend, child
from bcp.backends.objects import ObjectBackend
from bcp.protocols import Backend
from bcp.testing.storage_fakes import CountingBackend

STEPS = (1, 2, 3)
OLD = (1, 2)
"""Steps that are moved: all but the newest."""

HOT, COLD = "cooltest://hot/run", "cooltest://cold/run"

turn: ContextVar[tuple[Turns, int] | None] = ContextVar("turn", default=None)
"""The order in which this task's requests take turns with those of others."""


def states(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of a step, which no other step has."""
    made = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(257, 3, generator=made), "b": torch.randn(5, generator=made)}}


def train(path: str | Path, steps: tuple[int, ...] = STEPS, keep: int = 100) -> None:
    """Save some steps of a run."""
    model = states(0)["model"]
    with bcp.Run(path, {"model": model}, save=1, keep=keep) as run:
        run.resume()
        for step in steps:
            for name, value in states(step)["model"].items():
                model[name].copy_(value)
            run.save(step)


def assert_loads(path: str | Path, step: int, options: bcp.LoadOptions | None = None) -> None:
    """Compare a load of a step with the tensors that were saved."""
    target = {"model": {"w": torch.zeros(257, 3), "b": torch.zeros(5)}}
    bcp.load(f"{path}/step-{step:08d}", target, options=options)
    assert all(torch.equal(target["model"][name], value) for name, value in states(step)["model"].items()), step


def names(folder: Path, kind: str = "model") -> list[str]:
    """Return the data files of a run's folder or of a cold place, relative to it."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(str(file) for file in files if kind in str(file))


class Stores:
    """Hot and cold storage behind one scheme of URLs, in the memory of this process.

    Attributes:
        requests: names and keys of all requests, as in ``"hot get run/run.json"``.
        dies_at: the request, from 1, before which the process dies; None for never.
        hit: called before each request with its name and key; may raise.
    """

    def __init__(self, *, objects: bool = False) -> None:
        self.requests: list[str] = []
        self.dies_at: int | None = None
        self.hit: Callable[[str], None] = lambda _: None
        self._fakes = {name: FakeStore() for name in ("hot", "cold")} if objects else None
        for fake in () if self._fakes is None else self._fakes.values():
            fake.fail = self._fail
        for name in ("hot", "cold"):
            MemoryBackend.forget(f"cooltest-{name}")
        bcp.backends.register("cooltest", self._opened)

    @property
    def is_dead(self) -> bool:
        """Whether the process has died: nothing reaches storage any more, whatever a clean-up tries."""
        return self.dies_at is not None and len(self.requests) >= self.dies_at

    def _fail(self, _: str) -> None:
        if self.is_dead:
            raise Dead

    def _opened(self, url: str, **_: object) -> Backend:
        store, _, prefix = url.removeprefix("cooltest://").partition("/")
        return child(_Store(self, store), prefix)

    def inner(self, store: str) -> Backend:
        """Return the storage itself."""
        return MemoryBackend(f"cooltest-{store}") if self._fakes is None else ObjectBackend(self._fakes[store])

    async def contents(self) -> Mapping[str, bytes]:
        """Return all objects of both stores."""
        found = {}
        for store in ("hot", "cold"):
            for info in await self.inner(store).list():
                found[f"{store}/{info.key}"] = bytes(await self.inner(store).get(info.key))
        return found

    def unfinished(self) -> list[str]:
        """Return the keys of unfinished writes of the cold store."""
        return [] if self._fakes is None else [upload.key for upload in self._fakes["cold"].uploads.values()]

    async def restore(self, contents: Mapping[str, bytes]) -> None:
        """Make both stores what they were; the process lives again."""
        self.dies_at = None
        self.requests.clear()
        for store in ("hot", "cold"):
            inner = self.inner(store)
            await inner.delete([info.key for info in await inner.list()])
            if self._fakes is not None:
                self._fakes[store].uploads.clear()
        for key, data in contents.items():
            store, _, name = key.partition("/")
            await self.inner(store).put(name, data)


class _Store(CountingBackend):
    def __init__(self, stores: Stores, store: str) -> None:
        super().__init__(stores.inner(store))
        self._stores, self._store = stores, store

    async def before(self, operation: str, key: str) -> None:
        what, stores = f"{self._store} {operation} {key}", self._stores
        if (mine := turn.get()) is not None:
            await mine[0].step(mine[1], what)
        stores.requests.append(what)
        if stores.is_dead:
            raise Dead
        stores.hit(what)
