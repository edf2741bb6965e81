"""How bulk data is laid out over connections, and whom a rank measures its way to."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from bcp._load.reads import speeds
from bcp._messages.coordination import Card
from bcp._messages.planning import Rate
from bcp.coordinators.exchange import Exchange, _flows
from bcp.coordinators.mesh import _listen

MIB = 1 << 20

pytestmark = pytest.mark.anyio


async def elsewhere(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of other hosts that each rank sends probes to."""

    async def card_of(rank: int) -> Card:
        return Card("", 1, "", hosts[rank], "", tls=False)

    found = []
    for rank, host in enumerate(hosts):
        exchange = Exchange(SimpleNamespace(rank=rank, network=host), card_of, report_peer_failure=None)  # type: ignore[arg-type]  # as much of a mesh as is asked for
        found.append(await exchange._elsewhere(len(hosts)))
    return found


async def test_ranks_of_one_host_measure_nothing() -> None:
    assert await elsewhere(["a"] * 5) == [[]] * 5


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abab", "aaaabbbb", "aabbcc", "abcabc", "aaab", "aabbbc", "abacad"])
async def test_every_rank_measures_its_way_to_other_hosts(hosts: str) -> None:
    for rank, targets in enumerate(await elsewhere(hosts)):
        assert 1 <= len(targets) <= 2
        assert len(set(targets)) == len(targets)
        assert all(hosts[target] != hosts[rank] for target in targets)


async def test_ranks_of_a_host_measure_their_ways_to_different_ranks() -> None:
    found = await elsewhere("aaaabbbbcccc")
    assert found[:4] == [[4, 8], [5, 9], [6, 10], [7, 11]]


@pytest.mark.parametrize("size", [2, 3, 5, 100])
@pytest.mark.parametrize("nbytes", [0, 1, 16 * MIB, 16 * MIB + 1, 64 * MIB, 200 * MIB + 7])
async def test_a_transfer_is_cut_into_equal_parts(size: int, nbytes: int) -> None:
    flows = list(_flows(memoryview(bytes(nbytes)), size))
    assert [flow for flow, _, _ in flows] == list(range(len(flows)))
    assert sum(len(part) for _, part, _ in flows) == nbytes
    assert (
        max((len(part) for _, part, _ in flows), default=0) - min((len(part) for _, part, _ in flows), default=0) <= 1
    )
    assert len(flows) <= max(1, 4 // (size - 1))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([5e8, 6e8, 4e8, 7e8], None),
        ([math.inf] * 3, None),
        ([1e8, 1e9], [0.1, 1.0]),
        ([1e9, 1e8, 1e9, 1e9], [1.0, 0.1, 1.0, 1.0]),
        ([1e9, 1e9, 1e9, 9e9], None),  # one that is faster than all others slows nobody down
        ([1e9, 1.0, 1e9, 1e9], [1.0, 1e-3, 1.0, 1.0]),
    ],
)
async def test_only_much_slower_ranks_count_as_slow(rates: list[float], expected: list[float] | None) -> None:
    found = speeds([Rate(rate).encode() for rate in rates])
    assert (found if found is None else found.tolist()) == expected


@pytest.mark.parametrize("patience", [0.5, 6.0, 7.0, 120.0, 1e6, math.inf])
async def test_a_silent_peer_is_given_up_after_the_timeout(patience: float) -> None:
    listener = _listen("127.0.0.1", patience)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, pause, probes = (listener.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    listener.close()
    assert idle + probes * pause == max(4, min(patience, 32_000))  # whole seconds, four of them at least
