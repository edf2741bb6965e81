"""Plan the reading of a load once for all ranks, and exchange chunks (paper sec. 3.3 steps 3 and 4, 4.1).

:func:`plan_reads` agrees on the plan: ranks exchange the messages between the steps of :func:`bcp.plan.read.plan_load`.
:func:`exchange` opens the transport on which ranks send chunks to each other, chosen by ``LoadOptions(exchange=...)``.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_

import numpy as np
import numpy.typing as npt
import torch

from bcp._agree import gather_broadcast, no_answer, nothing_in
from bcp._job import LoadJob
from bcp._load.targets import LoadRequest, some
from bcp._load.units import check_wanted
from bcp._messages.base import refused
from bcp._messages.planning import LoadAnswer, LoadRequestColumns, Rate
from bcp.coordinators.process_group import GroupExchange, join_group
from bcp.errors import BcpError, CorruptError, FqnMismatchError, MessageError, StorageError
from bcp.options import LoadOptions
from bcp.pipeline import Budget, unwrap_stage_errors
from bcp.plan.columns import Ints, concat
from bcp.plan.layout import Layout, find, resolve, resolve_all
from bcp.plan.read import divide_load
from bcp.plan.read.copies import Assignment, ZeroCopyReads, assign
from bcp.plan.read.renamed import MASTER, RenamedLayout
from bcp.plan.read.share import VERSIONS, BlockIndex, Floats, SharedReads
from bcp.plan.shards import KINDS
from bcp.plan.units import decode_claims, encode_claims
from bcp.protocols import Agreement, FailureReporter
from bcp.read.source import Source
from bcp.read.tensors import line_of, read_items, tensors_in
from bcp.runtime.device import Lanes
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.items import ReadItem
from bcp.stages.load import AllToAll, never_replaced
from bcp.stages.memcpy import bytes_of
from bcp.state.optimizer_entries import OWN

__all__ = [
    "LoadPlan",
    "budget_of",
    "contents",
    "exchange",
    "exchange_devices",
    "found_items",
    "plan_reads",
    "speeds",
]

MEASURED_BYTES = 32 << 20
"""Shared bytes a rank from which on the ranks measure their ways: below, the load takes no longer than measuring."""

SHARED_BYTES = 256 << 10
"""Bytes of a foreign file that lie together from which on ranks share them, in a round of their own.

3,000 tensors of 4 KiB in a folder of DCP, wanted by 4 ranks on 2 cores: 17 s in 750 rounds, and 6 s by each rank alone.
"""

_FAST = 0.75  # quantile of the ranks whose rate counts as full speed
_SLOW = 0.4  # of that rate; faster ranks count as equals, since a measurement of some milliseconds varies
_LEAST = 1e-3


def speeds(told: Sequence[bytes]) -> Floats | None:
    """Return the relative speed of each rank, 1 for most; None if no rank is slow. ``told``: a Rate of each rank."""
    rates = np.array([rate.bytes_per_second for rate in Rate.decode_all(told)])
    if np.isinf(rates).any():  # all ranks share a host
        return None
    relative = rates / np.quantile(rates, _FAST, method="nearest")
    slow = relative < _SLOW
    return np.where(slow, np.maximum(relative, _LEAST), 1.0) if slow.any() else None


def exchange_devices(job: LoadJob, devices: Sequence[int]) -> list[int]:
    """Return the indices of CUDA devices, and that on which chunks are exchanged, if there is one."""
    own = job.exchange_device
    return list(devices) if own is None or own.index is None else sorted({*devices, own.index})


@asynccontextmanager
async def exchange(job: LoadJob, agreement: Agreement, reading: LoadPlan, lanes: Lanes) -> AsyncIterator[AllToAll]:
    """Open the transport of a load's rounds; all ranks enter it, and leave it after their last round.

    A process group lives as long as one load. One that was kept would hold threads, or device memory, in training.
    """
    if job.options.exchange == "sockets" or job.world_size == 1 or not reading.assignment.rounds:
        yield partial(_over_sockets, agreement)
        return
    nonce = (await gather_broadcast(agreement, "process group", job.rank, b"", _draw)).decode()
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
    return secrets.token_hex(16).encode()


async def _over_sockets(agreement: Agreement, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
    await agreement.all_to_all([*map(bytes_of, send)], [*map(bytes_of, receive)])


async def _report(agreement: Agreement, rank: int, cause: str) -> Exception:
    """Tell the others, or return an error that they are told of when this rank leaves the operation with it."""
    if isinstance(agreement, FailureReporter):
        return await agreement.report_failure(rank, cause)
    return BcpError(cause)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reading that all ranks agreed on."""

    assignment: Assignment  # the chunks that this rank reads, sends and receives
    unexpected: tuple[str, ...]  # names of the checkpoint that no rank wants, within the kinds that are loaded


async def plan_reads(
    agreement: Agreement,
    source: Source,
    request: LoadRequest | BcpError,
    *,
    world_size: int,
    is_replaced: Callable[[], Awaitable[bool]] = never_replaced,
) -> tuple[LoadRequest, LoadPlan] | None:
    """Share the reading: bytes that several ranks want are read by one of them, chosen by rank 0 (paper sec. 4.1).

    If ranks share much, all ranks measure how fast they send to other hosts, and rank 0 gives less to slow ones.
    Returns None on all ranks if one of them has not found a file because another save has replaced the checkpoint.
    """
    line, options, rank = line_of(source.metadata), source.options, source.rank
    if isinstance(request, CorruptError | StorageError) and await is_replaced():
        await gather_broadcast(agreement, "reads", rank, b"", no_answer)
        return None
    if isinstance(request, BcpError):
        await gather_broadcast(agreement, "reads", rank, request, no_answer)
        raise request

    requests: list[LoadRequestColumns] = []  # on rank 0

    async def answer(messages: Sequence[bytes]) -> bytes:
        if not all(messages):
            return b""
        requests.extend(LoadRequestColumns.decode_all(messages))
        return await in_thread_gc_paused(_answer, request, line, requests, options)

    async def answer_again(rates: Sequence[bytes]) -> bytes:
        speed = speeds(rates)
        return b"" if speed is None else await in_thread_gc_paused(_share, line, requests, options, speed)

    runs = await in_thread_gc_paused(line.runs, request.wants.ranges())
    kinds = sum(1 << code for code in request.kinds)
    claims = encode_claims([read.claim for read in request.units])
    offered = runs if source.metadata.foreign is None else _long(line, runs)
    blocks = line.encode(offered) if options.overlap_loading else b""
    message = LoadRequestColumns(kinds, request.rows.astype("<i4").tobytes(), claims, blocks).encode()
    if not (reply := await gather_broadcast(agreement, "reads", rank, message, answer)):
        return None
    agreed = _agreed(reply, world_size)
    unexpected = _rows(agreed.names, request.renamed, 0)
    shared = await in_thread_gc_paused(SharedReads.decode, agreed.runs, line, world_size)
    over_tcp = options.exchange != "nccl"  # which may have a network of its own
    if over_tcp and shared.nbytes(line) >= MEASURED_BYTES * world_size:
        rate = Rate(await agreement.bandwidth()).encode()
        if table := await gather_broadcast(agreement, "speeds", rank, rate, answer_again):
            shared = await in_thread_gc_paused(SharedReads.decode, table, line, world_size)
    assignment = await in_thread_gc_paused(partial(assign, read_bytes=options.read_bytes), line, rank, runs, shared)
    return request, LoadPlan(assignment, tuple(_names(request.renamed, unexpected)))


def _long(line: BlockIndex, runs: Ints) -> Ints:
    """Return the runs of foreign files that are worth a round of all ranks; each rank reads the others by itself.

    Blocks of bcp's own files hold many small tensors. Ranges of foreign files are exact, so that each is a run.
    """
    return runs[np.diff(runs)[:, 0] * line.block_bytes >= SHARED_BYTES]


def _agreed(data: bytes, world_size: int) -> LoadAnswer:
    """Decode rank 0's answer. Raises MessageError if it is for another number of ranks."""
    agreed = LoadAnswer.decode(data, sender=0)
    if agreed.world_size != world_size:
        raise refused("LoadAnswer", data, f"it is for {agreed.world_size} ranks, the job has {world_size}", 0)
    return agreed


def _rows(data: bytes, names: RenamedLayout, rank: int) -> Ints:
    """Return rows of names that a rank has sent. Raises MessageError if they name nothing."""
    known, rows = len(names.saved.tensors) + len(names.layout.objects), np.frombuffer(data, "<i4")
    if rows.min(initial=0) < 0 or rows.max(initial=0) >= max(known, 1):
        raise MessageError(f"rank {rank} sent {len(data)} bytes that do not name any of {known} names; {VERSIONS}")
    return rows


def _answer(
    request: LoadRequest, line: BlockIndex, requests: Sequence[LoadRequestColumns], options: LoadOptions
) -> bytes:
    """Find the names that no rank wants, and divide the reading; on rank 0."""
    names = request.renamed
    kinds = reduce(or_, (wanted.kinds for wanted in requests))
    if not kinds:
        raise nothing_in(len(requests))
    rows = [_rows(wanted.names, names, rank) for rank, wanted in enumerate(requests)]
    unexpected = _unexpected(names, kinds, concat(rows))
    if len(unexpected) and options.strict:
        raise FqnMismatchError(
            f"the checkpoint has {len(unexpected)} names that no rank wants: {some(_names(names, unexpected))}; "
            "pass strict=False to leave them out"
        )
    claims = [(rank, decode_claims(wanted.claims, rank)) for rank, wanted in enumerate(requests)]
    check_wanted(request.saved_units, claims, strict=options.strict)
    table = _share(line, requests, options) if options.overlap_loading else SharedReads.nothing().encode(line)
    return LoadAnswer(len(requests), unexpected.astype("<i4").tobytes(), table).encode()


def _share(
    line: BlockIndex, requests: Sequence[LoadRequestColumns], options: LoadOptions, speed: Floats | None = None
) -> bytes:
    """Divide the reading of the blocks that several ranks want; on rank 0."""
    limits = {"read_bytes": options.read_bytes, "exchange_bytes": options.exchange_bytes}
    return divide_load(line, [request.runs for request in requests], **limits, speed=speed).encode(line)


def _unexpected(names: RenamedLayout, kinds: int, rows: Ints) -> Ints:
    """Return the names that no rank wants, of the kinds that any rank loads, as rows of ``LoadRequest.rows``.

    One wanted name of several tied ones is enough. A master goes with its parameter.
    """
    layout, saved = names.layout, names.saved.tensors
    count, behind = len(layout.tensors), len(layout.objects)
    wanted = np.zeros(len(saved) + behind, bool)
    wanted[rows] = True
    loaded = np.array([kinds >> code & 1 for code in range(len(KINDS))], bool)
    partly = _partly(names, wanted, loaded)
    for row in (count + np.flatnonzero(wanted[count + behind :])).tolist():
        wanted[list(names.sources(row))] = True
    wanted[resolve_all(layout, np.flatnonzero(wanted[:count] & layout.tensors.tied))] = True
    tensors = np.flatnonzero(~wanted[:count] & loaded[layout.tensors.kind])
    tensors = tensors[~wanted[resolve_all(layout, tensors)]]
    tensors = tensors[[not _goes_with_parameter(layout, row, wanted) for row in tensors.tolist()]]
    # an optimizer's hyper-parameters come and go with torch's versions, further entries of its state dict do not
    model = np.array(
        [
            (kind == "model" or path.startswith(OWN)) and bool(loaded[KINDS.index(kind)])
            for kind, path in layout.objects
        ],
        bool,
    )
    return concat([tensors, count + np.flatnonzero(~wanted[count : count + behind] & model), partly])


def _partly(names: RenamedLayout, wanted: npt.NDArray[np.bool_], loaded: npt.NDArray[np.bool_]) -> Ints:
    """Return assembled tensors that no rank wants although other blocks of their source tensors are wanted.

    A rename may offer one block under several names: it is enough that one of them is wanted.
    """
    count, behind, codes = len(names.layout.tensors), len(names.layout.objects), names.saved.tensors.kind
    made = range(count, len(codes))
    blocks = {block for row in made if wanted[row + behind] for block in names.blocks(row)}
    sources = {source for source, _ in blocks}
    return np.array(
        [
            row + behind
            for row in made
            if not wanted[row + behind]
            and loaded[codes[row]]
            and any(source in sources and not wanted[source] for source, _ in names.blocks(row))
            and not blocks.issuperset(names.blocks(row))
        ],
        np.int64,
    )


def _goes_with_parameter(layout: Layout, row: int, wanted: npt.NDArray[np.bool_]) -> bool:
    """Whether a tensor is the master of a parameter whose tensor in the model is wanted."""
    section, _, name = layout.tensors.fqn[row].partition(".")
    fqn, _, key = name.rpartition(".")
    parameter = find(layout, "model", fqn) if (section, key) == ("state", MASTER) else None
    return parameter is not None and bool(wanted[resolve(layout, parameter)])


def _names(names: RenamedLayout, rows: Ints) -> list[str]:
    return [_named(names, row) for row in rows.tolist()]


def _named(names: RenamedLayout, row: int) -> str:
    layout, count = names.layout, len(names.layout.tensors)
    if count <= row < count + len(layout.objects):
        return ": ".join(layout.objects[row - count])
    tensors = layout.tensors
    if row < count:
        return f"{KINDS[int(tensors.kind[row])]}: {tensors.fqn[row]}"
    made = row - len(layout.objects)
    sources = [tensors.fqn[source] for source in names.sources(made)]
    return f"{KINDS[int(names.saved.tensors.kind[made])]}: {sources[0]} (what becomes {names.saved.tensors.fqn[made]})"


async def found_items(
    source: Source,
    wanted: LoadRequest,
    reading: LoadPlan,
    straight: ZeroCopyReads,
    is_replaced: Callable[[], Awaitable[bool]],
) -> list[ReadItem] | None:
    """List the chunks that this rank reads; None if files are gone because another save has replaced the checkpoint.

    Raises as :func:`bcp.read.tensors.read_items`.
    """
    try:
        with unwrap_stage_errors():
            return await read_items(source, wanted.tensors, reading.assignment, straight)
    except (CorruptError, StorageError):
        if not await is_replaced():
            raise
        return None


def budget_of(options: LoadOptions, reading: LoadPlan) -> Budget:
    """Return the graph's byte budget: ``budget_bytes`` less the most bytes that a round brings in, held besides."""
    return Budget(max(options.budget_bytes - reading.assignment.most_received, 1))


def contents(items: Mapping[str, ReadItem], wanted: LoadRequest, name: str) -> tuple[str, Sequence[str]]:
    """Return the file and the first tensors of a chunk, by the name of its item; both empty if there is none."""
    item = items.get(name)
    if item is None or item.chunk is None:
        return "", ()
    tensors = wanted.targets.shards.table.tensors
    return item.key, [tensors.fqn[row] for row in tensors_in(wanted.tensors, item.chunk)]
