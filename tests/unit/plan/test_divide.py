from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter

import numpy as np
import pytest
import torch
from counted import growth
from divided import Divided, divided
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from bcp.errors import CoverageError, StateError
from bcp.plan.box import Box
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, ShardRow, ShardTable, TensorMeta
from bcp.plan.write.files import data_files

DTYPES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "int8": 1, "bool": 1}
W = TensorMeta("model", "w", "float32", 4, (4, 6), (6, 1), "cuda")

# Random worlds: every tensor is sharded on its own random grid, cells may be cut flat, anything may be replicated.
# States of a parameter are mostly held alike, but not always.


def cut(draw: st.DrawFn, length: int, most: int = 3) -> list[tuple[int, int]]:
    """Cut 0 .. length into up to ``most`` non-empty intervals."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=most - 1)) if length > 1 else set()
    ends = sorted({0, length, *inner})
    return list(pairwise(ends))


def shards(
    draw: st.DrawFn, shape: tuple[int, ...], some_ranks: st.SearchStrategy[set[int]]
) -> list[tuple[int, Box, int, int]]:
    """Shard a shape; returns (rank, box, start, stop)."""
    cells = [Box((), ())]
    for length in shape:
        cells = [
            Box((*cell.offsets, a), (*cell.lengths, b - a)) for cell in cells for a, b in cut(draw, length, most=2)
        ]
    return [
        (rank, cell, start, stop)
        for cell in cells
        for start, stop in (cut(draw, cell.numel) if draw(st.booleans()) else [(0, cell.numel)])
        for rank in draw(some_ranks)
    ]


@st.composite
def worlds(draw: st.DrawFn) -> list[ShardTable]:
    world_size = draw(st.integers(1, 5))
    rows: list[list[ShardRow]] = [[] for _ in range(world_size)]
    metas = []
    some_ranks = st.sets(st.integers(0, world_size - 1), min_size=1)
    for index in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple) | st.just((0, 4)) | st.just((33, 50)))
        kind = draw(st.sampled_from(KINDS[:2]))
        dtypes = draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3 if kind == "optimizer" else 1))
        held: list[tuple[int, Box, int, int]] = []
        for state, dtype in enumerate(dtypes):
            meta = TensorMeta(kind, f"t{index}.{state}", dtype, DTYPES[dtype], shape)
            metas.append(meta)
            if 0 in shape:
                continue
            if not held or draw(st.integers(0, 4)) == 0:
                held = shards(draw, shape, some_ranks)
            for rank, *row in held:
                rows[rank].append(ShardRow(meta, *row))
    return [ShardTable.build(draw(st.permutations(mine)), more=metas) for mine in rows]


def value(meta: TensorMeta) -> torch.Tensor:
    """Return a tensor in which (almost) every element is different."""
    numbers = torch.arange(math.prod(meta.shape)) * 7 + len(meta.fqn)
    return (numbers % 251).to(getattr(torch, meta.dtype)).reshape(meta.shape)


def flat(tensor: torch.Tensor, box: Box, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a flat interval of a box of a tensor."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))].reshape(-1)[start:stop]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def segments(layout: Layout) -> list[tuple[int, TensorMeta, Box, int, int, int]]:
    """List (file, tensor, box, start, stop, offset) of every segment of every tensor."""
    found = []
    all_segments = layout.segments
    for number, at in zip(*(c.tolist() for c in all_segments.of_boxes(np.arange(len(layout.offset)))), strict=True):
        for row in np.flatnonzero(layout.leader == layout.box_tensor[number]).tolist():
            meta, file = layout.tensors[row], int(all_segments.file[number] + all_segments.step[at])
            ndim = len(meta.shape)
            box = Box(tuple(layout.offset[number, :ndim].tolist()), tuple(layout.length[number, :ndim].tolist()))
            start, stop = (all_segments.line[at : at + 2] - all_segments.starts[number]).tolist()
            offset = int(layout.file_planes[file, layout.plane[row]] + all_segments.at[at] * meta.itemsize)
            found.append((file, meta, box, start, stop, offset))
    return found


def check_every_element_once(layout: Layout) -> None:
    metas = [layout.tensors[row] for row in range(len(layout.tensors))]
    counts = {(meta.kind, meta.fqn): np.zeros(meta.shape, dtype=int) for meta in metas}
    for _, meta, box, start, stop, _ in segments(layout):
        positions = np.arange(math.prod(meta.shape)).reshape(meta.shape)
        inside = positions[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))]
        counts[meta.kind, meta.fqn].reshape(-1)[inside.reshape(-1)[start:stop]] += 1
    for meta in metas:
        assert np.all(counts[meta.kind, meta.fqn] == (0 if meta.tied_to else 1))


def check_files_are_packed_and_aligned(layout: Layout) -> None:
    by_file = defaultdict(list)
    for file, meta, box, start, stop, offset in segments(layout):
        assert KINDS[layout.file_kind[file]] == meta.kind
        assert offset % meta.itemsize == 0
        by_file[file].append((offset, (stop - start) * meta.itemsize, meta, box.offsets, start))
    assert sorted(by_file) == list(range(len(layout.file_nbytes)))
    for file, found in by_file.items():
        found.sort(key=itemgetter(0))
        ends = np.cumsum([nbytes for _, nbytes, *_ in found])
        assert [offset for offset, *_ in found] == [0, *ends[:-1]]
        assert ends[-1] == layout.file_nbytes[file]
        sizes = [meta.itemsize for _, _, meta, *_ in found]
        assert sizes == sorted(sizes, reverse=True)
        runs = defaultdict(list)
        for _, _, meta, *place in found:
            runs[meta].append(place)
        assert all(run == sorted(run) for run in runs.values())
    owners = list(zip(layout.file_kind.tolist(), layout.file_rank.tolist(), strict=True))
    assert owners == sorted(set(owners))


def check_rows_are_sorted(layout: Layout) -> None:
    names = list(zip(layout.tensors.kind.tolist(), layout.tensors.fqn, strict=True))
    assert names == sorted(set(names))
    boxes = np.column_stack([layout.box_tensor, layout.offset]).tolist()
    assert boxes == sorted(boxes)


def check_writers_hold_what_they_write(tables: list[ShardTable], division: Divided) -> None:
    layout = division.layout
    planned = defaultdict(set)
    for file, meta, box, start, stop, offset in segments(layout):
        planned[int(layout.file_rank[file])].add((meta.kind, meta.fqn, box, start, stop, offset))
    for rank, (table, writes) in enumerate(zip(tables, division.writes, strict=True)):
        assert np.all(table.start[writes.row] <= writes.start)
        assert np.all(writes.stop <= table.stop[writes.row])
        mine = {
            (table.meta(row).kind, table.meta(row).fqn, table.box(row), start, stop, offset)
            for row, start, stop, offset in zip(
                *(getattr(writes, f.name).tolist() for f in fields(writes)), strict=True
            )
        }
        assert len(mine) == len(writes)
        assert mine == planned[rank]


def write_files(table: ShardTable, division: Divided, rank: int) -> dict[tuple[str, int], bytes]:
    """Do what the save pipeline does, in memory."""
    files = {}
    for file in data_files(table, division.writes[rank], rank=rank, part_bytes=4096):
        data = bytearray()
        for part in file.parts:
            chunk = bytearray(file.header if part.index == 0 else b"")
            for span in part.spans:
                assert span.at == len(chunk)
                chunk += as_bytes(flat(value(table.meta(span.row)), table.box(span.row), span.start, span.stop))
            assert (part.start, part.stop, part.nbytes) == (len(data), len(data) + len(chunk), len(chunk))
            assert part.stop == file.nbytes or part.stop == len(file.header) + (part.index + 1) * 4096
            data += chunk
        assert len(data) == file.nbytes
        files[file.kind, len(file.header)] = bytes(data)
    return files


@settings(max_examples=100)
@given(worlds(), st.sampled_from(["split", "worst-fit"]))
def test_any_world_is_divided_exactly(tables, balance):
    division = divided(tables, balance=balance, block_bytes=4096)
    layout = division.layout
    assert layout.world_size == len(tables)
    check_every_element_once(layout)
    check_files_are_packed_and_aligned(layout)
    check_rows_are_sorted(layout)
    check_writers_hold_what_they_write(tables, division)


@settings(max_examples=60)
@given(worlds())
def test_files_written_part_by_part_hold_what_the_layout_says(tables):
    division = divided(tables, block_bytes=4096)
    layout = division.layout
    written = {}
    for rank, table in enumerate(tables):
        for (kind, head), data in write_files(table, division, rank).items():
            written[KINDS.index(kind), rank] = data[head:]
            # A stranger's reader finds the same bytes under the entries' names.
            assert sum(tensor.numel() * tensor.element_size() for tensor in load(data).values()) == len(data) - head
    sizes = zip(layout.file_kind.tolist(), layout.file_rank.tolist(), layout.file_nbytes.tolist(), strict=True)
    assert {key: len(data) for key, data in written.items()} == {(kind, rank): n for kind, rank, n in sizes}
    for file, meta, box, start, stop, offset in segments(layout):
        data = written[int(layout.file_kind[file]), int(layout.file_rank[file])]
        assert data[offset : offset + (stop - start) * meta.itemsize] == as_bytes(flat(value(meta), box, start, stop))


# -- examples ----------------------------------------------------------------------------------------------------------


def table(*rows: ShardRow, more: tuple[TensorMeta, ...] = (), **kwargs: list[object]) -> ShardTable:
    return ShardTable.build(rows, more=more, **kwargs)


def whole(meta: TensorMeta) -> ShardRow:
    return ShardRow(meta, Box.whole(meta.shape))


def test_replicas_are_written_once():
    division = divided([table(whole(W))] * 3, balance="worst-fit", block_bytes=4096)
    assert [len(writes) for writes in division.writes] == [1, 0, 0]
    assert division.layout.file_nbytes.tolist() == [96]
    assert division.layout.block_bytes == 4096


def test_a_shard_stated_twice_by_one_rank_is_one_shard():
    twice = ShardTable.build([whole(W), whole(W)])
    assert divided([twice], block_bytes=4096).writes[0].row.tolist() == [0]


def test_the_same_tables_give_the_same_division():
    big = TensorMeta("model", "big", "float32", 4, (500, 100))
    tables = [table(whole(big), whole(W))] * 4
    first, second = (divided(tables, block_bytes=4096) for _ in range(2))
    assert len(first.layout.segments) == 5
    for a, b in zip(first.writes, second.writes, strict=True):
        assert all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (4, 7)}, r"shape \(4, 6\) on rank 0 and \(4, 7\) on rank 2"),
        ({"shape": (4, 6, 1)}, r"shape \(4, 6\) on rank 0 and \(4, 6, 1\) on rank 2"),
        ({"dtype": "int32"}, "dtype 'float32' on rank 0 and 'int32' on rank 2"),
        ({"itemsize": 8}, "itemsize 4 on rank 0 and 8 on rank 2"),
        ({"tied_to": "v"}, "tied_to '' on rank 0 and 'v' on rank 2"),
    ],
)
def test_ranks_that_disagree_are_both_named(change, message):
    other = TensorMeta("model", "v", "float32", 4, (4, 6))
    tables = [table(whole(W)), table(whole(other)), table(whole(other), more=(replace(W, **change),))]
    with pytest.raises(StateError, match=f"model tensor 'w' .*{message}"):
        divided(tables, block_bytes=4096)


def test_one_rank_that_disagrees_with_itself_is_named():
    with pytest.raises(StateError, match="dtype 'float32' on rank 1 and 'int32' on rank 1"):
        divided([table(), table(whole(W), whole(replace(W, dtype="int32")))], block_bytes=4096)


def test_the_lowest_rank_says_stride_device_and_grad():
    other = replace(W, stride=(1, 4), device="cpu", requires_grad=True)
    layout = divided([table(), table(whole(W)), table(whole(other))], block_bytes=4096).layout
    assert layout.tensors[0] == W


def test_one_name_in_two_kinds_is_two_tensors():
    layout = divided([table(whole(replace(W, kind="optimizer")), whole(W))], block_bytes=4096).layout
    assert layout.tensors.fqn == ["w", "w"]
    assert layout.file_kind.tolist() == [0, 1]
    assert layout.file_nbytes.tolist() == [96, 96]


def test_tied_and_empty_tensors_have_no_boxes():
    tied, empty = replace(W, fqn="v", tied_to="w"), TensorMeta("model", "e", "float32", 4, (0, 3))
    layout = divided([table(whole(W), whole(tied), whole(empty)), table(more=(tied,))], block_bytes=4096).layout
    assert layout.tensors.fqn == ["e", "v", "w"]
    assert layout.tensors[1].tied_to == "w"
    assert layout.box_tensor.tolist() == [2]


@pytest.mark.parametrize(
    ("metas", "message"),
    [
        ([replace(W, tied_to="x")], "'w' is tied to 'x', which no rank holds"),
        ([W, replace(W, fqn="u", tied_to="w"), replace(W, fqn="v", tied_to="u")], "'u', which is itself tied to 'w'"),
        ([replace(W, dtype="odd", itemsize=3)], "elements of 3 bytes"),
    ],
)
def test_what_cannot_be_stored_is_refused(metas, message):
    with pytest.raises(StateError, match=message):
        divided([table(*map(whole, metas))], block_bytes=4096)


def test_gaps_are_refused():
    with pytest.raises(CoverageError, match="'w'"):
        divided([table(ShardRow(W, Box((0, 0), (2, 6))))], block_bytes=4096)


def test_tensors_of_different_ndim_on_different_ranks():
    deep = TensorMeta("model", "deep", "int8", 1, (2, 1, 2, 3))
    scalar = TensorMeta("optimizer", "step", "float32", 4, ())
    layout = divided([table(whole(scalar)), table(whole(W)), table(whole(deep))], block_bytes=4096).layout
    assert [layout.tensors[i].shape for i in range(3)] == [(2, 1, 2, 3), (4, 6), ()]
    assert layout.file_rank.tolist() == [1, 2, 0]
    check_every_element_once(layout)


def test_objects_belong_to_the_lowest_rank_that_has_them_and_extras_to_every_rank():
    tables = [
        table(objects=[("optimizer", "lr")], extras=["extra_states"]),
        table(objects=[("model", "version"), ("optimizer", "lr")], extras=["dataloader", "extra_states"]),
    ]
    layout = divided(tables, block_bytes=4096).layout
    assert list(layout.objects) == [("model", "version"), ("optimizer", "lr")]
    assert layout.object_rank.tolist() == [1, 0]
    assert [KINDS[code] for code in layout.extra_kind] == ["dataloader", "extra_states", "extra_states"]
    assert layout.extra_rank.tolist() == [1, 0, 1]
    assert [len(writes) for writes in divided(tables, block_bytes=4096).writes] == [0, 0]


def test_sizes_beyond_32_bits():
    huge = TensorMeta("model", "huge", "float32", 4, (1 << 20, 1 << 16))
    layout = divided([table(whole(huge), whole(W))] * 3, block_bytes=4096).layout
    assert layout.file_nbytes.sum() == (4 << 36) + 96
    assert layout.segments.length.sum() == (1 << 36) + 24
    assert layout.file_nbytes.max() / layout.file_nbytes.mean() <= 1.01
    columns = [getattr(layout, f.name) for f in fields(layout)]
    assert {column.dtype for column in columns if isinstance(column, np.ndarray)} == {np.dtype(np.int64)}


def tables_of_64_ranks(shards: int) -> list[ShardTable]:
    metas = [TensorMeta("model", f"layers.{i}.weight", "bfloat16", 2, (128, 64)) for i in range(shards)]
    return [table(*(ShardRow(meta, Box((2 * rank, 0), (2, 64))) for meta in metas)) for rank in range(64)]


def test_64_ranks_of_2000_shards():
    assert len(divided(tables_of_64_ranks(2000), block_bytes=4096).layout.segments) == 128_000


def test_twice_the_shards_are_at_most_twice_the_work():
    assert growth(lambda shards: partial(divided, tables_of_64_ranks(shards), block_bytes=4096), 250) <= 2.1
