"""A program of torchrun's whose ranks send spans and metrics by OTLP: an asynchronous save, a synchronous one, a load.

``traced.py FOLDER ADDRESS``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from remote import join
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bcp
from bcp.telemetry.settings import GROUPS, settings

MIB = 1 << 20


def state(mesh: DeviceMesh) -> dict[str, Any]:
    """Return this rank's states: each rank has two parts to write."""
    return {"model": {"w": distribute_tensor(torch.ones(8, MIB // 4), mesh, [Shard(0)])}}


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    resource = Resource({"service.name": "train", "dl.rank": rank})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address, insecure=True)))
    trace.set_tracer_provider(tracers)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=address, insecure=True))
    meters = MeterProvider([reader], resource=resource)
    metrics.set_meter_provider(meters)
    settings.spans, settings.run = GROUPS, "a-run"

    join(folder / "meeting")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = bcp.SaveOptions(part_bytes=MIB)
    tracer = trace.get_tracer("train")
    with tracer.start_as_current_span("train step 100"):
        pending = bcp.save(folder / "step-100", state(mesh), async_checkpoint=True, options=options)
    pending.wait()
    with tracer.start_as_current_span("train step 200"):
        bcp.save(folder / "step-200", state(mesh), options=options)
    with tracer.start_as_current_span("resume"):
        bcp.load(folder / "step-200", state(mesh))
    tracers.shutdown()
    meters.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
