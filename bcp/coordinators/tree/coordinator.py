"""Agreement over a tree of gRPC streams: the coordinator of jobs of more than one rank."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from weakref import finalize

import torch.distributed as dist

from bcp.coordinators.hosts import ProcessGroupMember
from bcp.coordinators.operation import Operation
from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.tree.channel import GrpcChannel
from bcp.coordinators.tree.link import Traffic
from bcp.coordinators.tree.loop import CoordinatorLoop, current_loop
from bcp.coordinators.tree.node import Node
from bcp.coordinators.tree.rendezvous import Addresses, MemoryRendezvous, Rendezvous, StoreRendezvous, Tree
from bcp.coordinators.tree.transport import Tls
from bcp.errors import InputError
from bcp.protocols import Agreement
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_thread

__all__ = ["FANOUT", "GrpcCoordinator"]

FANOUT = 16
"""Children of a rank, on its host and above other hosts; three levels of hosts are 4,000.

Few levels count more than few children: in a process that trains, each wake-up may wait 5 ms for the interpreter.
"""

_CLOSE_SECONDS = 8.0  # longer than a node's own limit


class GrpcCoordinator:
    """A :class:`~bcp.protocols.Coordinator` over a tree; made for up to some 100,000 ranks.

    Every rank has one stream to its parent, which stays open. Payloads of all ranks are gathered on their way up, each
    distinct payload once. Answers go down the same way. A rank watches its neighbours only. Nothing is sent or opened
    before the first operation.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: Rendezvous, tls: Tls | None = None) -> None:
        if not 0 <= rank < world_size:
            raise InputError(f"rank {rank} is not one of the ranks 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous
        self._tls = tls
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._lock = process_lock()
        self._loop: CoordinatorLoop | None = None
        self._node: Node | None = None
        self._closed = False

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup | None = None,
        address: str | None = None,
        fanout: int = FANOUT,
        tls: Tls | None = None,
    ) -> GrpcCoordinator:
        """Coordinate the ranks of a process group; they meet over a private connection to the group's own store.

        The group's collectives are not used. Every member has to call this equally often for one group.

        Args:
            group: None for the default group.
            address: the only address of this host on which to listen. None: the one that ``BCP_ADDRESS`` names, else
                the one at which the other hosts reach this one, else the loopback.
            fanout: the number of children of a rank, on its own host and on others; the same on all ranks.
            tls: certificates, for an untrusted network; they cover the tree and the bulk data of loads. All ranks have
                them, or none.

        Raises:
            InputError: torch.distributed is not initialised, or this rank is not a member.

        """
        member = ProcessGroupMember.of(group)
        rendezvous = StoreRendezvous(
            member.store, f"{member.prefix}/tree", member.rank, member.world_size, fanout, address
        )
        return cls(member.rank, member.world_size, rendezvous, tls)

    @classmethod
    def at(
        cls,
        rank: int,
        addresses: Sequence[str],
        token: str,
        *,
        hosts: Sequence[str] | None = None,
        fanout: int = FANOUT,
        tls: Tls | None = None,
    ) -> GrpcCoordinator:
        """Coordinate ranks whose addresses are known beforehand; needs no process group and no store.

        Args:
            rank: this rank.
            addresses: ``"host:port"`` of every rank; this rank listens on its own, on that address only.
            token: a secret of this job, the same on all ranks, as from ``secrets.token_hex()``.
            hosts: the name of every rank's host; None: the hosts of the addresses.
            fanout: the number of children of a rank, on its own host and on others; the same on all ranks.
            tls: certificates, for an untrusted network; they cover the tree and the bulk data of loads. All ranks have
                them, or none.

        """
        return cls(rank, len(addresses), Addresses(rank, addresses, token, fanout, hosts), tls)

    @classmethod
    def in_memory(cls, tree: Tree) -> list[GrpcCoordinator]:
        """Return a coordinator for each rank of a tree, all in this process."""
        ranks = enumerate(MemoryRendezvous.all_of(tree))
        return [cls(rank, len(tree.parents), rendezvous) for rank, rendezvous in ranks]

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not connected" if self._node is None else repr(self._node)
        return f"<GrpcCoordinator of rank {self.rank} of {self.world_size}, {self._rendezvous!r}: {state}>"

    @property
    def tls(self) -> Tls | None:
        """The certificates of the tree and of bulk data; None: there is no encryption."""
        return self._tls

    @property
    def traffic(self) -> Mapping[int, Traffic]:
        """The traffic between this rank and each neighbour in the tree; empty before the first operation."""
        return {} if self._node is None else self._node.traffic

    def begin(self, operation: str, timeout: float) -> AbstractAsyncContextManager[Agreement]:
        """Take this rank's place in the next operation."""
        if os.getpid() != self._pid:
            raise InputError(
                f"{self!r} was made in process {self._pid} and this is its fork {os.getpid()}: only the rank itself "
                "can take part; pass coordinator=SoloCoordinator() to save or load alone"
            )
        if self._closed:
            raise InputError(f"{self!r} cannot begin {operation!r}: it was closed")
        node, loop = self._connect()
        info = PeerInfo.of(self.rank, operation)
        channel = GrpcChannel(node, loop, next(self._numbers), info, self.world_size, timeout)
        return Operation(channel, info, self.world_size, patience=timeout, address=self._own_address, tls=self._tls)

    def close(self) -> None:
        """Say goodbye to the neighbours, and close the connections; blocks for some seconds at most. Idempotent.

        The end of the process does the same. Operations under way on other ranks end with an error.
        """
        self._closed = True
        if self._node is not None and self._loop is not None and os.getpid() == self._pid:
            with suppress(TimeoutError, InputError):
                self._loop.run(self._node.aclose()).result(_CLOSE_SECONDS)

    async def aclose(self) -> None:
        """Close the coordinator as :meth:`close` does, without blocking the event loop."""
        self._closed = True
        if self._node is not None and self._loop is not None and os.getpid() == self._pid:
            with suppress(InputError):
                await asyncio.shield(asyncio.wrap_future(self._loop.run(self._node.aclose())))

    async def _own_address(self) -> str:
        """Return this host's address; a method, so that an operation keeps its coordinator, and with it the node."""
        node, loop = self._connect()
        await asyncio.wrap_future(loop.run(node.placed()))
        return (await in_thread(self._rendezvous.bind_address)).rpartition(":")[0].strip("[]")

    def _connect(self) -> tuple[Node, CoordinatorLoop]:
        """Return this rank's node; the first call makes it."""
        with self._lock:
            if self._node is None or self._loop is None:
                if self._tls is not None:
                    self._tls.check()
                self._loop = current_loop()
                self._node = Node(PeerInfo.of(self.rank, ""), self._rendezvous, self._tls)
                self._loop.residents.add(self._node)
                finalize(self, _let_go, self._loop, self._node).atexit = False  # the loop closes its residents itself
            return self._node, self._loop


def _let_go(loop: CoordinatorLoop, node: Node) -> None:
    """Close the node of a coordinator that was collected."""
    if loop.alive:
        with suppress(InputError):
            loop.run(node.aclose())
