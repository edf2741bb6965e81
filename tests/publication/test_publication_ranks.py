"""Live models of all layouts are published by all ranks of a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import publishing_jobs as jobs
import pytest
import torch
from published import assert_folder, followed
from ranks import Ranks

import bcp

pytestmark = pytest.mark.dist
INDEX = "model.safetensors.index.json"
FAULTS = [("open_write", 2, 3), ("open_write", 0, 3), ("read", 1, 2), ("seal", 0, 2)]


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    with closing(Ranks(2)) as pool:
        yield pool


def bits(step: int) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in jobs.whole_of(step).items()}


def test_one_model_in_all_layouts_and_worlds(ranks4: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    """Each version has another layout, and another world has written the base of its delta."""
    root = tmp_path / "pub"
    bcp.publish(jobs.model_of(1), root, 1, dtype="bfloat16")
    for step, layout in enumerate(jobs.LAYOUTS, 2):
        results = (ranks2 if step % 2 else ranks4).run(jobs.publish, root, step, layout, {"anchor_every": 4})
        assert len(set(results)) == 1
        changed = sum(bits(step)[name] != old for name, old in bits(step - 1).items())
        assert (results[0].has_delta, results[0].changed, results[0].tensors) == (True, changed, 10), layout
        assert results[0].is_anchor == (step % 4 == 1)
        assert followed(root, step) == bits(step), layout
        bcp.Subscriber(root, tmp_path / "engine").pull()
        assert_folder(tmp_path / "engine", jobs.whole_of(step))


def test_stages_of_a_pipeline(ranks4: Ranks, tmp_path: Path) -> None:
    root = tmp_path / "pub"
    for step in (1, 2):
        assert {result.tensors for result in ranks4.run(jobs.publish_stages, root, step)} == {10}
        assert followed(root, step) == bits(step)


def test_every_rank_writes_a_part(ranks4: Ranks, tmp_path: Path) -> None:
    root = tmp_path / "pub"
    for step in (1, 2):
        ranks4.run(jobs.publish, root, step, "fsdp2", {})
        files = json.loads((root / f"weight_v00000{step}" / INDEX).read_text())["weight_map"]
        assert len(set(files.values())) > 1
        there = {path.name for path in (root / f"weight_v00000{step}").glob("*.safetensors")}
        assert set(files.values()) <= there


def test_no_rank_gets_more_than_its_part_or_a_round(ranks4: Ranks, tmp_path: Path) -> None:
    found = ranks4.run(jobs.count_received, tmp_path / "pub")
    assert [most for most, _ in found] == [4096] * 4
    assert [nbytes for _, nbytes in found] == [3 * 2048] * 4
    read = followed(tmp_path / "pub", 1)
    assert {
        name: set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()) for name, data in read.items()
    } == {f"w{number}": {float(number)} for number in range(12)}


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_training_goes_on_behind_the_copy(ranks4: Ranks, tmp_path: Path, layout: str) -> None:
    assert ranks4.run(jobs.change_at_once, tmp_path / "pub", layout) == [True] * 4
    assert followed(tmp_path / "pub", 1) == bits(1)


@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
def test_a_step_waits_for_the_copy(ranks4: Ranks, tmp_path: Path, layout: str) -> None:
    assert ranks4.run(jobs.step_at_once, tmp_path / "pub", layout) == [True] * 4
    assert followed(tmp_path / "pub", 1) == bits(1)


def test_a_cache_saves_the_reads_of_the_base(ranks4: Ranks, tmp_path: Path) -> None:
    """The base is not read from storage, and the cache keeps two versions of a rank's tensors at most."""
    root = tmp_path / "pub"
    caches = ranks4.run(jobs.publish_cached, root, tmp_path, [1, 2, 3, 4])
    whole = sum(value.nbytes for value in jobs.whole_of(1).values())
    for number in range(4):
        assert whole <= sum(sum(sizes[number]) for sizes in caches) <= 2 * whole
    assert followed(root, 4) == bits(4)
    assert all(not errors for errors in ranks4.run(jobs.publish_blind, root, tmp_path, 5))
    assert followed(root, 5) == bits(5)


@pytest.mark.parametrize(("call", "rank", "step"), FAULTS)
def test_an_error_of_one_rank_reaches_all(ranks4: Ranks, tmp_path: Path, call: str, rank: int, step: int) -> None:
    """Nothing is left, and the next call needs no patience."""
    root = tmp_path / "pub"
    ranks4.run(jobs.publish, root, 1, "fsdp2", {})
    before = sorted(path.name for path in root.iterdir())
    errors = ranks4.run(jobs.fail, root, call, rank, step)
    if call == "seal":
        assert all("another publisher has taken over the claim" in error for error in errors)
    else:
        assert all(
            error.startswith("StorageError" if number == rank else "PeerError") for number, error in enumerate(errors)
        )
        assert all(f"rank {rank}" in error for number, error in enumerate(errors) if number != rank)
    left = [path for path in root.rglob("*.safetensors") if "weight_v000001" not in str(path)]
    assert left == []
    assert sorted(path.name for path in root.iterdir() if path.name != f"weight_v00000{step}") == before
    ranks4.run(jobs.publish, root, 2, "hsdp", {"claim_seconds": 0 if call == "seal" else 600})
    assert followed(root, 2) == bits(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_storage_fails_at_every_call(ranks2: Ranks, tmp_path: Path, rank: int) -> None:
    """What was committed stays, nothing else is seen, and the next call goes on."""
    root = tmp_path / "pub"
    ranks2.run(jobs.publish, root, 1, "fsdp2", {})
    step, number, failures = 2, 0, 0
    while True:
        number += 1
        answers = ranks2.run(jobs.fail_at, root, number, rank, step)
        newest = bcp.Subscriber(root, tmp_path / "engine").pull().version
        assert newest in (step - 1, step)
        assert followed(root, newest) == bits(newest), number
        assert len({bool(error) for error, _ in answers}) == 1
        step = newest + 1
        if "is committed now" in answers[0][0]:  # this call has ended the commit of the one before
            number -= 1
            continue
        if answers[rank][1] > 0:
            assert not answers[0][0]
            break
        failures += bool(answers[0][0])
    assert failures > (20 if rank == 0 else 3)
    ranks2.run(jobs.publish, root, step, "fsdp2", {})
    assert followed(root, step) == bits(step)


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("rename", "rank 1 gives the tensors other names or dtypes than rank 0", ""),
        ("encoding", "encoding='add' is unknown", "rank 1 failed"),
        ("version", "publish version 2", ""),
    ],
)
def test_what_one_rank_is_asked_all_refuse(ranks4: Ranks, tmp_path: Path, how: str, own: str, others: str) -> None:
    for number, error in enumerate(ranks4.run(jobs.refuse, tmp_path / "pub", how)):
        assert (own if number == 1 or not others else others) in error
    assert not list((tmp_path / "pub").rglob("*.safetensors"))
