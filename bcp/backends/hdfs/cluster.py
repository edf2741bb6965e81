"""The NameNodes of one HDFS: where they are, and requests to whichever is active."""

from __future__ import annotations

import errno
import getpass
import os
import xml.etree.ElementTree as ET
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import anyio

from bcp._log import log
from bcp.backends.hdfs import wire
from bcp.backends.hdfs.faults import HdfsError, from_java
from bcp.backends.hdfs.wire import Address, Call, Connection, RpcRefusedError
from bcp.errors import InputError, MissingExtraError
from bcp.runtime.imports import importing

__all__ = ["Cluster", "FileState", "NameNodes", "ServiceAbsentError", "find_cluster", "user_name"]

T = TypeVar("T")
PORT = 8020
ANSWER_SECONDS = 20.0
"""How long one NameNode may take for one answer, before the other one of a pair is asked."""

WEB_CHARACTERS = 6000
"""Most of a URL, which the NameNode's web server wants below 8 KiB."""

_FILES = ("core-site.xml", "hdfs-site.xml")
_DIRECTORY = 1


class ServiceAbsentError(OSError):
    """Nobody serves such requests here."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file or directory.

    Attributes:
        nbytes: its size.
        is_directory: whether it is one.
        modified: when it was closed, concatenated or appended to, in milliseconds.
        file_id: its inode, which is never used again; 0 if the NameNode could not be asked for it.
    """

    nbytes: int
    is_directory: bool
    modified: int
    file_id: int

    @property
    def version(self) -> str:
        """Name the contents: a file with this id, size and time has had these contents only."""
        return f"{self.file_id:x}-{self.nbytes:x}-{self.modified:x}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """One HDFS.

    Attributes:
        url: its root as hdfs-native takes it.
        rpc: addresses of its NameNodes.
        web: addresses of their web servers, as in ``"host:9870"``; empty if not known.
        settings: Hadoop's, from options and configuration files.
    """

    url: str
    rpc: Sequence[Address]
    web: Sequence[str]
    settings: Mapping[str, str] = field(repr=False)


def find_cluster(authority: str, config: Mapping[str, str], config_dir: str | None) -> Cluster:
    """Return the HDFS of a URL's authority: ``host:port``, ``host``, a name service, or "" for ``fs.defaultFS``.

    Settings are those of ``config``, then of ``core-site.xml`` and ``hdfs-site.xml`` in ``config_dir``, in
    ``$HADOOP_CONF_DIR`` or in ``$HADOOP_HOME/etc/hadoop``, as for hdfs-native.
    """
    settings = {**_settings(config_dir), **config}
    if not authority:
        default = settings.get("fs.defaultFS", "")
        scheme, _, authority = default.rstrip("/").partition("://")
        if scheme != "hdfs" or not authority:
            raise InputError(
                f"the URL names no HDFS, and fs.defaultFS is {default!r}: write hdfs://host:port/path, or set "
                "HADOOP_CONF_DIR"
            )
    if "@" in authority:
        raise InputError("a user in an hdfs:// URL is not supported; set HADOOP_USER_NAME")
    ids = [name.strip() for name in settings.get(f"dfs.ha.namenodes.{authority}", "").split(",") if name.strip()]
    if ids:
        names = [f"{authority}.{name}" for name in ids]
        rpc = [settings.get(f"dfs.namenode.rpc-address.{name}", "") for name in names]
        if not all(rpc):
            raise InputError(f"the name service {authority!r} has NameNodes without dfs.namenode.rpc-address.*")
        web = [settings.get(f"dfs.namenode.http-address.{name}", "") for name in names]
    else:
        rpc, web = [authority], [settings.get("dfs.namenode.http-address", "")]
    return Cluster(
        f"hdfs://{authority}", [_address(address) for address in rpc], [address for address in web if address], settings
    )


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", str(PORT))
    if not host or not port.isdecimal():
        hidden = f"{host}:***"  # a password with a slash ends here, and its begin is in the place of the port
        raise InputError(f"{hidden!r} is not the address of a NameNode, as in 'host:8020'")
    return host.strip("[]"), int(port)


def _settings(folder: str | None) -> dict[str, str]:
    """Return the settings of Hadoop's configuration files; of absent ones none."""
    if folder is None:
        home = os.environ.get("HADOOP_HOME")
        folder = os.environ.get("HADOOP_CONF_DIR") or (f"{home}/etc/hadoop" if home else None)
    settings: dict[str, str] = {}
    for name in _FILES if folder else ():
        path = Path(str(folder), name)
        if path.exists():
            try:
                root = ET.parse(path).getroot()  # noqa: S314 -- the administrator's own file
            except (ET.ParseError, OSError) as error:
                raise InputError(f"{path} cannot be read: {error}") from error
            for element in root.iter("property"):
                settings[(element.findtext("name") or "").strip()] = (element.findtext("value") or "").strip()
    return settings


def user_name() -> str:
    """Return the user that HDFS without Kerberos believes, as Hadoop's own clients do."""
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()


class NameNodes:
    """Requests that hdfs-native does not make; of one event loop and process.

    By Hadoop's own protocol; WebHDFS if the NameNodes refuse that, as those with Kerberos do. A NameNode that is
    standby, silent or gone is left for the next one. A :class:`~bcp.backends.hdfs.wire.Call` may be made again after
    any error: the NameNodes carry it out once.
    """

    def __init__(self, cluster: Cluster, user: str) -> None:
        self._cluster = cluster
        self._user = user
        self._client_id = os.urandom(16)
        self._ids = count(1)
        self._active = 0
        self._active_web = 0
        self._connections: dict[int, Connection] = {}
        self._opens = [anyio.Lock() for _ in cluster.rpc]
        self._refused = ""

    def __repr__(self) -> str:
        return f"<NameNodes of {self._cluster.url}>"

    def new_call(self) -> Call:
        """Return a new request's number."""
        return Call(next(self._ids))

    async def concat(self, target: str, sources: Sequence[str], call: Call) -> None:
        """Append whole files to another one in the same directory; they vanish. One step, without a copy.

        Raises:
            FileNotFoundError: one of them is absent; after a lost answer of WebHDFS also because it was done.
            ServiceAbsentError: there is no NameNode that would do it for us.
            OSError: it failed.

        """
        if not self._refused:
            request = wire.field(1, target) + b"".join(wire.field(2, source) for source in sources)
            try:
                await self._rpc("concat", request, call)
            except RpcRefusedError as error:
                self._refuse(error)
            else:
                return
        for some in _groups(sources):
            await self._web("POST", target, {"op": "CONCAT", "sources": ",".join(some)})

    async def state(self, path: str) -> FileState | None:
        """Return the state of a file or directory; None if there is none.

        Raises:
            ServiceAbsentError: there is no NameNode that would tell us.

        """
        try:
            if not self._refused:
                try:
                    return _state(await self._rpc("getFileInfo", wire.field(1, path), self.new_call()))
                except RpcRefusedError as error:
                    self._refuse(error)
            status = (await self._web("GET", path, {"op": "GETFILESTATUS"}))["FileStatus"]
        except FileNotFoundError:
            return None
        is_directory = status["type"] == "DIRECTORY"
        return FileState(status["length"], is_directory, status["modificationTime"], status.get("fileId", 0))

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _refuse(self, error: RpcRefusedError) -> None:
        """Remember that the NameNodes do not speak our protocol."""
        self._refused = str(error)
        log.info("the NameNodes refuse Hadoop's protocol without SASL; WebHDFS is used", said=self._refused)

    async def _rpc(self, method: str, request: bytes, call: Call) -> bytes:
        async def ask(index: int) -> bytes:
            connection = await self._connection(index)
            return await connection.call(method, request, call)

        answer, self._active = await _first_active(
            ask, [f"{host}:{port}" for host, port in self._cluster.rpc], self._active
        )
        return answer

    async def _connection(self, index: int) -> Connection:
        async with self._opens[index]:
            connection = self._connections.get(index)
            if connection is None or connection.closed:
                connection = await Connection.open(self._cluster.rpc[index], self._user, self._client_id)
                self._connections[index] = connection
            return connection

    async def _web(self, method: str, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        if not self._cluster.web:
            raise ServiceAbsentError(
                f"the NameNodes refuse Hadoop's protocol without SASL ({self._refused}), and no setting "
                "dfs.namenode.http-address tells where WebHDFS is"
            )

        async def ask(index: int) -> dict[str, Any]:
            return await _web_request(method, self._cluster.web[index], path, {**query, "user.name": self._user})

        answer, self._active_web = await _first_active(ask, self._cluster.web, self._active_web)
        return answer


async def _first_active(ask: Callable[[int], Awaitable[T]], addresses: Sequence[str], first: int) -> tuple[T, int]:
    """Ask NameNodes in turn until one answers; return its answer and which it was.

    The first one is asked once more at the end: its connection may have been an old one, which broke.
    """
    error: OSError | None = None
    for turn in range(len(addresses) + 1):
        index = (first + turn) % len(addresses)
        try:
            with anyio.fail_after(ANSWER_SECONDS):
                return await ask(index), index
        except HdfsError as refusal:
            if refusal.java not in ("StandbyException", "ObserverRetryOnActiveException"):
                raise
            error = refusal
        except (ConnectionError, TimeoutError) as silence:
            error = silence
        except (RpcRefusedError, FileNotFoundError, FileExistsError, PermissionError, ServiceAbsentError):
            raise
        except OSError as unreachable:  # as "no route to host", or an unknown name
            error = unreachable
    reason = f"{type(error).__name__}: {error}" if not isinstance(error, HdfsError) else str(error.strerror)
    raise HdfsError(
        errno.EAGAIN, f"no NameNode of {', '.join(addresses)} serves requests: {reason}", transient=True
    ) from error


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Cut a list of names so that each piece fits into a URL."""
    groups: list[list[str]] = []
    length = WEB_CHARACTERS
    for name in names:
        length += len(name.encode()) * 3 + 3  # at worst each byte is quoted
        if length > WEB_CHARACTERS:
            groups.append([])
            length = 0
        groups[-1].append(name)
    return groups


async def _web_request(method: str, address: str, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Make one request to WebHDFS; return the answer, empty where there is none."""
    try:
        with importing:
            import aiohttp  # noqa: PLC0415 -- only this second channel needs it
            from yarl import URL  # noqa: PLC0415 -- comes with aiohttp
    except ImportError as error:
        raise MissingExtraError("WebHDFS needs aiohttp: pip install 'bcp-checkpoint[hdfs]'") from error

    url = URL.build(scheme="http", authority=address, path=f"/webhdfs/v1{path}", query=query)
    try:
        async with aiohttp.ClientSession() as session, session.request(method, url) as response:
            if response.status == 200:  # noqa: PLR2004 -- OK
                return dict(await response.json(content_type=None)) if method == "GET" else {}
            try:
                answer = await response.json(content_type=None)
            except ValueError:
                answer = None
    except aiohttp.ClientError as error:
        raise ConnectionResetError(f"WebHDFS at {address}: {type(error).__name__}: {error}") from error
    if isinstance(answer, dict) and "RemoteException" in answer:
        remote = answer["RemoteException"]
        raise from_java(str(remote.get("javaClassName") or remote["exception"]), str(remote.get("message") or ""))
    raise ServiceAbsentError(f"WebHDFS at {address} answers {response.status} {response.reason}")


def _state(answer: bytes) -> FileState | None:
    """Return the state in an answer to getFileInfo."""
    values = wire.parse(answer).get(1)
    if not values or not isinstance(values[0], bytes):
        return None
    fields = wire.parse(values[0])

    def number(index: int) -> int:
        value = fields.get(index, [0])[0]
        return value if isinstance(value, int) else 0

    return FileState(number(3), number(1) == _DIRECTORY, number(7), number(13))
