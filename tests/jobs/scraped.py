"""A program of torchrun's whose ranks are scraped by Prometheus, and do everything that has a metric, in rounds.

``scraped.py FOLDER``: each rank writes the address of its metrics to ``target-RANK``. A round begins when
``begin-ROUND`` appears. Its first save waits in a stage of its own until ``release-ROUND`` is there. At the end each
rank writes its reports to ``done-ROUND-RANK``. The file ``end`` ends the job.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import prometheus_client
import torch
from fsspec.implementations.local import LocalFileSystem
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from ranks import HOST
from remote import join
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from waiting import wait_until

import bcp

MIB = 1 << 20
PARTS = 3
"""Of each rank's file."""

RETRIES = 2
"""Of each rank in each round."""


class Flaky(LocalFileSystem):  # type: ignore[misc]  # untyped
    """Local files behind a connection that breaks."""

    protocol = "flaky"
    left = 0

    def mv(self, *args: Any, **options: Any) -> None:
        """Rename a file, or lose the connection."""
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionResetError("the connection broke")
        super().mv(*args, **options)


class Rounds:
    """One rank of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(self) -> dict[str, Any]:
        """Return states of which each rank writes so many parts, and holds something that another one writes."""
        rows = PARTS * dist.get_world_size() - 1
        sharded = distribute_tensor(torch.ones(rows, MIB // 4), self.mesh, [Shard(0)])
        same = distribute_tensor(torch.ones(MIB // 8), self.mesh, [Replicate()])
        return {"model": {"sharded": sharded, "same": same}}

    def run(self, number: int) -> dict[str, Any]:
        """Save in the background, save, load, fail, try again, and load something corrupt; return the reports."""
        run = self.folder / f"round-{number}"
        held = bcp.SaveOptions(part_bytes=MIB, edit=lambda graph: graph.after("serialize", self.waiting(number)))
        pending = bcp.save(run / f"step-{number}1", self.state(), async_checkpoint=True, options=held)
        saved = [pending.wait(), bcp.save(run / f"step-{number}2", self.state(), snapshot="eager")]
        loaded = bcp.load(run / f"step-{number}2", self.state())
        failed = [self.fails(run), self.corrupt(run / f"step-{number}1")]
        Flaky.left = RETRIES
        options = bcp.SaveOptions(retries=bcp.RetryPolicy(first_pause_seconds=1e-3, longest_pause_seconds=1e-3))
        kept = self.kept(run / "kept", 10 * number)
        saved.append(bcp.save(f"flaky://{run}/step-{number}3", self.state(), options=options))
        reports = {"saved": saved, "loaded": [loaded], "kept": kept}
        return {**{name: [asdict(each) for each in found] for name, found in reports.items()}, "failed": failed}

    def kept(self, run: Path, step: int) -> list[bcp.SaveResult]:
        """Save into memory alone, die, come back from there, and save into memory and storage; return both reports."""
        tiers = bcp.Tiers(folder=self.folder / f"memory-{step}")
        results: list[bcp.SaveResult] = []
        with suppress(InterruptedError), bcp.Run(run, self.state(), save=1, durable=1000, tiers=tiers) as first:
            first.resume()
            stays = first.maybe_save(step - 1)
            assert stays is not None
            results.append(stays.wait())
            raise InterruptedError
        with bcp.Run(run, self.state(), save=1, tiers=tiers) as second:
            assert second.resume() == step - 1
            pending = second.maybe_save(step)
            assert pending is not None
            results.append(pending.wait())
        return results

    def waiting(self, number: int) -> bcp.extend.Stage[Any, Any]:
        """Return a stage that waits for a file."""

        async def wait(item: Any) -> Any:
            await asyncio.to_thread(wait_until, (self.folder / f"release-{number}").exists)
            return item

        return bcp.extend.Stage("wait", wait)

    def fails(self, run: Path) -> str:
        """Fail on rank 1 in a stage of its own; return the type of this rank's error."""

        async def fail(item: Any) -> Any:
            if self.rank == 1:
                raise RuntimeError("out of order")
            return item

        options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("compress", fail)))
        try:
            bcp.save(run / "fails", self.state(), options=options)
        except bcp.BcpError as error:
            return type(error).__name__
        return ""

    def corrupt(self, path: Path) -> str:
        """Change a byte of rank 0's file, and load; return the type of this rank's error."""
        if self.rank == 0:
            file = min((path / "model").iterdir())
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        dist.barrier()
        try:
            bcp.load(path, self.state(), options=bcp.LoadOptions(overlap_loading=True))
        except bcp.BcpError as error:
            return type(error).__name__
        return ""


def write(path: Path, text: str) -> None:
    """Let a file appear with all of its text."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    fsspec.register_implementation("flaky", Flaky)
    reader = PrometheusMetricReader(resource_attribute_filter=lambda key: key == "dl.rank")
    metrics.set_meter_provider(MeterProvider([reader], resource=Resource({"service.name": "train", "dl.rank": rank})))
    server, _ = prometheus_client.start_http_server(0, HOST)
    join(folder / "meeting")
    rounds = Rounds(folder)
    write(folder / f"target-{rank}", f"{HOST}:{server.server_port}")
    end = folder / "end"
    for number in count(1):
        begin = folder / f"begin-{number}"
        wait_until(lambda begin=begin: begin.exists() or end.exists())
        if end.exists():
            break
        write(folder / f"done-{number}-{rank}", json.dumps(rounds.run(number)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
