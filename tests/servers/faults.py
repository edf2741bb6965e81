"""A front for a server of HTTP that fails as it is told to."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import web
from servers.passing import PassingServer
from yarl import URL

XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message><RequestId>R1</RequestId></Error>"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "server", "date"}


@dataclass
class Fault:
    """One kind of failure.

    Attributes:
        pattern: regular expression, searched in ``"METHOD /path?query"``.
        count: how many requests fail so; None for all.
        share: which share of the requests fails so.
        status: answer with this status, without asking the server.
        acted: ask the server, and answer with the status all the same.
        code: S3's code for it.
        headers: headers of that answer.
        delay: seconds before the request is passed on.
        hang: give no answer.
        refuse: drop the connection before the server is asked.
        lose: ask the server, and drop the connection then.
        mute: ask the server, and give no answer.
        cut: ask the server, and drop the connection after so many bytes of the answer's body; -1: before the last one.
        early: answer before the request's body is read.
    """

    pattern: str
    count: int | None = None
    share: float = 1.0
    status: int = 0
    acted: bool = False
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    hang: bool = False
    refuse: bool = False
    lose: bool = False
    mute: bool = False
    cut: int | None = None
    early: bool = False
    then: Callable[[], None] | None = None
    hits: int = 0


class Front(PassingServer):
    """Passes requests on to a server, and lets some fail.

    Attributes:
        faults: what fails; may be changed at any time.
        requests: the requests that came, as ``"METHOD /path?query"``.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self._rng = Random(1)  # noqa: S311 -- no secret

    def fail(self, pattern: str, count: int | None = 1, **how: Any) -> Fault:
        """Let requests fail; once, if not said otherwise."""
        fault = Fault(pattern, count, **how)
        self.faults.append(fault)
        return fault

    def count(self, pattern: str) -> int:
        """Return how many requests came that match."""
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def clear(self) -> None:
        """Forget faults and requests."""
        self.faults.clear()
        self.requests.clear()

    def seed(self, seed: int) -> None:
        """Seed the shares."""
        self._rng.seed(seed)

    def _fault_of(self, what: str) -> Fault | None:
        for fault in self.faults:
            wanted = fault.count is None or fault.hits < fault.count
            if wanted and re.search(fault.pattern, what) and self._rng.random() < fault.share:
                fault.hits += 1
                return fault
        return None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        what = f"{request.method} {request.raw_path}"
        self.requests.append(what)
        fault = self._fault_of(what) or Fault("")
        if fault.early:
            return self._answer(fault)
        body = await request.read()
        await asyncio.sleep(fault.delay)
        if fault.hang:
            await asyncio.sleep(3600)
        if fault.status and not fault.acted:
            return self._answer(fault)
        if fault.refuse:
            return _drop(request)
        if fault.then is not None:
            await asyncio.to_thread(fault.then)
        return await self._pass_on(request, body, fault)

    @staticmethod
    def _answer(fault: Fault) -> web.Response:
        text = XML.format(fault.code or f"Code{fault.status}", "injected") if fault.code else "<html>no XML</html>"
        return web.Response(status=fault.status, text=text, content_type="application/xml", headers=fault.headers)

    async def _pass_on(self, request: web.Request, body: bytes, fault: Fault) -> web.StreamResponse:
        url = URL(self.target + request.raw_path, encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        async with self.session.request(
            request.method, url, headers=headers, data=io.BytesIO(body) if body else None, allow_redirects=False
        ) as answer:
            data = await answer.read()
            if fault.lose:
                return _drop(request)
            if fault.mute:
                await asyncio.sleep(3600)
            if fault.status:
                return self._answer(fault)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            await response.write(data if fault.cut is None else data[: fault.cut])
            if fault.cut is not None:
                return _drop(request, response)
            await response.write_eof()
            return response


def _drop(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection without an answer, or in the middle of one."""
    if request.transport is not None:
        request.transport.close() if response is not None else request.transport.abort()
    return response or web.Response()


@contextmanager
def front_of(target: str) -> Iterator[Front]:
    """Run a front for a server."""
    front = Front(target)
    front.start()
    try:
        yield front
    finally:
        front.stop()
