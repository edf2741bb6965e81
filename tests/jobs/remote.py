"""Jobs of torchrun's agent: four ranks save to a URL and are killed; two ranks go on with other placements.

The four are started again, and each time killed at the next one of :data:`MOMENTS`. The two load what must be there,
and save over all that was being written.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from ranks import PRELOADED, forkserver
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bcp
from bcp.backends import resolve
from bcp.format.metadata import METADATA_KEY
from benchmarks.soak.store import own_store

MIB = 1 << 20
PART_BYTES = 5 * MIB
END_SECONDS = 500.0
KILL_SECONDS = 120.0
"""How long a rank that has saved waits to be killed: it may be the parts of another one that are under way."""

ROWS = 3_400_000
"""Of the large tensor: 52 MiB, so that each rank writes two parts, also where parts are put together."""

SAVED: dict[str, Any] = {
    "large": [Shard(0), Shard(1)],
    "odd": [Shard(1), Shard(0)],
    "half": [Replicate(), Shard(0)],
    "same": [Replicate(), Replicate()],
}
"""Placements on a mesh of 2 x 2 ranks."""

LOADED: dict[str, Any] = {"large": [Shard(1)], "odd": [Shard(0)], "half": [Shard(1)], "same": [Shard(0)]}
"""Placements on two ranks."""

MOMENTS = {
    "part": "part",
    "finish": "twice",
    "commit": "commit",
    "committed": "twice",
}
"""When all ranks are killed, and the checkpoint that is being saved then.

``part``: half of a part's bytes are written. ``finish``: a rank has written all parts of its file, which has not
appeared. ``commit``: the metadata are on their way. ``committed``: they are there, and nothing is swept yet.
"""


# -- states -----------------------------------------------------------------------------------


def whole(seed: int) -> dict[str, torch.Tensor]:
    """Return the global tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.rand(ROWS, 4, generator=generator),
        "odd": torch.rand(7, 13, generator=generator).bfloat16(),
        "half": torch.rand(33, 5, generator=generator),
        "same": torch.rand(1001, generator=generator),
    }


def states(mesh: DeviceMesh, placements: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return this rank's states."""
    model = {name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in whole(seed).items()}
    return {"model": model, "extra_states": {"seed": seed}}


def assert_is(found: Mapping[str, Any], seed: int) -> None:
    """Compare every element with what was made of that seed, by torch's own gather."""
    for name, tensor in whole(seed).items():
        live = found["model"][name]
        assert isinstance(live, DTensor)
        assert torch.equal(live.full_tensor(), tensor), name
    assert found["extra_states"] == {"seed": seed}


# -- kills ------------------------------------------------------------------------------------

HALVES = {
    "gs": ("bcp.backends.objects.gcs_http", "_Body", "write", "_value"),
    "s3": ("bcp.backends.objects.s3_client", "Sending", "write", "data"),
    "hdfs": ("bcp.backends.hdfs.client", "Stream", "write", ""),
    "": ("bcp.backends.objects.generic", "_Stream", "_write", ""),
}
"""By scheme, "" for the generic adapter: what writes the bytes of a part; the attribute or argument that has them."""


class Killer:
    """Kills all ranks at one moment."""

    def __init__(self, moment: str, scheme: str, folder: Path) -> None:
        self.moment, self.scheme, self.folder = moment, scheme, folder
        self.commits = False
        pids = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self.others = [pid for pid in pids if pid != os.getpid()]

    def kill(self) -> None:
        (self.folder / self.moment).touch()
        for pid in [*self.others, os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    def arm(self, url: str, storage_options: Mapping[str, Any]) -> None:
        """Put the kill where it belongs."""
        backend = type(resolve(url, storage_options))
        if self.moment == "part" and self.scheme != "file":
            self._after_half_a_part()
        if self.moment == "finish":
            self._wrap(backend, "open_write", self._opened)
        if self.moment in ("commit", "committed"):
            self._wrap(backend, "put_if", self._committed)
        if self.moment == "commit" and self.scheme in ("gs", "s3"):
            module, kind, name, _ = HALVES[self.scheme]
            self._wrap(getattr(import_module(module), kind), name, self._sent)
        if self.moment == "commit" and self.scheme == "hdfs":
            self._wrap(import_module("bcp.backends.hdfs.client").Hdfs, "rename", self._renamed)
        if self.moment == "commit" and self.scheme not in ("gs", "s3", "hdfs", "file"):
            self._wrap(import_module("fsspec").get_filesystem_class(self.scheme), "mv", self._moved)

    def edit(self, graph: Any) -> Any:
        """Kill behind the second part of a local file."""
        if self.moment != "part" or self.scheme != "file":
            return graph
        left = [2]

        async def deadly(item: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                self.kill()
            return item

        return graph.after("upload", bcp.extend.Stage("deadly", deadly))

    def _after_half_a_part(self) -> None:
        """Kill when half of this rank's second part is written."""
        module, kind, name, attribute = HALVES.get(self.scheme, HALVES[""])
        count = [0]

        async def write(original: Callable[..., Any], writer: Any, data: Any) -> None:
            whole = getattr(writer, attribute) if attribute else data
            count[0] += len(whole) >= MIB
            if count[0] < 2 or len(whole) < MIB:
                await original(writer, data)
                return
            half = whole[: len(whole) // 2]
            if attribute:
                setattr(writer, attribute, half)
            await original(writer, data if attribute else half)
            self.kill()

        self._wrap(getattr(import_module(module), kind), name, write)

    @asynccontextmanager
    async def _opened(self, original: Callable[..., Any], *args: Any) -> AsyncIterator[Any]:
        async with original(*args) as writer:
            yield writer
            self.kill()

    async def _committed(self, original: Callable[..., Any], *args: Any) -> Any:
        self.commits = True
        if self.moment == "commit" and self.scheme == "file":
            self.kill()
        await original(*args)
        self.kill()

    async def _sent(self, original: Callable[..., Any], *args: Any) -> None:
        await original(*args)
        if self.commits:
            self.kill()

    async def _renamed(self, original: Callable[..., Any], hdfs: Any, old: str, new: str, *, overwrite: bool) -> None:
        if self.commits and new.endswith(METADATA_KEY):
            self.kill()
        await original(hdfs, old, new, overwrite=overwrite)

    def _moved(self, original: Callable[..., Any], system: Any, old: str, new: str, **options: Any) -> None:
        if self.commits and new.endswith(METADATA_KEY):
            self.kill()
        original(system, old, new, **options)

    @staticmethod
    def _wrap(kind: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(kind, name)
        setattr(kind, name, lambda *args, **options: wrapper(original, *args, **options))


# -- jobs -------------------------------------------------------------------------------------


def die(url: str, folder: Path, storage_options: Mapping[str, Any]) -> None:
    """Save; then save and be killed."""
    mesh = init_device_mesh("cpu", (2, 2))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        for name in ("older", "twice"):
            options = bcp.SaveOptions(part_bytes=PART_BYTES, storage_options=storage_options)
            bcp.save(f"{url}/{name}", states(mesh, SAVED, 1), options=options)
    moment, name = list(MOMENTS.items())[attempt]
    killer = Killer(moment, url.partition("://")[0], folder)
    killer.arm(f"{url}/{name}", storage_options)
    options = bcp.SaveOptions(
        part_bytes=PART_BYTES, overwrite=name == "twice", edit=killer.edit, storage_options=storage_options
    )
    saved = states(mesh, SAVED, 2 + attempt)
    bcp.save(f"{url}/{name}", saved, async_checkpoint=moment == "part", options=options)
    time.sleep(KILL_SECONDS)
    raise AssertionError(f"no rank was killed: {moment}")


def go_on(url: str, _: Path, storage_options: Mapping[str, Any]) -> None:
    """Load what must be there; save over what was being written, and load that."""
    mesh = init_device_mesh("cpu", (2,))
    loading = bcp.LoadOptions(storage_options=storage_options)
    saving = bcp.SaveOptions(overwrite=True, part_bytes=PART_BYTES, storage_options=storage_options)
    seeds = {"older": [1], "part": [None], "twice": [5], "commit": [None, 4]}
    for name, expected in seeds.items():
        found = states(mesh, LOADED, 0)
        try:
            bcp.load(f"{url}/{name}", found, options=loading)
            seed = found["extra_states"]["seed"]
            assert_is(found, seed)
        except (bcp.UncommittedError, bcp.NotACheckpointError):
            seed = None
        assert seed in expected, (name, seed)
    for name in ("part", "twice", "commit"):
        bcp.save(f"{url}/{name}", states(mesh, LOADED, 7), options=saving)
        found = states(mesh, LOADED, 0)
        bcp.load(f"{url}/{name}", found, options=loading)
        assert_is(found, 7)


# -- by torchrun's agent -----------------------------------------------------------------------


def elastic(log: Path, environ: Mapping[str, str], ranks: int, restarts: int, *words: str) -> None:
    """Be torchrun's agent, and exit with 1 if its job fails.

    Its ranks are forked from a process that has imported torch and bcp once. ``torchrun`` would start each of them
    anew, which takes longer than all the rest.
    """
    os.environ.update(environ, GLOO_SOCKET_IFNAME="lo")
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_forkserver_preload(PRELOADED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="forkserver",
        local_addr="localhost",
        monitor_interval=0.05,
    )
    try:
        elastic_launch(config, main)(*words)
    except ChildFailedError as error:
        sys.exit(str(error))


def launched(log: Path, ranks: int, restarts: int, *words: str) -> tuple[int | None, str]:
    """Run ranks under torchrun's agent; return the exit code, and the end of what they have printed."""
    process = forkserver().Process(target=elastic, args=(log, dict(os.environ), ranks, restarts, *words))
    process.start()
    try:
        process.join(END_SECONDS)
    finally:
        process.terminate()  # which ends its ranks too
        process.join(60)
    return process.exitcode, log.read_text(errors="replace")[-25000:]


def assert_survives_kills(url: str, folder: Path, storage_options: Mapping[str, Any] | None = None) -> None:
    """Kill four ranks at all moments, and let two go on.

    Args:
        url: where to; it is empty.
        folder: for marks of the moments, stores and output; it is empty.
        storage_options: of saves and of loads.

    """
    marks = folder / "marks"
    marks.mkdir()
    words = [url, str(marks), json.dumps(storage_options or {})]
    code, output = launched(folder / "died.log", 4, len(MOMENTS) - 1, "die", *words)
    assert {file.name for file in marks.iterdir()} == set(MOMENTS), output
    assert code == 1, output
    code, output = launched(folder / "went-on.log", 2, 0, "go-on", *words)
    assert code == 0, output


def join(meeting: Path) -> None:
    """Join the process group, over a store of this start's own.

    The store of torchrun's agent has addresses of dead ranks, to which gloo would connect after a restart.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting.mkdir(exist_ok=True)
    dist.init_process_group(
        "gloo", store=own_store(rank, meeting), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def main(job: str, url: str, marks: str, storage_options: str) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    join(Path(marks).with_name(f"{job}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"))
    {"die": die, "go-on": go_on}[job](url, Path(marks), json.loads(storage_options))
    dist.destroy_process_group()
