"""A server of HTTP in a thread that passes requests on to another one."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future

import aiohttp
from aiohttp import web


class PassingServer(ABC):
    """Listens at a port of this machine; a subclass answers.

    Attributes:
        target: URL of the other server.
        url: the own endpoint.
    """

    session: aiohttp.ClientSession

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self._started: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()
        self._started.result(60)

    def stop(self) -> None:
        """End, with all connections."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)

    @abstractmethod
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request; ``session`` asks the other server."""

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0)
        skipped = {"Accept", "Content-Type", "User-Agent"}
        async with aiohttp.ClientSession(
            auto_decompress=False, connector=connector, skip_auto_headers=skipped
        ) as self.session:
            application = web.Application(client_max_size=1 << 30)
            application.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._started.set_result(None)
            await self._stopping.wait()
            await runner.cleanup()
