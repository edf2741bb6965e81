"""Agreement over a ``torch.distributed`` Store: every job has one already, and it is no process group."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections import deque
from contextlib import AbstractAsyncContextManager, suppress
from typing import ClassVar
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import Store

from bcp.coordinators.hosts import ProcessGroupMember
from bcp.coordinators.messages import PeerInfo
from bcp.coordinators.operation import Operation
from bcp.coordinators.roll_call import RollCall
from bcp.coordinators.store.channel import StoreChannel
from bcp.coordinators.store.mailbox import Mailbox
from bcp.coordinators.store_client import StoreClient
from bcp.errors import InputError, PeerError
from bcp.protocols import Agreement
from bcp.runtime.threads import in_thread

__all__ = ["StoreCoordinator"]

_LINGER_SECONDS = 5.0  # how long rank 0, whose process usually is the store, waits for readers when it exits


class StoreCoordinator:
    """A :class:`~bcp.protocols.Coordinator` over a store; made for up to some thousand ranks (a star around rank 0).

    One of the same prefix for each rank, and only one. Any store will do: TCPStore, FileStore, HashStore,
    PrefixStore. All calls are short, so that a store that is shared with others is not held up.

    Attributes:
        rank: this rank.
        world_size: how many ranks take part.
    """

    _lingering: ClassVar[WeakSet[StoreCoordinator]] = WeakSet()

    def __init__(
        self, store: Store | StoreClient, rank: int, world_size: int, prefix: str = "bcp", address: str | None = None
    ) -> None:
        """Coordinate over ``store``, whose keys below ``prefix`` belong to this coordinator.

        ``address`` is this host's, for the bulk data of ``all_to_all``: nothing listens on any other one. None: see
        :meth:`over`.
        """
        if not 0 <= rank < world_size:
            raise InputError(f"rank {rank} is not one of the ranks 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self._client = StoreClient.of(store)
        self._roll = RollCall(self._client, prefix, rank, world_size, address=address)
        self._numbers = itertools.count()
        self._left: deque[Mailbox] = deque()
        self._pid = os.getpid()

    @classmethod
    def over(cls, group: dist.ProcessGroup | None = None, address: str | None = None) -> StoreCoordinator:
        """Coordinate the ranks of a process group, over a private connection to the group's own store.

        The group's collectives are not used. Every member has to call this equally often for one group.

        Args:
            group: None for the default group.
            address: this host's, for bulk data; None: the one that ``BCP_ADDRESS`` names, else the one at which the
                other hosts reach this one, else the loopback.

        Raises:
            InputError: torch.distributed is not initialised, or this rank is not a member.

        """
        seat = ProcessGroupMember.of(group)
        coordinator = cls(seat.store, seat.rank, seat.world_size, seat.prefix, address)
        if seat.rank == 0:
            cls._lingering.add(coordinator)
        return coordinator

    def __repr__(self) -> str:
        return f"<StoreCoordinator, {self._roll!r}>"

    def begin(self, what: str, timeout: float) -> AbstractAsyncContextManager[Agreement]:
        """Take this rank's place in the next operation."""
        if os.getpid() != self._pid:
            raise InputError(
                f"{self!r} was made in process {self._pid} and this is its fork {os.getpid()}: only the rank itself "
                "can take part; pass coordinator=SoloCoordinator() to save or load alone"
            )
        mailbox = Mailbox(self._roll, next(self._numbers), self.rank, self.world_size)
        hello = PeerInfo.of(self.rank, what)
        channel = StoreChannel(mailbox, hello, self.world_size, timeout, left=self._left)
        return Operation(channel, hello, self.world_size, patience=timeout, address=self._own_address)

    async def _own_address(self) -> str:
        return await in_thread(self._roll.address)

    def _linger(self, deadline: float) -> None:
        """Wait until all ranks have left the operations that this one has left."""
        with suppress(PeerError):
            while self._left and os.getpid() == self._pid and (left := deadline - time.monotonic()) > 0:
                if self._client.call_blocking(self._left[0].sweep, seconds=left):
                    self._left.popleft()
                else:
                    time.sleep(0.01)

    @classmethod
    def _linger_all(cls) -> None:
        """At exit of rank 0, whose process often is the store, wait shortly for ranks that still read an answer."""
        deadline = time.monotonic() + _LINGER_SECONDS
        for coordinator in list(cls._lingering):
            coordinator._linger(deadline)  # noqa: SLF001 -- this class's own


atexit.register(StoreCoordinator._linger_all)  # noqa: SLF001 -- this module's own
