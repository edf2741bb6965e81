"""Edges of the tree that fall silent and do not break: a host that was away, or a flow that a NAT table has dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from anyio import to_thread
from relays import Wires

import bcp
from bcp.coordinators.tree import channel, operation_state
from bcp.errors import PeerError
from bcp.protocols import Agreement
from bcp.testing.coordinator_failures import run_ranks

pytestmark = pytest.mark.anyio

GIVES_UP = 6.0
PATIENT = 60.0
WAYS = {"both": {}, "up": {"down": False}, "down": {"up": False}}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dial anew long before the timeout: a busy machine has the rest of it."""
    monkeypatch.setattr(channel, "_BEAT_SECONDS", 0.4)
    monkeypatch.setattr(operation_state, "_ASK", 1.5 / PATIENT)
    monkeypatch.setattr(operation_state, "_RENEW", 2.0 / PATIENT)


def of_rank(rank: int) -> torch.Tensor:
    return torch.full((50,), float(rank))


async def saved(wires: Wires, path: Path, patience: float) -> list[Exception | None]:
    """Save on all ranks, each in a thread; return the error of each."""
    outcomes: list[Exception | None] = [None] * len(wires.coordinators)

    def save(rank: int) -> None:
        try:
            bcp.save(
                path,
                {"model": {f"w{rank}": of_rank(rank)}},
                coordinator=wires.coordinators[rank],
                options=bcp.SaveOptions(timeout=patience),
            )
        except PeerError as error:
            outcomes[rank] = error

    async with anyio.create_task_group() as group:
        for rank in range(len(outcomes)):
            group.start_soon(to_thread.run_sync, save, rank)
    return outcomes


def check_saved(path: Path, size: int) -> None:
    target = {f"w{rank}": torch.zeros(50) for rank in range(size)}
    bcp.load(path, {"model": target})
    assert all(torch.equal(target[f"w{rank}"], of_rank(rank)) for rank in range(size))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", WAYS)
async def test_a_save_dials_anew_beside_a_silent_connection(tmp_path: Path, way: str) -> None:
    async with Wires(4, fanout=2) as wires:
        assert await saved(wires, tmp_path / "first", PATIENT) == [None] * 4
        wires.hush(1, **WAYS[way])
        assert await saved(wires, tmp_path / "second", PATIENT) == [None] * 4
        assert wires.connections(1) > 1
        assert await saved(wires, tmp_path / "third", PATIENT) == [None] * 4
    for name in ("first", "second", "third"):
        check_saved(tmp_path / name, 4)


async def test_an_edge_that_stays_silent_is_named_and_is_renewed_once_the_network_is_back(tmp_path: Path) -> None:
    async with Wires(3, fanout=1) as wires:
        assert await saved(wires, tmp_path / "first", PATIENT) == [None] * 3
        wires.hush(2, for_good=True)
        for error in await saved(wires, tmp_path / "lost", GIVES_UP):
            assert isinstance(error, PeerError)
            assert "the connection to rank" in error.cause
            assert "has given no sign of life for" in error.cause
        assert not (tmp_path / "lost" / "metadata.arrow").exists()
        wires.hush(2)
        assert await saved(wires, tmp_path / "second", PATIENT) == [None] * 3
    check_saved(tmp_path / "second", 3)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(2))
async def test_no_message_of_an_operation_is_lost_or_doubled(seed: int) -> None:
    """Edges fall silent at random moments of an operation, in which frames of many sizes are under way."""
    rounds, size, chance = 12, 4, random.Random(seed)  # noqa: S311 -- the same for each seed
    ways: Sequence[dict[str, bool]] = list(WAYS.values())

    def part(number: int, rank: int) -> bytes:
        return b"%d of %d;" % (number, rank) * [1, 500, 40_000][(number * size + rank + seed) % 3]

    async def joined(parts: Sequence[bytes]) -> bytes:
        return b"".join(parts)

    async with Wires(size, fanout=chance.choice([1, 2])) as wires:
        hushes: dict[int, Callable[[], None]] = {
            number: partial(wires.hush, chance.randrange(1, size), **chance.choice(ways))
            for number in chance.sample(range(1, rounds), 2)
        }

        async def body(rank: int, agreement: Agreement) -> None:
            for number in range(rounds):
                if rank == 0 and number in hushes:
                    hushes[number]()
                expected = b"".join(part(number, other) for other in range(size))
                assert await agreement.gather_broadcast(f"round {number}", part(number, rank), joined) == expected
                own = await agreement.gather_scatter(f"each {number}", part(number, rank), lambda parts: parts)
                assert own == part(number, rank)

        assert await run_ranks(wires.coordinators, body, timeout=PATIENT) == [None] * size
