"""Names and directories of local files: durable, and never outside of a root. Everything here blocks.

The system calls that Python has no name for.

Shared file systems: their names, and the caches of their clients. Everything here blocks.

A client of a file server keeps names, absent names and attributes for up to some minutes. It asks the server when it
opens a file or a directory (close-to-open). It repeats a call if the answer was lost, and the second answer then tells
of the first call's work: ENOENT for a rename, EEXIST for a link. A file or directory that another host has deleted is
stale (ESTALE).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import fstat
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from bcp.backends.small import check_small
from bcp.errors import CorruptError

__all__ = [
    "TEMP_SUFFIX",
    "Bytes",
    "Tries",
    "address",
    "certain",
    "create_empty",
    "direct_alignment",
    "fallocate",
    "file_system_type",
    "final_name",
    "in_page_cache",
    "is_in_memory",
    "is_left_over",
    "is_sealed",
    "is_shared",
    "list_files",
    "list_folders",
    "list_links",
    "open_anew",
    "open_regular",
    "prune",
    "read_file",
    "remove",
    "rename_written",
    "sync_directory",
    "synced",
    "temp_path",
    "unfinished",
    "unlink_all",
    "unlink_link",
    "write_new",
]

Bytes = npt.NDArray[np.uint8]

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_DIO_MEM_ALIGN = 0x98  # where it lies in struct statx; stx_dio_offset_align follows
_libc = ctypes.CDLL(None, use_errno=True)


def address(view: memoryview) -> int:
    """Return where the first byte of a buffer is in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def fallocate(fd: int, nbytes: int) -> None:
    """Reserve the space of a file's first bytes; OSError where the file system cannot.

    Not ``os.posix_fallocate``: where the file system cannot, the C library writes a byte to every 4 KiB itself.
    """
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def file_system_type(path: Path | int) -> int:
    """Return ``f_type`` of statfs(2), for a path or a descriptor; 0 if the file system does not say."""
    answer = (ctypes.c_long * 32)()  # struct statfs has 15
    failed = _libc.fstatfs(path, answer) if isinstance(path, int) else _libc.statfs(os.fsencode(path), answer)
    return 0 if failed else answer[0] & 0xFFFFFFFF


def is_in_memory(path: Path) -> bool:
    """Whether a path is on a tmpfs or ramfs; True where the file system does not say."""
    return file_system_type(path) in (0, _TMPFS, _RAMFS)


def direct_alignment(fd: int) -> tuple[int, int]:
    """Return the alignment that direct I/O needs: of addresses, and of offsets and lengths.

    Zeros where it is not known: Linux before 6.1, and file systems that do not say.
    """
    answer = ctypes.create_string_buffer(256)
    statx = getattr(_libc, "statx", None)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return 0, 0
    (mask,) = struct.unpack_from("=I", answer)
    if not mask & _STATX_DIOALIGN:
        return 0, 0
    memory, offset = struct.unpack_from("=II", answer, _STATX_DIO_MEM_ALIGN)
    return memory, offset


def in_page_cache(fd: int, start: int, nbytes: int, step: int) -> list[bool]:
    """Say for one page in every ``step`` bytes from ``start``, both multiples of a page, whether it is in memory.

    Reads nothing, and starts no read-ahead. True as well for files that are another user's and that this one may not
    write: Linux does not tell about those. Raises OSError if the file cannot be mapped. Raises
    ValueError if the file ends before these bytes.
    """
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as mapped:
        first = address(memoryview(mapped))
        page = ctypes.c_ubyte()
        flags = []
        for pointer in range(first, first + nbytes, step):
            failed = _libc.mincore(ctypes.c_void_p(pointer), ctypes.c_size_t(1), ctypes.byref(page))
            flags.append(not failed and bool(page.value & 1))
    return flags


T = TypeVar("T")

_TMPFS, _RAMFS = 0x01021994, 0x858458F6
_FUSE = 0x65735546
_SHARED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x5346414F: "AFS",
    0x6B414653: "kAFS",
    0x01021997: "9P",
    _FUSE: "FUSE",
}
"""``f_type`` of statfs(2). Not Lustre, CephFS, GPFS and other cluster file systems: they are made for direct I/O."""

_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")
"""FUSE file systems over a disk of this host; all others are taken for shared ones."""

_STALE_TRIES = 3
_known: dict[int, bool] = {}


def is_shared(path: Path | int) -> bool:
    """Return whether a file or directory, or its descriptor, is on a file server. The first call for each asks it."""
    device = os.stat(path).st_dev  # noqa: PTH116 -- a descriptor, too
    if device not in _known:
        kind = file_system_type(path)
        _known[device] = kind in _SHARED and not (kind == _FUSE and _mounted_as(device) in _LOCAL_FUSE)
    return _known[device]


def _mounted_as(device: int) -> str:
    """Return the type of a mount, as in ``fuse.sshfs``; empty if it cannot be found."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0]
    return ""


def open_anew(folder: Path) -> None:
    """Open a directory and close it: a client then asks the server for its names again."""
    with suppress(OSError):  # it is absent, or may not be read
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class Tries:
    """Decides whether a call is to be made again, after an error that a client's memory may have caused.

    Once for an absent file, a few times for a stale one. The directories above are opened anew before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._absent = 1
        self._stale = _STALE_TRIES - 1

    def again(self, error: OSError) -> bool:
        """Return whether to try again. Blocks."""
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            self._absent -= 1
            left = self._absent
        elif error.errno == errno.ESTALE:
            self._stale -= 1
            left = self._stale
        else:
            return False
        if left < 0:
            return False
        for folder in reversed(self._path.parents):
            open_anew(folder)
        return True


def certain(path: Path, call: Callable[[], T]) -> T:
    """Return ``call()``, which finds or reads ``path``, whatever the client remembers. It begins anew each time."""
    tries = Tries(path)
    while True:
        try:
            return call()
        except OSError as error:
            if not tries.again(error):
                raise


_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_NO_SUCH_DEVICE = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)  # the answers of open(2) for sockets and dead devices


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor, without waiting for a writer of a named pipe.

    Raises CorruptError for a named pipe, a device and a socket, which have no end or no content to read. Raises
    IsADirectoryError for a directory.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # a lease of a file server has to be given back first, which only regular files have
        _check_regular(path, os.stat(path).st_mode)  # noqa: PTH116 -- as the descriptor below
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in _NO_SUCH_DEVICE:
            _check_regular(path, os.stat(path).st_mode)  # noqa: PTH116 -- as above
        raise
    try:
        _check_regular(path, fstat(fd).st_mode)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(path: Path, mode: int) -> None:
    """Refuse to read anything but a regular file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = next((words for matches, words in _KINDS if matches(mode)), "no regular file")
        raise CorruptError(f"{path} is {kind} and not a file: move it away, and put the file back")


def read_file(path: Path) -> bytes:
    """Return the bytes of a small regular file.

    Raises the errors of :func:`open_regular`. Raises CorruptError if the file is too large to be a small one.
    """
    with open(open_regular(path), "rb") as file:
        check_small(str(path), fstat(file.fileno()).st_size)
        return file.read()


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
    entries: list[tuple[str, str]] = []
    for folder, _, names in os.walk(root, onerror=partial(_unless_not_ours, root)):
        base = Path(folder).relative_to(root)
        entries += [
            ((base / final_name(name)).as_posix(), (base / name).as_posix())
            for name in names
            if name.endswith(TEMP_SUFFIX)
        ]
    return entries


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
    """Create an empty file with a unique name; return a descriptor to write to it."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # a file server ran the call twice: its first answer was lost
        return os.open(path, flags)


def write_new(path: Path, data: memoryview) -> None:
    """Create a file with a unique name and these flat bytes, durably. Its name is not yet durable."""
    fd = certain(path, partial(open_new, path))
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
    certain(path, partial(path.unlink, missing_ok=True))


def rename_written(temp: Path, final: Path, written: os.stat_result) -> None:
    """Give a temporary file its final name.

    ``written`` is the status of the file. If ``temp`` is gone and ``final`` has this status, a file server has run the
    call twice.
    """
    try:
        certain(final, partial(os.rename, temp, final))
    except FileNotFoundError:
        open_anew(final.parent)
        with suppress(OSError):
            status = final.stat()
            if (status.st_ino, status.st_size) == (written.st_ino, written.st_size):
                return
        raise


def is_left_over(name: str) -> bool:
    """Return whether a client of a file server gives such names to deleted files that are still open."""
    return _LEFT_OVER.fullmatch(name) is not None


def list_files(root: Path, prefix: str) -> list[tuple[str, int, float]]:
    """Return (key, bytes, Unix seconds of the last write) of every regular, finished file, sorted.

    The keys start with ``prefix``.
    """
    top = root / prefix.rpartition("/")[0]
    with suppress(FileNotFoundError, NotADirectoryError):
        return certain(top, partial(_list_files, root, top, prefix))
    return []


def _list_files(root: Path, top: Path, prefix: str) -> list[tuple[str, int, float]]:
    entries: list[tuple[str, int, float]] = []
    for folder, _, names in os.walk(top, onerror=partial(_unless_not_ours, top)):
        base = Path(folder).relative_to(root).as_posix()
        for name in names:
            key = name if base == "." else f"{base}/{name}"
            if name.endswith(TEMP_SUFFIX) or is_left_over(name) or not key.startswith(prefix):
                continue
            with suppress(FileNotFoundError):  # deleted since
                status = Path(folder, name).lstat()
                if stat.S_ISREG(status.st_mode):
                    entries.append((key, status.st_size, status.st_mtime))
    return sorted(entries)


def list_folders(top: Path) -> list[str]:
    """Return the names of the directories in a directory, sorted; symbolic links are left out."""
    return _list_names(top, lambda entry: entry.is_dir(follow_symlinks=False))


def list_links(top: Path) -> list[str]:
    """Return the names of the symbolic links in a directory, sorted."""
    return _list_names(top, lambda entry: entry.is_symlink())


def _list_names(top: Path, takes: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    def scan() -> list[str]:
        with os.scandir(top) as entries:
            return sorted(entry.name for entry in entries if takes(entry))

    with suppress(FileNotFoundError, NotADirectoryError):
        return certain(top, scan)
    return []


def unlink_link(path: Path) -> None:
    """Remove a symbolic link that may be gone already. OSError for anything else of that name."""
    with suppress(FileNotFoundError):
        if not stat.S_ISLNK(certain(path, path.lstat).st_mode):
            raise OSError(errno.EINVAL, "it is no symbolic link", str(path))
        remove(path)
        sync_directory(path.parent)


def _unless_not_ours(top: Path, error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, unless it is below ``top``, and absent or another user's.

    An example is ``lost+found`` at the top of a file system. A directory that may not be listed has no files of ours.
    """
    passing = isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
    if not passing or error.filename is None or Path(error.filename) == top:
        raise error


def is_sealed(root: Path, path: Path) -> bool:
    """Return whether a file, or a directory from the root down to it, has a mode that lets nobody write."""
    for place in (path, *path.parents):
        with suppress(OSError):
            if not place.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
                return True
        if place == root:
            break
    return False


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
