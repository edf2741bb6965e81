"""Prometheus itself, Debian's package, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import urlopen

from filelock import FileLock

CACHE = Path(__file__).resolve().parents[2] / ".cache"
LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
READY = 'msg="Server is ready to receive web requests."'
CONF = """
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: train
    static_configs:
      - targets: {targets}
"""


def prepare() -> str:
    """Return the path of ``prometheus``; install it, with ``promtool``, if it is missing."""
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "prometheus.lock"):
        if shutil.which("prometheus") is None:
            if not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
                _run("apt-get", "update", "-q")
            _run("apt-get", "install", "-q", "-y", "--no-install-recommends", "prometheus")
    found = shutil.which("prometheus")
    assert found is not None
    return found


def _run(*command: str) -> None:
    """Run a command; its output is part of the error. A package's own service is not started."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def promtool(*words: str | Path) -> str:
    """Run ``promtool``, and return its output; AssertionError if it finds fault with something."""
    program = Path(prepare()).with_name("promtool")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A server that scrapes some targets every second.

    Attributes:
        url: of the server; known inside of the context.
    """

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        """Take an empty folder, and hosts with ports."""
        self._folder = folder
        (folder / "prometheus.yml").write_text(CONF.format(targets=json.dumps(list(targets))))
        self.url = ""

    def __enter__(self) -> Self:
        command = [prepare(), f"--config.file={self._folder}/prometheus.yml", "--web.listen-address=127.0.0.1:0"]
        command += [f"--storage.tsdb.path={self._folder}/data", "--web.page-title=bcp"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 -- ours
        assert self._process.stderr is not None
        said: list[str] = []
        ready = False  # until then it answers with 503
        for line in self._process.stderr:
            said.append(line)
            ready = ready or READY in line
            if found := LISTENING.search(line):
                self.url = f"http://{found[1]}"
            if ready and self.url:  # these lines come in any order
                break
        else:
            self._process.wait()
            self._process.stderr.close()
            raise RuntimeError(f"prometheus does not start: {''.join(said)[-3000:]}")
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)  # a full pipe would stop it
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the values of an expression by their labels; a query that Prometheus refuses is an HTTPError."""
        data = self._get("query", query=expression)
        assert data["resultType"] == "vector", data
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in data["result"]}

    def names(self) -> set[str]:
        """Return the names of all metrics."""
        return set(self._get("label/__name__/values"))

    def _get(self, what: str, **arguments: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{what}?{urlencode(arguments)}") as response:  # noqa: S310 -- our own server
            answer: Mapping[str, Any] = json.load(response)
        return answer["data"]
