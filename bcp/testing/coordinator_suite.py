"""The tests that every coordinator has to pass.

::

    class TestMine(CoordinatorSuite):
        def coordinators(self, world_size):
            return [MyCoordinator(rank, world_size) for rank in range(world_size)]

Needs pytest and anyio's pytest plugin, which comes with anyio.
"""
# ruff: noqa: S101 -- a suite is made of assertions about small worlds

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from anyio import to_thread

from bcp.protocols import Agreement, Coordinator
from bcp.testing.coordinator_failures import QUIET_SECONDS, CoordinatorFailures, concatenated, run_ranks

__all__ = ["CoordinatorSuite", "run_ranks"]


class CoordinatorSuite(CoordinatorFailures):
    """Subclass it and override :meth:`coordinators`."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run on asyncio."""
        return "asyncio"

    # -- success ------------------------------------------------------------------------------

    async def test_ranks(self) -> None:
        """Every coordinator knows its place."""
        assert [(coordinator.rank, coordinator.world_size) for coordinator in self.coordinators(3)] == [
            (0, 3),
            (1, 3),
            (2, 3),
        ]

    @pytest.mark.parametrize("world_size", [1, 2, 5])
    async def test_divide(self, world_size: int) -> None:
        """Every rank gets its own answer; rank 0 divides, in a thread of its own."""
        loop_thread = threading.get_ident()
        threads: list[int] = []

        def divide(gathered: Sequence[bytes]) -> list[bytes]:
            threads.append(threading.get_ident())
            return [b"|".join(gathered) + b"->%d" % rank for rank in range(world_size)]

        outcomes = await run_ranks(
            self.coordinators(world_size),
            lambda rank, agreement: agreement.gather_scatter("plan", b"%d" % rank, divide),
        )
        together = b"|".join(b"%d" % rank for rank in range(world_size))
        assert outcomes == [together + b"->%d" % rank for rank in range(world_size)]
        assert len(threads) == 1
        assert threads[0] != loop_thread

    @pytest.mark.parametrize("world_size", [1, 2, 5])
    async def test_decide(self, world_size: int) -> None:
        """All ranks get the one answer."""
        outcomes = await run_ranks(
            self.coordinators(world_size),
            lambda rank, agreement: agreement.gather_broadcast("commit", b"%d" % rank, concatenated),
        )
        assert outcomes == [b"|".join(b"%d" % rank for rank in range(world_size))] * world_size

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    async def test_all_to_all(self, world_size: int) -> None:
        """Every pair of ranks exchanges its own number of bytes, also none and many; twice."""

        def payload(source: int, target: int) -> bytes:
            many = 20_000_001 * (source == world_size - 1 and target == 0)
            return bytes([10 * source + target]) * (70_000 * source * (target % 2) + target + many)

        async def body(rank: int, agreement: Agreement) -> bool:
            for _ in range(2):
                send = [bytearray(payload(rank, target)) for target in range(world_size)]
                received = [bytearray(len(payload(source, rank))) for source in range(world_size)]
                await agreement.all_to_all(send, received)
                for buffer in send:
                    buffer[:] = bytes(len(buffer))
                for source, data in enumerate(received):
                    assert data == payload(source, rank)
            return True

        assert await run_ranks(self.coordinators(world_size), body) == [True] * world_size

    async def test_bandwidth(self) -> None:
        """All ranks learn a rate; it can be asked for again, and bulk data still goes."""

        async def body(_: int, agreement: Agreement) -> list[float]:
            rates = [await agreement.bandwidth(), await agreement.bandwidth()]
            await agreement.all_to_all([b"x"] * 3, [bytearray(1) for _ in range(3)])
            return rates

        outcomes = await run_ranks(self.coordinators(3), body)
        assert all(isinstance(rates, list) and min(rates) > 0 for rates in outcomes), outcomes

    async def test_large_payloads(self) -> None:
        """Plans and metadata of many MiB pass, empty ones too."""
        large = bytes(range(256)) * (9 << 12)  # 9 MiB

        async def body(rank: int, agreement: Agreement) -> list[bytes]:
            first = await agreement.gather_scatter(
                "plan", large if rank == 1 else b"", lambda got: [got[1], got[0], got[1]]
            )
            return [first, await agreement.gather_broadcast("commit", b"", _constant(large))]

        outcomes = await run_ranks(self.coordinators(3), body)
        assert outcomes == [[large, large], [b"", large], [large, large]]

    async def test_many_steps_and_operations(self) -> None:
        """Operations follow one another without getting mixed up, though ranks leave them at different times."""
        coordinators = self.coordinators(3)

        async def rank_of(coordinator: Coordinator, seen: list[list[bytes]]) -> None:
            for number in range(4):
                async with coordinator.begin(f"operation {number}", QUIET_SECONDS) as agreement:
                    for step in range(2):
                        own_message = b"%d%d%d" % (number, step, coordinator.rank)
                        seen[coordinator.rank].append(
                            await agreement.gather_broadcast(f"step {step}", own_message, concatenated)
                        )

        seen: list[list[bytes]] = [[], [], []]
        async with anyio.create_task_group() as group:
            for coordinator in coordinators:
                group.start_soon(rank_of, coordinator, seen)
        expected = [b"|".join(b"%d%d%d" % (n, step, rank) for rank in range(3)) for n in range(4) for step in range(2)]
        assert seen == [expected] * 3

    async def test_two_operations_at_once(self) -> None:
        """The n-th ``begin`` of every rank belong together, whichever is entered or ends first."""
        coordinators = self.coordinators(2)
        begun = [
            (coordinator.begin("first", QUIET_SECONDS), coordinator.begin("second", QUIET_SECONDS))
            for coordinator in coordinators
        ]

        async def one_by_one(rank: int, answers: dict[int, list[bytes]]) -> None:
            order = (0, 1) if rank == 0 else (1, 0)
            async with begun[rank][order[0]] as outer, begun[rank][order[1]] as inner:
                by_number = {order[0]: outer, order[1]: inner}
                results: dict[int, bytes] = {}

                async def decide(number: int) -> None:
                    results[number] = await by_number[number].gather_broadcast(
                        "x", b"%d%d" % (number, rank), concatenated
                    )

                async with anyio.create_task_group() as group:
                    group.start_soon(decide, 0)
                    group.start_soon(decide, 1)
            answers[rank] = [results[0], results[1]]

        answers: dict[int, list[bytes]] = {}
        async with anyio.create_task_group() as group:
            group.start_soon(one_by_one, 0, answers)
            group.start_soon(one_by_one, 1, answers)
        assert answers == {rank: [b"00|01", b"10|11"] for rank in range(2)}

    async def test_ranks_in_threads(self) -> None:
        """Every rank may live on an event loop of its own."""
        coordinators = self.coordinators(3)
        answers: dict[int, bytes] = {}

        async def rank_of(coordinator: Coordinator) -> None:
            async with coordinator.begin("threads", QUIET_SECONDS) as agreement:
                answers[coordinator.rank] = await agreement.gather_broadcast(
                    "x", b"%d" % coordinator.rank, concatenated
                )

        async with anyio.create_task_group() as group:
            for coordinator in coordinators:
                group.start_soon(to_thread.run_sync, anyio.run, rank_of, coordinator)
        assert answers == dict.fromkeys(range(3), b"0|1|2")


def _constant(answer: bytes) -> Callable[[Sequence[bytes]], Awaitable[bytes]]:
    """Return a ``gather_broadcast`` that has made up its mind."""

    async def decide(_gathered: Sequence[bytes]) -> bytes:
        return answer

    return decide
