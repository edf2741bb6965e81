"""Loads with ``exchange="gloo"``: the same values as over sockets, and the same errors."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import process_group
import pytest
from patience import patiently
from ranks import Ranks, ended, meeting_place, started
from samples import sample

pytestmark = pytest.mark.dist


WAYS = itertools.product(["plain", "unverified", "codecs", "edited"], [False, True])


@pytest.mark.parametrize(
    ("way", "on_device"),
    sample(WAYS, ("plain", False), ("unverified", True), ("codecs", True), ("edited", False)),
)
def test_gloo_loads_the_same_bits_as_sockets(ranks4: Ranks, tmp_path: Path, way: str, on_device: bool) -> None:  # noqa: FBT001
    results = ranks4.run(_replicated, tmp_path, way, on_device)
    for right, by_sockets, by_gloo, rounds in results:
        assert right
        assert by_sockets == by_gloo > 0
        assert len(rounds) == 1
        assert rounds[0] > 1


def _replicated(path: Path, way: str, on_device: bool) -> tuple[bool, int, int, list[int]]:  # noqa: FBT001
    return process_group.replicated(path, way, 1500, on_device=on_device)


def test_shards_of_another_layout_come_over_gloo(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(process_group.resharded, tmp_path)
    assert all(right and rounds for right, rounds in results)


def test_each_subgroup_has_a_group_of_its_own(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(process_group.subgroups, tmp_path)
    assert all(right and rounds[0] for right, rounds in results)


def test_the_training_thread_may_make_groups_meanwhile(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(process_group.beside_new_groups, tmp_path) == [True] * 4


def test_ranks_that_ask_for_different_exchanges_are_told_so(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4.run(process_group.disagree, tmp_path)
    assert all(text.startswith("InputError") for text in said)
    assert all("exchange=gloo" in text and "exchange=sockets" in text for text in said)


def test_nccl_is_refused_where_it_is_not(ranks4: Ranks, tmp_path: Path) -> None:
    for rank, text in enumerate(ranks4.run(process_group.without_nccl, tmp_path)):
        assert f"exchange='nccl' needs NCCL and an accelerator on every rank; rank {rank} " in text


@pytest.mark.parametrize("when", [process_group.cancelled, process_group.cancelled_while_joining])
def test_a_cancelled_rank_ends_the_load_and_the_next_one_is_right(
    ranks4: Ranks, tmp_path: Path, when: Callable[[Path], tuple[str, bool]]
) -> None:
    results = ranks4.run(when, tmp_path)
    victim = process_group.VICTIM
    assert [said for said, _ in results] == [
        "cancelled" if rank == victim else f"PeerError {victim}" for rank in range(4)
    ]
    assert all(right for _, right in results)


@pytest.mark.parametrize("how", sample(process_group.HOW, "stop"))
def test_a_rank_that_comes_to_harm_is_named_and_the_others_load_again(tmp_path: Path, how: str) -> None:
    patiently(partial(harm, tmp_path, how), *process_group.TIMEOUTS.get(how, (process_group.NEVER,)))


def harm(folder: Path, how: str, timeout: float) -> None:
    server, size, victim = meeting_place(), process_group.SIZE, process_group.VICTIM
    folder /= str(timeout)
    folder.mkdir()
    processes = started(size, process_group.main, server.port, folder, how, timeout)
    others = [process for rank, process in enumerate(processes) if rank != victim or how == "raise"]
    for process in others:
        process.join(120)
    codes = ended(processes, 1)
    expected = {"stop": None, "raise": 0}.get(how, -signal.SIGKILL)
    assert codes == [expected if rank == victim else 0 for rank in range(size)]
    for rank in set(range(size)) - {victim}:
        kind, blamed, message = json.loads((folder / str(rank)).read_text())
        assert (kind, blamed) == ("PeerError", victim), message
    if how == "raise":
        kind, _, message = json.loads((folder / str(victim)).read_text())
        assert "a bug in a stage" in message
