"""A receiver of OTLP over gRPC, as a process of its own: made of OpenTelemetry's own messages and services."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """One span as it arrived; ids are base64, as the messages have them in JSON."""

    name: str
    trace: str
    id: str
    parent: str
    links: Mapping[str, str]
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    start: int
    end: int
    failed: bool

    @property
    def rank(self) -> int:
        """The rank of the process that sent it."""
        return int(self.resource["dl.rank"])


class OtlpServer:
    """The process, from entering to leaving the context. It ends with this process too, however it ends.

    Attributes:
        address: host and port.
    """

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(  # noqa: S603 -- this file
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._answer()["address"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)

    def spans(self) -> list[Received]:
        """Return all spans that have arrived."""
        return [_received(span, resource) for span, resource in self._ask("spans")]

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Return the latest metrics of each rank by their names, as the messages have them in JSON."""
        return {int(rank): metrics for rank, metrics in self._ask("metrics").items()}

    def _ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver of OTLP has died; its error is on stderr"
        return json.loads(line)


def _received(span: Mapping[str, Any], resource: Mapping[str, Any]) -> Received:
    links = {_values(link.get("attributes", []))["bcp.link"]: link["spanId"] for link in span.get("links", [])}
    return Received(
        name=span["name"],
        trace=span["traceId"],
        id=span["spanId"],
        parent=span.get("parentSpanId", ""),
        links=links,
        attributes=_values(span.get("attributes", [])),
        resource=resource,
        start=int(span["startTimeUnixNano"]),
        end=int(span["endTimeUnixNano"]),
        failed=span.get("status", {}).get("code") == "STATUS_CODE_ERROR",
    )


def _values(pairs: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return attributes as a mapping; JSON has integers as texts."""
    read = {"intValue": int, "doubleValue": float, "boolValue": bool, "stringValue": str}
    return {pair["key"]: read[kind](value) for pair in pairs for kind, value in pair["value"].items()}


# -- the process ------------------------------------------------------------------------------------


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]  # untyped
    def __init__(self) -> None:
        self.spans: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802 -- the service's name
        del context
        for of_resource in MessageToDict(request).get("resourceSpans", []):
            resource = _values(of_resource["resource"].get("attributes", []))
            for scope in of_resource["scopeSpans"]:
                self.spans += [(span, resource) for span in scope["spans"]]
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]  # untyped
    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, Any]] = {}

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802 -- the service's name
        del context
        for of_resource in MessageToDict(request).get("resourceMetrics", []):
            rank = _values(of_resource["resource"].get("attributes", []))["dl.rank"]
            for scope in of_resource["scopeMetrics"]:
                self.metrics.setdefault(rank, {}).update({metric["name"]: metric for metric in scope["metrics"]})
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _main() -> None:
    """Serve, and answer questions from standard input until it is closed."""
    traces, metrics = _Traces(), _Metrics()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _say({"address": f"127.0.0.1:{port}"})
    for line in sys.stdin:
        _say(traces.spans if line.strip() == "spans" else metrics.metrics)
    server.stop(None).wait()


if __name__ == "__main__":
    _main()
