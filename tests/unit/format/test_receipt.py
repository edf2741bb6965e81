from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from handmade import OPERATION, file_receipt
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import CheckpointError, CorruptError, FormatVersionError, NotACheckpointError
from bcp.format.receipt import Blocks, FileReceipt, Receipt, decode_receipt, encode_receipt, receipt_digest

WHERE = "receipts/00003.arrow"
DIGESTS = [bytes([k]) * 16 for k in range(256)]
IMAGE = bytes(range(256)) * 17
PLAIN = file_receipt(0, 4096, IMAGE)
ENCODED = FileReceipt(1, 4096, 5000, 900, ("zstd", "xor"), Blocks.build([600, 300], [4608, 392], DIGESTS[:2]))
OBJECTS = {("optimizer", "step"): "17", ("model", "näme"): '{"a": [1, null]}'}
RECEIPT = Receipt(3, OPERATION, [ENCODED, PLAIN], OBJECTS)


def columns(file: FileReceipt) -> list[object]:
    blocks = file.blocks
    numbers = [blocks.stored_start, blocks.stored_length, blocks.raw_start, blocks.raw_length]
    head = [file.kind, file.data_start, file.nbytes, file.stored_nbytes, file.codecs, list(blocks.checksum)]
    return [*head, *(column.tolist() for column in numbers)]


def test_round_trip() -> None:
    found = decode_receipt(encode_receipt(RECEIPT), WHERE)
    assert (found.rank, found.operation, found.objects) == (3, OPERATION, OBJECTS)
    assert [columns(file) for file in found.files] == [columns(PLAIN), columns(ENCODED)]
    encoded = found.file(1)
    assert encoded is not None
    assert encoded.codecs == ("zstd", "xor")
    assert found.file(2) is None


def test_a_rank_that_wrote_nothing_has_a_receipt_too() -> None:
    found = decode_receipt(encode_receipt(Receipt(0, OPERATION, [], {})), WHERE)
    assert (list(found.files), found.objects) == ([], {})


def test_encoding_is_deterministic() -> None:
    other = Receipt(3, OPERATION, [PLAIN, ENCODED], dict(reversed(OBJECTS.items())))
    assert encode_receipt(RECEIPT) == encode_receipt(other)
    assert receipt_digest(encode_receipt(other)) == xxhash.xxh3_128(encode_receipt(RECEIPT)).digest()


def test_every_truncation_and_damage_to_any_byte_is_noticed() -> None:
    data = encode_receipt(RECEIPT)
    for position in range(len(data)):
        with pytest.raises((CorruptError, NotACheckpointError), match=WHERE):
            decode_receipt(data[:position], WHERE)
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match=WHERE):
            decode_receipt(damaged, WHERE)
    with pytest.raises(FormatVersionError, match="version 3"):
        decode_receipt(data[:-1] + b"\x03", WHERE)
    with pytest.raises(CorruptError, match=WHERE):
        decode_receipt(data[:-1] + b"\x02", WHERE)
    with pytest.raises(NotACheckpointError):
        decode_receipt(b"something else", WHERE)


@given(st.data())
def test_covering_finds_the_blocks_of_a_range(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([PLAIN, ENCODED]))
    start = data.draw(st.integers(0, file.nbytes))
    stop = data.draw(st.integers(start, file.nbytes))
    raw = list(zip(file.blocks.raw_start.tolist(), file.blocks.raw_length.tolist(), strict=True))
    wanted = [row for row, (first, n) in enumerate(raw) if max(first, start) < min(first + n, stop)]
    assert list(range(len(raw)))[file.covering(start, stop)] == wanted


def test_blocks_hold_the_bytes_they_say() -> None:
    rows = PLAIN.covering(4096 + 20, 4096 + 40)
    assert rows == slice(1, 3)
    for row in range(rows.start, rows.stop):
        start, length = int(PLAIN.blocks.stored_start[row]), int(PLAIN.blocks.stored_length[row])
        assert xxhash.xxh3_128_digest(IMAGE[start : start + length]) == PLAIN.blocks.checksum[row]


def forged(stored: Sequence[int], raw: Sequence[int], **fields: object) -> bytes:
    values = {"kind": 0, "data_start": 4096, "nbytes": 5000, "stored_nbytes": 900, "codecs": ("zstd",)} | fields
    blocks = Blocks.build(stored, raw, DIGESTS[: len(stored)])
    return encode_receipt(Receipt(0, OPERATION, [FileReceipt(blocks=blocks, **values)], {}))  # type: ignore[arg-type]  # forged


@pytest.mark.parametrize(
    "data",
    [
        forged([600, 300], [4608, 391]),
        forged([600, 299], [4608, 392]),
        forged([1000, -100], [4608, 392]),
        forged([600, 300], [5000, 0]),
        forged([600, 300], [2**63 - 1, 2**63 - 1]),
        forged([600, 300], [4608, 392], kind=4),
        forged([600, 300], [4608, 392], data_start=5001),
        forged([600, 300], [4608, 392], data_start=-1),
        forged([600, 300], [4608, 392], codecs=()),
        forged([600, 300], [4608, 392], codecs=("",)),
        encode_receipt(Receipt(0, "x" * 16, [], {})),
        encode_receipt(Receipt(0, OPERATION, [PLAIN, PLAIN], {})),
    ],
)
def test_numbers_that_do_not_add_up_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=WHERE):
        decode_receipt(data, WHERE)


def test_the_forger_can_also_be_honest() -> None:
    (file,) = decode_receipt(forged([600, 300], [4608, 392]), WHERE).files
    assert np.array_equal(file.blocks.raw_start, [0, 4608])
