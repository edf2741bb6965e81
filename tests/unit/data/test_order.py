"""Permutations and draws."""

from __future__ import annotations

from collections import Counter
from math import sqrt

import numpy as np
import pytest

from bcp.data import Source, TokenLoader
from bcp.data.recipe import Permutation, Recipe


def recipe(*sources: Source, seed: int = 0) -> Recipe:
    return Recipe(sources, context=8, shards=4, seed=seed, epochs=None, parts=1)


@pytest.mark.parametrize("size", [*range(1, 70), 1000, 4096, 10_007])
def test_a_permutation_has_every_value_once(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        permutation = Permutation(size, key)
        assert sorted(permutation[position] for position in range(size)) == list(range(size))


def test_a_permutation_of_a_huge_source_needs_no_table() -> None:
    permutation = Permutation(10**15, 3)
    values = [permutation[position] for position in range(1000)]
    assert len(set(values)) == 1000
    assert min(values) < 10**13 < 9 * 10**14 < max(values) < 10**15


def test_every_value_comes_equally_often_to_every_position() -> None:
    size, keys = 7, 7000
    counts = np.zeros((size, size))
    for key in range(keys):
        permutation = Permutation(size, key * 0x9E3779B97F4A7C15 % 2**64)
        for position in range(size):
            counts[position, permutation[position]] += 1
    assert np.abs(counts - keys / size).max() < 6 * sqrt(keys / size)


def test_epochs_seeds_and_sources_have_orders_of_their_own() -> None:
    samples = [[1]] * 100
    orders = {
        tuple(recipe(Source(name, samples), seed=seed).index(0, epoch, position) for position in range(100))
        for name in ("a", "b")
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 8


def test_sources_are_drawn_by_weight() -> None:
    weights = [1.0, 2.0, 7.0]
    mixture = recipe(*(Source(str(number), [[1]], weight) for number, weight in enumerate(weights)))
    draws = 20_000
    counts = Counter(mixture.draw(unit, number, [0, 1, 2]) for unit in range(4) for number in range(draws // 4))
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(counts[source] - draws * share) < 5 * sqrt(draws * share * (1 - share))
    few = Counter(mixture.draw(0, number, [0, 1]) for number in range(draws))
    assert abs(few[1] - draws * 2 / 3) < 5 * sqrt(draws * 2 / 9)
    assert few.keys() == {0, 1}


def test_a_run_without_end_mixes_its_sources_by_weight() -> None:
    samples = [[token] * 4 for token in range(50)]
    loader = TokenLoader([Source("a", samples, 3.0), Source("b", samples)], context=4, batch=100, shards=4)
    names = Counter(sample.source for _ in range(40) for window in next(loader).samples for sample in window)
    assert names.total() == 4000
    assert abs(names["a"] - 3000) < 5 * sqrt(4000 * 3 / 16)


def test_an_epoch_comes_after_the_other() -> None:
    loader = TokenLoader([Source("a", [[1]] * 40)], context=1, batch=40, shards=8)
    for epoch in range(3):
        batch = next(loader)
        assert sorted(window[0].index for window in batch.samples) == list(range(40))
        assert {window[0].epoch for window in batch.samples} == {epoch}
