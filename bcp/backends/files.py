"""Names and directories of local files: durable, and never outside of a root. Everything here blocks."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

from bcp.backends.shared import certain, open_anew

__all__ = [
    "TEMP_SUFFIX",
    "create_empty",
    "final_name",
    "is_left_over",
    "list_files",
    "list_folders",
    "open_new",
    "prune",
    "remove",
    "rename_written",
    "sync_directory",
    "synced",
    "temp_path",
    "unfinished",
    "unlink_all",
    "write_new",
]

TEMP_SUFFIX = ".bcp-tmp"
"""How the names of unfinished files end; such files are never listed."""

_LEFT_OVER = re.compile(r"\.nfs[0-9a-f]{24}|\.fuse_hidden[0-9a-f]{16}|\.__afs[0-9A-Fa-f]{4,}|\.smb[0-9a-f]{12,}")
_TRIES = 16  # a directory may be pruned between its creation and the first file in it; others do that rarely


def synced(fd: int) -> os.stat_result:
    """Make a file's bytes durable; return its status."""
    os.fsync(fd)
    return os.fstat(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    certain(path, partial(_sync_directory, path))


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file server that cannot do it does it at once
            raise
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
    with suppress(FileNotFoundError, NotADirectoryError):
        return certain(root, partial(_unfinished, root))
    return []


def _unfinished(root: Path) -> list[tuple[str, str]]:
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
    """Create a file that is not there yet, and the directories it needs, durably. Nobody else uses its name."""
    for tries_left in reversed(range(_TRIES)):
        try:
            _make_directory(path.parent)
            os.close(open_new(path))
        except OSError as error:
            if not tries_left or error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            open_anew(path.parent)
        else:
            return


def open_new(path: Path) -> int:
    """Create an empty file whose name nobody else uses; return a descriptor to write to it."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # a file server ran the call twice: its first answer was lost
        return os.open(path, flags)


def write_new(path: Path, data: memoryview) -> None:
    """Create a file whose name nobody else uses, with these flat bytes, durably. Its name is not yet durable."""
    fd = open_new(path)
    try:
        written = 0
        while written < len(data):
            written += os.write(fd, data[written:])
        os.fsync(fd)
    finally:
        os.close(fd)


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


def rename_written(temp: Path, final: Path, written: os.stat_result) -> None:
    """Give a temporary file its final name.

    Args:
        temp: the file.
        final: the name.
        written: its status. If ``temp`` is gone and such a file has the name, a file server has run the call twice.

    """
    try:
        os.rename(temp, final)  # noqa: PTH104 -- the tests record os.rename and os.fsync in their order
    except FileNotFoundError:
        open_anew(final.parent)
        with suppress(OSError):
            found = final.stat()
            if (found.st_ino, found.st_size) == (written.st_ino, written.st_size):
                return
        raise


def is_left_over(name: str) -> bool:
    """Return whether a client of a file server gives such names to deleted files that are still open."""
    return _LEFT_OVER.fullmatch(name) is not None


def list_files(root: Path, prefix: str) -> list[tuple[str, int]]:
    """Return (key, size in bytes) of every regular, finished file whose key starts with ``prefix``, sorted."""
    top = root / prefix.rpartition("/")[0]
    with suppress(FileNotFoundError, NotADirectoryError):
        return certain(top, partial(_list_files, root, top, prefix))
    return []


def _list_files(root: Path, top: Path, prefix: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for folder, _, names in os.walk(top, onerror=partial(_unless_not_ours, top)):
        base = Path(folder).relative_to(root).as_posix()
        for name in names:
            key = name if base == "." else f"{base}/{name}"
            if name.endswith(TEMP_SUFFIX) or is_left_over(name) or not key.startswith(prefix):
                continue
            with suppress(FileNotFoundError):  # deleted since
                status = Path(folder, name).lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append((key, status.st_size))
    return sorted(found)


def list_folders(top: Path) -> list[str]:
    """Return the names of the directories in a directory, sorted; symbolic links are left out."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return certain(top, partial(_list_folders, top))
    return []


def _list_folders(top: Path) -> list[str]:
    with os.scandir(top) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _unless_not_ours(top: Path, error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, unless it is below ``top``, and absent or another user's.

    An example is ``lost+found`` at the top of a file system. A directory that may not be listed has no files of ours.
    """
    passing = isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
    if not passing or error.filename is None or Path(error.filename) == top:
        raise error


def unlink_all(root: Path, paths: list[Path]) -> None:
    """Remove files, and the directories below ``root`` that became empty; absent ones are skipped."""
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            certain(path, path.unlink)
        prune(root, path.parent)


def prune(root: Path, folder: Path) -> None:
    """Remove ``folder`` and its parents below ``root`` as far as they are empty."""
    with suppress(OSError):  # not empty, or gone: somebody else uses it, was quicker, or reads a deleted file in it
        while folder != root and folder.is_relative_to(root):
            folder.rmdir()
            folder = folder.parent
