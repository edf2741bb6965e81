"""Compare and swap of one local file, between processes and hosts that share its directory. Everything here blocks.

A new file takes its name by a hard link, which fails if the name is taken. To replace version V a writer claims V: it
makes a symbolic link, ``.NAME.V-0.bcp-tmp``, to its temporary file. This fails if V is claimed already. Only the writer
of the claim renames its temporary file over the old one, and only if the old one is still V.

Whoever finds V claimed waits a moment, then removes the temporary file that the claim names, and makes the next claim,
``V-1``. The removal and the claimant's rename exclude each other: one of them finds the file gone. So neither a dead
claimant nor a slow one needs to be recognized, and no clock, lock or process id decides. A claim on V is deleted only
after V has been replaced. docs/design-notes/2026-11-22-conditional-commit.md has the proof.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from bcp._log import log
from bcp.backends import files
from bcp.backends.files import certain, open_anew
from bcp.backends.keys import content_version
from bcp.backends.small import SMALL_BYTES
from bcp.protocols import Version

__all__ = ["put_if", "version_of"]

PATIENCE_SECONDS = 2.0
"""How long a claimant may take for its rename, which needs milliseconds. Safety does not depend on it."""

_POLL_SECONDS = 0.01
_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def version_of(path: Path) -> Version | None:
    """Return the digest of a file's contents; None if there is no such file.

    A file too large to be a small object is damaged. It is not read: size, time and inode are its version.

    Raises CorruptError if a named pipe, a device or a socket has the name.
    """
    open_anew(path.parent)  # else a client of a file server may find the file that had the name before
    try:
        return certain(path, partial(_version_of, path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _version_of(path: Path) -> Version:
    fd = files.open_regular(path)
    try:
        status = os.fstat(fd)
        if status.st_size > SMALL_BYTES:
            return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"
        with open(fd, "rb", closefd=False) as file:
            return content_version(file.read())
    finally:
        os.close(fd)


def put_if(final: Path, data: memoryview, old_version: Version | None) -> Version | None:
    """Write a file if the one of that name still has ``old_version``, durably; return its version, else None.

    Raises OSError if a call failed; the file is then the old one or the new one. Raises FileNotFoundError if the
    directory is gone.
    """
    if version_of(final) != old_version:
        return None
    temp = files.temp_path(final)
    try:
        files.write_new(temp, data)
        version = content_version(data)
        done = _create(temp, final) if old_version is None else None
        if done is None:
            done = _replace(temp, final, old_version, version)
        if done:
            files.sync_directory(final.parent)
        return version if done else None
    finally:
        with suppress(OSError):  # a file that stays is no danger: the next save to come removes it
            files.remove(temp)


def _create(temp: Path, final: Path) -> bool | None:
    """Give the temporary file its name if nobody has it; None if the file system has no hard links."""
    try:
        certain(final, partial(os.link, temp, final))
    except FileExistsError:
        with suppress(FileNotFoundError):
            if temp.samefile(final):  # a file server ran the call twice: its first answer was lost
                return True
        if final.is_dir():  # else every attempt would end as if another writer had been quicker
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final)) from None
        return False
    except FileNotFoundError:  # another writer has committed, and removed the temporary file as a left-over
        if version_of(final) is None:
            raise
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None
    return True


def _replace(temp: Path, final: Path, old_version: Version | None, version: Version) -> bool:
    """Rename the temporary file over ``old_version``; say whether that happened."""
    claims = []
    for turn in count():
        claims.append(_claim_path(final, old_version, turn))
        if _claim(claims[-1], temp):
            break
        _end_claim(claims[-1], final)
    now = version_of(final)
    if now == old_version:
        with suppress(FileNotFoundError):  # another writer has removed the temporary file, and this claim with it
            certain(final, partial(os.rename, temp, final))
            now = version
    if now == old_version:
        now = version_of(final)
    if now != old_version:  # replaced, by this writer or another
        for claim in claims:
            with suppress(OSError):  # as above
                files.remove(claim)
    return now == version


def _claim_path(final: Path, old_version: Version | None, turn: int) -> Path:
    return final.parent / f".{final.name}.{old_version or 'none'}-{turn}{files.TEMP_SUFFIX}"


def _claim(claim: Path, temp: Path) -> bool:
    """Make a claim; False if another writer has it."""
    try:
        certain(claim, partial(claim.symlink_to, temp.name))
    except FileExistsError:
        return _claimant(claim) == temp.name  # true if a file server ran the call twice
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        log.warning("no symbolic links here: commits at the same moment are not told apart", folder=str(claim.parent))
    return True


def _claimant(claim: Path) -> str | None:
    """Return the name of the temporary file that a claim names; None if the claim is gone."""
    try:
        return certain(claim, partial(os.readlink, claim))  # as text: it has to be a name in this directory
    except FileNotFoundError:
        return None


def _end_claim(claim: Path, final: Path) -> None:
    """Wait until another writer's claim has led to its commit, or end it: from here on the writer cannot commit."""
    name = _claimant(claim)
    if name is None or "/" in name or files.final_name(name) != final.name:
        return
    temp, deadline = final.parent / name, time.monotonic() + PATIENCE_SECONDS
    while os.path.lexists(temp) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        open_anew(final.parent)
    files.remove(temp)
