"""A front for a server of HTTP that answers chosen requests of chosen paths in a chosen way.

Many paths are served at once. A path has a token in its name, by which the front knows its requests.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from aiohttp import web
from multidict import CIMultiDict
from servers.passing import PassingServer
from yarl import URL

from benchmarks.commit_table.cells import Answer, Fault, Faults

_TOKEN = re.compile(r"cell-[0-9a-f]{12}")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "server", "date", "expect", "host", "content-length"}
_VERSIONS = re.compile(r"etag|x-amz-.*|x-goog-.*", re.IGNORECASE)
_FIELDS = re.compile(rb"<ETag>.*?</ETag>|<UploadId>.*?</UploadId>|<Checksum[^>]*>.*?</Checksum[^>]*>", re.DOTALL)
_CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(frozen=True)
class Reply:
    """The answer of a server."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    nbytes: str | None = None  # Content-Length, which of a HEAD request is another than that of the body


@dataclass
class Wire:
    """The requests of one path.

    Attributes:
        token: the text in the path.
        faults: answers that are another than the server's.
        requests: the requests by their kinds, in the order in which they came.
        old: the server's last answer to each request before the first faults; later answers may be large.
    """

    token: str
    faults: Faults = field(default_factory=Faults)
    requests: list[str] = field(default_factory=list)
    old: dict[str, Reply] = field(default_factory=dict)
    is_armed: bool = False

    def arm(self, faults: Sequence[Fault]) -> None:
        """Let requests get these answers. Stale answers are those of now."""
        self.is_armed = True
        self.requests.clear()
        self.faults.arm(faults)


class AnswerFront(PassingServer):
    """Passes requests on to a server, and answers some in a chosen way."""

    def __init__(self, target: str, kind_of: Callable[[str, str], str], refusal: Callable[[int, str], bytes]) -> None:
        super().__init__(target)
        self._kind_of = kind_of
        self._refusal = refusal
        self._wires: dict[str, Wire] = {}

    def wire(self) -> Wire:
        """Return a new path's wire."""
        token = f"cell-{secrets.token_hex(6)}"
        return self._wires.setdefault(token, Wire(token))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        found = _TOKEN.search(request.raw_path) or _TOKEN.search(body[:4096].decode("latin-1"))
        wire = None if found is None else self._wires.get(found[0])
        if wire is None:
            return _answered(request, await self._ask(request, body))
        path = f"{request.method} {request.raw_path}"
        kind = self._kind_of(unquote(path), wire.token)
        wire.requests.append(kind)
        fault = wire.faults.take(kind)
        if fault is None:
            reply = await asyncio.shield(asyncio.ensure_future(self._ask(request, body)))
            if not wire.is_armed:
                wire.old[path] = reply
            return _answered(request, reply)
        return await self._faulty(request, body, wire, fault.answer)

    async def _faulty(self, request: web.Request, body: bytes, wire: Wire, answer: Answer) -> web.StreamResponse:
        """Answer as the fault says."""
        reply = Reply(200, {}, b"")
        if answer.name == "stale":
            key = f"{request.method} {request.raw_path}"
            reply = wire.old.get(key) or await self._ask(request, body, wire.token)
        elif answer.acted:
            reply = await asyncio.shield(asyncio.ensure_future(self._ask(request, body)))
            if answer.name == "twice":
                reply = await self._ask(request, body)
        if answer.name == "lost" or (answer.name == "cut" and not reply.body):
            return _dropped(request)
        if answer.name == "cut":
            return await _cut(request, reply)
        if answer.name.isdecimal():
            status = int(answer.name)
            reply = Reply(status, {"Content-Type": "application/xml"}, self._refusal(status, _CODES[status]))
        elif answer.name == "bare":
            reply = _bare(reply)
        elif answer.name == "empty":
            reply = Reply(200, {}, b"")
        return _answered(request, reply)

    async def _ask(self, request: web.Request, body: bytes, absent: str = "") -> Reply:
        """Ask the server; of a path where nothing is, if that path is named."""
        path = request.raw_path.replace(absent, "nothing-here") if absent else request.raw_path
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = URL(self.target + path, encoded=True)
        async with self.session.request(
            request.method, url, headers=headers, data=io.BytesIO(body) if body else None, allow_redirects=False
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            return Reply(answer.status, kept, await answer.read(), answer.headers.get("Content-Length"))


def _answered(request: web.Request, reply: Reply) -> web.Response:
    headers = CIMultiDict(reply.headers)
    if request.method == "HEAD":
        headers["Content-Length"] = reply.nbytes or "0"
        return web.Response(status=reply.status, headers=headers)
    return web.Response(status=reply.status, headers=headers, body=reply.body)


def _dropped(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _cut(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Announce the whole body, and send the first half of it."""
    headers = {**reply.headers, "Content-Length": str(len(reply.body))}
    response = web.StreamResponse(status=reply.status, headers=headers)
    await response.prepare(request)
    await response.write(reply.body[: len(reply.body) // 2])
    if request.transport is not None:
        request.transport.close()  # sends what is written first
    return response


def _bare(reply: Reply) -> Reply:
    """Leave out what tells the version of an object, its checksum or its upload."""
    headers = {name: value for name, value in reply.headers.items() if not _VERSIONS.fullmatch(name)}
    body = _FIELDS.sub(b"", reply.body)
    try:
        fields = json.loads(body)
    except ValueError:
        pass
    else:
        if isinstance(fields, dict):
            kept = {name: value for name, value in fields.items() if name not in ("generation", "crc32c", "size")}
            body = json.dumps(kept).encode()
    return Reply(reply.status, headers, body)


@contextmanager
def answer_front(
    target: str, kind_of: Callable[[str, str], str], refusal: Callable[[int, str], bytes]
) -> Iterator[AnswerFront]:
    """Run a front for a server; ``kind_of`` names a request, and ``refusal`` makes the body of an error."""
    front = AnswerFront(target, kind_of, refusal)
    front.start()
    try:
        yield front
    finally:
        front.stop()
