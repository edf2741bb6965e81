"""Who reads what, executed with numpy on byte buffers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from saved import Memory, Saved, SavedBox, checkpoints, meta, save, targets

from bcp._messages.planning import BlockRuns, SharedRuns
from bcp.errors import MessageError
from bcp.plan.box import Box
from bcp.plan.columns import Ints, begins
from bcp.plan.read import plan_load
from bcp.plan.read import share as sharing
from bcp.plan.read.copies import Assignment
from bcp.plan.read.share import BlockIndex, RankSets, SharedReads, WantedBlocks, fill, share_reads

MIB = 1 << 20


def blocks_of(line: BlockIndex, plan: Assignment) -> Counter[tuple[int, int]]:
    chunks = [item for item in plan.items() if item.file >= 0]
    size = line.block_bytes
    return Counter((c.file, b) for c in chunks for b in range(c.start // size, -(-c.stop // size)))


def loads(plan: Sequence[Assignment]) -> list[int]:
    return [sum(item.nbytes for item in each.items()) for each in plan]


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_readers_share_every_wanted_block_and_everything_arrives(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    ranks = data.draw(st.integers(1, 5))
    ours = data.draw(targets(saved))  # replicas are what sharing is for
    tables = [ours if data.draw(st.booleans()) else data.draw(targets(saved)) for _ in range(ranks)]
    memories = [Memory(saved, table) for table in tables]
    shared = data.draw(st.booleans())
    read_bytes, exchange_bytes = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 400))
    line = BlockIndex.of(saved.layout, data.draw(st.sampled_from([None, 48])))
    ranges = [memory.wants.ranges() for memory in memories]
    limits = {"read_bytes": read_bytes, "exchange_bytes": exchange_bytes}
    speed = data.draw(st.none() | st.lists(st.floats(0.001, 1.0), min_size=ranks, max_size=ranks).map(np.array))
    plan = plan_load(line, ranges, **limits, shared=shared, speed=speed)
    size = line.block_bytes
    wanted = [{(f, b) for f, a, z in rows.tolist() for b in range(a // size, -(-z // size))} for rows in ranges]
    check_chunks(line, plan, wanted, read_bytes)
    read = [blocks_of(line, each) for each in plan]
    if shared:
        assert sum(read, Counter()) == Counter(set().union(*wanted))
    else:
        assert plan[0].rounds == 0
        assert read == [Counter(blocks) for blocks in wanted]
    run_job(memories, plan, max(exchange_bytes, size * (ranks - 1)))
    for memory in memories:
        memory.check()


def check_chunks(line: BlockIndex, plan: list[Assignment], wanted: list[set[tuple[int, int]]], most: int) -> None:
    for rank, mine in enumerate(wanted):
        items = plan[rank].items()
        assert [item.round for item in items if item.round >= 0] == list(range(plan[0].rounds))
        for item in items:
            assert item.reader == rank
            assert item.nbytes <= max(line.block_bytes, most)
            if item.file >= 0:
                assert item.start % line.block_bytes == 0
                assert item.stop % line.block_bytes == 0 or item.stop == line.nbytes[item.file]
                blocks = range(item.start // line.block_bytes, -(-item.stop // line.block_bytes))
                assert mine.issuperset((item.file, block) for block in blocks)


def run_job(memories: list[Memory], plan: list[Assignment], most_received: int) -> None:
    """Place what every rank reads and receives, as a load does."""
    for rank, memory in enumerate(memories):
        for item in plan[rank].items():
            if item.file >= 0:
                memory.place(item.file, item.start, item.stop)
            received = plan[rank].receives(item.round) if item.round >= 0 else []
            assert sum(chunk.nbytes for chunk in received) <= most_received
            for chunk in received:
                assert rank in plan[chunk.reader].sends(item.round)
                assert chunk in plan[chunk.reader].items()
                memory.place(chunk.file, chunk.start, chunk.stop)
            for peer in plan[rank].sends(item.round) if item.round >= 0 else []:
                assert item in plan[peer].receives(item.round)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_sets_that_look_the_same_cost_reads_and_no_bytes(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memories = [Memory(saved, data.draw(targets(saved))) for _ in range(4)]
    ranges = [memory.wants.ranges() for memory in memories]
    line = BlockIndex.of(saved.layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "mix", lambda values, _: np.ones(len(values), dtype=np.uint64))  # as many, so the same
        plan = plan_load(line, ranges, read_bytes=64, exchange_bytes=64)
    run_job_loosely(memories, plan)


def run_job_loosely(memories: list[Memory], plan: list[Assignment]) -> None:
    for rank, memory in enumerate(memories):
        for item in plan[rank].items():
            chunks = plan[rank].receives(item.round) if item.round >= 0 else []
            for chunk in [item, *chunks]:
                if chunk.file >= 0:
                    memory.place(chunk.file, chunk.start, chunk.stop)
        memory.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(1, 9)), min_size=1, max_size=8))
@example(
    [
        ({0}, 3),
        ({0, 1, 2, 3, 4}, 9),
        ({0, 1, 2, 3, 4, 5}, 5),
        ({0, 1, 3, 4}, 9),
        ({0, 1, 2, 3, 4, 5}, 3),
        ({0, 4}, 7),
        ({0, 1, 2, 3, 4, 5}, 7),
    ]
)
def test_a_strip_is_divided_among_the_members_of_its_sets(given_: list[tuple[set[int], int]]) -> None:
    ranks = [sorted(members) for members, _ in given_]
    blocks = np.array([n for _, n in given_])
    nbytes = blocks * 16 - 3  # the last block of each is short
    sets = RankSets(begins(np.array([len(members) for members in ranks])), np.concatenate(ranks))
    strip = WantedBlocks(16, begins(blocks), begins(nbytes), np.arange(len(ranks) + 1))
    load, speed = np.arange(6) * 10.0, np.array([1.0, 0.5, 1.0, 0.1, 1.0, 1.0])
    cuts = fill(strip, sets, load, speed)
    assert (np.diff(cuts) >= 0).all()
    assert cuts[sets.begin].tolist() == strip.blocks.tolist()
    owner, size = sets.owner, np.diff(cuts)
    last = cuts[1:] == strip.blocks[owner + 1]
    got = size * 16 - np.where(last & (size > 0), 3, 0)
    np.testing.assert_allclose(load, np.arange(6) * 10 + np.bincount(sets.rank, weights=got, minlength=6))


# -- balance ------------------------------------------------------------------------------------


def one_file(nbytes: int, block_bytes: int = 16) -> Saved:
    tensor = meta("w", (nbytes,), "uint8")
    return save([tensor], [SavedBox(tensor, Box.whole(tensor.shape), [(nbytes, 0)])], 1, block_bytes)


def line_of(blocks: int, files: int = 1, block_bytes: int = MIB) -> BlockIndex:
    """A line of files of so many blocks; nobody makes the bytes."""
    base = np.arange(files + 1) * blocks
    return BlockIndex(block_bytes, base, np.full(files, blocks * block_bytes), np.empty(0, dtype=np.int64))


def rows(*ranges: tuple[int, int, int]) -> Ints:
    return np.array(ranges, dtype=np.int64).reshape(-1, 3)


def test_replicas_share_the_reading_evenly() -> None:
    line = line_of(1000)
    found = loads(plan_load(line, [rows((0, 0, 1000 * MIB))] * 8, read_bytes=32 * MIB, exchange_bytes=256 * MIB))
    assert sum(found) == 1000 * MIB
    assert max(found) == 125 * MIB


def test_a_rank_with_much_of_its_own_reads_less_for_others() -> None:
    line = line_of(100, files=4)
    ranges = [rows((0, 0, 100 * MIB), (1, 0, 40 * MIB)), rows((0, 0, 100 * MIB)), rows((0, 0, 100 * MIB))]
    found = loads(plan_load(line, ranges, read_bytes=32 * MIB, exchange_bytes=256 * MIB))
    assert sum(found) == 140 * MIB
    assert max(found) - min(found) <= MIB


def test_experts_are_read_by_those_that_want_them_and_dense_tensors_by_the_others() -> None:
    # 32 ranks: file 0 is dense, wanted by all; files 1 to 8 are experts, each wanted by 2 ranks: 0 and 1, 2 and 3 ...
    line = line_of(320, files=9)
    ranges = [rows((0, 0, 320 * MIB), *([(1 + rank // 2, 0, 10 * MIB)] if rank < 16 else [])) for rank in range(32)]
    plan = plan_load(line, ranges, read_bytes=32 * MIB, exchange_bytes=256 * MIB)
    found = loads(plan)
    assert sum(found) == 400 * MIB
    assert max(found) <= 13.5 * MIB  # the mean is 12.5
    expert = [sum(i.nbytes for i in each.items() if i.file > 0) // MIB for each in plan]
    assert expert[:16] == [5] * 16
    assert not any(expert[16:])


def test_neighbours_that_share_edges_end_up_with_equal_loads() -> None:
    line, ranks = line_of(10_000), 200
    ranges = [rows((0, (47 * rank) * MIB, (47 * rank + 60) * MIB)) for rank in range(ranks)]
    found = loads(plan_load(line, ranges, read_bytes=32 * MIB, exchange_bytes=256 * MIB))
    assert sum(found) == (47 * (ranks - 1) + 60) * MIB
    assert max(found) <= 1.08 * sum(found) / ranks


def test_random_pairs_end_up_with_about_equal_loads() -> None:
    rng = np.random.default_rng(0)
    line, ranks = line_of(4000), 64
    wanted: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for at in range(0, 4000, 4):
        for rank in rng.choice(ranks, 2, replace=False).tolist():
            wanted[rank].append((0, at * MIB, (at + 4) * MIB))
    found = loads(plan_load(line, [rows(*each) for each in wanted], read_bytes=32 * MIB, exchange_bytes=256 * MIB))
    assert sum(found) == 4000 * MIB
    assert max(found) <= 1.05 * sum(found) / ranks


def test_the_work_depends_on_what_is_wanted_and_not_on_how_many_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = sharing._Wanted.of.__func__  # type: ignore[attr-defined]  # a classmethod

    def counted(cls: type, line: BlockIndex, parties: sharing._Parties) -> sharing._Wanted:
        seen.append(len(parties.runs))
        found: sharing._Wanted = original(cls, line, parties)
        return found

    monkeypatch.setattr(sharing._Wanted, "of", classmethod(counted))
    nbytes, kinds = np.full(2, 100 * MIB), np.array([100])
    line = BlockIndex(MIB, np.array([0, 100, 200]), nbytes, kinds)  # a model file and an optimizer file
    model = [(0, 2 * at * MIB, (2 * at + 1) * MIB) for at in range(50)]
    for ranks in (2, 100):
        ranges = [rows(*model, (1, rank * MIB, (rank + 1) * MIB)) for rank in range(ranks)]
        plan_load(line, ranges, read_bytes=MIB, exchange_bytes=MIB)
    assert seen == [50 + 2, 50 + 100]  # the model once, although no two ranks want the same in all


# -- examples -----------------------------------------------------------------------------------


def whole(saved: Saved) -> Ints:
    return rows((0, 0, len(saved.files[0])))


def test_the_same_inputs_give_the_same_assignment() -> None:
    line = BlockIndex.of(one_file(999).layout)
    ranges = [rows((0, 100 * rank, 999)) for rank in range(3)]
    one, two = (plan_load(line, ranges, read_bytes=64, exchange_bytes=96) for _ in range(2))
    assert [one[r].items() for r in range(3)] == [two[r].items() for r in range(3)]
    assert one[0].rounds > 1


def test_a_rank_without_wants_takes_part_in_every_round() -> None:
    saved = one_file(160)
    plan = plan_load(
        BlockIndex.of(saved.layout), [whole(saved), whole(saved), rows()], read_bytes=64, exchange_bytes=96
    )
    rounds = plan[2].rounds
    assert rounds > 0
    assert [(item.file, item.nbytes, item.round) for item in plan[2].items()] == [(-1, 0, k) for k in range(rounds)]
    assert all(not plan[2].receives(k) and not plan[2].sends(k) for k in range(rounds))


def test_private_chunks_are_spread_between_the_rounds() -> None:
    line = BlockIndex.of(one_file(96 * 16).layout)
    ranges = [rows((0, 0, 64 * 16)), rows((0, 0, 96 * 16))]
    plan = plan_load(line, ranges, read_bytes=32, exchange_bytes=32)
    rounds = [item.round for item in plan[1].items()]
    assert plan[0].rounds == 24  # rank 0 reads 48 blocks, two a round; rank 1 reads 16, and 32 that it alone wants
    gaps = [len(list(run)) for private, run in itertools.groupby(rounds, lambda n: n < 0) if private]
    assert sum(gaps) == 16
    assert max(gaps) - min(gaps) <= 1


def test_a_single_rank_reads_everything_by_itself() -> None:
    saved = one_file(1000)
    (plan,) = plan_load(BlockIndex.of(saved.layout), [whole(saved)], read_bytes=160, exchange_bytes=1)
    assert plan.rounds == 0
    assert sum(item.nbytes for item in plan.items()) == 1000
    assert max(item.nbytes for item in plan.items()) <= 160


def test_blocks_may_be_parts_of_encoded_files() -> None:
    line = BlockIndex.of(one_file(1000).layout, 256)
    plan = plan_load(line, [rows((0, 10, 20)), rows((0, 15, 600))], read_bytes=1, exchange_bytes=1)
    chunks = sorted((item.start, item.stop) for each in plan for item in each.items() if item.file >= 0)
    assert chunks == [(0, 256), (256, 512), (512, 768)]


def test_a_shared_chunk_travels_whole() -> None:
    line = BlockIndex.of(one_file(64, block_bytes=64).layout)
    plan = plan_load(line, [rows((0, 0, 64)), rows((0, 3, 5), (0, 9, 12))], read_bytes=64, exchange_bytes=64)
    (chunk,) = [*plan[0].receives(0), *plan[1].receives(0)]
    assert (chunk.start, chunk.stop) == (0, 64)


def test_nothing_wanted_is_nothing_to_do() -> None:
    plan = plan_load(BlockIndex.of(one_file(64).layout), [rows(), rows()], read_bytes=64, exchange_bytes=64)
    assert (plan[0].rounds, plan[0].items()) == (0, [])


def test_a_slow_rank_reads_less_and_sends_less_in_each_round() -> None:
    line = line_of(1000)
    wanted = [rows((0, 0, 1000 * MIB))] * 4
    speed = np.array([1.0, 1.0, 0.1, 1.0])
    plan = plan_load(line, wanted, read_bytes=32 * MIB, exchange_bytes=256 * MIB, speed=speed)
    found = loads(plan)
    assert sum(found) == 1000 * MIB
    np.testing.assert_allclose(found, 1000 * MIB * speed / speed.sum(), atol=MIB)
    rounds = [[chunk.nbytes for chunk in each.items() if chunk.nbytes] for each in plan]
    assert max(rounds[2]) <= 0.2 * max(rounds[0])
    assert len(rounds[2]) <= len(rounds[0])


def test_chunks_are_smaller_the_more_ranks_send_to_one() -> None:
    line = line_of(3200)
    for ranks in (2, 5, 33):
        plan = plan_load(line, [rows((0, 0, 3200 * MIB))] * ranks, read_bytes=32 * MIB, exchange_bytes=64 * MIB)
        for number in range(plan[0].rounds):
            assert sum(chunk.nbytes for chunk in plan[0].receives(number)) <= 64 * MIB
        assert max(item.nbytes for item in plan[0].items()) >= min(32, 64 // (ranks - 1)) * MIB * 0.9


# -- what comes over the wire -------------------------------------------------------------------


def table() -> tuple[BlockIndex, SharedReads]:
    line = line_of(64, files=2)
    runs = [line.runs(rows((0, 0, 64 * MIB), (1, 0, 64 * MIB)))] * 2 + [line.runs(rows((1, 0, MIB)))]
    return line, share_reads(line, runs, read_bytes=8 * MIB, exchange_bytes=8 * MIB)


def test_a_table_survives_the_wire() -> None:
    line, shared = table()
    again = SharedReads.decode(shared.encode(line), line, 3)
    for name in ("run", "parts", "reader", "group"):
        assert getattr(again, name).tolist() == getattr(shared, name).tolist()
    assert again.groups.rank.tolist() == shared.groups.rank.tolist()
    assert again.rounds == shared.rounds > 1


@pytest.mark.parametrize(
    ("column", "value"),
    [("reader", 3), ("group", 9), ("parts", 0), ("parts", 1000)],
)
def test_a_table_that_names_what_does_not_exist_is_refused(column: str, value: int) -> None:
    line, shared = table()
    getattr(shared, column)[-1] = value
    with pytest.raises(MessageError, match="contradicts itself"):
        SharedReads.decode(shared.encode(line), line, 3)


def test_a_table_whose_reader_wants_nothing_of_it_is_refused() -> None:
    line, shared = table()
    shared.groups.rank[:] = (shared.groups.rank + 1) % 3
    with pytest.raises(MessageError, match="contradicts itself"):
        SharedReads.decode(shared.encode(line), line, 3)


def test_a_table_that_names_a_block_twice_is_refused() -> None:
    line, shared = table()
    shared.run[-1] = shared.run[0]
    shared.parts[-1] = 1
    with pytest.raises(MessageError, match="contradicts itself"):
        SharedReads.decode(shared.encode(line), line, 3)


@pytest.mark.parametrize("run", [(127, 129), (63, 65), (-2, -1)])
def test_a_table_of_blocks_that_do_not_exist_is_refused(run: tuple[int, int]) -> None:
    line, shared = table()
    shared.run[-1] = run
    with pytest.raises(MessageError, match="not in one file"):
        SharedReads.decode(shared.encode(line), line, 3)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_table_are_refused(data: bytes) -> None:
    line, shared = table()
    message = SharedRuns.decode(shared.encode(line))
    for damaged in (data, shared.encode(line)[:-1], structs.replace(message, columns=data).encode()):
        with pytest.raises(MessageError):
            SharedReads.decode(damaged, line, 3)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_runs_are_refused_or_named(data: bytes) -> None:
    line = line_of(64)
    for damaged in (data, BlockRuns(3, data).encode()):
        with pytest.raises(MessageError):
            line.check(line.decode(damaged))


@pytest.mark.parametrize("run", [(0, 65), (3, 3), (63, 66)])
def test_runs_outside_the_line_are_refused(run: tuple[int, int]) -> None:
    line = line_of(64)
    with pytest.raises(MessageError, match="not in one file"):
        line.check(line.decode(line.encode(np.array([run]))))


def test_runs_are_as_long_as_they_can_be_but_stay_in_their_files() -> None:
    line = line_of(4, files=2, block_bytes=16)
    ranges = rows((0, 3, 5), (0, 9, 20), (0, 33, 34), (0, 50, 64), (1, 0, 1), (1, 40, 41))
    assert line.runs(ranges).tolist() == [[0, 4], [4, 5], [6, 7]]
    assert [ends.tolist() for ends in line.bytes_of(line.runs(ranges))] == [[0, 1, 1], [0, 0, 32], [64, 16, 48]]


def test_long_lines_have_longer_numbers() -> None:
    line = line_of(1 << 33, block_bytes=16)
    runs: npt.NDArray[np.int64] = np.array([[5, 6], [1 << 32, (1 << 32) + 9]])
    assert line.decode(line.encode(runs)).tolist() == runs.tolist()
