"""Headless Chromium from Debian, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

SECONDS = 120.0
"""Until the browser counts as hanging."""

FLAGS = [
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
]


def prepare() -> Path:
    """Return the browser's program; install Debian's package if it is missing."""
    found = shutil.which("chromium")
    if found is None:
        update = ["apt-get", "update", "-q"]
        install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"]
        for command in (update, install):
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)  # noqa: S603
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed, try it as root: {done.stderr[-2000:]}")
        found = shutil.which("chromium")
    if found is None:
        raise RuntimeError("the package chromium has no program chromium")
    return Path(found)


class Tab:
    """One page in the browser.

    Attributes:
        events: all events of the protocol so far: their methods and parameters.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._loop = loop
        self._socket = socket
        self._number = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), SECONDS))

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, *, dark: bool = False, kind: str = "") -> None:
        """Set the preferred colours, and a medium such as ``print``."""
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[wanted])

    def open(self, path: Path) -> None:
        """Load a file from disk, and wait until its report is drawn or has failed."""
        self.run("window.bcpReport = undefined")
        self.call("Page.navigate", url=path.as_uri())
        drawn = "document.readyState === 'complete' && (window.bcpReport || !document.getElementById('problem').hidden)"
        self.until(f"location.href === {path.as_uri()!r} && {drawn}")

    def until(self, condition: str) -> None:
        """Wait for a condition in JavaScript."""
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"the page never came to {condition}: {self.complaints()}")

    def run(self, code: str) -> Any:
        """Return the value of an expression in JavaScript; an animation frame passes after it."""
        whole = f"(async () => {{ const x = await ({code}); await new Promise(requestAnimationFrame); return x; }})()"
        answer = self.call("Runtime.evaluate", expression=whole, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    def choose(self, select: str, value: str) -> None:
        """Choose a value in a select box, as a user does."""
        self.run(
            f"(() => {{ const box = document.getElementById({select!r}); box.value = {value!r};"
            f" if (box.value !== {value!r}) throw new Error('no such value in the box');"
            " box.dispatchEvent(new Event('input', {bubbles: true}));"
            " box.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send ``mouseMoved``, ``mousePressed`` or ``mouseReleased`` at a place in the window."""
        more = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, path: Path, end: str = "body") -> None:
        """Write a picture of the page from its top to the end of an element."""
        height = self.run(f"document.querySelector({end!r}).getBoundingClientRect().bottom + scrollY")
        clip = {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": height, "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console, and uncaught errors."""
        found = []
        for method, parameters in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
            if method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(str(parameters["entry"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for; an address of data inside the page is none."""
        asked = [
            parameters["request"]["url"] for method, parameters in self.events if method == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("data:")]

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if "method" in message:
                self.events.append((message["method"], message["params"]))
            elif message["id"] == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])


@contextmanager
def browser() -> Iterator[str]:
    """Run a browser, and yield its address for :func:`tab`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        command = [prepare(), *FLAGS, f"--user-data-dir={folder}/profile", "about:blank"]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "HOME": folder, "TMPDIR": folder},
            )
        try:
            yield _address(process, log)
        finally:
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                _, alive = psutil.wait_procs([psutil.Process(process.pid), *family], timeout=20)
                for member in alive:
                    member.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        found = re.search(r"DevTools listening on ws://([^/]+)/", log.read_text(errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"Chromium did not start: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def tab(address: str, *, width: int = 1280, dark: bool = False) -> Iterator[Tab]:
    """Open an empty page in a browser, and yield it."""
    with closing(asyncio.new_event_loop()) as loop:
        session = loop.run_until_complete(_session())
        try:
            target = loop.run_until_complete(_answer(session, "PUT", f"http://{address}/json/new?about:blank"))
            url = json.loads(target)["webSocketDebuggerUrl"]
            made = Tab(loop, loop.run_until_complete(session.ws_connect(url, max_msg_size=0)))
            made.size(width)
            made.media(dark=dark)
            yield made
            close = f"http://{address}/json/close/{json.loads(target)['id']}"
            loop.run_until_complete(_answer(session, "GET", close))
        finally:
            loop.run_until_complete(session.close())


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _answer(session: aiohttp.ClientSession, method: str, url: str) -> str:
    async with session.request(method, url) as answer:
        answer.raise_for_status()
        return await answer.text()
