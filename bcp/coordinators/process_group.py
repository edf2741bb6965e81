"""The exchange of one load over a process group of torch's own, which ends with the load.

The backend's object is made directly, below a prefix that the ranks of the load have drawn. ``dist.new_group`` would
count the group in every process. It also needs all ranks of the job, in the order of the training thread's calls.

gloo is tested here. The code for NCCL follows torch 2.13's sources and has never been run.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import anyio
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from bcp.coordinators.hosts import store_of_job
from bcp.coordinators.store_client import StoreClient
from bcp.errors import BcpError, InputError
from bcp.protocols import Coordinator
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_pool, in_thread

__all__ = ["GroupExchange", "end_gloo_groups", "exchange_device", "join_group"]

_FOREVER = timedelta(days=365)  # a rank may be late for a round for as long as its storage is slow; see GroupExchange
_AT_ONCE = timedelta(milliseconds=1)
_LEAST_JOIN_SECONDS = 10.0  # a busy host is late, not dead; of those that are dead the coordinator tells
_WORD_SECONDS = 2.0  # what the word of a failed rank needs, with a margin
_CAUSE_SECONDS = 10.0  # what the coordinator needs to name the rank whose end broke the joining of the others
_CLOSING_TAG = (1 << 31) - 1  # of a message that no rank sends
_CLEAN_UP_ONLY = "2"

ReportFailure = Callable[[int, str], Awaitable[Exception]]
"""Tells all ranks that the connection to a rank has failed, and why; returns the error that ends the operation."""


def exchange_device(exchange: str, coordinator: Coordinator) -> torch.device | None:
    """Check that this process can take part in an exchange; call it in the caller's thread.

    Return the device of the chunks: the caller's current one for NCCL, None for host memory. Raises InputError if a
    process group cannot be made here, or would send bytes unencrypted that the coordinator encrypts.
    """
    if exchange == "sockets" or coordinator.world_size == 1:
        return None
    if getattr(coordinator, "tls", None) is not None:
        raise InputError(
            f"exchange={exchange!r} sends bytes unencrypted, and the coordinator has certificates; use "
            "exchange='sockets', which these cover"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            f"exchange={exchange!r} needs torch.distributed: call torch.distributed.init_process_group on every rank "
            "before the load, or use exchange='sockets'"
        )
    if exchange == "gloo":
        if not dist.is_gloo_available():
            raise InputError(f"torch {torch.__version__} was built without gloo; use exchange='sockets'")
        return None
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        lacking = "an accelerator" if dist.is_nccl_available() else "NCCL"
        raise InputError(
            f"exchange='nccl' needs NCCL and an accelerator on every rank; rank {coordinator.rank} (torch "
            f"{torch.__version__}) lacks {lacking}; use exchange='sockets' or 'gloo'"
        )
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == _CLEAN_UP_ONLY:
        raise InputError(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=2 lets torch go on after an error of NCCL with bytes that never arrived; "
            "unset it, or use exchange='sockets'"
        )
    return torch.device("cuda", torch.cuda.current_device())


async def join_group(nonce: str, rank: int, world_size: int, *, device: torch.device | None, patience: float) -> Any:
    """Make a new process group of all ranks of a load, with NCCL for an accelerator ``device``, else with gloo.

    The random ``nonce``, the same on all ranks, is a part of the keys in the store. ``patience`` is the number of
    seconds that others may need. The thread that makes the group is left behind if the store or a peer does not answer.
    This thread holds no buffer. Raises PeerError if the store does not answer, or ranks do not come. Raises BcpError if
    torch cannot make the group on this rank. A rank that leaves while others join breaks their connections, too. So the
    error waits until the coordinator would have named such a rank, which cancels this call.
    """
    client, patience = StoreClient(*store_of_job()), max(patience, _LEAST_JOIN_SECONDS)
    backend, make = ("nccl", _nccl_group) if _is_accelerator(device) else ("gloo", _gloo_group)
    outcome = await client.call(
        _attempt, make, client, nonce, rank, world_size, device, timedelta(seconds=patience), seconds=2 * patience
    )
    if isinstance(outcome, RuntimeError):
        await anyio.sleep(_CAUSE_SECONDS)
        raise BcpError(
            f"rank {rank} cannot join a {backend} group of {world_size} ranks: {outcome}; look at GLOO_SOCKET_IFNAME "
            "or NCCL_SOCKET_IFNAME, or use exchange='sockets'"
        ) from outcome
    return outcome


def _is_accelerator(device: torch.device | None) -> bool:
    return device is not None and device.type != "cpu"


def _attempt(make: Callable[..., Any], *args: Any) -> Any:
    """Call ``make``, and return its error too: the store's thread would take a raised one for the store's."""
    try:
        return make(*args)
    except RuntimeError as error:
        return error


def _prefixed(client: StoreClient, nonce: str) -> PrefixStore:
    return PrefixStore(f"bcp/exchange/{nonce}", client.store)


def _gloo_group(
    client: StoreClient, nonce: str, rank: int, world_size: int, device: torch.device | None, timeout: timedelta
) -> Any:
    """Connect with all other ranks, at the addresses that gloo chooses."""
    del device
    return dist.ProcessGroupGloo(_prefixed(client, nonce), rank, world_size, timeout)


def _nccl_group(
    client: StoreClient, nonce: str, rank: int, world_size: int, device: torch.device, timeout: timedelta
) -> Any:
    """Make NCCL's communicator now, in a thread that can be left behind: the first round could not be."""
    del timeout
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER  # noqa: SLF001 -- as torch does; else torch's watchdog ends the process in a slow round
    group = dist.ProcessGroupNCCL(_prefixed(client, nonce), rank, world_size, options)
    torch.cuda.set_device(device)  # of this thread, which ends with the call
    group.eager_connect_single_device(device)
    return group


class GroupExchange:
    """This rank's side of the rounds of one load over a process group of their own.

    A wait in torch has no time limit here: the coordinator knows which rank is silent, and cancels the exchange. Then
    the group is ended, which wakes the thread that waits. A connection that is lost between two ranks that live is
    noticed by the kernel or by NCCL, not by bcp.
    """

    def __init__(
        self,
        group: Any,  # a backend of torch's, as from join_group
        rank: int,
        *,
        device: torch.device | None,  # of a round's tensors; None for host memory
        on_stream: Callable[[], AbstractContextManager[None]],  # in a worker thread; sets the tensors' streams
        report: ReportFailure,  # tells the other ranks of a failed connection
    ) -> None:
        """Take ownership of a group."""
        self._group = group
        self._rank = rank
        self._peers = [peer for peer in range(group.size()) if peer != rank]
        self._on_accelerator = _is_accelerator(device)
        self._on_stream = on_stream
        self._report = report
        self._rounds = 0
        self._ended = False
        self._ending = process_lock()
        self._threads = ThreadPoolExecutor(2, "bcp-process-group")  # one waits; the other one ends the group meanwhile

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open"
        return f"<GroupExchange of rank {self._rank} with {len(self._peers)} others: {state}, {self._rounds} rounds>"

    async def all_to_all(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
        """Send ``send[r]`` to every rank r and fill ``receive[r]``; uint8, contiguous, empty for no message.

        All ranks call it equally often. The tensors belong to the caller again when this returns or raises.
        """
        self._rounds += 1
        transfer = self._collective if self._on_accelerator else self._messages
        try:
            await in_pool(self._threads, transfer, send, receive, interrupt=self._end_soon)
        except _TransferError as error:
            try:  # the word goes out before the other connections close, else this rank is taken for the cause
                if error.rank == self._rank:  # NCCL names no rank: the one that has failed says so itself
                    await anyio.sleep(_WORD_SECONDS)
                failure = await self._report(error.rank, str(error))
            finally:
                await self._end()
            raise failure from error

    async def aclose(self, *, failed: bool) -> None:
        """Release the group and the threads."""
        with anyio.CancelScope(shield=True):
            if failed:
                await self._end()
            await in_pool(self._threads, self._drop)
            await in_thread(self._threads.shutdown)

    # -- in a thread --------------------------------------------------------------------------

    def _messages(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
        """Exchange messages one by one over gloo; blocks."""
        works: deque[tuple[int, Any]] = deque()
        work, peer = None, self._rank
        try:
            for peer in self._peers:
                if receive[peer].numel():
                    works.append((peer, self._group.recv([receive[peer]], peer, self._rounds)))
                if send[peer].numel():
                    works.append((peer, self._group.send([send[peer]], peer, self._rounds)))
            while works:
                peer, work = works.popleft()
                work.wait(_FOREVER)
        except RuntimeError as error:
            raise _TransferError(
                peer, f"the connection between rank {self._rank} and rank {peer} failed: {error}"
            ) from error
        finally:
            # gloo writes to no buffer whose work is gone, not even in a connection that is still open
            works.clear()
            del work

    def _collective(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
        """Exchange in one collective on the device, after the queued work of its side stream; blocks until done."""
        with self._on_stream():
            device = receive[self._rank].device
            try:
                self._group.alltoall(list(receive), list(send)).wait()  # the current stream waits for it, the host not
                done = torch.cuda.Event(blocking=True)
                done.record(torch.cuda.current_stream(device))
                done.synchronize()
            except RuntimeError as error:
                cause = f"the exchange over NCCL failed on rank {self._rank} ({device}): {error}"
                raise _TransferError(self._rank, cause) from error
        if self._ended:
            raise _TransferError(self._rank, f"the exchange over NCCL was ended on rank {self._rank}")

    def _stop(self) -> None:
        """End the group: every wait in it raises. Connections to all other ranks close."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            if self._on_accelerator:
                self._group.abort()
                return
            _close_gloo(self._group, self._peers)

    def _drop(self) -> None:
        if self._on_accelerator and not self._ended:
            self._group.shutdown()
        self._group = None

    # -- on the loop --------------------------------------------------------------------------

    def _end_soon(self) -> None:
        """Let the other thread end the group."""
        try:
            self._threads.submit(self._stop)
        except RuntimeError:  # no thread can be had
            self._stop()

    async def _end(self) -> None:
        """End the group, and wait until that is done."""
        with anyio.CancelScope(shield=True):
            await in_pool(self._threads, self._stop)


def end_gloo_groups() -> None:
    """Close the connections of all gloo groups of this process, which are of no use then.

    Ranks that wait for this one in a collective get an error. Otherwise a rank that is no neighbour of one that has
    died waits until torch's timeout. Blocks for some milliseconds.
    """
    if not dist.is_available() or not dist.is_initialized() or not dist.is_gloo_available():
        return
    for group in list(distributed_c10d._world.pg_map):  # noqa: SLF001 -- there is no public list of groups
        try:
            backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001 -- no public name for it
        except RuntimeError:  # of accelerators alone
            continue
        if isinstance(backend, dist.ProcessGroupGloo):
            _close_gloo(backend, [peer for peer in range(backend.size()) if peer != backend.rank()])


def _close_gloo(group: Any, peers: Sequence[int]) -> None:
    """Close all connections of a gloo group, which has no abort.

    A receive that times out does it. One whose own connection is broken already fails without that, so it is tried with
    every rank.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in peers:
        with suppress(RuntimeError):
            group.recv([nothing], peer, _CLOSING_TAG).wait(_AT_ONCE)


class _TransferError(Exception):
    """A round failed, with the connection to a rank or on this rank itself."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank
