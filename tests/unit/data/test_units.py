"""The state of one unit: cut, split and merged."""

from __future__ import annotations

import pytest
from feeding import make_sources, seeded

from bcp.data.recipe import Recipe
from bcp.data.stream import Schedule, Stream, initial_state
from bcp.data.units import Unit, needed_units


def test_a_state_that_is_cut_goes_on_as_the_stream_does() -> None:
    cut = lacking = 0
    for seed in range(300):
        rng = seeded(seed)
        sources = make_sources(rng, [rng.randint(1, 12), rng.randint(1, 12)], rng.choice([1, 3, 9]))
        recipe = Recipe(sources, rng.randint(1, 6), 1, seed, 1, 1)
        stream = Stream(recipe, 0, initial_state(recipe, 0))
        for _ in range(rng.randint(0, 4)):
            stream.cut()
            stream.consume()
        ahead = rng.randint(0, 4)
        for _ in range(ahead):
            stream.cut()
        state = stream.state()
        windows = rng.randint(0, 5)
        later = state.after(windows, recipe, 0)
        for number in range(windows):
            if number >= ahead:
                stream.cut()
            stream.consume()
        if later is None:
            assert windows > ahead
            lacking += 1
            continue
        cut += windows > 0
        left, right = Stream(recipe, 0, later), Stream(recipe, 0, stream.state())
        assert left.live == right.live
        while left.live or right.live:
            pairs = zip(left.cut(), right.cut(), strict=True)
            assert all(
                a.sample == b.sample and a.begins == b.begins and a.tokens.tolist() == b.tokens.tolist()
                for a, b in pairs
            ), seed
    assert cut > 100
    assert lacking > 10


@pytest.mark.parametrize(
    ("unit", "parts", "needed"),
    [
        (Unit(3), 1, ["00003"]),
        (Unit(3, 1, 4), 1, ["00003"]),
        (Unit(3), 4, ["00003.0of4", "00003.1of4", "00003.2of4", "00003.3of4"]),
        (Unit(3, 1, 2), 4, ["00003.1of4", "00003.3of4"]),
        (Unit(3, 3, 4), 2, ["00003.1of2"]),
        (Unit(3, 1, 6), 4, ["00003.1of4", "00003.3of4"]),
        (Unit(123456, 2, 3), 2, ["123456.0of2", "123456.1of2"]),
    ],
)
def test_which_units_have_the_samples_of_a_part(unit: Unit, parts: int, needed: list[str]) -> None:
    assert [str(each) for each in needed_units(unit, parts)] == needed


@pytest.mark.parametrize(("readers", "units", "batch"), [(1, 1, 1), (1, 12, 5), (3, 12, 6), (4, 4, 8), (2, 6, 4)])
@pytest.mark.parametrize("start", [0, 1, 7, 12])
def test_readers_share_each_batch_equally(readers: int, units: int, batch: int, start: int) -> None:
    schedules = [Schedule(reader, readers, units, batch, start) for reader in range(readers)]
    for step in range(5):
        parts = [list(schedule.windows(step)) for schedule in schedules]
        assert {len(part) for part in parts} == {batch // readers}
        assert sorted(number for part in parts for number in part) == list(
            range(start + step * batch, start + (step + 1) * batch)
        )
        assert all(number % units % readers == reader for reader, part in enumerate(parts) for number in part)
        for unit in range(units):
            seen = sum(number % units == unit for part in parts for number in part)
            assert schedules[0].count(unit, step, step + 1) == seen
