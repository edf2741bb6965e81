"""Names and directories of local files: durable, and never outside of a root. Everything here blocks."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

__all__ = [
    "TEMP_SUFFIX",
    "create_empty",
    "final_name",
    "list_files",
    "prune",
    "remove",
    "sync_directory",
    "temp_path",
    "unfinished",
    "unlink_all",
]

TEMP_SUFFIX = ".bcp-tmp"
"""How the names of unfinished files end; such files are never listed."""

_TRIES = 16  # a directory may be pruned between its creation and the first file in it; others do that rarely


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temp_path(final: Path) -> Path:
    """Return an unused name next to ``final``; creates nothing."""
    return final.parent / f".{final.name}.{secrets.token_hex(12)}{TEMP_SUFFIX}"


def final_name(temp: str) -> str:
    """Return the name that the file of a temporary name was to have."""
    return temp[1:].removesuffix(TEMP_SUFFIX).rpartition(".")[0]


def unfinished(root: Path) -> list[tuple[str, str]]:
    """Return (final key, path below ``root``) of every temporary file, symbolic links included."""
    found: list[tuple[str, str]] = []
    for folder, _, names in os.walk(root, onerror=partial(_unless_not_ours, root)):
        base = Path(folder).relative_to(root)
        found += [
            ((base / final_name(name)).as_posix(), (base / name).as_posix())
            for name in names
            if name.endswith(TEMP_SUFFIX)
        ]
    return found


def create_empty(path: Path) -> None:
    """Create a file that is not there yet, and the directories it needs, durably."""
    for tries_left in reversed(range(_TRIES)):
        try:
            _make_directory(path.parent)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileNotFoundError:
            if not tries_left:
                raise
        else:
            return


def _make_directory(path: Path) -> None:
    """Create a directory and its parents, and make their names durable."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
        sync_directory(path.parent)


def remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    path.unlink(missing_ok=True)


def list_files(root: Path, prefix: str) -> list[tuple[str, int]]:
    """Return (key, size in bytes) of every regular, finished file whose key starts with ``prefix``, sorted."""
    found: list[tuple[str, int]] = []
    above, _, _ = prefix.rpartition("/")
    for folder, _, names in os.walk(root / above, onerror=partial(_unless_not_ours, root / above)):
        base = Path(folder).relative_to(root).as_posix()
        for name in names:
            key = name if base == "." else f"{base}/{name}"
            if name.endswith(TEMP_SUFFIX) or not key.startswith(prefix):
                continue
            with suppress(FileNotFoundError):  # deleted since
                status = Path(folder, name).lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append((key, status.st_size))
    return sorted(found)


def _unless_not_ours(top: Path, error: OSError) -> None:
    """Raise what keeps a directory from being listed, unless it is not there, or is somebody else's below ``top``.

    As ``lost+found`` is at the top of a file system: what may not be listed was not written by this user.
    """
    absent = isinstance(error, FileNotFoundError | NotADirectoryError)
    if not (absent or (isinstance(error, PermissionError) and Path(error.filename) != top)):
        raise error


def unlink_all(root: Path, paths: list[Path]) -> None:
    """Remove files, and the directories below ``root`` that became empty; absent ones are skipped."""
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        prune(root, path.parent)


def prune(root: Path, folder: Path) -> None:
    """Remove ``folder`` and its parents below ``root`` as far as they are empty."""
    with suppress(OSError):  # not empty, or gone: somebody else uses it, or was quicker
        while folder != root and folder.is_relative_to(root):
            folder.rmdir()
            folder = folder.parent
