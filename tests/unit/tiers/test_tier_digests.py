"""Whether a kept receipt is that of a mark, compared with the bytes of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from bcp.format.receipt import Blocks, FileReceipt, Receipt, encode_receipt
from bcp.tiers.digests import blank_of, is_of


def receipts() -> list[Receipt]:
    """Return receipts each of which differs from the first in one thing."""
    file = FileReceipt(0, 128, 640, 640, (), Blocks.build([512, 128], [512, 128], [bytes(16)] * 2))
    other = replace(file, kind=1)
    first = Receipt(0, "0" * 16, [file, other], {("model", "a"): "1"})
    files = [
        replace(file, data_start=120),
        replace(file, nbytes=641),
        replace(file, stored_nbytes=641),
        replace(file, codecs=("zlib",)),
        replace(file, blocks=Blocks.build([128, 512], [512, 128], [bytes(16)] * 2)),
        replace(file, blocks=Blocks.build([512, 128], [128, 512], [bytes(16)] * 2)),
        replace(file, blocks=Blocks.build([640], [640], [bytes(16)])),
    ]
    return [
        first,
        replace(first, rank=1),
        replace(first, operation="1" * 16),
        replace(first, files=[file]),
        replace(first, files=[file, replace(file, kind=2)]),
        replace(first, objects={}),
        replace(first, objects={("model", "a"): "2"}),
        replace(first, objects={("model", "b"): "1"}),
        *(replace(first, files=[each, other]) for each in files),
    ]


def test_receipts_that_differ_in_one_thing() -> None:
    every = receipts()
    for one, blank in product(every, repeat=2):
        assert is_of(one, blank) == (encode_receipt(blank_of(one)) == encode_receipt(blank)) == (one is blank)


def test_digests_do_not_count() -> None:
    for blank in receipts():
        files = [
            replace(file, blocks=replace(file.blocks, checksum=[b"\7" * 16] * len(file.blocks))) for file in blank.files
        ]
        assert is_of(replace(blank, files=files), blank)
