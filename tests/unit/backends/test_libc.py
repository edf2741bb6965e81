from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import PAGE, can_drop, drop

from bcp.backends import files as libc


def test_fallocate_reserves_space(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        libc.fallocate(file.fileno(), 3 * PAGE)
        assert (tmp_path / "file").stat().st_size == 3 * PAGE


def test_fallocate_says_what_went_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor") as caught:
        libc.fallocate(file.fileno(), PAGE)
    assert caught.value.errno == errno.EBADF


def test_alignment_is_a_power_of_two_or_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        for number in libc.direct_alignment(file.fileno()):
            assert number & (number - 1) == 0
        assert libc.direct_alignment(-1) == (0, 0)
        monkeypatch.setattr(libc, "_libc", SimpleNamespace())
        assert libc.direct_alignment(file.fileno()) == (0, 0)


def test_pages_in_the_cache(tmp_path: Path) -> None:
    if not can_drop(tmp_path):
        pytest.skip("this file system is the page cache")
    path = tmp_path / "file"
    path.write_bytes(bytes(9 * PAGE + 1))
    with path.open("rb") as file:
        assert libc.in_page_cache(file.fileno(), PAGE, 8 * PAGE + 1, 2 * PAGE) == [True] * 5
        drop(path)
        assert libc.in_page_cache(file.fileno(), 0, 9 * PAGE + 1, PAGE) == [False] * 10
        with pytest.raises(ValueError, match="size"):
            libc.in_page_cache(file.fileno(), 0, 11 * PAGE, PAGE)
