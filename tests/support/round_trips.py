"""Round trips: files of another library, through bcp and back to that library, on some ranks and in some storage.

The functions at the top level run on every rank. Where there is one rank, it has no process group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alike import alike_in_any_order
from dcp_states import emptied, full, state_of, trained
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bcp
from bcp.backends import child, resolve
from bcp.runtime import bridge
from bcp.testing.storage_fakes import CountingBackend

__all__ = [
    "LAYOUTS",
    "Alone",
    "Store",
    "Through",
    "across_the_bridge",
    "check",
    "load_by_dcp",
    "load_rows",
    "save_by_dcp",
    "states_of",
    "store_at",
    "through",
]

LAYOUTS = {1: "plain", 3: "fsdp", 4: "fsdp_tp"}
"""The layout of each number of ranks. Three ranks have shards of different sizes."""


class Alone:
    """One rank without a process group, called as :class:`ranks.Ranks` are."""

    size = 1

    @staticmethod
    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(*args)]


@dataclass(frozen=True)
class Store:
    """A folder in some storage.

    Attributes:
        url: path or URL of the folder.
        options: for the file system of the URL.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def place(self, name: str) -> str:
        return f"{self.url}/{name}"

    def put(self, folder: Path, name: str) -> None:
        """Copy a local file, or all files of a folder, to a name."""
        paths = {path: f"{name}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}
        paths = paths or {folder: name}

        async def copy() -> None:
            backend = resolve(self.url, self.options)
            for path, key in paths.items():
                await backend.put(key, path.read_bytes())
            await backend.aclose()

        asyncio.run(copy())

    def get(self, name: str, folder: Path) -> Path:
        """Copy the files below a name to a local folder; return the local path of the name."""

        async def copy() -> None:
            backend = resolve(self.url, self.options)
            for info in await backend.list(name):
                (folder / info.key).parent.mkdir(parents=True, exist_ok=True)
                (folder / info.key).write_bytes(await backend.get(info.key))
            await backend.aclose()

        asyncio.run(copy())
        return folder / name


def store_at(where: str, folder: Path, request: pytest.FixtureRequest) -> Store:
    """Return an empty folder in local files, S3 or HDFS. A server starts with the first call."""
    if where == "local":
        return Store(str(folder))
    if where == "hdfs":
        return Store(request.getfixturevalue("url"))
    server = request.getfixturevalue("server")
    return Store(server.place(), server.options)


def local_nbytes(*tensors: torch.Tensor) -> int:
    """Return the bytes that this rank holds."""
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


# -- on every rank ------------------------------------------------------------------------------------


def save_by_dcp(folder: Path, layout: str) -> Any:
    """Save a trained state by DCP's own storage; return its full tensors and its values, as torch gathers them."""
    state = state_of(*trained(layout), flat=True)
    dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return full(state)


def load_by_dcp(folder: Path, layout: str) -> Any:
    """Load by DCP's own storage into another state; return its full tensors and its values."""
    state = emptied(state_of(*trained(layout, seed=2), flat=True))
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return full(state)


def across_the_bridge(store: Store, layout: str) -> bool:
    """Save and load by DCP over bcp's storage; return whether nothing has changed."""
    state, found = (state_of(*trained(layout, seed=seed), flat=False) for seed in (0, 1))
    found, is_alone = emptied(found), not dist.is_initialized()
    write, read = bcp.SaveOptions(storage_options=store.options), bcp.LoadOptions(storage_options=store.options)
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(store.place("bridge"), options=write), no_dist=is_alone)
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(store.place("bridge"), options=read), no_dist=is_alone)
    return alike_in_any_order(full(found), full(state))


@dataclass(frozen=True)
class Through:
    """The way of files through bcp, on one rank.

    Attributes:
        needed: bytes of the tensors that this rank holds.
        tensors: how many these are.
        read: bytes that it has read for them, as the result of the load says.
        counted: bytes that it has read from the store, those of the opening included.
        files: names of the exported files.
    """

    needed: int
    tensors: int
    read: int
    counted: int
    files: tuple[str, ...] = ()


def load_counted(store: Store, name: str, states: dict[str, Any], *, strict: bool = True) -> tuple[int, int]:
    """Load states; return the bytes read as the result has them, and as the store has counted them."""
    counting = CountingBackend(resolve(store.url, store.options))
    result = bcp.load(child(counting, name), states, strict=strict)
    bridge.run(counting.aclose, name="close")
    return result.read_nbytes, sum(counting.read.values())


def states_of(layout: str, *kinds: str) -> dict[str, Any]:
    """Return a model and its optimizer, or one of both, without a step."""
    model, optimizer = trained(layout, seed=1, steps=0)
    return {kind: each for kind, each in (("model", model), ("optimizer", optimizer)) if kind in kinds}


def through(
    store: Store,
    name: str,
    empty: Callable[[], dict[str, Any]],
    export: Callable[..., bcp.tools.ExportResult],
    strict: bool = True,  # noqa: FBT001, FBT002 -- ranks take no keywords
) -> Through:
    """Load files of another library into empty states, save these, and export the checkpoint; all in one store."""
    states = empty()
    read, counted = load_counted(store, name, states, strict=strict)
    tensors = list(states["model"].state_dict().values())
    if "optimizer" in states:
        tensors += [each for state in states["optimizer"].state.values() for each in state.values()]
    bcp.save(store.place("ckpt"), states, options=bcp.SaveOptions(storage_options=store.options))
    target, options = store.place(f"again{Path(name).suffix}"), store.options
    exported = export(store.place("ckpt"), target, storage_options=options, target_options=options)
    return Through(local_nbytes(*tensors), len(tensors), read, counted, exported.files)


def check(ways: Sequence[Through]) -> None:
    """Compare the bytes that each rank has read with those that it holds: ranges are read from 8 bytes to 8 bytes."""
    for rank, way in enumerate(ways):
        assert way.needed <= way.read < way.needed + 16 * way.tensors
        assert way.counted == way.read if rank else way.counted > way.read, "rank 0 reads tables of contents, too"
        assert way.files == ways[0].files


def load_rows(store: Store, name: str, whole: Mapping[str, torch.Tensor]) -> Through:
    """Load the rows of each tensor that belong to this rank, and compare them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {name: distribute_tensor(torch.zeros_like(each), mesh, [Shard(0)]) for name, each in whole.items()}
    read, counted = load_counted(store, name, {"model": found})
    for key, tensor in found.items():
        assert torch.equal(tensor.full_tensor(), whole[key])
    return Through(local_nbytes(*found.values()), len(found), read, counted)
