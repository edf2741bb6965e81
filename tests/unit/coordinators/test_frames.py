from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp.coordinators.tree.frames import (
    Frame,
    FrameError,
    Kind,
    Values,
    pack_number,
    unpack_number,
)

numbers = st.integers(0, 2**63 - 1)
members = st.lists(st.sampled_from([b"", b"a", b"b", b"longer" * 40, b"\0"]) | st.binary(max_size=3), min_size=1)


@given(numbers)
def test_numbers(number: int) -> None:
    packed = pack_number(number)
    assert len(packed) == max(1, -(-number.bit_length() // 7))
    assert unpack_number(b"x" + packed + b"y", 1) == (number, 1 + len(packed))


@given(st.sampled_from(Kind), numbers, numbers, st.binary())
def test_frames(kind: Kind, operation: int, step: int, body: bytes) -> None:
    frame = Frame(kind, operation, step, body)
    assert Frame.unpack(frame.pack()) == frame


@given(st.binary(max_size=40))
def test_bytes_of_a_stranger_are_a_frame_or_an_error(data: bytes) -> None:
    try:
        frame = Frame.unpack(data)
    except FrameError:
        return
    assert Frame.unpack(frame.pack()) == frame


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\x63\0\0", b"\x01", b"\x01\xff", b"\x01" + b"\xff" * 20])
def test_bytes_that_are_no_frame(data: bytes) -> None:
    with pytest.raises(FrameError):
        Frame.unpack(data)


# -- values ----------------------------------------------------------------------------------


@given(members)
def test_values(said: list[bytes]) -> None:
    values = Values.unpack(Values.of(said).pack(), len(said))
    assert values.members() == said
    assert list(values.distinct) == list(dict.fromkeys(said))


@given(st.lists(members, min_size=1, max_size=5))
def test_values_are_joined_and_split(pieces: list[list[bytes]]) -> None:
    together = Values.joined([Values.of(piece) for piece in pieces])
    assert together.members() == [member for piece in pieces for member in piece]
    again = together.split([len(piece) for piece in pieces])
    assert [piece.members() for piece in again] == pieces
    assert [piece.distinct for piece in again] == [tuple(dict.fromkeys(piece)) for piece in pieces]


def test_what_all_say_is_sent_once() -> None:
    digest = bytes(range(17))
    assert len(Values.of([digest] * 10_000).pack()) == len(digest) + 2
    assert len(Values.of([digest] * 9_999 + [b"other"]).pack()) == len(digest) + len(b"other") + 3 + 10_000


def test_many_distinct_values() -> None:
    said = [b"%d" % number for number in range(70_000)]
    assert Values.unpack(Values.of(said).pack(), len(said)).members() == said
    assert Values.unpack(Values.of(said[:300]).pack(), 300).members() == said[:300]


@given(st.binary(max_size=40), st.integers(1, 5))
def test_bytes_of_a_stranger_are_values_or_an_error(data: bytes, count: int) -> None:
    try:
        values = Values.unpack(data, count)
    except FrameError:
        return
    assert len(values.members()) == count


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no number"),
        (b"\0", "0 distinct values"),
        (b"\x04\1\1\1\1abcd", "4 distinct values for 3 ranks"),
        (pack_number(2**62), "distinct values"),
        (b"\1" + pack_number(2**62) + b"a", "instead of"),
        (b"\1\1ab", "instead of"),
        (b"\2\1\1ab\0\1", "instead of"),
        (b"\2\1\1ab\0\1\2", "value 2 of 2"),
    ],
)
def test_bytes_that_are_no_values(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        Values.unpack(data, 3)
