from __future__ import annotations

import random
from collections import Counter

import pytest

from bcp._messages.planning import Claim
from bcp.errors import MessageError, StateError
from bcp.plan.units import decode_claims, divide_units, encode_claims, unit_path


def claim(reader: int, readers: int, ids: str, name: str = "train") -> Claim:
    return Claim(name, reader, readers, tuple(ids.split()))


def test_claims_survive() -> None:
    claims = [claim(0, 2, "a b ü"), Claim("", 1, 3, ()), Claim('x"/y', 0, 1, ("[",))]
    assert decode_claims(encode_claims(claims)) == claims
    assert encode_claims([]) == ""
    assert decode_claims("") == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "7",
        "[7]",
        "[[1]]",
        '[["a", 0, 1]]',
        '[["a", "0", 1, []]]',
        '[["a", 0, 1, [7]]]',
        '[["a", 0, 1, [], 1]]',
        "\udcff",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(MessageError, match="run the same version of bcp on all ranks"):
        decode_claims(text)


def test_every_unit_has_one_writer_among_the_ranks_that_hold_it() -> None:
    dice = random.Random(0)  # noqa: S311 -- a sample, no secret
    for _ in range(300):
        readers, holders = dice.randint(1, 9), dice.randint(1, 4)
        ids = {reader: [f"{reader}-{number}" for number in range(dice.randint(0, 9))] for reader in range(readers)}
        ranks = [reader for reader in range(readers) for _ in range(holders)]
        dice.shuffle(ranks)
        claims = {rank: [Claim("x", reader, readers, tuple(ids[reader]))] for rank, reader in enumerate(ranks)}
        owners = divide_units(claims)
        assert owners.pop("x/") == 0
        assert owners.keys() == {unit_path("x", unit) for units in ids.values() for unit in units}
        for reader, units in ids.items():
            counts = Counter(owners[unit_path("x", unit)] for unit in units)
            assert all(ranks[rank] == reader for rank in counts)
            assert max(counts.values(), default=0) <= -(-len(units) // holders)


def test_states_of_different_names_are_apart() -> None:
    owners = divide_units({0: [claim(0, 1, "a", "t"), claim(0, 2, "a", "v")], 5: [claim(1, 2, "b", "v")]})
    assert owners == {"t/": 0, "t/a": 0, "v/": 0, "v/a": 0, "v/b": 5}


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({0: [claim(0, 2, "a")]}, r"'train' has 2 readers, and no rank is reader 1 \(rank: reader = 0: 0\)"),
        (
            {0: [claim(1, 1 << 40, "a")], 2: [claim(5, 1 << 40, "b")]},
            f"'train' has {1 << 40} readers, .* reader 0, 2, 3, 4, 6 and {(1 << 40) - 7} more .*; 2 ranks have",
        ),
        ({0: [claim(0, 1, "a")], 1: [claim(0, 2, "a")]}, "rank 1 is one of 2 readers, rank 0 one of 1"),
        ({3: [claim(1, 1, "a")]}, "rank 3 is reader 1 of 1"),
        ({3: [claim(-1, 1, "a")]}, "rank 3 is reader -1 of 1"),
        ({0: [claim(0, 1, "a")], 1: [claim(0, 1, "a b")]}, "ranks 0 and 1 are both reader 0 and differ in units: b"),
        ({0: [claim(0, 1, "b a")], 1: [claim(0, 1, "a b")]}, "differ in units: their order"),
        ({0: [claim(0, 2, "a")], 1: [claim(1, 2, "a")]}, "unit 'a' is claimed by rank 0 .* and by rank 1"),
        ({0: [claim(0, 1, "a"), claim(0, 1, "b")]}, "rank 0 has two dataloader states at 'train'"),
    ],
)
def test_claims_that_cannot_be_are_named(claims: dict[int, list[Claim]], message: str) -> None:
    with pytest.raises(StateError, match=message):
        divide_units(claims)
