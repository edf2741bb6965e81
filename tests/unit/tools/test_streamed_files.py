"""A file that is laid out piece by piece is cut into parts that tile it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp.plan.box import Box
from bcp.tools.exports.streamed import JOINED_BYTES, Elements, Fixed, Sealed, TargetFile

PIECES = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda data: ("fixed", data)),
        st.tuples(st.just("elements"), st.integers(0, 30)),
        st.tuples(st.just("sealed"), st.integers(1, 30)),
    ),
    max_size=30,
)


def laid_out(pieces: list[tuple[str, object]]) -> tuple[TargetFile, bytes]:
    """Return a file, and its bytes: those of elements are 1, of sealed pieces 2, of padding 0."""
    file, image = TargetFile("file"), b""
    for kind, content in pieces:
        if kind == "fixed":
            assert isinstance(content, bytes)
            file.fixed(content)
            image += content
            continue
        assert isinstance(content, int)
        if kind == "sealed":
            file.sealed(content, lambda _, count=content: b"\2" * count)
            image += b"\2" * content
            continue
        file.pad(4)
        file.elements(0, Box.whole((content,)), "float32", 4)
        image += bytes(-len(image) % 4) + b"\1" * (4 * content)
    return file, image


def bytes_of(piece: Fixed | Elements | Sealed) -> bytes:
    if isinstance(piece, Fixed):
        return piece.data
    return b"\1" * piece.nbytes if isinstance(piece, Elements) else piece.make([])


@given(PIECES, st.integers(1, 20))
def test_parts_tile_the_file_and_have_all_pieces_that_they_touch(pieces: list[tuple[str, object]], size: int) -> None:
    file, image = laid_out(pieces)
    assert file.nbytes == len(image)
    found, end = b"", 0
    for index, part in enumerate(file.parts(16 * size)):
        assert (part.index, part.start) == (index, end)
        assert part.nbytes == 16 * size or part.stop == file.nbytes
        for piece in part.pieces:
            data = bytes_of(piece)
            assert len(data) == piece.nbytes > 0
            own, place = part.of(piece), part.within(piece)
            assert part.start + place.start == piece.at + own.start == len(found)
            assert 0 <= own.start < own.stop <= piece.nbytes
            found += data[own]
        end = part.stop
    assert found == image
    assert file.data_nbytes == sum(piece.nbytes for piece in file.pieces if isinstance(piece, Elements))


@given(PIECES)
def test_checksums_are_kept_only_if_a_piece_needs_them(pieces: list[tuple[str, object]]) -> None:
    file, _ = laid_out(pieces)
    count = sum(kind == "elements" for kind, _ in pieces)
    assert file.checksums == (count if any(kind == "sealed" for kind, _ in pieces) else 0)


def test_small_neighbours_become_one_piece() -> None:
    file = TargetFile("file")
    for _ in range(3 * JOINED_BYTES):
        file.fixed(b"ab")
    assert len(file.pieces) == 6
    assert file.nbytes == 6 * JOINED_BYTES


def test_elements_that_are_not_aligned_are_a_mistake() -> None:
    file = TargetFile("file")
    file.fixed(b"abc")
    with pytest.raises(ValueError, match="elements of 4 bytes cannot begin at byte 3"):
        file.elements(0, Box.whole((1,)), "float32", 4)
