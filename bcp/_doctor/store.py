"""The way to the job's store: a store that nobody serves, that is stopped or out of reach holds nobody up."""

from __future__ import annotations

from functools import partial

import anyio
from torch.distributed import HashStore, Store, TCPStore

from bcp._doctor.dial import connected, reason_of
from bcp._doctor.place import Place
from bcp._doctor.report import Finding, FoundError
from bcp._doctor.times import Times, left
from bcp.coordinators.store_client import STORE_ERRORS, StoreClient
from bcp.errors import PeerError

__all__ = ["opened_store", "store_help"]

_RETRY_SECONDS = 0.2  # between two attempts to reach a store that is not there yet
_NOT_OWN = "serves the store, and does not reach it at {}: that is another host, as it seems"
_SILENT = "has connected to {}, where no store answers"


async def opened_store(place: Place, times: Times) -> Store:
    """Return a client of the job's store; serve it if that is this process's task.

    Raises:
        FoundError: the store cannot be reached or served.

    """
    if place.server is None:
        return HashStore()
    if not place.serves:
        await _reached(place, times)
    opening = StoreClient(HashStore())  # its thread is left alone when the connection hangs
    make = partial(TCPStore, *place.server, None, is_master=place.serves, wait_for_workers=False)
    try:
        with anyio.fail_after(left(times.met)):
            return await opening.call(make)
    except TimeoutError:
        raise _found(place, (_NOT_OWN if place.serves else _SILENT).format(place.store)) from None
    except PeerError as error:
        cause = error.__cause__ if isinstance(error.__cause__, STORE_ERRORS) else error
        verb = "serve" if place.serves else "use"
        raise _found(place, f"cannot {verb} the store at {place.store}: {str(cause).splitlines()[0]}") from error


async def _reached(place: Place, times: Times) -> None:
    """Wait until something listens where the store is to be. A store comes later than the ranks, as a rule."""
    assert place.server is not None  # noqa: S101 -- for mypy
    last = "no answer"
    with anyio.move_on_after(left(times.met)):
        while True:
            try:
                _, writer = await connected(*place.server)
            except OSError as error:
                last = reason_of(error)
            else:
                writer.close()
                return
            await anyio.sleep(_RETRY_SECONDS)
    raise _found(place, f"cannot reach the store at {place.store}: {last}")


def store_help(place: Place) -> str:
    """Return what to do where a rank has no store."""
    if place.serves:
        return "let MASTER_ADDR be the host of rank 0, and MASTER_PORT a port that is free there"
    return (
        "see whether rank 0 or torchrun's agent runs there, and whether MASTER_ADDR, MASTER_PORT and firewalls let "
        "this host reach it"
    )


def _found(place: Place, text: str) -> FoundError:
    return FoundError(Finding("store", text, store_help(place)))
