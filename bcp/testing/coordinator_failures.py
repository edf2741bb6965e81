"""Operations of ranks of one process, and tests that every coordinator has to pass when a rank fails."""
# ruff: noqa: S101, PLR2004 -- a suite is made of assertions about small worlds

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from anyio import to_thread

from bcp.errors import InputError, PeerError
from bcp.protocols import REFUSED, Agreement, Coordinator

__all__ = ["QUIET_SECONDS", "CoordinatorFailures", "concatenated", "run_ranks"]

Body = Callable[[int, Agreement], Awaitable[object]]
QUIET_SECONDS = 60.0  # a timeout that no test reaches


async def run_ranks(
    coordinators: Sequence[Coordinator],
    body: Body,
    operation: str | Sequence[str] = "test",
    timeout: float = QUIET_SECONDS,  # noqa: ASYNC109 -- of silence, not of this call
) -> list[object]:
    """Run ``body(rank, agreement)`` for all ranks at once, in one operation; return the result or error of each.

    ``operation`` is the operation's name, one for all or one for each.
    """
    outcomes: dict[int, object] = {}

    async def one(coordinator: Coordinator, name: str) -> None:
        try:
            async with coordinator.begin(name, timeout) as agreement:
                outcome = await body(coordinator.rank, agreement)
            outcomes[coordinator.rank] = outcome
        except Exception as error:  # noqa: BLE001 -- errors are outcomes
            outcomes[coordinator.rank] = error

    operations = [operation] * len(coordinators) if isinstance(operation, str) else operation
    async with anyio.create_task_group() as group:
        for coordinator, name in zip(coordinators, operations, strict=True):
            group.start_soon(one, coordinator, name)
    return [outcomes[coordinator.rank] for coordinator in coordinators]


async def concatenated(gathered: Sequence[bytes]) -> bytes:
    """Return all payloads as one."""
    return b"|".join(gathered)


class CoordinatorFailures:
    """The tests of failures, a part of :class:`~bcp.testing.coordinator_suite.CoordinatorSuite`."""

    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        """Return new coordinators, one for each rank of a world; they are used as tasks and threads of one process."""
        raise NotImplementedError("override `coordinators`")

    @pytest.mark.parametrize("failing", [0, 2])
    async def test_a_rank_fails(self, failing: int) -> None:
        """The rank raises its own error; the others PeerError, in a verb or between verbs; the next operation works."""

        async def body(rank: int, agreement: Agreement) -> object:
            if rank == failing:
                raise KeyError("the reason")
            if rank == 1:
                return await agreement.gather_scatter("plan", b"", list)
            await anyio.sleep_forever()
            return None

        coordinators = self.coordinators(4)
        outcomes = await run_ranks(coordinators, body)
        for rank, outcome in enumerate(outcomes):
            if rank == failing:
                assert type(outcome) is KeyError
            else:
                _check_peer_error(outcome, failing, "KeyError: 'the reason'")
        await self._still_usable(coordinators)

    async def test_a_rank_is_cancelled(self) -> None:
        """Cancellation from outside stays cancellation, and the others are told."""
        coordinators = self.coordinators(3)
        scope = anyio.CancelScope()

        async def body(rank: int, agreement: Agreement) -> object:
            await agreement.gather_broadcast("all are here", b"", concatenated)
            if rank == 1:
                scope.cancel()
            await anyio.sleep_forever()
            return None

        outcomes: list[object] = []

        async def cancelled_rank() -> None:
            with scope:
                await run_ranks([coordinators[1]], body)
            outcomes.append(scope.cancelled_caught)

        async with anyio.create_task_group() as group:
            group.start_soon(cancelled_rank)
            outcomes.extend(await run_ranks([coordinators[0], coordinators[2]], body))
        cancelled, *others = sorted(outcomes, key=lambda outcome: isinstance(outcome, PeerError))
        assert cancelled is True
        for outcome in others:
            _check_peer_error(outcome, 1, "cancelled")
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("verb", ["gather_scatter", "gather_broadcast"])
    async def test_rank_0_cannot_answer(self, verb: str) -> None:
        """An error of rank 0's callback is rank 0's error."""

        def divide(_gathered: Sequence[bytes]) -> list[bytes]:
            raise ZeroDivisionError("the plan")

        async def decide(_gathered: Sequence[bytes]) -> bytes:
            raise ZeroDivisionError("the plan")

        async def body(_rank: int, agreement: Agreement) -> bytes:
            if verb == "gather_scatter":
                return await agreement.gather_scatter("plan", b"", divide)
            return await agreement.gather_broadcast("plan", b"", decide)

        coordinators = self.coordinators(3)
        first, *others = await run_ranks(coordinators, body)
        assert type(first) is ZeroDivisionError
        for outcome in others:
            _check_peer_error(outcome, 0, "ZeroDivisionError: the plan")
        await self._still_usable(coordinators)

    async def test_wrong_number_of_answers(self) -> None:
        """A ``gather_scatter`` that leaves a rank out is an error on all ranks."""
        first, second = await run_ranks(
            self.coordinators(2), lambda _, agreement: agreement.gather_scatter("plan", b"", lambda _: [b""])
        )
        assert type(first) is InputError
        _check_peer_error(second, 0, "1 answers for 2 ranks")

    async def test_a_rank_fails_while_data_is_exchanged(self) -> None:
        """Nobody waits for bytes of a rank that has failed."""

        async def body(rank: int, agreement: Agreement) -> object:
            await agreement.all_to_all([b"x"] * 3, [bytearray(1) for _ in range(3)])
            if rank == 2:
                raise KeyError("the reason")
            await agreement.all_to_all([b"x"] * 3, [bytearray(1) for _ in range(3)])
            return None

        coordinators = self.coordinators(3)
        *others, failed = await run_ranks(coordinators, body)
        assert type(failed) is KeyError
        for outcome in others:
            _check_peer_error(outcome, 2, "the reason")
        await self._still_usable(coordinators)

    async def test_different_operations(self) -> None:
        """Ranks that do different things all learn the operations of the others."""

        async def body(_rank: int, agreement: Agreement) -> bytes:
            return await agreement.gather_broadcast("x", b"", concatenated)

        coordinators = self.coordinators(3)
        for outcome in await run_ranks(coordinators, body, ["save /a", "save /a", "load /b"]):
            assert type(outcome) is InputError
            assert "save /a" in str(outcome)
            assert "rank 2: load /b" in str(outcome)
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("refused", [0, 1, 2])
    async def test_a_refused_call_agrees_with_any(self, refused: int) -> None:
        """A rank whose arguments were refused takes part, in a chain of ranks too, and tells its error."""

        async def body(rank: int, agreement: Agreement) -> bytes:
            return await agreement.gather_broadcast("begin", b"refused" if rank == refused else b"", concatenated)

        operations = [REFUSED if rank == refused else "save /a" for rank in range(4)]
        coordinators = self.coordinators(4)
        expected = b"|".join(b"refused" if rank == refused else b"" for rank in range(4))
        assert await run_ranks(coordinators, body, operations) == [expected] * 4
        await self._still_usable(coordinators)

    async def test_different_steps(self) -> None:
        """The same for ranks that are in different steps."""
        coordinators = self.coordinators(3)
        steps = ["plan", "commit", "plan"]
        for outcome in await run_ranks(
            coordinators, lambda rank, agreement: agreement.gather_broadcast(steps[rank], b"", concatenated)
        ):
            assert type(outcome) is InputError
            assert "gather_broadcast 'plan'" in str(outcome)
            assert "rank 1: gather_broadcast 'commit'" in str(outcome)
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("early", [0, 1])
    async def test_a_rank_leaves_early(self, early: int) -> None:
        """A rank that takes no part in a step is not waited for."""

        async def body(rank: int, agreement: Agreement) -> bytes:
            if rank == early:
                return b"done"
            return await agreement.gather_broadcast("commit", b"", concatenated)

        coordinators = self.coordinators(3)
        outcomes = await run_ranks(coordinators, body)
        for rank, outcome in enumerate(outcomes):
            if rank == early:
                assert outcome == b"done"
            else:
                _check_peer_error(outcome, early, "left early")
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("late", [0, 2])
    async def test_a_rank_is_late(self, late: int) -> None:
        """Ranks do not wait longer than the timeout; the late one learns of it, and the next operation works."""

        async def body(_rank: int, agreement: Agreement) -> bytes:
            return await agreement.gather_broadcast("commit", b"", concatenated)

        coordinators = self.coordinators(3)
        others = [coordinator for coordinator in coordinators if coordinator.rank != late]
        for outcome in await run_ranks(others, body, timeout=1.0):
            _check_peer_error(outcome, late, "has not begun")
        [outcome] = await run_ranks([coordinators[late]], body, timeout=QUIET_SECONDS)
        _check_peer_error(outcome, late, "has not begun")
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("stuck", [0, 1])
    async def test_a_rank_falls_silent(self, stuck: int) -> None:
        """A rank that has joined and then gives no sign of life is given up after the timeout."""
        coordinators = self.coordinators(3)
        joined, released = threading.Event(), threading.Event()

        async def stuck_body(_rank: int, agreement: Agreement) -> None:
            await agreement.gather_broadcast("all are here", b"", concatenated)
            joined.set()
            released.wait()  # the event loop of this rank stands still

        async def body(_rank: int, agreement: Agreement) -> bytes:
            await agreement.gather_broadcast("all are here", b"", concatenated)
            return await agreement.gather_broadcast("commit", b"", concatenated)

        outcomes: list[object] = []

        async def others() -> None:
            live = [coordinator for coordinator in coordinators if coordinator.rank != stuck]
            try:
                outcomes.extend(await run_ranks(live, body, timeout=1.0))
            finally:
                released.set()

        def in_a_thread() -> None:
            anyio.run(run_ranks, [coordinators[stuck]], stuck_body)

        async with anyio.create_task_group() as group:
            group.start_soon(to_thread.run_sync, in_a_thread)
            await others()
        assert joined.is_set()
        for outcome in outcomes:
            _check_peer_error(outcome, stuck, "no sign of life")
        await self._still_usable(coordinators)

    async def _still_usable(self, coordinators: Sequence[Coordinator]) -> None:
        """Check that the next operation works."""
        outcomes = await run_ranks(
            coordinators, lambda rank, agreement: agreement.gather_broadcast("again", b"%d" % rank, concatenated)
        )
        assert outcomes == [b"|".join(b"%d" % coordinator.rank for coordinator in coordinators)] * len(coordinators)


def _check_peer_error(outcome: object, rank: int, cause: str) -> None:
    """Check that a rank was told the failed rank, and the cause."""
    assert type(outcome) is PeerError, outcome
    assert (outcome.rank, cause in outcome.cause) == (rank, True), outcome
