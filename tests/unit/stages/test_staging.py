from __future__ import annotations

import os
from pathlib import Path

import pytest

from bcp.runtime.staging import PATIENCE, StagingPool


def test_the_second_save_finds_every_buffer_of_the_first() -> None:
    pool = StagingPool()
    with pool.lease() as lease:
        first = {lease.take(nbytes).data_ptr() for nbytes in (5000, 1 << 20, 3 << 20)}
    with pool.lease() as lease:
        assert {lease.take(nbytes).data_ptr() for nbytes in (3 << 20, 5000, 1 << 20)} == first


def test_buffers_are_page_aligned_and_long_enough() -> None:
    with StagingPool().lease() as lease:
        for nbytes in (0, 1, 4096, 4097, (1 << 20) + 3):
            buffer = lease.take(nbytes)
            assert buffer.data_ptr() % 4096 == 0
            assert buffer.numel() >= nbytes


def test_a_buffer_given_back_early_is_used_again() -> None:
    with StagingPool().lease() as lease:
        buffer = lease.take(1 << 20)
        lease.give(buffer)
        lease.give(buffer)
        assert lease.take(1 << 20) is buffer
        assert lease.take(1 << 20) is not buffer


def test_a_much_larger_buffer_is_not_wasted_on_a_small_part() -> None:
    pool = StagingPool()
    with pool.lease() as lease:
        lease.take(1 << 20)
    with pool.lease() as lease:
        assert lease.take(4096).numel() == 4096


def test_after_an_error_everything_is_back() -> None:
    pool = StagingPool()

    def fail() -> None:
        with pool.lease() as lease:
            lease.take(4096)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert pool.free_nbytes == 4096


def test_what_the_last_saves_did_not_need_is_given_up() -> None:
    pool = StagingPool()
    with pool.lease() as lease:
        lease.take(1 << 20)
        lease.take(4096)
    for _ in range(PATIENCE - 1):
        with pool.lease() as lease:
            lease.take(4096)
        assert pool.free_nbytes == 4096 + (1 << 20)
    with pool.lease() as lease:
        lease.take(4096)
    assert pool.free_nbytes == 4096
    pool.clear()
    assert "0 free buffers" in repr(pool)


def test_two_states_that_are_saved_in_turn_keep_their_buffers() -> None:
    pool = StagingPool()
    found: list[set[int]] = []
    for _ in range(4):
        for nbytes in (8 << 20, 1 << 20):
            with pool.lease() as lease:
                found.append({lease.take(nbytes).data_ptr()})
    assert found[2:] == found[:2] * 3


def test_a_load_keeps_nothing_that_it_allocated_and_takes_nothing_from_saves() -> None:
    pool = StagingPool()
    with pool.lease() as lease:
        kept = lease.take(1 << 20)
    for _ in range(PATIENCE + 1):
        with pool.lease(keep=False) as lease:
            assert lease.take(1 << 20) is kept
            lease.give(lease.take(4096))
            lease.take(4096)
    assert pool.free_nbytes == 1 << 20


def test_reserved_buffers_are_there_for_the_first_save() -> None:
    pool = StagingPool()
    pool.reserve([1 << 20, 1 << 20, 4096])
    assert pool.free_nbytes == (2 << 20) + 4096
    with pool.lease() as lease:
        assert {lease.take(1 << 20).numel() for _ in range(2)} == {1 << 20}
        assert not lease.fresh


def test_staging_memory_is_not_copied_into_forked_children() -> None:
    with StagingPool().lease() as lease:
        address = lease.take(8 << 20).data_ptr()
        child = os.fork()
        if child == 0:
            maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
            spans = [[int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in maps]
            os._exit(any(start <= address < stop for start, stop in spans))
        assert os.waitpid(child, 0)[1] == 0


def test_operations_that_overlap_do_not_share_buffers() -> None:
    pool = StagingPool()
    with pool.lease() as one, pool.lease() as two:
        assert one.take(4096).data_ptr() != two.take(4096).data_ptr()
    assert pool.free_nbytes == 8192
