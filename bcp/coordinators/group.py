"""The seat of a rank in a process group: its number, a store, and a prefix of our keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store, TCPStore, distributed_c10d

from bcp.coordinators.store_client import StoreClient, innermost
from bcp.errors import InputError

__all__ = ["GroupSeat", "private_connection", "reconnected", "store_of_job"]

_CALL_SECONDS = 30.0  # torch's own limit for a call, as far as it keeps one; nothing in here waits for a key
_numbers: WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """This rank's seat in a process group, for one coordinator.

    Attributes:
        store: a private connection to the group's own store, which is made at the first call.
        rank: this rank in the group.
        world_size: how many ranks the group has.
        prefix: of keys that no other coordinator of these processes has: group, and how many seats came before.
            Keys of processes that have ended may be there: torchrun may keep its store over restarts of the workers.
    """

    store: StoreClient
    rank: int
    world_size: int
    prefix: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> GroupSeat:
        """Take a seat in a group, None for the default one. Every member has to do so equally often.

        Nothing is sent, so this never waits for the store.

        Raises:
            InputError: torch.distributed is not initialised, the group was destroyed, or this rank is not a member.

        """
        if not dist.is_initialized():
            raise InputError("there is no process group; call torch.distributed.init_process_group first")
        group = distributed_c10d._get_default_group() if group is None else group  # noqa: SLF001 -- no public name
        try:
            rank = dist.get_rank(group)
            shared = None if rank < 0 else distributed_c10d._get_process_group_store(group)  # noqa: SLF001 -- same
        except (ValueError, KeyError) as error:
            raise InputError(f"{group!r} was destroyed, or never was a process group; pass one in use") from error
        if shared is None:
            raise InputError("this rank is not a member of the process group; only members can take part")
        number = next(_numbers.setdefault(group, itertools.count()))
        prefix = f"bcp/{group.group_name}/{number}"
        return cls(StoreClient(shared, private_connection), rank, dist.get_world_size(group), prefix)


def store_of_job() -> tuple[Store, Callable[[Store], Store]]:
    """Return the store of the default process group, and what connects to it anew: arguments of a ``StoreClient``.

    Raises:
        InputError: there is no default group, or it has no store.

    """
    if not dist.is_initialized():
        raise InputError("there is no process group any more; call torch.distributed.init_process_group first")
    group = distributed_c10d._get_default_group()  # noqa: SLF001 -- no public name
    store = distributed_c10d._get_process_group_store(group)  # noqa: SLF001 -- same
    if store is None:
        raise InputError("the default process group has no store; initialise it with one, or use exchange='sockets'")
    return store, private_connection


def private_connection(store: Store) -> Store:
    """Return a connection of our own to a store, so that nobody's long wait holds up our signs of life.

    A TCPStore client does one call at a time, and ``init_process_group`` and ``new_group`` wait for minutes in one.
    Stores without connections are returned as they are. Blocks, for ever if the server is stopped: see
    :class:`~bcp.coordinators.store_client.StoreClient`.
    """
    if not isinstance(innermost(store), TCPStore):
        return store
    clone = getattr(store, "clone", None)  # torch 2.13 has it
    private: Store = reconnected(store) if clone is None else clone()
    private.set_timeout(timedelta(seconds=_CALL_SECONDS))
    return private


def reconnected(store: Store) -> Store:
    """Return a new client of a TCPStore's server, or the store itself; the way of torch before ``Store.clone``.

    Prefixes are lost: torch does not tell them.
    """
    inner = innermost(store)
    if not isinstance(inner, TCPStore):
        return store
    limit = timedelta(seconds=_CALL_SECONDS)
    return TCPStore(inner.host, inner.port, None, is_master=False, wait_for_workers=False, timeout=limit)
