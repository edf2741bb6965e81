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
from samples import sample

import bcp
from bcp.coordinators.tree import channel, operation_state
from bcp.errors import PeerError
from bcp.protocols import Agreement
from bcp.testing.coordinator_failures import run_ranks

pytestmark = pytest.mark.anyio

GIVES_UP = (6.0, 60.0)  # the longer one where a machine is too busy for the other
PATIENT = 240.0
DIALS_ANEW = (2.0, 20.0)  # same: a rank without time for its beats is silent, too
WAYS = {"both": {}, "up": {"down": False}, "down": {"up": False}}


@pytest.fixture
def dial_anew_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what says after how many seconds of silence ranks dial anew, long before the timeout."""

    def after(seconds: float) -> None:
        monkeypatch.setattr(channel, "_BEAT_SECONDS", seconds / 5)
        monkeypatch.setattr(operation_state, "_ASK", 0.75 * seconds / PATIENT)
        monkeypatch.setattr(operation_state, "_RENEW", seconds / PATIENT)

    return after


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


@pytest.mark.parametrize("way", sample(WAYS, "both"))
async def test_a_save_dials_anew_beside_a_silent_connection(
    tmp_path: Path, dial_anew_after: Callable[[float], None], way: str
) -> None:
    for seconds in DIALS_ANEW:
        dial_anew_after(seconds)
        path = tmp_path / str(seconds)
        async with Wires(4, fanout=2) as wires:
            outcomes = await saved(wires, path / "first", PATIENT)
            wires.hush(1, **WAYS[way])
            outcomes += await saved(wires, path / "second", PATIENT)
            connections = wires.connections(1)
            outcomes += await saved(wires, path / "third", PATIENT)
        if outcomes == [None] * 12:
            break
    assert outcomes == [None] * 12
    assert connections > 1
    for name in ("first", "second", "third"):
        check_saved(path / name, 4)


async def test_an_edge_that_stays_silent_is_named_and_is_renewed_once_the_network_is_back(tmp_path: Path) -> None:
    async with Wires(3, fanout=1) as wires:
        assert await saved(wires, tmp_path / "first", PATIENT) == [None] * 3
        wires.hush(2, for_good=True)
        for seconds in GIVES_UP:
            errors = await saved(wires, tmp_path / "lost", seconds)
            assert all(isinstance(error, PeerError) for error in errors)
            causes = [error.cause for error in errors if isinstance(error, PeerError)]
            if all("has given no sign of life for" in cause for cause in causes):
                break
        assert all("the connection to rank" in cause for cause in causes), causes
        assert all("has given no sign of life for" in cause for cause in causes), causes
        assert not (tmp_path / "lost" / "metadata.arrow").exists()
        wires.hush(2)
        assert await saved(wires, tmp_path / "second", PATIENT) == [None] * 3
    check_saved(tmp_path / "second", 3)


@pytest.mark.parametrize("seed", sample(range(2), 0))
async def test_no_message_of_an_operation_is_lost_or_doubled(
    seed: int, dial_anew_after: Callable[[float], None]
) -> None:
    """Edges fall silent at random moments of an operation, in which frames of many sizes are under way."""
    for seconds in DIALS_ANEW:
        dial_anew_after(seconds)
        outcomes = await many_rounds(seed)
        if not any(isinstance(outcome, PeerError) for outcome in outcomes):
            break
    assert outcomes == [None] * len(outcomes)


async def many_rounds(seed: int) -> list[object]:
    """Send messages, and return the error of each rank."""
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

        return list(await run_ranks(wires.coordinators, body, timeout=PATIENT))
