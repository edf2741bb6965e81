"""Rows that bcp reads of DTensors, held against torch's own scatter and gather on all ranks of many meshes."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from every_rank import MISSING, EveryRank, Verdict, placements_of, strided, verdict
from lacking import lacking
from samples import sample, sample_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from bcp.errors import StateError

S, R = Shard(0), Replicate()

SAME = ("same", "same")


@pytest.fixture(autouse=True)
def _has_all_names() -> None:
    if MISSING:
        lacking(", ".join(MISSING))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Let torch not say of each gather that it takes several steps."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.disabled = True
    yield
    logger.disabled = False


NAMED = [
    ((2, 2, 2), [strided(4), S, S]),
    ((2, 2, 2), [S, strided(2), S]),
    ((2, 1, 2), [S, strided(2), S]),
    ((2, 1, 2), [strided(1), strided(2), S]),
    ((2, 2, 2), [strided(4), strided(2), S]),
    ((2, 2, 2), [strided(2), strided(2), S]),
    ((2, 3, 2), [strided(6), strided(2), S]),
    ((2, 2, 2), [R, strided(2), S]),
    ((2, 2, 2), [strided(2), R, S]),
    ((2, 1, 2, 2), [strided(4), strided(4), S, S]),
    ((2, 2, 3), [strided(6), S, S]),
]


@pytest.mark.parametrize(("mesh", "placements"), sample(NAMED, *NAMED[::2]))
def test_strided_shards_among_other_cuts_of_their_dimension(mesh: tuple[int, ...], placements: list[Placement]) -> None:
    ranks = EveryRank(mesh)
    for rows in (math.prod(mesh), 3 * math.prod(mesh)):
        assert verdict(ranks, (rows, 2), placements) == SAME


AGREED: set[Verdict] = {SAME, ("permuted", "refused"), ("fails", "refused")}
"""Layouts that torch gathers again are read, others are refused."""


def counted(cases: Iterable[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]]) -> dict[Verdict, int]:
    """Count the verdicts on meshes, placements and shapes."""
    meshes = functools.cache(EveryRank)
    return dict(collections.Counter(verdict(meshes(mesh), shape, placements) for mesh, placements, shape in cases))


@pytest.mark.parametrize("mesh", [(3,), (1, 2), (2, 2), (3, 2)])
def test_every_placement_of_one_dimension(mesh: tuple[int, ...]) -> None:
    counts = counted(itertools.product([mesh], placements_of(mesh), [(24,), (13,)]))
    assert set(counts) <= AGREED
    assert counts[SAME] > sum(counts.values()) / 2


@pytest.mark.parametrize("mesh", [pytest.param((2, 2, 2), marks=pytest.mark.long), (2, 1, 2)])
def test_every_fourth_placement_of_one_dimension_on_three_mesh_dimensions(mesh: tuple[int, ...]) -> None:
    cases = itertools.product([mesh], placements_of(mesh), [(48,), (29,)])
    assert set(counted(itertools.islice(cases, 3, None, 4))) <= AGREED


def test_every_placement_of_two_dimensions() -> None:
    cases = itertools.product([(2, 2)], placements_of((2, 2), 2), [(8, 13)])
    assert set(counted(cases)) <= AGREED


def test_a_factor_that_is_no_order_makes_those_of_other_dimensions_none() -> None:
    """torch decodes all dimensions of a tensor or none, so that its gather fails of what it could gather alone."""
    ranks = EveryRank((2, 2, 2))
    assert verdict(ranks, (8, 6), [strided(2), S, R]) == SAME
    for alone in (Shard(1), strided(1, 1)):
        assert verdict(ranks, (8, 6), [strided(2), S, alone]) == SAME
    assert verdict(ranks, (8, 6), [strided(2), S, strided(3, 1)]) == ("fails", "refused")
    assert verdict(ranks, (8, 6), [S, R, strided(3, 1)]) == SAME


def test_small_dimensions() -> None:
    """Accept two exceptions for very few rows: refused although torch gathers them, and read although it fails."""
    mesh = (4, 2)
    counts = counted(itertools.product([mesh], itertools.islice(placements_of(mesh), 1, None, 2), [(0,), (1,), (5,)]))
    assert set(counts) <= AGREED | {("same", "refused"), ("fails", "same")}
    assert counts.get(("same", "refused"), 0) <= 3


# -- layouts that torch makes in another way ------------------------------------------------------------


def after_tp(whole: torch.Tensor, dp: int, tp: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the local tensors of FSDP2 over parameters that are sharded over a mesh of one or two dimensions."""
    inner = [tensor.to_local() for tensor in EveryRank(tp).scattered(whole, [S] * len(tp))]
    empty = whole[:0]
    parts = [[*local.chunk(dp), *([empty] * dp)] if len(local) else [empty] * dp for local in inner]
    return [part[rank] for rank in range(dp) for part in parts]


MESHES = [(4, 2), (3, 2), (2, 4), (2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 1, 2), (1, 2, 2)]
NAMED_MESHES = {" x ".join(map(str, mesh)): mesh for mesh in MESHES}


@pytest.mark.parametrize("mesh", sample_of(NAMED_MESHES, *list(NAMED_MESHES)[1::2]))
def test_fsdp2_over_tp_is_exact_for_every_size(mesh: tuple[int, ...]) -> None:
    ranks = EveryRank(mesh)
    placements = [strided(math.prod(mesh[1:])), *([S] * (len(mesh) - 1))]
    for rows in range(1, 2 * math.prod(mesh) + 2):
        whole = torch.arange(rows * 2).view(rows, 2)
        tensors = ranks.made(whole, placements, after_tp(whole, mesh[0], mesh[1:]))
        assert torch.equal(ranks.read(tensors), whole), rows
        if rows in (9, 13):
            assert all(torch.equal(full, whole) for full in ranks.gathered(tensors))


def test_a_tensor_that_torch_distributed_otherwise_than_it_gathers_is_what_torch_gathers() -> None:
    """The parts of 9 rows have the same sizes in both readings: neither torch nor bcp can tell which one it was."""
    ranks, placements = EveryRank((2, 2, 3)), [strided(6), S, S]
    whole = torch.arange(9)
    tensors = ranks.scattered(whole, placements)
    by_fsdp2 = ranks.made(whole, placements, after_tp(whole, 2, (2, 3)))
    assert [tensor.to_local().shape for tensor in tensors] == [tensor.to_local().shape for tensor in by_fsdp2]
    assert torch.equal(ranks.read(by_fsdp2), whole)
    read = ranks.read(tensors)
    assert read.tolist() != list(range(9))
    assert all(torch.equal(full, read) for full in ranks.gathered(tensors))


VIEWS = [
    ((2, 2), (4, 6), [S, Shard(1)]),
    ((2, 2), (4, 6), [Shard(1), S]),
    ((2, 2), (4, 6), [R, Shard(1)]),
    ((2, 2), (4, 8), [Shard(1), Shard(1)]),
    ((3, 2), (4, 6), [Shard(1), S]),
    ((2, 1, 2), (2, 4), [Shard(1), S, S]),
]


@pytest.mark.parametrize(("mesh", "shape", "placements"), VIEWS)
def test_flattened_views(mesh: tuple[int, ...], shape: tuple[int, ...], placements: list[Placement]) -> None:
    ranks = EveryRank(mesh)
    whole = torch.arange(math.prod(shape))
    views = ranks.viewed(ranks.scattered(whole.view(*shape), placements), [-1])
    assert any(hasattr(placement, "split_factor") for placement in views[0].placements)
    assert torch.equal(ranks.read(views), whole)
    assert all(torch.equal(full, whole) for full in ranks.gathered(views))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_orders_that_a_tensor_states(order: tuple[int, ...]) -> None:
    mesh = (2, 2, 3)
    ranks = EveryRank(mesh)
    for rows in (24, 13):
        whole = torch.arange(rows)
        sorted_mesh = EveryRank([mesh[dim] for dim in order]).scattered(whole, [S, S, S])
        places = (
            torch.arange(len(sorted_mesh)).view(*(mesh[dim] for dim in order)).permute(*torch.tensor(order).argsort())
        )
        parts = [sorted_mesh[place].to_local() for place in places.flatten().tolist()]
        tensors = ranks.ordered(ranks.made(whole, [S, S, S], parts), *order)
        assert torch.equal(ranks.read(tensors), whole)
        assert all(torch.equal(full, whole) for full in ranks.gathered(tensors))


def test_strided_shards_that_torch_says_are_cuts_in_mesh_order() -> None:
    ranks = EveryRank((3, 2))
    cases = itertools.product(placements_of((3, 2)), [(24,), (13,)])
    found = {verdict(ranks, shape, placements, in_order=True) for placements, shape in cases}
    assert found == {SAME}


def test_a_rank_asks_for_its_layout_anew_when_only_the_order_differs() -> None:
    """Compare a view with a distributed tensor of the same placements, shape and local shapes."""
    ranks = EveryRank((2, 2))
    whole = torch.arange(12)
    placements = [strided(2), S]
    assert torch.equal(ranks.read(ranks.scattered(whole, placements)), whole)
    views = ranks.viewed(ranks.scattered(whole.view(2, 6), [Shard(1), S]), [-1])
    assert list(views[0].placements) == placements
    assert torch.equal(ranks.read(views), whole)


# -- layouts that are refused -----------------------------------------------------------------------------


REFUSED: list[tuple[tuple[int, ...], list[Any], str]] = [
    (
        (2, 2),
        [strided(3), S],
        r"placements \(_S.*3.*, S.*on a mesh of shape \(2, 2\).*disagree.*\(13, 2\).*redistribute",
    ),
    ((2, 2, 2), [strided(4), strided(2), S], r"disagree on which rows.*does not divide evenly; redistribute it"),
    ((2, 2), [strided(1), strided(2)], r"disagree.*split factor is not the number of shards"),
    ((2,), [Shard(2)], r"placement Shard\(dim=2\), but its global shape is \(13, 2\)"),
    ((2,), [Partial()], r"its values are not there before a reduction"),
]


@pytest.mark.parametrize(("mesh", "placements", "message"), REFUSED)
def test_refused_layouts_are_named_on_every_rank(mesh: tuple[int, ...], placements: list[Any], message: str) -> None:
    ranks = EveryRank(mesh)
    whole = torch.zeros(13, 2)
    for tensor in ranks.made(whole, placements, [torch.zeros(1, 2)] * math.prod(mesh)):
        with pytest.raises(StateError, match=rf"model tensor 't' on rank 0.*{message}"):
            ranks.read([tensor])


def test_tensors_without_elements_are_never_refused() -> None:
    ranks = EveryRank((2, 2))
    for placements in ([strided(3), S], [strided(1), strided(2)]):
        whole = torch.zeros(13, 0)
        assert ranks.read(ranks.made(whole, placements, [torch.zeros(0, 0)] * 4)).shape == whole.shape
