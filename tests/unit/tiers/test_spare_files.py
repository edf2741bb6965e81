"""Files of a rank in the memory of its host, where the network decides which snapshots are copied."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_node_folder import intent

from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import Mark

SIZES = {"model": 5000, "optimizer": 9000}


class Rank:
    """A rank that saves again and again."""

    def __init__(self, root: Path, copies: int) -> None:
        self.folder = NodeFolder(root)
        self.memory = TierMemory(self.folder, 0)
        self.memory.copies = copies
        self.count = 0

    def save(self, *, is_copied: bool) -> list[set[int]]:
        """Save once; return the files before and after, by their numbers."""
        self.count += 1
        operation, before = f"{self.count:016x}", self.files()
        self.memory.begin({f"{kind}/00000-{operation}.safetensors": size for kind, size in SIZES.items()}, operation)
        self.folder.prepare(intent(0, operation))
        self.folder.mark(Mark(operation, 0))
        self.memory.all_marked(operation, is_copied=is_copied)
        return [before, self.files()]

    def files(self) -> set[int]:
        return {path.stat().st_ino for paths in self.folder.data_files().values() for path in paths}


@pytest.mark.parametrize("pattern", [(True,), (True, False), (True, False, False), (False,), (True, True, False)])
def test_saves_beside_copies_make_no_new_files(pattern: tuple[bool, ...], tmp_path: Path) -> None:
    rank = Rank(tmp_path / "memory", copies=1)
    for number in range(4 * len(pattern) + 8):
        before, after = rank.save(is_copied=pattern[number % len(pattern)])
        assert len(after) <= 4 * len(SIZES)
        if number >= 2 * len(pattern) + 4:
            assert after == before
    rank.memory.close()


def test_without_copies_nothing_is_spared(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "memory", copies=0)
    for _ in range(6):
        _, after = rank.save(is_copied=True)
        assert len(after) <= 2 * len(SIZES)
    rank.memory.close()


def test_files_of_other_sizes_are_not_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path / "memory", copies=1)
    for _ in range(5):
        rank.save(is_copied=True)
    monkeypatch.setitem(SIZES, "model", 6000)
    for _ in range(4):
        rank.save(is_copied=True)
    sizes = {path.stat().st_size for paths in rank.folder.data_files().values() for path in paths}
    assert sizes == {6000, 9000}
    rank.memory.close()
