"""The way on which ranks send each other what they read for each other: chosen by ``LoadOptions(exchange=...)``."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import torch

from bcp._agree import agree
from bcp._job import LoadJob
from bcp._load.reads import Reading
from bcp.coordinators.process_group import GroupExchange, join_group
from bcp.errors import BcpError
from bcp.protocols import Agreement, FailureReporter
from bcp.stages.device import Lanes
from bcp.stages.flat import bytes_of
from bcp.stages.load import AllToAll

__all__ = ["exchange", "exchange_devices"]


def exchange_devices(job: LoadJob, devices: Sequence[int]) -> list[int]:
    """Return the indices of CUDA devices, and that on which chunks are exchanged, if there is one."""
    own = job.exchange_device
    return list(devices) if own is None or own.index is None else sorted({*devices, own.index})


@asynccontextmanager
async def exchange(job: LoadJob, agreement: Agreement, reading: Reading, lanes: Lanes) -> AsyncIterator[AllToAll]:
    """Open what the rounds of a load run over; all ranks enter it, and leave it after their last round.

    A process group lives as long as one load. One that was kept would hold threads, or device memory, in training.
    """
    if job.options.exchange == "sockets" or job.world_size == 1 or not reading.assignment.rounds:
        yield partial(_over_sockets, agreement)
        return
    nonce = (await agree(agreement, "process group", job.rank, b"", _draw)).decode()
    device = job.exchange_device
    group = await join_group(nonce, job.rank, job.world_size, device=device, patience=job.options.timeout)
    report = partial(_report, agreement)
    over_group = GroupExchange(group, job.rank, device=device, on_stream=lanes.opened, report=report)
    del group  # else this frame would keep its threads alive
    failed = True
    try:
        yield over_group.all_to_all
        failed = False
    finally:
        await over_group.aclose(failed=failed)


async def _draw(_: Sequence[bytes]) -> bytes:
    """Draw a name that no other group has, in this job or in an earlier one over the same store."""
    return secrets.token_hex(16).encode()


async def _over_sockets(agreement: Agreement, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
    await agreement.all_to_all([*map(bytes_of, send)], [*map(bytes_of, receive)])


async def _report(agreement: Agreement, rank: int, cause: str) -> Exception:
    """Tell the others, or return an error that they are told of when this rank leaves the operation with it."""
    if isinstance(agreement, FailureReporter):
        return await agreement.report_failure(rank, cause)
    return BcpError(cause)
