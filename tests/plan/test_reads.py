"""The load side of planning, executed with numpy on byte buffers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.errors import CorruptError
from bcp.plan.box import Box
from bcp.plan.check import check_layout
from bcp.plan.layout import Layout
from bcp.plan.lookup import find, names, resolve
from bcp.plan.reads import Assignment, Wants, assign, decode_ranges, encode_ranges, placements, wants
from bcp.plan.shards import KINDS, Ints, ShardRow, ShardTable, TensorMeta, TensorTable, matrix

DTYPES = {"uint8": 1, "int16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and its segments as (elements, rank that writes them)."""

    tensor: TensorMeta
    box: Box
    segments: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Saved:
    """A layout, the data sections of its files, and what was saved: arrays, and (file, byte) of every element."""

    layout: Layout
    files: list[npt.NDArray[np.uint8]]
    arrays: list[npt.NDArray[np.int64]]
    places: list[tuple[Ints, Ints]]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for low, n in zip(box.offsets, box.lengths, strict=True))


def meta(fqn: str, shape: tuple[int, ...], dtype: str = "int32", kind: str = "model", tied_to: str = "") -> TensorMeta:
    stride = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    return TensorMeta(kind, fqn, dtype, DTYPES[dtype], shape, stride, tied_to=tied_to)


def save(tensors: Sequence[TensorMeta], pieces: Sequence[Piece], world_size: int, block_bytes: int) -> Saved:
    """Write tensors of random numbers; tensors are sorted, pieces are in their order."""
    width = max((len(tensor.shape) for tensor in tensors), default=0)
    rows = [(p, start, n, rank) for p, piece in enumerate(pieces) for start, n, rank in _starts(piece.segments)]
    keys = sorted({(KINDS.index(pieces[p].tensor.kind), rank) for p, _, _, rank in rows})
    file = np.array([keys.index((KINDS.index(pieces[p].tensor.kind), rank)) for p, _, _, rank in rows], dtype=np.int64)
    itemsize = np.array([pieces[p].tensor.itemsize for p, *_ in rows], dtype=np.int64)
    ends, offset = [0] * len(keys), np.zeros(len(rows), dtype=np.int64)
    for row in np.argsort(-itemsize, kind="stable").tolist():
        offset[row] = ends[file[row]]
        ends[file[row]] += rows[row][2] * itemsize[row]
    columns = np.array([(p, start, n) for p, start, n, _ in rows], dtype=np.int64).reshape(-1, 3)
    layout = Layout(
        world_size=world_size,
        block_bytes=block_bytes,
        tensors=TensorTable.build(tensors),
        piece_tensor=np.array([tensors.index(piece.tensor) for piece in pieces], dtype=np.int64),
        offset=matrix([piece.box.offsets for piece in pieces], width, 0),
        length=matrix([piece.box.lengths for piece in pieces], width, 1),
        segment_piece=columns[:, 0],
        segment_start=columns[:, 1],
        segment_length=columns[:, 2],
        segment_file=file,
        segment_offset=offset,
        file_kind=np.array([kind for kind, _ in keys], dtype=np.int64),
        file_rank=np.array([rank for _, rank in keys], dtype=np.int64),
        file_nbytes=np.array(ends, dtype=np.int64),
        objects=[],
        object_rank=np.empty(0, dtype=np.int64),
        extra_kind=np.empty(0, dtype=np.int64),
        extra_rank=np.empty(0, dtype=np.int64),
    )
    check_layout(layout)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256 if t.itemsize == 1 else 30_000, t.shape) for t in tensors]
    places = [(np.full(t.shape, -1), np.full(t.shape, -1)) for t in tensors]
    files = [np.zeros(end, dtype=np.uint8) for end in ends]
    for row, (p, start, n, _) in enumerate(rows):
        piece, tensor = pieces[p], tensors.index(pieces[p].tensor)
        flat = np.zeros(piece.box.numel, dtype=np.bool_)
        flat[start : start + n] = True
        inside = np.zeros(piece.tensor.shape, dtype=np.bool_)
        inside[slices(piece.box)] = flat.reshape(piece.box.lengths)
        places[tensor][0][inside] = file[row]
        places[tensor][1][inside] = offset[row] + np.arange(n) * itemsize[row]
        data = arrays[tensor][inside].astype(piece.tensor.dtype).view(np.uint8)
        files[file[row]][offset[row] : offset[row] + len(data)] = data
    return Saved(layout, files, arrays, places)


def _starts(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    starts = itertools.accumulate((n for n, _ in segments), initial=0)
    return [(start, n, rank) for start, (n, rank) in zip(starts, segments, strict=False)]


class Memory:
    """The tensors of one loading rank, and how often each element was written."""

    def __init__(self, saved: Saved, table: ShardTable) -> None:
        self.saved, self.table, self.wants = saved, table, wants(saved.layout, table)
        full = [table.stop[row] - table.start[row] == table.box(row).numel for row in range(len(table))]
        shapes = [table.box(r).lengths if full[r] else (table.stop[r] - table.start[r],) for r in range(len(table))]
        self.values = [np.full(shape, -1) for shape in shapes]
        self.counts = [np.zeros(shape, dtype=np.int64) for shape in shapes]

    def place(self, file: int, lo: int, hi: int) -> None:
        run = self.saved.files[file][lo:hi].tobytes()
        for p in placements(self.saved.layout, self.table, self.wants, file, lo, hi):
            dtype = self.saved.layout.tensors.dtype[self.tensor(p.row)]
            count = int(np.prod(p.source_lengths, dtype=np.int64))
            source = np.frombuffer(run, dtype, count, p.source_at).reshape(p.source_lengths)[slices(p.source_box)]
            for target, new in ((self.values, source), (self.counts, None)):
                view = target[p.row]
                if p.target_at is not None:
                    count = int(np.prod(p.target_lengths, dtype=np.int64))
                    view = view[p.target_at : p.target_at + count].reshape(p.target_lengths)
                assert view.shape == p.target_lengths
                if new is None:
                    view[slices(p.target_box)] += 1
                else:
                    view[slices(p.target_box)] = new

    def check(self) -> None:
        for row, (found, count) in enumerate(zip(self.values, self.counts, strict=True)):
            np.testing.assert_array_equal(count, 1)
            np.testing.assert_array_equal(found, self.expected(row, self.saved.arrays[self.tensor(row)]))

    def expected(self, row: int, of: Ints) -> Ints:
        block = of[slices(self.table.box(row))]
        flat = block.reshape(-1)[self.table.start[row] : self.table.stop[row]]
        return block if len(flat) == block.size else flat

    def tensor(self, row: int) -> int:
        stored = find(self.saved.layout, self.table.meta(row).kind, self.table.meta(row).fqn)
        assert stored is not None
        return stored


# -- random layouts -----------------------------------------------------------------------------


def cuts(draw: st.DrawFn, n: int, most: int) -> list[tuple[int, int]]:
    """Cut [0, n) into at most ``most`` non-empty intervals."""
    inner = draw(st.sets(st.integers(1, n - 1), max_size=most - 1)) if n > 1 else set()
    return list(itertools.pairwise([0, *sorted(inner), n])) if n else []


@st.composite
def checkpoints(draw: st.DrawFn) -> Saved:
    """Save random tensors under random grids, every box cut into segments of random writers."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4))
    kinds = [draw(st.sampled_from(KINDS[:2])) for _ in shapes]
    dtypes = [draw(st.sampled_from(sorted(DTYPES))) for _ in shapes]
    tensors = sorted(
        (meta(f"t{i}", shape, dtypes[i], kinds[i]) for i, shape in enumerate(shapes)),
        key=lambda tensor: (KINDS.index(tensor.kind), tensor.fqn),
    )
    pieces = []
    for tensor in tensors:
        for grid in itertools.product(*(cuts(draw, n, 3) for n in tensor.shape)):
            box = Box(tuple(a for a, _ in grid), tuple(b - a for a, b in grid))
            segments = [(b - a, draw(st.integers(0, 2))) for a, b in cuts(draw, box.numel, 4)]
            pieces.append(Piece(tensor, box, segments))
    return save(tensors, pieces, 3, draw(st.sampled_from([16, 32, 64])))


@st.composite
def targets(draw: st.DrawFn, saved: Saved) -> ShardTable:
    """Draw arbitrary shards of saved tensors: whole boxes, and flat intervals of boxes."""
    rows = []
    for index in draw(st.lists(st.integers(0, len(saved.layout.tensors) - 1), max_size=4)):
        tensor = saved.layout.tensors[index]
        low = [draw(st.integers(0, max(0, n - 1))) for n in tensor.shape]
        lengths = [draw(st.integers(min(1, n), n - a)) for n, a in zip(tensor.shape, low, strict=True)]
        box = Box(tuple(low), tuple(lengths))
        start = draw(st.integers(0, box.numel)) if draw(st.booleans()) else 0
        rows.append(ShardRow(tensor, box, start, draw(st.integers(start, box.numel)) if start else None))
    return ShardTable.build(rows)


def element_boundaries(saved: Saved, file: int) -> list[int]:
    layout = saved.layout
    sizes = layout.tensors.itemsize[layout.piece_tensor[layout.segment_piece]]
    ranges = [
        range(int(offset), int(offset + n * size) + 1, int(size))
        for f, offset, n, size in zip(
            layout.segment_file, layout.segment_offset, layout.segment_length, sizes, strict=True
        )
        if f == file
    ]
    return sorted({position for one in ranges for position in one})


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_runs_that_tile_the_files_write_every_element_once(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    for file in range(len(saved.files)):
        bounds = element_boundaries(saved, file)
        inner = data.draw(st.sets(st.sampled_from(bounds), max_size=5))
        for lo, hi in itertools.pairwise(sorted({0, bounds[-1], *inner})):
            memory.place(file, lo, hi)
    memory.check()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_wants_are_exact_hulls(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    layout, found = saved.layout, memory.wants
    sizes = layout.tensors.itemsize[layout.piece_tensor[layout.segment_piece]]
    needed: dict[tuple[int, int], tuple[int, int]] = {}
    for row in range(len(memory.table)):
        files, starts = (memory.expected(row, of).reshape(-1) for of in saved.places[memory.tensor(row)])
        for segment in range(len(sizes)):
            first = layout.segment_offset[segment]
            last = first + layout.segment_length[segment] * sizes[segment]
            inside = starts[(files == layout.segment_file[segment]) & (starts >= first) & (starts < last)]
            if inside.size:
                needed[row, segment] = int(inside.min()), int(inside.max() + sizes[segment])
    keys = zip(found.row.tolist(), found.segment.tolist(), strict=True)
    assert dict(zip(keys, zip(found.start, found.stop, strict=True), strict=True)) == needed
    assert len(found) == len(needed)
    order = list(zip(found.file.tolist(), found.start.tolist(), strict=True))
    assert order == sorted(order)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_readers_share_every_wanted_block_and_everything_arrives(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    ranks = data.draw(st.integers(1, 4))
    ours = data.draw(targets(saved))  # replicas are what sharing is for
    tables = [ours if data.draw(st.booleans()) else data.draw(targets(saved)) for _ in range(ranks)]
    memories = [Memory(saved, table) for table in tables]
    ranges = [memory.wants.ranges() for memory in memories]
    share = data.draw(st.booleans())
    read_bytes, exchange_bytes = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 400))
    block = data.draw(st.sampled_from([None, 48]))
    plan = assign(
        saved.layout, ranges, read_bytes=read_bytes, exchange_bytes=exchange_bytes, share=share, block_bytes=block
    )
    block = block or saved.layout.block_bytes
    wanted = [{(f, b) for f, a, z in rows.tolist() for b in range(a // block, -(-z // block))} for rows in ranges]
    check_chunks(saved, plan, wanted, block, read_bytes)
    read = [blocks_of(plan, rank, block) for rank in range(ranks)]
    if share:
        assert sum(read, Counter()) == Counter(set().union(*wanted))
    else:
        assert plan.rounds == 0
        assert read == [Counter(blocks) for blocks in wanted]
    run_job(memories, plan, max(exchange_bytes, block * ranks))
    for memory in memories:
        memory.check()


def check_chunks(saved: Saved, plan: Assignment, wanted: list[set[tuple[int, int]]], block: int, most: int) -> None:
    for rank, mine in enumerate(wanted):
        items = plan.items(rank)
        assert [item.round for item in items if item.round >= 0] == list(range(plan.rounds))
        for item in items:
            assert item.reader == rank
            assert item.nbytes <= max(block, most)
            if item.file >= 0:
                assert item.start % block == 0
                assert item.stop % block == 0 or item.stop == saved.layout.file_nbytes[item.file]
                assert (item.file, item.start // block) in mine


def blocks_of(plan: Assignment, rank: int, block: int) -> Counter[tuple[int, int]]:
    chunks = [item for item in plan.items(rank) if item.file >= 0]
    return Counter((c.file, b) for c in chunks for b in range(c.start // block, -(-c.stop // block)))


def run_job(memories: list[Memory], plan: Assignment, most_received: int) -> None:
    for rank, memory in enumerate(memories):
        for item in plan.items(rank):
            if item.file >= 0:
                memory.place(item.file, item.start, item.stop)
            received = plan.receives(rank, item.round) if item.round >= 0 else {}
            assert sum(part.hi - part.lo for part in received.values()) <= most_received
            for peer, part in received.items():
                assert plan.sends(peer, item.round)[rank] == part
                (chunk,) = [c for c in plan.items(peer) if c.round == item.round]
                assert (chunk.file, chunk.start <= part.lo < part.hi <= chunk.stop) == (part.file, True)
                memory.place(part.file, part.lo, part.hi)
            for peer, part in (plan.sends(rank, item.round) if item.round >= 0 else {}).items():
                assert plan.receives(peer, item.round)[rank] == part


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_ranges_are_the_union_of_the_wants(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    found = wants(saved.layout, data.draw(targets(saved)))
    ranges = found.ranges()
    union = [np.zeros(len(file) + 1, dtype=np.bool_) for file in saved.files]
    for file, start, stop in zip(found.file, found.start, found.stop, strict=True):
        union[file][start:stop] = True
    again = [np.zeros(len(file) + 1, dtype=np.bool_) for file in saved.files]
    for index, (file, start, stop) in enumerate(ranges.tolist()):
        assert not again[file][max(0, start - 1) : stop + 1].any(), index  # neither overlapping nor adjacent
        again[file][start:stop] = True
    assert all((a == b).all() for a, b in zip(union, again, strict=True))
    assert (decode_ranges(encode_ranges(ranges)) == ranges).all()


# -- examples -----------------------------------------------------------------------------------


def one_file(nbytes: int, block_bytes: int = 16) -> Saved:
    tensor = meta("w", (nbytes,), "uint8")
    return save([tensor], [Piece(tensor, Box.whole(tensor.shape), [(nbytes, 0)])], 1, block_bytes)


def whole(saved: Saved) -> Ints:
    tensor = saved.layout.tensors[0]
    return wants(saved.layout, ShardTable.build([ShardRow(tensor, Box.whole(tensor.shape))])).ranges()


def test_replicas_share_the_reading_evenly() -> None:
    saved = one_file(64 * 1024 + 5, block_bytes=64)
    plan = assign(saved.layout, [whole(saved)] * 8, read_bytes=1 << 20, exchange_bytes=1 << 20, share=True)
    loads = [sum(item.nbytes for item in plan.items(rank)) for rank in range(8)]
    assert sum(loads) == 64 * 1024 + 5
    assert max(loads) <= sum(loads) / 8 * 1.125 + 64


def test_the_same_inputs_give_the_same_assignment() -> None:
    saved = one_file(999)
    ranges = [whole(saved)[:, :] + [[0, 100 * rank, 0]] for rank in range(3)]
    one, two = (assign(saved.layout, ranges, read_bytes=64, exchange_bytes=96, share=True) for _ in range(2))
    assert [one.items(r) for r in range(3)] == [two.items(r) for r in range(3)]
    assert one.rounds > 1


def test_a_rank_without_wants_takes_part_in_every_round() -> None:
    saved = one_file(160)
    nothing = np.empty((0, 3), dtype=np.int64)
    plan = assign(saved.layout, [whole(saved), whole(saved), nothing], read_bytes=64, exchange_bytes=96, share=True)
    assert [(item.file, item.nbytes, item.round) for item in plan.items(2)] == [(-1, 0, k) for k in range(plan.rounds)]
    assert all(not plan.receives(2, k) and not plan.sends(2, k) for k in range(plan.rounds))


def test_private_chunks_are_spread_between_the_rounds() -> None:
    saved = one_file(64 * 16)
    shared, private = [0, 0, 8 * 16], [0, 8 * 16, 64 * 16]
    ranges = [np.array([shared]), np.array([[0, 0, private[2]]])]
    plan = assign(saved.layout, ranges, read_bytes=64, exchange_bytes=32, share=True)
    rounds = [item.round for item in plan.items(1)]
    gaps = [len(list(run)) for private_, run in itertools.groupby(rounds, lambda n: n < 0) if private_]
    assert plan.rounds == 8  # rank 0 has nothing else to do
    assert max(gaps) - min(gaps) <= 1


def test_blocks_may_be_parts_of_encoded_files() -> None:
    saved = one_file(1000)
    ranges = [np.array([[0, 10, 20]]), np.array([[0, 15, 600]])]
    plan = assign(saved.layout, ranges, read_bytes=1, exchange_bytes=1, share=True, block_bytes=256)
    chunks = sorted((item.start, item.stop) for rank in (0, 1) for item in plan.items(rank) if item.file >= 0)
    assert chunks == [(0, 256), (256, 512), (512, 768)]


def test_only_what_is_needed_of_a_shared_chunk_travels() -> None:
    saved = one_file(64, block_bytes=64)
    plan = assign(
        saved.layout,
        [np.array([[0, 0, 64]]), np.array([[0, 3, 5], [0, 9, 12]])],
        read_bytes=64,
        exchange_bytes=64,
        share=True,
    )
    (transfer,) = [*plan.receives(0, 0).values(), *plan.receives(1, 0).values()]
    assert (transfer.lo, transfer.hi) in {(0, 64), (3, 12)}


def test_nothing_wanted_is_nothing_to_do() -> None:
    saved = one_file(64)
    nothing = wants(saved.layout, ShardTable.build([])).ranges()
    plan = assign(saved.layout, [nothing, nothing], read_bytes=64, exchange_bytes=64, share=True)
    assert (plan.rounds, plan.items(0)) == (0, [])
    assert decode_ranges(encode_ranges(nothing)).shape == (0, 3)


def test_a_message_that_is_not_ranges_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reshape|multiple"):
        decode_ranges(b"x" * 25)


def test_tied_tensors_are_read_where_they_are_stored_and_unknown_ones_not_at_all() -> None:
    stored, tied = meta("embed", (4, 2)), meta("head", (4, 2), tied_to="embed")
    saved = save([stored, tied], [Piece(stored, Box.whole((4, 2)), [(8, 0)])], 1, 16)
    other = meta("other", (4, 2, 3))  # more dimensions than the layout has columns
    table = ShardTable.build([ShardRow(tied, Box((1, 0), (2, 2))), ShardRow(other, Box.whole((4, 2, 3)))])
    found = wants(saved.layout, table)
    assert list(zip(found.row, found.start, found.stop, strict=True)) == [(0, 8, 24)]


def test_lookups() -> None:
    tensors = [meta("a", (1,)), meta("b", (1,)), meta("a", (1,), kind="optimizer")]
    saved = save(tensors, [Piece(t, Box.whole((1,)), [(1, 0)]) for t in tensors], 1, 16)
    assert [find(saved.layout, "model", name) for name in ("", "a", "aa", "b", "c")] == [None, 0, None, 1, None]
    assert find(saved.layout, "optimizer", "a") == 2
    assert find(saved.layout, "optimizer", "b") is None
    assert list(names(saved.layout, "model")) == ["a", "b"]
    assert list(names(saved.layout, "dataloader")) == []
    dangling = replace(saved.layout, tensors=TensorTable.build([meta("a", (1,), tied_to="zz")]))
    with pytest.raises(CorruptError, match="zz"):
        resolve(dangling, 0)


def test_wants_of_a_column_shard_skip_segments_between_its_rows() -> None:
    tensor = meta("w", (4, 8), "uint8")
    saved = save([tensor], [Piece(tensor, Box.whole((4, 8)), [(4, k % 2) for k in range(8)])], 2, 16)
    found: Wants = wants(saved.layout, ShardTable.build([ShardRow(tensor, Box((0, 1), (4, 2)))]))
    assert found.file.tolist() == [0, 0, 0, 0]  # the right halves of all rows are in file 1
    assert (found.stop - found.start).tolist() == [2, 2, 2, 2]


def test_wants_end_with_the_last_needed_row_of_a_segment_that_goes_on() -> None:
    tensor = meta("w", (4, 8), "uint8")
    saved = save([tensor], [Piece(tensor, Box.whole((4, 8)), [(26, 0), (6, 0)])], 1, 16)
    found = wants(saved.layout, ShardTable.build([ShardRow(tensor, Box((0, 1), (2, 2)))]))
    assert list(zip(found.segment, found.start, found.stop, strict=True)) == [(0, 1, 11)]


def test_an_empty_shard_wants_nothing() -> None:
    tensor = meta("w", (4, 8), "uint8")
    saved = save([tensor], [Piece(tensor, Box.whole((4, 8)), [(32, 0)])], 1, 16)
    rows = [ShardRow(tensor, Box((4, 0), (0, 8))), ShardRow(tensor, Box((0, 0), (4, 8)), 5, 5)]
    assert len(wants(saved.layout, ShardTable.build(rows))) == 0
