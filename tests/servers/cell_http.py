"""GCS and S3 behind fronts that give chosen answers, as ``benchmarks.commit_table`` takes them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import anyio
from servers.answers import AnswerFront, Wire
from servers.cell_names import without_ids
from servers.gcs import BUCKET, GcsServer
from servers.s3 import S3Server

from bcp.backends import child, resolve
from bcp.protocols import Backend
from benchmarks.commit_table.cells import Answer, Fault
from benchmarks.commit_table.trial import POLICY

STATUSES = ("403", "404", "409", "412", "500", "503")
OUTCOMES = [Answer(name, acted=acted) for name in ("lost", *STATUSES, "empty") for acted in (False, True)]
ANSWERS = [*OUTCOMES, Answer("cut", acted=True), Answer("twice", acted=True), Answer("bare", acted=True)]
STALE = Answer("stale")
DOUBTS = [*(Answer(name, acted=True) for name in ("lost", "404", "412", "bare")), Answer("412")]


@dataclass
class HttpWire:
    """One path of a store behind a front."""

    wire: Wire
    calm: Backend
    open: Callable[[], Backend]
    list_names: Callable[[], Sequence[str]]

    def backend(self) -> Backend:
        return self.open()

    def arm(self, faults: Sequence[Fault]) -> None:
        self.wire.arm(faults)

    def disarm(self) -> tuple[list[str], list[int]]:
        return list(self.wire.requests), self.wire.faults.disarm()

    async def names(self) -> Sequence[str]:
        return await anyio.to_thread.run_sync(self.list_names)


class HttpStore(ABC):
    """A store behind a front."""

    at_once = 4
    reads: tuple[str, ...] = ("GET",)
    commit = ""  # kind of the request that commits
    receipt = ""  # kind of the read of the receipt

    def __init__(self, front: AnswerFront, root: str, options: Mapping[str, Any]) -> None:
        self._front, self._root, self._options = front, root, options
        self._calm = resolve(root, options, POLICY)

    def wire(self) -> HttpWire:
        wire = self._front.wire()
        path = f"{self._root}/{wire.token}"
        opened = partial(resolve, path, self._options, POLICY)
        return HttpWire(wire, child(self._calm, wire.token), opened, partial(self.names, path))

    async def aclose(self) -> None:
        await self._calm.aclose()

    def answers(self, request: str) -> Sequence[Answer]:
        return [*ANSWERS, STALE] if request.startswith(self.reads) else ANSWERS

    def doubts(self) -> Sequence[Fault]:
        return [*(Fault(self.commit, answer) for answer in DOUBTS), Fault(self.receipt, Answer("404"))]

    @abstractmethod
    def names(self, path: str) -> Sequence[str]:
        """Return the names of the objects of a path, without the path."""


class S3(HttpStore):
    """moto behind a front."""

    name = "S3"
    reads = ("GET", "HEAD")
    commit = "PUT metadata.arrow"
    receipt = "GET receipts/00000-*.arrow"

    def __init__(self, server: S3Server, front: AnswerFront) -> None:
        super().__init__(front, f"s3://{server.bucket()}/a root", S3Server(front.url).options)
        self._server = server

    def names(self, path: str) -> Sequence[str]:
        root = path.removeprefix("s3://").partition("/")[2]
        return [name.replace(f"{root}/", "", 1) for name in self._server.names(path)]

    @staticmethod
    def kind_of(request: str, token: str) -> str:
        """Return the method, the key below the root without ids, and the words of the query."""
        method, _, rest = request.partition(" ")
        path, _, query = rest.partition("?")
        key = path.partition(f"{token}/")[2]
        words = [word for word in parse_qs(query, keep_blank_values=True) if word in _S3_WORDS]
        return without_ids(f"{method} {key}{'?' if words else ''}{'&'.join(words)}")

    @staticmethod
    def refusal(status: int, code: str) -> bytes:
        return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>chosen {status}</Message></Error>".encode()


_S3_WORDS = ("list-type", "uploads", "uploadId", "partNumber", "delete")


class Gcs(HttpStore):
    """fake-gcs-server behind a front."""

    name = "GCS"
    commit = "POST metadata.arrow?uploadType&ifGenerationMatch"
    receipt = "GET receipts/00000-*.arrow?alt"

    def __init__(self, server: GcsServer, front: AnswerFront) -> None:
        super().__init__(front, f"gs://{BUCKET}/a root", {"token": "anon", "endpoint_url": front.url})
        self._server = server

    def names(self, path: str) -> Sequence[str]:
        root = path.removeprefix(f"gs://{BUCKET}/")
        return [name[len(root) + 1 :] for name in self._server.names(f"{root}/")]

    @staticmethod
    def kind_of(request: str, token: str) -> str:
        """Return the method, the key below the root without ids, and the words of the query."""
        method, _, rest = request.partition(" ")
        path, _, query = rest.partition("?")
        given = parse_qs(query, keep_blank_values=True)
        key = (given.get("name") or given.get("prefix") or [path])[0].partition(f"{token}/")[2]
        words = [word for word in given if word in _GCS_WORDS]
        return without_ids(f"{method} {key}{'?' if words else ''}{'&'.join(words)}")

    @staticmethod
    def refusal(status: int, code: str) -> bytes:
        return json.dumps({"error": {"code": status, "message": code, "errors": [{"reason": code}]}}).encode()


_GCS_WORDS = ("uploadType", "alt", "ifGenerationMatch", "prefix")
