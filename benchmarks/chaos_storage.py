"""Save and load checkpoints on GCS and S3 while 5 % of all requests fail, 1 % hang and 2 % are slow.

The servers are those of the tests: fake-gcs-server and moto, each behind a front that makes the faults. Every load has
to return the saved bytes. At the end each server's own listing must show the committed checkpoints and nothing else:
no object, part or open upload of another save. The extra ``servers`` has both servers.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

import anyio
import torch
from torch import Tensor

import bcp
from bcp.backends import resolve
from bcp.format.metadata import METADATA_KEY, decode_metadata, operation_of
from bcp.protocols import RetryPolicy
from bcp.telemetry.store import FOLDER
from benchmarks.figures import Figures, parser

__all__ = ["RATES", "Chaos", "Target", "leftovers"]

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
RATES = {
    "500": 0.007,
    "502": 0.006,
    "503": 0.006,
    "429": 0.006,
    "500 once it was done": 0.006,
    "dropped before": 0.006,
    "dropped after": 0.007,
    "answer cut": 0.006,
    "hang before": 0.005,
    "hang after": 0.005,
    "slow": 0.02,
}
"""Share of the requests that each kind of fault meets: failures have 5 %, hangs 1 %, delays 2 %."""

POLICY = RetryPolicy(
    deadline_seconds=60.0, attempt_seconds=1.0, first_pause_seconds=0.02, longest_pause_seconds=0.5, allowance=1000
)


class Target(Protocol):
    """A server behind a front that fails.

    Attributes:
        name: of the server, for figures.
    """

    name: str

    @property
    def options(self) -> Mapping[str, Any]:
        """Storage options by which bcp reaches the front."""

    def place(self) -> str:
        """Return a URL where nothing is yet."""

    def fail(self, rates: Mapping[str, float], delay: float, seed: int) -> None:
        """Let requests fail at these rates; a slow one is delayed by so many seconds."""

    def hits(self) -> Mapping[str, int]:
        """Return how many faults of each kind were made."""

    def names(self, url: str) -> Sequence[str]:
        """List objects and open uploads below a URL, past the front, by names relative to the URL."""


@dataclass(slots=True)
class Chaos:
    """Saves and loads on one server.

    Attributes:
        target: the server.
        seed: of states, paths and faults.
        nbytes: bytes of the largest tensor.
        intensity: factor of :data:`RATES`.
        slow_seconds: delay of a slow request.
        attempt: seconds after which a request that hangs is given up.
        seconds: of each save and each load.
        retries: how many requests were made again, by the first word of the error.
    """

    target: Target
    seed: int
    nbytes: int = 16 * MIB
    intensity: float = 1.0
    slow_seconds: float = 0.5
    attempt: float = 1.0
    seconds: list[float] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    _saved: dict[str, int] = field(default_factory=dict)
    _deleted: list[str] = field(default_factory=list)

    def run(self, rounds: int) -> list[str]:
        """Save and load so many times; return the names that are left over at the end.

        Raises:
            AssertionError: a load returned other bytes than were saved.
            BcpError: a save or a load failed.

        """
        rng = Random(self.seed)  # noqa: S311 -- no secret
        rates = {kind: rate * self.intensity for kind, rate in RATES.items()}
        self.target.fail(rates, self.slow_seconds, self.seed)
        for number in range(rounds):
            self._round(rng, number)
        return self.left()

    def _round(self, rng: Random, number: int) -> None:
        """Save to a new path or over an older checkpoint, load, and at times delete another one."""
        overwrite = bool(self._saved) and rng.random() < 0.4  # noqa: PLR2004 -- a share
        url = rng.choice(sorted(self._saved)) if overwrite else f"{self.target.place()}/step-{number}"
        seed = rng.getrandbits(32)
        options = bcp.SaveOptions(
            overwrite=overwrite,
            part_bytes=rng.choice([MIB, 2 * MIB, 5 * MIB, 8 * MIB]),
            storage_options=self.target.options,
            retries=self._policy(),
        )
        began = time.monotonic()
        if rng.random() < 0.5:  # noqa: PLR2004 -- a share
            bcp.save(url, states_of(seed, self.nbytes), async_checkpoint=True, options=options).wait()
        else:
            bcp.save(url, states_of(seed, self.nbytes), options=options)
        self.seconds.append(time.monotonic() - began)
        self._saved[url] = seed
        self._load(url)
        if len(self._saved) > 2 and rng.random() < 0.2:  # noqa: PLR2004 -- a share of those beside this one
            self._delete(rng.choice(sorted(set(self._saved) - {url})))

    def _load(self, url: str) -> None:
        """Load a checkpoint and compare every byte."""
        states = states_of(self._saved[url], self.nbytes)
        found: dict[str, Any] = {"model": {name: torch.zeros_like(tensor) for name, tensor in states["model"].items()}}
        found["extra_states"] = {}
        options = bcp.LoadOptions(storage_options=self.target.options, retries=self._policy())
        began = time.monotonic()
        bcp.load(url, found, options=options)
        self.seconds.append(time.monotonic() - began)
        for name, tensor in states["model"].items():
            if not torch.equal(bytes_of(found["model"][name]), bytes_of(tensor)):
                raise AssertionError(f"{url}: {name} has other bytes than were saved (seed {self.seed})")
        if found["extra_states"] != states["extra_states"]:
            raise AssertionError(f"{url}: extra states are {found['extra_states']} (seed {self.seed})")

    def _delete(self, url: str) -> None:
        """Delete a checkpoint: all of its objects."""

        async def delete() -> None:
            backend = resolve(url, self.target.options, self._policy())
            await backend.delete([info.key for info in await backend.list()])
            await backend.aclose()

        anyio.run(delete)
        del self._saved[url]
        self._deleted.append(url)

    def _policy(self) -> RetryPolicy:
        def count(event: bcp.extend.RetryEvent) -> None:
            self.retries[event.said[:40]] += 1

        return replace(POLICY, attempt_seconds=self.attempt, on_retry=count)

    def left(self) -> list[str]:
        """Load all checkpoints once more, and return the names that belong to none of them."""
        for url in self._saved:
            self._load(url)
        found = [f"{url}/{name}" for url in self._deleted for name in self.target.names(url)]
        for url in self._saved:
            found += leftovers(url, self.target.names(url), self.target.options)
        return found


def leftovers(url: str, names: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the names below a committed checkpoint that do not belong to it; recordings do not count."""

    async def committed() -> str:
        backend = resolve(url, options, POLICY)
        data = await backend.get(METADATA_KEY)
        await backend.aclose()
        return decode_metadata(data, url).commit.operation

    operation = anyio.run(committed)
    others = [name for name in names if name != METADATA_KEY and not name.startswith(FOLDER)]
    return [f"{url}/{name}" for name in others if operation_of(name) != operation]


def states_of(seed: int, nbytes: int) -> dict[str, Any]:
    """Return random states: tensors of up to so many bytes, small ones, an empty one, and a scalar; any bits."""
    rng = Random(seed)  # noqa: S311 -- no secret
    generator = torch.Generator().manual_seed(seed)
    sizes = [rng.randrange(nbytes // 2, nbytes) for _ in range(rng.randrange(3))]
    sizes += [rng.randrange(1, 3000) for _ in range(rng.randrange(1, 5))]
    model = {"scalar": torch.tensor(seed), "empty": torch.zeros(0, 3)}
    for number, size in enumerate(sizes):
        kind = rng.choice([torch.float32, torch.bfloat16, torch.uint8])
        count = max(size // kind.itemsize, 1)
        bits = torch.randint(0, 256, (count * kind.itemsize,), dtype=torch.uint8, generator=generator)
        model[f"layer{number}"] = bits.view(kind)
    return {"model": model, "extra_states": {"seed": seed}}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, which are equal for equal NaNs too."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def servers() -> AbstractContextManager[Sequence[Target]]:
    """Return the tests' servers, which run within the context."""
    sys.path.insert(0, str(ROOT / "tests"))
    context: AbstractContextManager[Sequence[Target]] = importlib.import_module("servers.targets").running()
    return context


def main() -> int:
    """Run the chaos on all servers, print the figures, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--seed", type=int, default=1, help="of states, paths and faults")
    options.add_argument("--intensity", type=float, default=1.0, help="factor of the shares of faults")
    chosen = options.parse_args()
    rounds = 5 if chosen.quick else 50
    figures = Figures()
    with servers() as targets:
        for target in targets:
            figures.head(f"{target.name}: {rounds} saves and loads")
            chaos = Chaos(target, chosen.seed, intensity=chosen.intensity)
            left = chaos.run(rounds)
            for kind, count in target.hits().items():
                figures.add(f"{target.name}, faults: {kind}", count)
            figures.add(f"{target.name}, requests made again", chaos.retries.total())
            figures.add(f"{target.name}, all saves and loads", sum(chaos.seconds), "s")
            figures.add(f"{target.name}, slowest save or load", max(chaos.seconds), "s", goal=POLICY.deadline_seconds)
            figures.add(f"{target.name}, names left over", len(left), goal=0)
            print(*left, sep="\n")
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
