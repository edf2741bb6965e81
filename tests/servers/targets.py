"""Servers behind fronts that fail, as ``benchmarks.chaos_storage`` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from servers.faults import Fault, Front, front_of
from servers.gcs import BUCKET, GcsServer
from servers.s3 import S3Server, moto_server

from benchmarks.chaos_storage import Target

FAULTS: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "502": {"status": 502},
    "503": {"status": 503, "code": "SlowDown"},
    "429": {"status": 429, "code": "TooManyRequests"},
    "500 once it was done": {"status": 500, "acted": True},
    "dropped before": {"refuse": True},
    "dropped after": {"lose": True},
    "answer cut": {"cut": -1},
    "hang before": {"hang": True},
    "hang after": {"mute": True},
    "slow": {},
}
"""How the front of :mod:`servers.faults` makes the faults that have these names."""

WORDS = {"refuse": ("drop", "before"), "lose": ("drop", "after"), "hang": ("delay", 3600)}
"""Words of the front of Google Cloud Storage that are others."""


@dataclass
class GcsTarget:
    """fake-gcs-server behind its front."""

    server: GcsServer
    name: str = "GCS"
    _kinds: list[str] = field(default_factory=list)

    @property
    def options(self) -> Mapping[str, Any]:
        return {"token": "anon", "endpoint_url": self.server.url}

    def place(self) -> str:
        return f"gs://{BUCKET}/{uuid4().hex}"

    def fail(self, rates: Mapping[str, float], delay: float, seed: int) -> None:
        self._kinds = list(rates)
        faults = []
        for kind, rate in rates.items():
            how = dict(WORDS.get(word, (word, value)) for word, value in FAULTS[kind].items() if word != "code")
            faults.append({"match": ".", "rate": rate, **({"delay": delay} if kind == "slow" else how)})
        self.server.faults(*faults, seed=seed)

    def hits(self) -> Mapping[str, int]:
        return dict(zip(self._kinds, self.server.hits(), strict=True))

    def names(self, url: str) -> list[str]:
        root = url.removeprefix(f"gs://{BUCKET}/")
        return [name[len(root) + 1 :] for name in self.server.names(f"{root}/")]


@dataclass
class S3Target:
    """A server of S3 behind a front."""

    server: S3Server
    front: Front
    name: str = "S3"
    _faults: dict[str, Fault] = field(default_factory=dict)

    @property
    def options(self) -> Mapping[str, Any]:
        return S3Server(self.front.url).options

    def place(self) -> str:
        return self.server.place()

    def fail(self, rates: Mapping[str, float], delay: float, seed: int) -> None:
        self.front.seed(seed)
        self.front.clear()
        self._faults = {
            kind: self.front.fail(".", None, share=rate, delay=delay if kind == "slow" else 0.0, **FAULTS[kind])
            for kind, rate in rates.items()
        }

    def hits(self) -> Mapping[str, int]:
        return {kind: fault.hits for kind, fault in self._faults.items()}

    def names(self, url: str) -> list[str]:
        root = url.removeprefix("s3://").partition("/")[2]
        return [name.replace(f"{root}/", "", 1) for name in self.server.names(url)]


@contextmanager
def running() -> Iterator[list[Target]]:
    """Run fake-gcs-server and moto."""
    with GcsServer() as gcs, moto_server() as moto, front_of(moto.url) as front:
        yield [GcsTarget(gcs), S3Target(moto, front)]
