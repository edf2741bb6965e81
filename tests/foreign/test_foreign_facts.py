"""Facts of a foreign checkpoint: JSON data, of bounded length, whatever a pickle refers to."""

from __future__ import annotations

from typing import Any

import pytest

from bcp.interop.facts import MOST_FACTS, facts_of


def test_json_data_come_over_and_the_rest_is_listed() -> None:
    value = {"step": 3, "rates": (0.5, None), "nested": {"a": {1: True}}, "none": None, "odd": b"x", "state": 1}
    facts = facts_of("library", value, {"state"}, ["before"])
    assert facts == {
        "library": {"step": 3, "rates": [0.5, None], "nested": {"a": {"1": True}}, "left_out": ["before", "odd"]}
    }


def often(levels: int) -> list[Any]:
    inner: list[Any] = ["x"]
    for _ in range(levels):
        inner = [inner, inner]
    return inner


LONG = [often(60), ["y" * 10_000] * 1_000_000, "z" * (MOST_FACTS + 1), float("nan"), 10**5000]


@pytest.mark.parametrize("value", LONG, ids=["list", "string", "characters", "number", "digits"])
def test_what_is_too_long_is_left_out(value: Any) -> None:
    assert facts_of("library", {"long": value, "short": 1}, ()) == {"library": {"short": 1, "left_out": ["long"]}}


def test_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    assert facts_of("library", {"self": value}, ())["library"] == {"left_out": ["self"]}
