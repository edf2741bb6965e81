"""The load graph on checkpoints made by hand: every way of a chunk gives the same tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import HEADER, Files, Rank, Room, load
from saved import Saved, SavedBox, checkpoints, meta, save, targets

from bcp.errors import CorruptError, StageError
from bcp.pipeline import Stage
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable
from bcp.protocols import Buffer, Codec
from bcp.stages import load as stages
from bcp.stages import place
from bcp.stages.items import Loaded, ReadItem
from bcp.stages.load import LoadContext

TORCH = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
FORMS = ("plain", "strided", "cast", "inside")


def empty(shape: Sequence[int], dtype: torch.dtype, form: str) -> torch.Tensor:
    """Make a tensor that nobody has written to, and that lies in memory as ``form`` says."""
    if form == "cast":
        return torch.full(tuple(shape), -1, dtype=torch.float64)
    if form == "strided":
        wide = torch.full([n * 2 for n in shape], 77, dtype=dtype)
        return wide[tuple(slice(None, None, 2) for _ in shape)]
    if form == "inside":
        count = int(np.prod(shape, dtype=np.int64))
        return torch.full((count + 7,), 77, dtype=dtype)[3 : 3 + count].view(tuple(shape))
    return torch.full(tuple(shape), 77, dtype=dtype)


def rank_of(saved: Saved, table: ShardTable, forms: Sequence[str], **how: Any) -> Rank:
    rank = Rank(saved, table, [], **how)
    rank.tensors = [
        empty(rank.memory.values[row].shape, TORCH[dtype], forms[row % len(forms)])
        for row, dtype in enumerate(rank.dtypes)
    ]
    return rank


def one_tensor(count: int = 64, block_bytes: int = 16, dtype: str = "uint8") -> Saved:
    tensor = meta("w", (count,), dtype)
    return save([tensor], [SavedBox(tensor, Box.whole((count,)), [(count, 0)])], 1, block_bytes)


def wants_of(saved: Saved, *parts: tuple[int, int]) -> ShardTable:
    tensor = saved.layout.tensors[0]
    return ShardTable.build([ShardRow(tensor, Box((a,), (b - a,))) for a, b in parts])


def run(files: Files, ranks: Sequence[Rank], **how: Any) -> None:
    anyio.run(lambda: load(files, ranks, **how))


def failure(files: Files, ranks: Sequence[Rank], **how: Any) -> StageError:
    """Run a load that fails on one rank; return its error."""
    with pytest.raises(ExceptionGroup) as caught:
        run(files, ranks, **how)
    (error,) = caught.value.exceptions
    assert isinstance(error, StageError)
    return error


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_straight_or_staged_alone_or_shared_the_tensors_are_what_was_saved(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    tables = [data.draw(targets(saved)) for _ in range(data.draw(st.integers(1, 3)))]
    tables = [data.draw(st.sampled_from(tables)) for _ in tables]  # replicas share what they read
    forms = data.draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=4))
    ranks = [rank_of(saved, table, forms, plain=data.draw(st.booleans())) for table in tables]
    files = Files(saved)
    run(files, ranks, go_straight=data.draw(st.booleans()), shared=data.draw(st.booleans()))
    for rank in ranks:
        rank.check()
        assert rank.context is not None
        assert rank.context.placed_nbytes == sum(tensor.nbytes for tensor in rank.tensors)
        assert rank.lease.given == len(rank.lease.taken)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_codecs_are_undone(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    codec = Codec("zlib", encode=zlib.compress, decode=zlib.decompress)
    rank = rank_of(saved, data.draw(targets(saved)), FORMS)
    run(Files(saved, codec), [rank], codecs={"zlib": codec})
    rank.check()


# -- straight -------------------------------------------------------------------------------------


def test_a_chunk_that_is_wanted_whole_needs_no_staging_and_lands_in_its_tensor() -> None:
    saved = one_tensor()
    files, rank = Files(saved), rank_of(saved, wants_of(saved, (0, 64)), ["inside"])
    around = rank.tensors[0]._base
    assert around is not None
    run(files, [rank])
    rank.check()
    assert files.scattered == [[len(HEADER), 64]]
    assert rank.lease.taken == []
    assert (around[:3].tolist(), around[-4:].tolist()) == ([77] * 3, [77] * 4)


def test_what_nobody_wants_of_a_block_goes_nowhere() -> None:
    saved = one_tensor()
    files, rank = Files(saved), rank_of(saved, wants_of(saved, (3, 5), (20, 40)), ["inside"])
    run(files, [rank], read_bytes=1024)
    rank.check()
    assert files.scattered == [[len(HEADER) + 3, 2, 15, 20, 8]]
    assert rank.lease.taken == []
    for tensor, size in zip(rank.tensors, (2, 20), strict=True):
        assert tensor._base is not None
        assert tensor._base.tolist().count(77) >= 7
        assert len(tensor._base) == size + 7


@pytest.mark.parametrize("go_straight", [False, True])
def test_elements_in_the_midst_of_small_tensors_are_copied_together(go_straight: bool) -> None:  # noqa: FBT001
    """The second element of a column is in a row that lies in the file whole; another shard wants the element, too."""
    matrix, vector = meta("m", (5, 2), "int16"), meta("v", (2,), "int16")
    boxes = [SavedBox(matrix, Box.whole((5, 2)), [(10, 0)]), SavedBox(vector, Box.whole((2,)), [(2, 0)])]
    saved = save([matrix, vector], boxes, 1, 16)
    rows = [(vector, Box((0,), (1,))), (matrix, Box((4, 1), (1, 1))), (matrix, Box((3, 1), (2, 1)))]
    rank = rank_of(saved, ShardTable.build([ShardRow(*row) for row in rows]), ["plain"], plain=False)
    run(Files(saved), [rank], go_straight=go_straight)
    rank.check()


def test_a_byte_that_two_tensors_want_is_staged() -> None:
    saved = one_tensor()
    files, rank = Files(saved), rank_of(saved, wants_of(saved, (0, 40), (30, 64)), ["plain"])
    run(files, [rank], read_bytes=16)
    rank.check()
    assert len(files.scattered) == 2  # bytes 0 to 16 and 48 to 64
    assert len(rank.lease.taken) == 2


def test_tensors_that_share_memory_are_staged() -> None:
    saved = one_tensor()
    whole = torch.zeros(40, dtype=torch.uint8)
    rank = Rank(saved, wants_of(saved, (0, 32), (32, 64)), [whole[:32], whole[8:]])
    files = Files(saved)
    run(files, [rank])
    assert files.scattered == []


@pytest.mark.parametrize("form", ["strided", "cast"])
def test_what_is_no_plain_memory_is_staged(form: str) -> None:
    saved = one_tensor()
    files, rank = Files(saved), rank_of(saved, wants_of(saved, (0, 64)), [form])
    run(files, [rank])
    rank.check()
    assert files.scattered == []
    assert rank.lease.taken


def test_versions_of_tensors_rise_whichever_way_they_are_written() -> None:
    saved = one_tensor()
    for go_straight in (True, False):
        rank = rank_of(saved, wants_of(saved, (0, 64)), ["plain"])
        before = rank.tensors[0]._version
        run(Files(saved), [rank], go_straight=go_straight)
        assert rank.tensors[0]._version > before


@pytest.mark.parametrize("go_straight", [True, False])
def test_a_flipped_bit_names_the_file_and_the_block(go_straight: bool) -> None:  # noqa: FBT001 -- a parameter of pytest
    saved = one_tensor()
    files, rank = Files(saved), rank_of(saved, wants_of(saved, (3, 50)), ["plain"])
    files.objects["file 0"][len(HEADER) + 40] ^= 4
    error = failure(files, [rank], go_straight=go_straight, read_bytes=1024)
    start = len(HEADER) + 32
    assert isinstance(error.__cause__, CorruptError)
    assert f"file 0 is corrupt: bytes {start} to {start + 16} have checksum" in str(error.__cause__)
    assert rank.context is not None
    assert rank.context.touched is go_straight


def test_a_flipped_bit_that_nobody_wants_is_noticed_too() -> None:
    saved = one_tensor()
    files, rank = Files(saved), rank_of(saved, wants_of(saved, (3, 50)), ["plain"])
    files.objects["file 0"][5] ^= 1
    assert "file 0 is corrupt: bytes 0 to" in str(failure(files, [rank]).__cause__)


# -- staged ---------------------------------------------------------------------------------------


def test_staging_memory_stays_within_the_budget() -> None:
    saved = one_tensor(1 << 16, 1 << 12)
    rank = rank_of(saved, wants_of(saved, (0, 1 << 16)), ["strided"])
    run(Files(saved), [rank], read_bytes=1 << 12, budget=3 << 12)
    rank.check()
    assert len(rank.lease.taken) == 16
    assert rank.lease.most <= (3 << 12) + 4096  # the header


@pytest.mark.parametrize("change", ["shorter", "floats"])
def test_a_stage_that_changes_lengths_is_told_of_codecs(change: str) -> None:
    async def spoil(loaded: Loaded) -> Loaded:
        data = loaded.data[:-1] if change == "shorter" else loaded.data.float()
        return Loaded(loaded.item, data, loaded.buffer)

    saved = one_tensor()
    rank = rank_of(saved, wants_of(saved, (0, 64)), ["plain"])
    error = failure(
        Files(saved), [rank], go_straight=False, edit=lambda graph: graph.before("h2d", Stage("spoil", spoil))
    )
    assert "a custom stage changed them; use LoadOptions(codecs=" in str(error.__cause__)


# -- devices --------------------------------------------------------------------------------------


class Point:
    """A mark that is reached when somebody waits for it."""

    events = ("one",)

    def __init__(self, log: list[str]) -> None:
        self.log, self.reached = log, False

    def wait(self) -> None:
        self.reached = True
        self.log.append("reached")


class Slow:
    """Lanes on a device whose copies take time."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.open = log, 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.open += 1
        yield
        self.open -= 1

    def mark(self) -> Point:
        assert self.open
        self.log.append("queued")
        return Point(self.log)


def on_device(saved: Saved, table: ShardTable, forms: Sequence[str] = ("plain",)) -> tuple[Rank, list[str]]:
    """Make a rank whose tensors are written to by queued copies only."""
    log: list[str] = []
    rank = rank_of(saved, table, forms, lanes=Slow(log), plain=False)
    give = rank.lease.give

    def logged(buffer: torch.Tensor) -> None:
        log.append("given")
        give(buffer)

    rank.lease.give = logged  # type: ignore[method-assign]  # it is the log that is looked at
    return rank, log


def test_a_buffer_goes_back_when_the_copies_out_of_it_are_done() -> None:
    saved = one_tensor()
    rank, log = on_device(saved, wants_of(saved, (0, 64)))
    run(Files(saved), [rank], read_bytes=16, budget=16)
    rank.check()
    assert log == ["queued", "reached", "given"] * 4


def test_reading_goes_on_while_copies_are_under_way() -> None:
    saved = one_tensor()
    rank, log = on_device(saved, wants_of(saved, (0, 64)))
    reached = anyio.Event()

    async def all_queued(loaded: Any) -> Any:
        if log.count("queued") == 4:
            reached.set()
        with anyio.fail_after(60):
            await reached.wait()
        return loaded

    run(
        Files(saved),
        [rank],
        read_bytes=16,
        edit=lambda graph: graph.before("exchange", Stage("wait", all_queued, workers=4)),
    )
    rank.check()
    assert log[:4] == ["queued"] * 4


def test_what_a_round_brings_stays_until_it_is_copied() -> None:
    saved = one_tensor()
    (one, first), (two, second) = (on_device(saved, wants_of(saved, (0, 64))) for _ in range(2))
    run(Files(saved), [one, two], read_bytes=16)
    for rank, log in ((one, first), (two, second)):
        rank.check()
        assert log.count("queued") == log.count("reached") == 4
        assert rank.context is not None
        assert rank.context.received_nbytes == 32


def test_small_neighbours_go_together_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 5, 40, 2, 1]
    tensors = [meta(f"t{n}", (size,), "int16") for n, size in enumerate(sizes)]
    saved = save(tensors, [SavedBox(t, Box.whole(t.shape), [(t.shape[0], 0)]) for t in tensors], 1, 1024)
    table = ShardTable.build([ShardRow(tensor, Box.whole(tensor.shape)) for tensor in tensors])
    rank, _ = on_device(saved, table, ["plain", "inside"])
    monkeypatch.setattr(place, "SMALL_BYTES", 64)
    groups: list[int] = []
    foreach = torch._foreach_copy_

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor], **how: Any) -> Any:
        groups.append(len(targets))
        return foreach(targets, sources, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    run(Files(saved), [rank], read_bytes=1024)
    rank.check()
    assert groups == [2, 2]


# -- rounds ---------------------------------------------------------------------------------------


def test_a_round_is_placed_while_the_next_one_travels() -> None:
    saved = one_tensor()
    table = wants_of(saved, (0, 64))
    ranks = [rank_of(saved, table, ["plain"]) for _ in range(2)]
    placed: list[int] = []

    async def before(rank: int, number: int) -> None:
        context = ranks[rank].context
        assert context is not None
        if number:  # it gets on only when the last round's bytes are in their tensors
            with anyio.fail_after(60):
                while context.placed_nbytes < 32 * number:
                    await anyio.lowlevel.checkpoint()
            placed.append(number)

    run(Files(saved), ranks, read_bytes=16, exchange_bytes=16, room=Room(2, before))
    assert sorted(placed) == [1, 1]
    for rank in ranks:
        rank.check()


def test_an_error_of_a_round_is_raised_as_it_is() -> None:
    saved = one_tensor()
    ranks = [rank_of(saved, wants_of(saved, (0, 64)), ["plain"]) for _ in range(2)]

    async def before(rank: int, number: int) -> None:
        if (rank, number) == (0, 1):
            raise OSError("the network is gone")

    error = failure(Files(saved), ranks, read_bytes=16, exchange_bytes=16, room=Room(2, before))
    assert error.stage == "exchange"
    assert str(error.__cause__) == "the network is gone"


def test_an_item_without_a_chunk_reads_nothing() -> None:
    assert ReadItem("round 3", 0, None, 3, "", None).rows == slice(0, 0)


class Flipping(Room):
    """Flips one bit of what rank 0 is sent in the first round."""

    async def all_to_all(self, rank: int, outgoing: Sequence[Buffer], incoming: Sequence[Buffer]) -> None:
        await super().all_to_all(rank, outgoing, incoming)
        if rank == 0 and self.calls[0] == 1:
            memoryview(incoming[1])[5] ^= 1


def test_a_bit_that_flips_between_ranks_names_the_sender_and_reaches_no_tensor() -> None:
    saved = one_tensor()
    ranks = [rank_of(saved, wants_of(saved, (0, 64)), ["plain"]) for _ in range(2)]
    error = failure(Files(saved), ranks, read_bytes=16, exchange_bytes=1024, room=Flipping(2))
    assert (error.stage, type(error.__cause__)) == ("exchange", CorruptError)
    assert "the 16 bytes that rank 0 received from rank 1 have digest" in str(error.__cause__)
    assert "file 0 data bytes 32 to 48" in str(error.__cause__)
    assert ranks[0].tensors[0][32:48].tolist() != ranks[0].expected(0)[32:48].tolist()


@pytest.mark.parametrize("codec", [None, Codec("zlib", encode=zlib.compress, decode=zlib.decompress)])
def test_bytes_that_change_after_they_were_checked_are_not_passed_on(
    codec: Codec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = one_tensor()
    ranks = [rank_of(saved, wants_of(saved, (0, 64)), ["plain"]) for _ in range(2)]
    deserialized = stages._deserialize

    def spoiled(context: LoadContext, *args: Any) -> Loaded:
        loaded = deserialized(context, *args)
        if context.rank == 1:
            loaded.data[3] ^= 16  # as a defect of the host's memory does
        return loaded

    monkeypatch.setattr(stages, "_deserialize", spoiled)
    error = failure(Files(saved, codec), ranks, read_bytes=16, codecs={"zlib": codec} if codec else None)
    assert isinstance(error.__cause__, CorruptError)
    assert "that rank 0 received from rank 1 have digest" in str(error.__cause__)
