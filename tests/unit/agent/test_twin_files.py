"""Files of twins: the blocks that differ from the owner's are fetched, and their tensors named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import on_ranks

import bcp
from bcp.agent.pace import Pace
from bcp.agent.twins import Differing, compared, drift_of
from bcp.backends import LocalBackend
from bcp.errors import CorruptError
from bcp.format.receipt import FileReceipt, Receipt, decode_receipt
from bcp.testing.storage_fakes import CountingBackend
from bcp.tiers.digests import key_of

MIB = 1 << 20
SIZES = {"a": 3 * MIB, "b": MIB // 2, "bn.mean": 40, "z": 12 * MIB}


class Pair:
    """A file of an owner, and the same on this host."""

    def __init__(self, root: Path) -> None:
        direct = root / "direct"
        model = {name: torch.arange(nbytes // 4, dtype=torch.int32) for name, nbytes in SIZES.items()}

        async def save(_: int, ranks: Any) -> None:
            await bcp.asave(direct, {"model": model}, options=bcp.SaveOptions(record=False), coordinator=ranks)

        on_ranks(1, save)
        self.receipt: Receipt = decode_receipt(next((direct / "receipts").iterdir()).read_bytes(), "receipt")
        self.file: FileReceipt = self.receipt.files[0]
        self.owner = direct / key_of(self.receipt, self.file)
        self.path = root / "copy"
        self.path.write_bytes(self.owner.read_bytes())
        self.storage = CountingBackend(LocalBackend(direct))

    def flip(self, *places: int) -> None:
        data = bytearray(self.path.read_bytes())
        for place in places:
            data[place] ^= 4
        self.path.write_bytes(data)

    def place_of(self, name: str, offset: int = 0) -> int:
        """Return the byte of the file at which a tensor begins."""
        table = json.loads(self.owner.read_bytes()[8 : self.file.data_start])
        return int(table[name]["data_offsets"][0]) + self.file.data_start + offset

    def compare(self, *may_differ: str) -> Differing:
        done = asyncio.run(compared(self.path, self.storage, self.receipt, self.file, Pace(None), may_differ))
        assert self.path.read_bytes() == self.owner.read_bytes()
        return done


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_equal_files_cost_no_network(pair: Pair) -> None:
    assert pair.compare() == Differing([], 0, [], 0)
    assert not pair.storage.read


def test_blocks_that_differ_are_fetched_and_named(pair: Pair) -> None:
    first, second = pair.place_of("a", 5 * MIB // 2), pair.place_of("z", 9 * MIB)
    pair.flip(first, first + 1, second, second + 7)
    done = pair.compare()
    starts = pair.file.blocks.stored_start.tolist()
    blocks = [max(row for row, start in enumerate(starts) if start <= place) for place in (first, second)]
    assert done == Differing(blocks, 4, ["a", "z"], 2 * MIB)
    assert sum(pair.storage.read.values()) == 2 * MIB
    drift = drift_of(done, pair.receipt, pair.file, 7, host="n0", twin=3)
    assert f"block {blocks[0]}, {blocks[1]}: 4 bytes of 'a', 'z' differ between rank 0 on host n0" in drift.said


def test_one_block_has_several_tensors(pair: Pair) -> None:
    """They lie side by side, and each is named by the bytes that differ."""
    places = sorted((pair.place_of("bn.mean", 4), pair.place_of("z", 1), pair.place_of("b", 2)))
    pair.flip(*places)
    done = pair.compare()
    assert sorted(done.tensors) == ["b", "bn.mean", "z"]
    assert done.nbytes == 3


def test_tensors_that_may_differ_are_fetched_and_not_told(pair: Pair) -> None:
    pair.flip(pair.place_of("bn.mean", 4))
    done = pair.compare("bn.mean")
    assert (done.blocks, done.nbytes, done.tensors) == ([], 0, [])
    assert done.fetched > 0
    pair.flip(pair.place_of("bn.mean", 4), pair.place_of("z", MIB))
    assert pair.compare("bn.mean", "bn").tensors == ["z"]
    pair.flip(pair.place_of("bn.mean", 4))
    assert pair.compare("bn").tensors == ["bn.mean"], "that is another tensor"


@pytest.mark.parametrize("place", [3, 9, 40])
def test_a_header_that_differs_is_replaced(pair: Pair, place: int) -> None:
    pair.flip(place)
    assert pair.compare().blocks == [0]


def test_everything_differs(pair: Pair) -> None:
    pair.path.write_bytes(bytes(pair.file.stored_nbytes))
    done = pair.compare()
    assert done.fetched == pair.file.stored_nbytes
    assert done.blocks == [*range(len(pair.file.blocks))]


def test_a_damaged_block_of_the_owner_is_no_copy(pair: Pair) -> None:
    pair.flip(pair.place_of("z"))
    pair.owner.write_bytes(pair.path.read_bytes())
    with pytest.raises(CorruptError, match="is corrupt"):
        pair.compare()
