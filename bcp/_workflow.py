"""The steps of a save and of a load. Read this first: everything else is a detail of one of these lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import pyarrow.compute  # noqa: F401 -- pyarrow would import it in the first save, where a fork may leave it half done

from bcp import _load as loading
from bcp import _save as saving
from bcp._agree import any_rank, capture_error, collective_operation, gather_broadcast, no_answer
from bcp._job import LoadJob, SaveJob
from bcp._log import log
from bcp._messages.planning import CodecTrial
from bcp._record import Record, recorded
from bcp.errors import InputError
from bcp.events import LoadResult, SaveResult
from bcp.options import Graph
from bcp.pipeline import Pipeline, run_while_opening, unwrap_stage_errors
from bcp.protocols import Agreement, Codec, ObjectKey
from bcp.read.replaced import asks_if_replaced, say_if_replaced
from bcp.read.source import Source
from bcp.read.tensors import lay_out, load_context
from bcp.runtime.device import Lanes, accelerators
from bcp.runtime.staging import pool_for
from bcp.runtime.threads import collect_failure_garbage, in_thread, in_thread_gc_paused, low_priority_threads
from bcp.stages.items import PartReceipt, WriteItem
from bcp.stages.keep import Keeping, keep_graph
from bcp.stages.load import LoadContext, load_graph
from bcp.stages.save import SaveContext, Staging, Writers, save_graph
from bcp.state.guard import being_loaded
from bcp.telemetry.progress import progress_bar

__all__ = ["achoose", "aload", "aprepare", "asave", "edited", "plan_save", "write_parts"]


# -- save ----------------------------------------------------------------------------------------


@collect_failure_garbage()
async def asave(job: SaveJob) -> SaveResult:
    """Plan, divide, run the graph, commit (paper Fig. 5). The checkpoint exists when this returns, or not at all."""
    with saving.only_save_to(job) as refusal, saving.Snapshot(job) as snapshot:
        async with (
            job.opened,
            recorded(job) as record,
            saving.undone_on_error(job) as undo,
            record.forgiving(job.operation) as agreement,
        ):
            with job.watch.phase("plan"):
                held, opening, _, planned, items, values = await plan_save(agreement, job, snapshot, refusal)
                planned, items, keeping = await saving.choose_base(agreement, job, planned, items)
                undo.begin(opening.operation, items)
            async with saving.not_replaced(job.backend, job.path, opening.operation, opening.version):
                with job.watch.phase("write"):
                    with unwrap_stage_errors():
                        stored = await write_parts(job, items, snapshot, keeping)
                    receipt = saving.make_receipt(
                        items, stored, values, opening.operation, job.rank, job.options, keeping
                    )
                    written = await saving.put_receipt(job.backend, receipt)
            undo.leave_to_rank_0()
            with job.watch.phase("commit"):
                all_nbytes = await saving.commit_save(agreement, planned, job.rank, written, undo)
            job.watch.all_nbytes = all_nbytes
            saving.remember_blocks(job, receipt)
            result = saving.result(job, held, opening, receipt, items, snapshot)
            await record.share(agreement, result)
    return result


async def plan_save(
    agreement: Agreement, job: SaveJob, snapshot: saving.Snapshot, refusal: InputError | None
) -> tuple[
    saving.LocalState, saving.Opening, saving.SavePlan, saving.Planned | None, list[WriteItem], dict[ObjectKey, str]
]:
    """Take stock of the state, and agree with all ranks on the writes; ``refusal`` is told to them in its place.

    Returns the state, the opening of the save, this rank's writes, the step that leads rank 0 to the commit, this
    rank's parts in the order of the graph, and the values that it owns.
    """
    stock = await capture_error(in_thread_gc_paused(snapshot.take_stock)) if refusal is None else refusal
    held, opening, plan, planned = await saving.plan_writes(agreement, job, stock, snapshot.fence)
    job.watch.join(opening.operation, opening.trace)
    items = await in_thread_gc_paused(saving.write_items, held, plan, opening.operation, job.rank, job.options)
    values = await in_thread(saving.owned_values, job, held, plan)
    return held, opening, plan, planned, items, values


async def write_parts(
    job: SaveJob, items: Sequence[WriteItem], snapshot: saving.Snapshot, keeping: Keeping | None = None
) -> list[PartReceipt]:
    """Send the parts through the graph; the data files are durable when this returns.

    ``keeping`` says which blocks an earlier checkpoint may have; None for none.
    """
    options = job.options
    job.watch.contents = partial(saving.contents, {item.name: item for item in items})
    changing = [item for item in items if not item.is_steady]
    nbytes = sum(item.nbytes for item in changing)
    job.watch.nbytes = sum(item.nbytes for item in items)
    budget = snapshot.lend(items)
    async with AsyncExitStack() as stack:
        stack.callback(snapshot.release)  # where copies fail: cleaning up may take long
        stack.enter_context(low_priority_threads(nice=options.nice, io=options.ionice))
        borrowing = pool_for(snapshot.devices).borrowed(most=saving.pinned_nbytes(options))
        lease = await stack.enter_async_context(borrowing)
        show = options.progress and job.rank == 0
        total = sum(item.nbytes for item in items)
        job.watch.add(stack.enter_context(progress_bar("save", job.path, stage="upload", nbytes=total, show=show)))
        writers = Writers()
        context = SaveContext(
            Staging(lease),
            writers,
            saving.BLOCK_BYTES,
            snapshot.fence,
            len(changing),
            snapshot.taken,
            copies_first=job.returns_after_snapshot and budget.capacity >= nbytes,
        )
        if keeping is None:
            graph = save_graph(context, options.codecs, copy_workers=options.copy_workers, io_workers=job.io_workers)
        else:
            graph = keep_graph(context, keeping, copy_workers=options.copy_workers, io_workers=job.io_workers)
        graph = edited(graph, options.edit)
        if not changing:
            await snapshot.taken()
        of_any_size = {item.key for item in items if options.codecs} if keeping is None else keeping.files.keys()
        files = saving.open_files(job.backend, items, of_any_size)
        stored = await run_while_opening(
            files, writers.opened, partial(graph.run, items, budget=budget, observe=job.watch)
        )
    snapshot.pinned_nbytes = lease.pinned_nbytes
    return stored


@collect_failure_garbage()
async def aprepare(job: SaveJob) -> None:
    """Agree on a plan (paper sec. 4.1) and get staging memory, which the first save of a layout would do."""
    async with job.opened, collective_operation(job.operation) as agreement:
        stock = await capture_error(in_thread_gc_paused(saving.rehearse, job))
        if isinstance(stock, saving.LocalState):
            job.on_snapshot()
        held, opening, plan, _ = await saving.plan_writes(agreement, job, stock, None)
    items = await in_thread_gc_paused(saving.write_items, held, plan, opening.operation, job.rank, job.options)
    pool = pool_for(accelerators(held.shards.tensors, held.address))
    sizes, most = saving.first_sizes(items, job.options), saving.pinned_nbytes(job.options)
    await in_thread(partial(pool.reserve, sizes, most=most))


@collect_failure_garbage()
async def achoose(job: SaveJob, codec: Codec) -> list[Codec]:
    """Try a codec and the storage on all ranks at once; return the codec if saves end clearly sooner with it."""

    async def answer(messages: Sequence[bytes]) -> bytes:
        trials = CodecTrial.decode_all(messages)
        chosen = saving.pays(trials)
        log.info("a codec was tried", codec=codec.name, chosen=chosen, **saving.measured(trials))
        return b"chosen" if chosen else b""

    async with job.opened, collective_operation(job.operation) as agreement:
        held = await capture_error(in_thread_gc_paused(saving.collect_local_state, job))
        if not isinstance(held, saving.LocalState):
            await gather_broadcast(agreement, "begin", job.rank, held, no_answer)
            raise held
        await gather_broadcast(agreement, "begin", job.rank, b"", no_answer)
        trial = await capture_error(saving.tried(job.backend, held, codec))
        own = trial.encode() if isinstance(trial, CodecTrial) else trial
        chosen = await gather_broadcast(agreement, "codecs", job.rank, own, answer)
    return [codec] if chosen else []


# -- load ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LoadedTensors:
    """One checkpoint, whose tensors are all in their places on every rank."""

    source: Source
    wanted: loading.LoadRequest
    reading: loading.LoadPlan
    context: LoadContext

    def result(self, job: LoadJob) -> LoadResult:
        return loading.result(job, self.source.metadata, self.wanted, self.reading, self.context)


@collect_failure_garbage()
async def aload(job: LoadJob) -> LoadResult:
    """Open, intersect, share the reading, run the graph, agree that all is there (paper sec. 3.3, steps 1 to 6)."""
    async with job.opened, recorded(job) as record:
        async with record.forgiving(job.operation) as agreement:
            loaded, restarts = None, 0
            while loaded is None:  # a save may replace the checkpoint during the load, and delete its files
                loaded = await _load_once(job, agreement, record, is_last=restarts == loading.RESTARTS)
                restarts += 1
            await record.share(agreement, loaded.result(job))
        with loading.say_if_half_loaded(loaded.context), job.watch.phase("finish"):
            await in_thread(loading.put_values, job, loaded.wanted)
        return loaded.result(job)


async def _load_once(job: LoadJob, agreement: Agreement, record: Record, *, is_last: bool) -> _LoadedTensors | None:
    """Load the tensors of the newest checkpoint; None on all ranks if it was replaced while they read it."""
    with job.watch.phase("open"):
        source = await loading.open_checkpoint(agreement, job)
        record.reads(source.metadata)
    is_replaced = asks_if_replaced(source, is_last=is_last)
    async with say_if_replaced(source, times=loading.RESTARTS + 1):
        with job.watch.phase("plan"):
            asking = capture_error(loading.ask(job, source))  # a local error would be kept by its traceback
            planned = await loading.plan_reads(
                agreement, source, await asking, world_size=job.world_size, is_replaced=is_replaced
            )
        if planned is None:
            return None
        with job.watch.phase("read"), unwrap_stage_errors():
            context = await _read(job, agreement, source, *planned, is_replaced)
    return None if context is None else _LoadedTensors(source, *planned, context)


async def _read(
    job: LoadJob,
    agreement: Agreement,
    source: Source,
    wanted: loading.LoadRequest,
    reading: loading.LoadPlan,
    is_replaced: Callable[[], Awaitable[bool]],
) -> LoadContext | None:
    """Fill the tensors, and wait until every rank has done so; None if they have to begin again."""
    options = job.options
    async with AsyncExitStack() as stack:
        devices = accelerators(wanted.targets.shards.tensors, wanted.targets.shards.address)
        devices = loading.exchange_devices(job, devices)
        lease = await stack.enter_async_context(pool_for(devices).borrowed(keep=False))
        lanes = await stack.enter_async_context(Lanes(devices))
        targets = await in_thread_gc_paused(lay_out, source, wanted.tensors, reading.assignment, lanes)
        stack.enter_context(
            being_loaded([*targets.tensors, *(t for overlap in wanted.shared for t in overlap.targets)])
        )
        items = await loading.found_items(source, wanted, reading, targets.straight, is_replaced)
        if reading.assignment.rounds and await any_rank(agreement, "files", job.rank, says=items is None):
            return None
        all_to_all = await stack.enter_async_context(loading.exchange(job, agreement, reading, lanes))
        context = load_context(
            source,
            reading.assignment,
            targets,
            lease,
            world_size=job.world_size,
            all_to_all=all_to_all,
            device=job.exchange_device,
            is_replaced=is_replaced,
        )
        context.is_lost = items is None
        stack.enter_context(loading.say_if_half_loaded(context))
        items = items or []
        job.watch.contents = partial(loading.contents, {item.name: item for item in items}, wanted)
        nbytes = sum(item.nbytes for item in items)
        show = options.progress and job.rank == 0
        job.watch.add(stack.enter_context(progress_bar("load", job.path, stage="exchange", nbytes=nbytes, show=show)))
        graph = edited(load_graph(context, copy_workers=options.copy_workers, io_workers=job.io_workers), options.edit)
        await graph.run(items, budget=loading.budget_of(options, reading), observe=job.watch)
        if not context.is_lost:
            context.is_lost = await loading.put_shared(job, wanted.shared, is_replaced)
        if await any_rank(agreement, "done", job.rank, says=context.is_lost):  # paper sec. 3.3, step 6
            return None
    return context


def edited(graph: Graph, edit: Callable[[Graph], Graph]) -> Graph:
    """Let the caller edit the graph; the result has to be one."""
    edited = edit(graph)
    if not isinstance(edited, Pipeline):
        raise InputError(f"options.edit returned {edited!r}; it has to return the graph to run: return g.after(...)")
    return edited
