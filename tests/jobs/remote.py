"""A job of four ranks that saves to a URL and is killed; one of two ranks that goes on with what was committed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import torch
from ranks import HOST, ended, meeting_place, started
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bcp
from bcp.backends import resolve
from bcp.protocols import Backend, Sweeper

ROWS = 1_100_000
"""Of the large tensor: 17 MiB, so that every rank writes several parts."""

PLACEMENTS: dict[str, Any] = {"large": Shard(0), "odd": Shard(1), "same": Replicate()}


def whole(seed: int) -> dict[str, torch.Tensor]:
    """Return the global tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.rand(ROWS, 4, generator=generator),
        "odd": torch.rand(7, 13, generator=generator).bfloat16(),
        "same": torch.rand(1001, generator=generator),
    }


def joined(rank: int, port: int, size: int, environ: Mapping[str, str]) -> Any:
    """Join the job; return its mesh."""
    os.environ.update(environ)
    store = dist.TCPStore(HOST, port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,))


def states(mesh: Any, seed: int) -> dict[str, Any]:
    """Return this rank's states."""
    model = {name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) for name, tensor in whole(seed).items()}
    return {"model": model, "extra_states": {"seed": seed}}


def killed_in_an_upload(rank: int, port: int, url: str, environ: Mapping[str, str], saving: Mapping[str, Any]) -> None:
    """Save ``older``; then save ``newer``, in the background, until all ranks are killed with parts on their way."""
    mesh = joined(rank, port, 4, environ)
    options = bcp.SaveOptions(part_bytes=1 << 20, **saving)
    bcp.save(f"{url}/older", states(mesh, 1), options=options)
    left = [2]

    async def deadly(item: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    kill = bcp.SaveOptions(
        part_bytes=1 << 20, edit=lambda graph: graph.after("upload", bcp.Stage("deadly", deadly)), **saving
    )
    bcp.save(f"{url}/newer", states(mesh, 2), async_checkpoint=True, options=kill).wait()


def going_on(
    rank: int, port: int, url: str, environ: Mapping[str, str], saving: Mapping[str, Any], loading: Mapping[str, Any]
) -> None:
    """Load ``older`` on two ranks; save over ``newer``, and load that."""
    mesh = joined(rank, port, 2, environ)
    with_options = {"options": bcp.LoadOptions(**loading)}
    try:
        bcp.load(f"{url}/newer", states(mesh, 0), **with_options)
        raise AssertionError("what was never committed was loaded")
    except (bcp.UncommittedError, bcp.NotACheckpointError):
        pass
    found = states(mesh, 0)
    bcp.load(f"{url}/older", found, **with_options)
    assert_is(found, 1)
    bcp.save(f"{url}/newer", found, options=bcp.SaveOptions(overwrite=True, **saving))
    again = states(mesh, 5)
    bcp.load(f"{url}/newer", again, **with_options)
    assert_is(again, 1)


def assert_is(found: Mapping[str, Any], seed: int) -> None:
    """Compare every element with what was made of that seed, by torch's own gather."""
    for name, tensor in whole(seed).items():
        live = found["model"][name]
        assert isinstance(live, DTensor)
        assert torch.equal(live.full_tensor(), tensor), name
    assert found["extra_states"] == {"seed": seed}


def assert_survives_kills(url: str, environ: Mapping[str, str] | None = None, **options: Any) -> None:
    """Run both jobs; after them nothing is left of the killed save.

    Args:
        url: where to; it is empty.
        environ: variables of the jobs.
        options: of saves and of loads.

    """
    environ = environ or {}
    server = meeting_place()
    codes = ended(started(4, killed_in_an_upload, server.port, url, environ, options), 120)
    assert -signal.SIGKILL in codes, codes
    server = meeting_place()
    assert ended(started(2, going_on, server.port, url, environ, options, options), 120) == [0, 0]
    os.environ.update(environ)
    assert anyio.run(_left, resolve(f"{url}/newer", options.get("storage_options"))) == []


async def _left(backend: Backend) -> list[str]:
    """Return what is there beside one committed save of two ranks."""
    keys = [info.key for info in await backend.list()]
    operations = {Path(key).stem.partition("-")[2] for key in keys if key != "metadata.arrow"}
    unfinished = [one.name for one in await backend.unfinished()] if isinstance(backend, Sweeper) else []
    await backend.aclose()
    return unfinished + (keys if len(operations) != 1 else [])
