"""Saves and loads on GCS and S3 while requests fail, hang and are slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from samples import sample
from servers.targets import running

from benchmarks.chaos_storage import RATES, Chaos, Target

MIB = 1 << 20
ROUNDS = 6


@pytest.fixture(scope="module")
def targets() -> Iterator[Mapping[str, Target]]:
    with running() as found:
        yield {target.name: target for target in found}


@pytest.mark.parametrize("name", sample(["GCS", "S3"], "GCS"))
def test_saves_and_loads_in_chaos(targets: Mapping[str, Target], name: str) -> None:
    """Every sixth request meets a fault, so that few rounds meet many."""
    chaos = Chaos(targets[name], seed=3, nbytes=6 * MIB, intensity=2.0, slow_seconds=0.05, attempt=0.5)
    assert chaos.run(ROUNDS) == []
    assert len(chaos.seconds) >= 2 * ROUNDS
    hits = targets[name].hits()
    assert set(hits) == set(RATES)
    assert sum(hits.values()) > ROUNDS
    assert chaos.retries.total() > 0


class Forgetful:
    """A server whose listing has names of a save that was killed."""

    name = "forgetful"
    options: Mapping[str, object] = {}

    def __init__(self, target: Target) -> None:
        self.target = target
        self.options, self.place, self.fail, self.hits = target.options, target.place, target.fail, target.hits

    def names(self, url: str) -> Sequence[str]:
        return [*self.target.names(url), "upload of model/00000-0123456789abcdef.bcp"]


def test_what_is_left_over_is_found(targets: Mapping[str, Target]) -> None:
    chaos = Chaos(Forgetful(targets["S3"]), seed=1, nbytes=MIB, intensity=0.0)
    (left,) = chaos.run(1)
    assert left.endswith("upload of model/00000-0123456789abcdef.bcp")
