"""Errors of HDFS: from Java classes, and from hdfs-native's own words, to those of Python.

hdfs-native maps absent and existing files only. Everything else of a NameNode is a ``RuntimeError`` with a Java class
in its text, and a panic of Rust is no ``Exception`` at all.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from bcp.backends.objects.store import RequestError

__all__ = ["HdfsError", "as_request", "from_java", "hdfs_errors", "request_errors"]

_RPC_ERROR = re.compile(r'RPCError\("([\w.$]+)", "((?:[^"\\]|\\.)*)', re.DOTALL)
_LONGEST = 500

_ABSENT = ("FileNotFoundException", "ParentNotDirectoryException")
_TRANSIENT = {
    "SafeModeException": "the NameNode is in safe mode",
    "StandbyException": "no NameNode of the pair is active",
    "NullPointerException": "the NameNode is stopping",  # its log of edits is closed already
    "ObserverRetryOnActiveException": "",
    "RetriableException": "",
    "NotReplicatedYetException": "",
    "AlreadyBeingCreatedException": "",
    "RecoveryInProgressException": "",
    "ConnectException": "",
    "ConnectTimeoutException": "",
    "SocketTimeoutException": "",
    "NoRouteToHostException": "",
    "EOFException": "",
    "IOException": "",  # as "could only be replicated to 0 nodes": no DataNode takes the block just now
}
"""Simple names of Java classes whose request may succeed later."""

_FINAL = {
    "PathIsNotEmptyDirectoryException": errno.ENOTEMPTY,
    "NSQuotaExceededException": errno.EDQUOT,
    "DSQuotaExceededException": errno.EDQUOT,
    "QuotaByStorageTypeExceededException": errno.EDQUOT,
    "QuotaExceededException": errno.EDQUOT,
    "InvalidPathException": errno.EINVAL,
    "PathComponentTooLongException": errno.ENAMETOOLONG,
    "HadoopIllegalArgumentException": errno.EINVAL,
    "LeaseExpiredException": errno.ESTALE,
    "IllegalStateException": errno.ENOTDIR,  # "Current inode is not a directory"
}
_HINTS = {
    errno.EDQUOT: "delete old checkpoints, or ask for a larger quota",
    errno.ESTALE: "the file was removed while it was being written",
    errno.ENOTDIR: "a file is where a directory has to be: save to another path, or move the file away",
}
_FINAL_WORDS = (
    "InvalidArgument",
    "InvalidPath",
    "UnsupportedFeature",
    "UnsupportedErasureCodingPolicy",
    "UrlParseError",
)


class HdfsError(OSError):
    """HDFS has failed or refused a request.

    Attributes:
        java: class of the NameNode's exception, as in ``"SafeModeException"``; "" if another part has failed.
        transient: whether the same request may succeed later.
    """

    def __init__(self, number: int, text: str, *, java: str = "", transient: bool = False) -> None:
        super().__init__(number, text)
        self.java = java
        self.transient = transient


def from_java(java: str, message: str) -> OSError:
    """Return the error of a Java exception; of the message the first line counts, the others are Java's stack."""
    name = java.rpartition(".")[2].rpartition("$")[2]
    text = f"{name}: {message.splitlines()[0][:_LONGEST] if message else 'no message'}"
    if name in _ABSENT:
        return FileNotFoundError(errno.ENOENT, text)
    if name == "FileAlreadyExistsException":
        return FileExistsError(errno.EEXIST, text)
    if name in ("AccessControlException", "AuthorizationException"):
        if "is not a directory" in text:
            return FileNotFoundError(errno.ENOENT, text)
        return PermissionError(errno.EACCES, text)
    if name in _TRANSIENT:
        hint = _TRANSIENT[name]
        return HdfsError(errno.EAGAIN, f"{text}; {hint}" if hint else text, java=name, transient=True)
    number = _FINAL.get(name, errno.EIO)
    hint = _HINTS.get(number, "")
    return HdfsError(number, f"{text}; {hint}" if hint else text, java=name)


@contextmanager
def hdfs_errors(description: str) -> Iterator[None]:
    """Turn hdfs-native's errors within the block into ``OSError``.

    Args:
        description: the request in words, as in ``"reading /a"``.

    Raises:
        FileNotFoundError: there is no such file, or it is a directory.
        FileExistsError: there is such a file.
        PermissionError: the user may not.
        TimeoutError: no answer within the deadline.
        HdfsError: everything else.

    """
    try:
        yield
    except (HdfsError, TimeoutError):
        raise
    except (FileNotFoundError, FileExistsError, PermissionError) as error:
        first = error.strerror or str(error).partition("\n")[0]
        raise type(error)(error.errno or _NUMBERS[type(error)], f"{description}: {first[:_LONGEST]}") from error
    except OSError as error:  # of a socket, without errno
        raise HdfsError(errno.EIO, f"{description}: {error}", transient=True) from error
    except RuntimeError as error:
        raise _from_runtime(description, error) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        text = f"{description}: no NameNode answers, or none is active (hdfs-native: {error})"
        raise HdfsError(errno.EAGAIN, text, transient=True) from None


_NUMBERS = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES}


def _from_runtime(description: str, error: RuntimeError) -> OSError:
    """Return the error that hdfs-native has put into the text of another."""
    text = str(error)
    match = _RPC_ERROR.match(text)
    if match is not None:
        java_error = from_java(match[1], match[2].partition("\\n")[0].replace('\\"', '"'))
        java_error.strerror = f"{description}: {java_error.strerror}"
        return java_error
    final = text.startswith(_FINAL_WORDS)
    return HdfsError(errno.EINVAL if final else errno.EIO, f"{description}: {text[:_LONGEST]}", transient=not final)


def as_request(error: OSError) -> RequestError:
    """Return the error as one that says whether to try again."""
    text = error.strerror or str(error)
    if isinstance(error, HdfsError):
        return RequestError(text, transient=error.transient)
    final = isinstance(error, FileNotFoundError | FileExistsError | PermissionError | NotADirectoryError)
    return RequestError(text, transient=not final)


@contextmanager
def request_errors(*, absent: bool) -> Iterator[None]:
    """Turn ``OSError`` into :class:`~bcp.backends.objects.RequestError`; ``absent``: but not FileNotFoundError."""
    try:
        yield
    except (TimeoutError, ConnectionError):
        raise  # these are retried as they are
    except OSError as error:
        if absent and isinstance(error, FileNotFoundError):
            raise
        raise as_request(error) from error
