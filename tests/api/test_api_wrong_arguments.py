"""Arguments of a wrong type: every field of the options and every argument of a run, with None and odd objects."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import bcp

ODD: tuple[Any, ...] = (None, "text", b"bytes", 1.5, -3, (), {"a": 1}, object(), float("nan"), True, 10**400)
KINDS = (bcp.SaveOptions, bcp.LoadOptions, bcp.RetryPolicy)


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}}


def refusal(kind: type[Any], name: str, value: Any) -> str:
    """Return the words that refuse a value of a field; empty if the options take it."""
    try:
        options = kind(**{name: value})
    except bcp.InputError as error:
        return str(error)
    kept = getattr(options, name)
    assert kept is value or (name == "metadata" and kept == value)  # a copy: the caller may use the dict again
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_options_takes_the_value_or_names_itself(kind: type[Any]) -> None:
    for name in (field.name for field in fields(kind)):
        for value in ODD:
            words = refusal(kind, name, value)
            assert not words or name in words
        assert refusal(kind, name, object()) or name == "retries"


NONES = {
    bcp.SaveOptions: {"budget_bytes", "pinned_bytes", "io_workers", "ionice", "retries", "step"},
    bcp.LoadOptions: {"rename", "io_workers", "cold", "retries", "record", "step"},
    bcp.RetryPolicy: {"hedge_seconds"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_taken_where_it_is_documented_and_nowhere_else(kind: type[Any]) -> None:
    words = {field.name: refusal(kind, field.name, None) for field in fields(kind)}
    taken = {name for name, text in words.items() if not text}
    assert taken == NONES[kind]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("edit", None),
        ("codecs", None),
        ("nice", None),
        ("observe", 3),
        ("codecs", "zstd"),
        ("guard", "no"),
        ("step", "a"),
    ],
)
def test_a_save_with_it_writes_nothing(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(bcp.InputError, match=name):
        bcp.save(tmp_path / "c", states(), options=bcp.SaveOptions(**{name: value}))
    assert not list(tmp_path.iterdir())


def test_arguments_of_a_run_are_refused_before_it_begins(tmp_path: Path) -> None:
    arguments = [name for name in inspect.signature(bcp.Run).parameters if name not in ("path", "states")]
    for name in arguments:
        for value in (object(), 1.5, b"bytes"):
            with pytest.raises(bcp.InputError), bcp.Run(tmp_path / "run", states(), **{name: value}) as run:
                run.resume()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("last", [None, "1", 0, 1.5, True])
def test_a_report_of_no_number_of_recordings_is_refused(tmp_path: Path, last: Any) -> None:
    with pytest.raises(bcp.InputError, match="last"):
        bcp.report(tmp_path, last=last)


@pytest.mark.parametrize("call", [bcp.report, bcp.latest])
def test_storage_options_that_are_no_dict_are_refused(tmp_path: Path, call: Any) -> None:
    with pytest.raises(bcp.InputError, match="storage_options is a list; pass a dict"):
        call(tmp_path, storage_options=[])
