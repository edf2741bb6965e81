"""What every coordinator has to pass.

::

    class TestMine(CoordinatorSuite):
        def coordinators(self, world_size):
            return [MyCoordinator(rank, world_size) for rank in range(world_size)]

Needs pytest and anyio's pytest plugin, which comes with anyio.
"""
# ruff: noqa: S101, PLR2004 -- a suite is made of assertions about small worlds

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from anyio import to_thread

from bcp.errors import InputError, PeerError
from bcp.protocols import Agreement, Coordinator

__all__ = ["CoordinatorSuite", "run_ranks"]

Body = Callable[[int, Agreement], Awaitable[object]]
_QUIET_SECONDS = 60.0  # a timeout that no test reaches


async def run_ranks(
    coordinators: Sequence[Coordinator],
    body: Body,
    what: str | Sequence[str] = "test",
    timeout: float = _QUIET_SECONDS,  # noqa: ASYNC109 -- of silence, not of this call
) -> list[object]:
    """Run ``body(rank, agreement)`` for all ranks at once, in one operation; return what each returned or raised.

    Args:
        coordinators: one of each rank that takes part.
        body: what each of them does in the operation.
        what: what is being done; one for all, or one for each.
        timeout: as for ``begin``, in seconds.

    """
    outcomes: dict[int, object] = {}

    async def one(coordinator: Coordinator, what: str) -> None:
        try:
            async with coordinator.begin(what, timeout) as agreement:
                outcome = await body(coordinator.rank, agreement)
            outcomes[coordinator.rank] = outcome
        except Exception as error:  # noqa: BLE001 -- errors are outcomes
            outcomes[coordinator.rank] = error

    whats = [what] * len(coordinators) if isinstance(what, str) else what
    async with anyio.create_task_group() as group:
        for coordinator, its in zip(coordinators, whats, strict=True):
            group.start_soon(one, coordinator, its)
    return [outcomes[coordinator.rank] for coordinator in coordinators]


class CoordinatorSuite:
    """Subclass it and override :meth:`coordinators`."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run on asyncio."""
        return "asyncio"

    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        """Return new coordinators, one for each rank of a world; they are used as tasks and threads of one process."""
        raise NotImplementedError("override `coordinators`")

    # -- what works ---------------------------------------------------------------------------

    async def test_ranks(self) -> None:
        """Every coordinator knows its place."""
        assert [(each.rank, each.world_size) for each in self.coordinators(3)] == [(0, 3), (1, 3), (2, 3)]

    @pytest.mark.parametrize("world_size", [1, 2, 5])
    async def test_divide(self, world_size: int) -> None:
        """Every rank gets its own answer; rank 0 divides, in a thread of its own."""
        loop_thread = threading.get_ident()
        threads: list[int] = []

        def divide(gathered: Sequence[bytes]) -> list[bytes]:
            threads.append(threading.get_ident())
            return [b"|".join(gathered) + b"->%d" % rank for rank in range(world_size)]

        outcomes = await run_ranks(
            self.coordinators(world_size), lambda rank, agreement: agreement.divide("plan", b"%d" % rank, divide)
        )
        together = b"|".join(b"%d" % rank for rank in range(world_size))
        assert outcomes == [together + b"->%d" % rank for rank in range(world_size)]
        assert len(threads) == 1
        assert threads[0] != loop_thread

    @pytest.mark.parametrize("world_size", [1, 2, 5])
    async def test_decide(self, world_size: int) -> None:
        """All ranks get the one answer."""
        outcomes = await run_ranks(
            self.coordinators(world_size), lambda rank, agreement: agreement.decide("commit", b"%d" % rank, _joined)
        )
        assert outcomes == [b"|".join(b"%d" % rank for rank in range(world_size))] * world_size

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    async def test_all_to_all(self, world_size: int) -> None:
        """Every pair of ranks exchanges its own number of bytes, also none; twice, into new writable memory."""

        def payload(source: int, target: int) -> bytes:
            return bytes([10 * source + target]) * (70_000 * source * (target % 2) + target)

        async def body(rank: int, agreement: Agreement) -> bool:
            for _ in range(2):
                send = [bytearray(payload(rank, target)) for target in range(world_size)]
                sizes = [len(payload(source, rank)) for source in range(world_size)]
                received = await agreement.all_to_all(send, sizes)
                for buffer in send:
                    buffer[:] = bytes(len(buffer))
                for source, data in enumerate(received):
                    assert bytes(data) == payload(source, rank)
                    assert not memoryview(data).readonly
            return True

        assert await run_ranks(self.coordinators(world_size), body) == [True] * world_size

    async def test_large_payloads(self) -> None:
        """Plans and metadata of many MiB pass, empty ones too."""
        large = bytes(range(256)) * (9 << 12)  # 9 MiB

        async def body(rank: int, agreement: Agreement) -> list[bytes]:
            first = await agreement.divide("plan", large if rank == 1 else b"", lambda got: [got[1], got[0], got[1]])
            return [first, await agreement.decide("commit", b"", _constant(large))]

        outcomes = await run_ranks(self.coordinators(3), body)
        assert outcomes == [[large, large], [b"", large], [large, large]]

    async def test_many_steps_and_operations(self) -> None:
        """Operations follow one another without getting mixed up, though ranks leave them at different times."""
        coordinators = self.coordinators(3)

        async def rank_of(coordinator: Coordinator, seen: list[list[bytes]]) -> None:
            for number in range(4):
                async with coordinator.begin(f"operation {number}", _QUIET_SECONDS) as agreement:
                    for step in range(2):
                        mine = b"%d%d%d" % (number, step, coordinator.rank)
                        seen[coordinator.rank].append(await agreement.decide(f"step {step}", mine, _joined))

        seen: list[list[bytes]] = [[], [], []]
        async with anyio.create_task_group() as group:
            for coordinator in coordinators:
                group.start_soon(rank_of, coordinator, seen)
        expected = [b"|".join(b"%d%d%d" % (n, step, rank) for rank in range(3)) for n in range(4) for step in range(2)]
        assert seen == [expected] * 3

    async def test_two_operations_at_once(self) -> None:
        """The n-th ``begin`` of every rank belong together, whichever is entered or ends first."""
        coordinators = self.coordinators(2)
        begun = [(each.begin("first", _QUIET_SECONDS), each.begin("second", _QUIET_SECONDS)) for each in coordinators]

        async def one_by_one(rank: int, answers: dict[int, list[bytes]]) -> None:
            order = (0, 1) if rank == 0 else (1, 0)
            async with begun[rank][order[0]] as outer, begun[rank][order[1]] as inner:
                by_number = {order[0]: outer, order[1]: inner}
                results: dict[int, bytes] = {}

                async def decide(number: int) -> None:
                    results[number] = await by_number[number].decide("x", b"%d%d" % (number, rank), _joined)

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
            async with coordinator.begin("threads", _QUIET_SECONDS) as agreement:
                answers[coordinator.rank] = await agreement.decide("x", b"%d" % coordinator.rank, _joined)

        async with anyio.create_task_group() as group:
            for coordinator in coordinators:
                group.start_soon(to_thread.run_sync, anyio.run, rank_of, coordinator)
        assert answers == dict.fromkeys(range(3), b"0|1|2")

    # -- what fails ---------------------------------------------------------------------------

    @pytest.mark.parametrize("failing", [0, 2])
    async def test_a_rank_fails(self, failing: int) -> None:
        """The rank raises its own error; the others PeerError, in a verb or between verbs; the next operation works."""

        async def body(rank: int, agreement: Agreement) -> object:
            if rank == failing:
                raise KeyError("the reason")
            if rank == 1:
                return await agreement.divide("plan", b"", list)
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
            await agreement.decide("all are here", b"", _joined)
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

    @pytest.mark.parametrize("verb", ["divide", "decide"])
    async def test_rank_0_cannot_answer(self, verb: str) -> None:
        """What the callback of rank 0 raises is rank 0's error."""

        def divide(_gathered: Sequence[bytes]) -> list[bytes]:
            raise ZeroDivisionError("the plan")

        async def decide(_gathered: Sequence[bytes]) -> bytes:
            raise ZeroDivisionError("the plan")

        async def body(_rank: int, agreement: Agreement) -> bytes:
            if verb == "divide":
                return await agreement.divide("plan", b"", divide)
            return await agreement.decide("plan", b"", decide)

        coordinators = self.coordinators(3)
        first, *others = await run_ranks(coordinators, body)
        assert type(first) is ZeroDivisionError
        for outcome in others:
            _check_peer_error(outcome, 0, "ZeroDivisionError: the plan")
        await self._still_usable(coordinators)

    async def test_wrong_number_of_answers(self) -> None:
        """A ``divide`` that leaves a rank out is an error on all ranks."""
        first, second = await run_ranks(self.coordinators(2), lambda _, each: each.divide("plan", b"", lambda _: [b""]))
        assert type(first) is InputError
        _check_peer_error(second, 0, "1 answers for 2 ranks")

    async def test_a_rank_fails_while_data_is_exchanged(self) -> None:
        """Nobody waits for bytes of a rank that has failed."""

        async def body(rank: int, agreement: Agreement) -> object:
            await agreement.all_to_all([b"x"] * 3, [1] * 3)
            if rank == 2:
                raise KeyError("the reason")
            return await agreement.all_to_all([b"x"] * 3, [1] * 3)

        coordinators = self.coordinators(3)
        *others, failed = await run_ranks(coordinators, body)
        assert type(failed) is KeyError
        for outcome in others:
            _check_peer_error(outcome, 2, "the reason")
        await self._still_usable(coordinators)

    async def test_different_operations(self) -> None:
        """Ranks that do different things all learn what the others do."""

        async def body(_rank: int, agreement: Agreement) -> bytes:
            return await agreement.decide("x", b"", _joined)

        coordinators = self.coordinators(3)
        for outcome in await run_ranks(coordinators, body, ["save /a", "save /a", "load /b"]):
            assert type(outcome) is InputError
            assert "save /a" in str(outcome)
            assert "rank 2: load /b" in str(outcome)
        await self._still_usable(coordinators)

    async def test_different_steps(self) -> None:
        """The same for ranks that are in different steps."""
        coordinators = self.coordinators(3)
        steps = ["plan", "commit", "plan"]
        for outcome in await run_ranks(coordinators, lambda rank, each: each.decide(steps[rank], b"", _joined)):
            assert type(outcome) is InputError
            assert "decide 'plan'" in str(outcome)
            assert "rank 1: decide 'commit'" in str(outcome)
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("early", [0, 1])
    async def test_a_rank_leaves_early(self, early: int) -> None:
        """A rank that takes no part in a step is not waited for."""

        async def body(rank: int, agreement: Agreement) -> bytes:
            if rank == early:
                return b"done"
            return await agreement.decide("commit", b"", _joined)

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
            return await agreement.decide("commit", b"", _joined)

        coordinators = self.coordinators(3)
        others = [each for each in coordinators if each.rank != late]
        for outcome in await run_ranks(others, body, timeout=0.3):
            _check_peer_error(outcome, late, "has not begun")
        [outcome] = await run_ranks([coordinators[late]], body, timeout=_QUIET_SECONDS)
        _check_peer_error(outcome, late, "has not begun")
        await self._still_usable(coordinators)

    @pytest.mark.parametrize("stuck", [0, 1])
    async def test_a_rank_falls_silent(self, stuck: int) -> None:
        """A rank that has joined and then gives no sign of life is given up after the timeout."""
        coordinators = self.coordinators(3)
        joined, released = threading.Event(), threading.Event()

        async def stuck_body(_rank: int, agreement: Agreement) -> None:
            await agreement.decide("all are here", b"", _joined)
            joined.set()
            released.wait()  # the event loop of this rank stands still

        async def body(_rank: int, agreement: Agreement) -> bytes:
            await agreement.decide("all are here", b"", _joined)
            return await agreement.decide("commit", b"", _joined)

        outcomes: list[object] = []

        async def others() -> None:
            live = [each for each in coordinators if each.rank != stuck]
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
        outcomes = await run_ranks(coordinators, lambda rank, each: each.decide("again", b"%d" % rank, _joined))
        assert outcomes == [b"|".join(b"%d" % each.rank for each in coordinators)] * len(coordinators)


async def _joined(gathered: Sequence[bytes]) -> bytes:
    """Decide on what was gathered."""
    return b"|".join(gathered)


def _constant(answer: bytes) -> Callable[[Sequence[bytes]], Awaitable[bytes]]:
    """Return a ``decide`` that has made up its mind."""

    async def decide(_gathered: Sequence[bytes]) -> bytes:
        return answer

    return decide


def _check_peer_error(outcome: object, rank: int, cause: str) -> None:
    """Check that a rank was told who is to blame, and why."""
    assert type(outcome) is PeerError, outcome
    assert (outcome.rank, cause in outcome.cause) == (rank, True), outcome
