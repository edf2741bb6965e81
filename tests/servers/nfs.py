"""A file system with the semantics of NFS, for tests: clients that cache, over one directory as their server.

Every client is a process of this file and one mount. It speaks the kernel's FUSE protocol over ``/dev/fuse`` itself, so
it needs root, and no library. The kernel caches nothing (all its timeouts are 0); the process is the NFS client::

    with Mount(server, here / "a") as a, Mount(server, here / "b") as b:
        a.fault("fsync", errno.EDQUOT)      # the next fsync fails, and its data is lost
        a.fault("rename", repeat=True)      # the server runs the call; its answer is lost, and the call is run again

Semantics, as Linux' NFS client has them:

* Written bytes stay in the client until fsync or close. Opening a file asks the server (close-to-open).
* Attributes, names, absent names too, and lists of directories are kept for ``keep`` seconds. Opening a directory
  fetches its attributes; names and lists of a directory that has changed are not used. With ``lazy=True`` they are used
  until they expire, as some FUSE file systems do.
* Lists fetch the attributes of all files in them (READDIRPLUS).
* A file that is deleted while this client has it open becomes ``.nfs...`` until it is closed; one that another client
  deletes is stale (ESTALE). A deleted directory is stale.
* ``O_DIRECT`` is refused unless ``direct=True``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

_DETACH, _PDEATHSIG = 2, 1  # MNT_DETACH, PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None, use_errno=True)


class Mount:
    """One client, in a process of its own, that ends with the one that made it.

    Attributes:
        path: where it is mounted.
    """

    def __init__(
        self, server: Path, path: Path, *, keep: float = 60.0, lazy: bool = False, direct: bool = False
    ) -> None:
        """Mount ``server`` at ``path``; the options are those of the module's docstring."""
        server.mkdir(parents=True, exist_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        options = json.dumps({"keep": keep, "lazy": lazy, "direct": direct})
        self._process = subprocess.Popen(  # noqa: S603 -- this file
            [sys.executable, "-S", __file__, str(server), str(path), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fault(self, op: str, code: int = 0, **how: Any) -> None:
        """Let the next calls of ``op`` go wrong; later faults of the same operation follow earlier ones.

        Args:
            op: name of the method of :class:`_Client`: write, fsync, flush (close), rename, link, unlink, read ...
            code: the error to fail with; 0 for none.
            how: ``times`` (1), after ``skip`` (0) calls of files in whose name the expression ``name`` is found;
                ``acted``: run the call, and fail all the same; ``repeat``: run the call twice, and answer as the second
                time; ``hang``: do not answer before :meth:`release`; ``delay``: answer late by so many seconds.

        """
        self._ask("fault", op=op, code=code, **how)

    def release(self) -> int:
        """Answer the calls that hang, and forget all faults; return how many calls went wrong since the last time."""
        return int(self._ask("release"))

    def hanging(self) -> int:
        """Return how many calls hang."""
        return int(self._ask("hanging"))

    def calls(self) -> list[tuple[str, str]]:
        """Return (operation, name of the file) of the calls since this was last asked."""
        return [(op, name) for op, name in self._ask("calls")]

    def close(self) -> None:
        """Unmount, also when the process is dead or hangs; idempotent."""
        _libc.umount2(os.fsencode(self.path), _DETACH)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process died"}
        if "error" in answer:
            raise RuntimeError(f"the file system of {self.path} failed: {answer['error']}")
        return answer["answer"]


# -- the kernel's side ------------------------------------------------------------------------

_MAX_WRITE = 1 << 20
_HEADER = struct.Struct("=IIQQIIIHH")
_REPLY = struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
_ENTRY = struct.Struct("=4Q2I")
_OPENED = struct.Struct("=QII")
_IO = struct.Struct("=QQIIQII")
_SETATTR = struct.Struct("=IIQQQQQQIIIIIIII")
_INIT = struct.Struct("=IIIIHHIIHHII8I")
# ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, PARALLEL_DIROPS, MAX_PAGES
_WISHES = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 18 | 1 << 22
_INIT_CALL, _SILENT = 26, {2, 36, 42}
_CALLS = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 25: "flush", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir",
    35: "create", 42: "batch_forget",
}  # fmt: skip


class _Kernel:
    """The mount: takes the kernel's requests in some threads and answers them."""

    def __init__(self, path: str, client: _Client) -> None:
        self._client = client
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        data = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        if _libc.mount(b"server", os.fsencode(path), b"fuse.nas", ctypes.c_ulong(2 | 4), data.encode()):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        self._answer(bytearray(1 << 17))  # the first request, INIT

    def serve(self, threads: int) -> list[threading.Thread]:
        """Start answering; the threads end when the file system is unmounted."""
        started = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        for thread in started:
            thread.start()
        return started

    def _serve(self) -> None:
        buffer = bytearray(_MAX_WRITE + (1 << 14))
        while True:
            try:
                self._answer(buffer)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno not in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # the request was called off
                    raise

    def _answer(self, buffer: bytearray) -> None:
        count = os.readv(self._fd, [buffer])
        _, opcode, unique, nodeid, *_ = _HEADER.unpack_from(buffer)
        body = memoryview(buffer)[_HEADER.size : count]
        code, reply = 0, b""
        try:
            reply = self._init(body) if opcode == _INIT_CALL else self._call(opcode, nodeid, body)
        except OSError as error:
            code = error.errno or errno.EIO
        if opcode not in _SILENT:
            with suppress(FileNotFoundError):  # called off meanwhile
                os.writev(self._fd, [_REPLY.pack(_REPLY.size + len(reply), -code, unique), reply])

    def _call(self, opcode: int, nodeid: int, body: memoryview) -> bytes:
        if opcode not in _CALLS:
            raise OSError(errno.ENOSYS, "no such call")
        method: Callable[[int, memoryview], bytes] = getattr(self._client, _CALLS[opcode])
        return method(nodeid, body)

    def _init(self, body: memoryview) -> bytes:
        _, minor, readahead, flags = struct.unpack_from("=4I", body)
        pages = _MAX_WRITE // 4096
        return _INIT.pack(
            7, min(minor, 31), readahead, flags & _WISHES, 16, 12, _MAX_WRITE, 1, pages, 0, 0, 0, *[0] * 8
        )[:64]


def _name(body: memoryview, skip: int = 0) -> str:
    return os.fsdecode(bytes(body[skip:]).partition(b"\0")[0])


def _names(body: memoryview, skip: int = 0) -> list[str]:
    return [os.fsdecode(name) for name in bytes(body[skip:]).split(b"\0")[:2]]


def _attributes(found: os.stat_result, nbytes: int) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    whole, parts = zip(*(divmod(at, 10**9) for at in times), strict=True)
    of_whom = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev)
    return _ATTR.pack(found.st_ino, nbytes, found.st_blocks, *whole, *parts, *of_whom, 1 << 20, 0)


# -- the client -------------------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    """A file or directory that the kernel knows; its handle is a descriptor, so it outlives changes of its name.

    Attributes:
        epoch: of a directory; another one when another client has changed it.
        listing: of a directory: (epoch, until when, entries).
        dirty: bytes that the server has not got yet.
        opens: how often this client has it open.
        silly: where it was moved to instead of being deleted.
        stale: the server has said that it is gone.
    """

    number: int
    fd: int
    ino: int
    name: str
    lookups: int = 0
    epoch: int = 0
    listing: tuple[int, float, list[tuple[str, int, int]]] | None = None
    known: dict[str, tuple[_Node | None, int, float]] = field(default_factory=dict)
    dirty: list[tuple[int, bytes]] = field(default_factory=list)
    dirty_end: int = 0
    lost: int = 0
    opens: int = 0
    silly: tuple[_Node, str] | None = None
    stale: bool = False

    def open(self, flags: int) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", flags | os.O_CLOEXEC)


@dataclass
class _Fault:
    op: str
    code: int = 0
    times: int = 1
    skip: int = 0
    name: str = ""
    acted: bool = False
    repeat: bool = False
    hang: bool = False
    delay: float = 0.0

    def fail(self) -> None:
        if self.code:
            raise OSError(self.code, os.strerror(self.code))


@dataclass
class _Handle:
    node: _Node
    fd: int = -1
    entries: list[tuple[str, int, int]] = field(default_factory=list)


class _Client:
    """An NFS client; its methods have the names of FUSE's calls."""

    def __init__(self, server: str, *, keep: float, lazy: bool, direct: bool) -> None:
        self._keep, self._lazy, self._direct = keep, lazy, direct
        self._lock = threading.RLock()
        self._released = threading.Condition()
        self._round = 0
        self._hanging = self._hits = 0
        self._faults: list[_Fault] = []
        self._log: list[tuple[str, str]] = []
        self._cache: dict[int, tuple[os.stat_result, float]] = {}
        self._handles: dict[int, _Handle] = {}
        self._counter = 1
        root = _Node(1, os.open(server, os.O_PATH | os.O_CLOEXEC), Path(server).stat().st_ino, "/", lookups=1)
        self._nodes = {1: root}
        self._by_ino = {root.ino: root}

    # -- orders of the tests --

    def order(self, do: str, **arguments: Any) -> Any:
        if do == "fault":
            self._faults.append(_Fault(**arguments))
        elif do == "release":
            with self._released:
                self._faults.clear()
                self._round += 1
                self._released.notify_all()
                hits, self._hits = self._hits, 0
            return hits
        elif do == "hanging":
            return self._hanging
        elif do == "calls":
            log, self._log = self._log, []
            return log
        return None

    def _fault(self, op: str, name: str) -> _Fault:
        """Do what was ordered for this call before it is run; return what is left to do then."""
        with self._lock:
            self._log.append((op, name))
            fault = next((one for one in self._faults if one.op == op and re.search(one.name, name)), None)
            if fault is None:
                return _Fault(op)
            if fault.skip:
                fault.skip -= 1
                return _Fault(op)
            self._hits += 1
            fault.times -= 1
            if not fault.times:
                self._faults.remove(fault)
        time.sleep(fault.delay)
        if fault.hang:
            with self._released:
                self._hanging += 1
                now = self._round
                self._released.wait_for(lambda: self._round != now)
                self._hanging -= 1
        if not fault.acted:
            fault.fail()
        return fault

    # -- caches --

    def _stat(self, node: _Node, *, fresh: bool = False) -> os.stat_result:
        """Return attributes, kept ones as long as they last."""
        known = self._cache.get(node.ino)
        if known is None or fresh or time.monotonic() >= known[1]:
            found = os.fstat(node.fd)
            if not found.st_nlink:
                node.stale = True
                self._cache.pop(node.ino, None)
                raise OSError(errno.ESTALE, "deleted")
            if known is None or known[0].st_mtime_ns != found.st_mtime_ns:
                node.epoch += 1
            known = self._cache[node.ino] = (found, time.monotonic() + self._keep)
        return known[0]

    def _found(self, parent: _Node, name: str) -> _Node | None:
        """Return what has a name, from memory if that may be."""
        self._stat(parent)
        known = parent.known.get(name)
        if known is not None and time.monotonic() < known[2] and (self._lazy or known[1] == parent.epoch):
            node = known[0]
            if node is None or not node.stale:
                return node
        return self._ask(parent, name)

    def _ask(self, parent: _Node, name: str) -> _Node | None:
        """Ask the server what has a name."""
        self._stat(parent, fresh=True)
        node = None
        with suppress(FileNotFoundError):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent.fd)
            ino = os.fstat(fd).st_ino
            node = self._by_ino.get(ino)
            if node is None:
                self._counter += 1
                node = self._nodes[self._counter] = self._by_ino[ino] = _Node(self._counter, fd, ino, name)
            else:
                os.close(fd)
            node.name = name
            self._stat(node, fresh=True)
        parent.known[name] = (node, parent.epoch, time.monotonic() + self._keep)
        return node

    @contextmanager
    def _changing(self, *parents: _Node) -> Iterator[None]:
        """Keep the names in directories that only this client changes."""
        before = {}
        for parent in parents:
            found, known = os.fstat(parent.fd), self._cache.get(parent.ino)
            if not found.st_nlink:
                parent.stale = True
                raise OSError(errno.ESTALE, "deleted")
            before[parent.number] = known is not None and known[0].st_mtime_ns == found.st_mtime_ns
        try:
            yield
        finally:
            for parent in parents:
                epoch = parent.epoch
                self._stat(parent, fresh=True)
                if before[parent.number]:
                    parent.epoch = epoch
                parent.listing = None

    def _change(self, op: str, parent: _Node, name: str, call: Callable[[], object], *others: _Node) -> None:
        """Change names on the server, twice if the first answer is lost."""
        fault = self._fault(op, name)
        with self._lock, self._changing(parent, *others):
            try:
                call()
                if fault.repeat:
                    call()
            finally:
                parent.known.pop(name, None)
        fault.fail()

    def _entry(self, parent: _Node, name: str, *, ask: bool = True) -> bytes:
        with self._lock:
            node = self._ask(parent, name) if ask else self._found(parent, name)
            if node is None:
                raise OSError(errno.ENOENT, name)
            node.lookups += 1
            return _ENTRY.pack(node.number, 0, 0, 0, 0, 0) + self._packed(node)

    def _packed(self, node: _Node, *, fresh: bool = False) -> bytes:
        found = self._stat(node, fresh=fresh)
        return _attributes(found, max(found.st_size, node.dirty_end))

    # -- names --

    def lookup(self, number: int, body: memoryview) -> bytes:
        parent, name = self._nodes[number], _name(body)
        self._fault("lookup", name)
        return self._entry(parent, name, ask=False)

    def forget(self, number: int, body: memoryview) -> bytes:
        with self._lock:
            self._forget(number, struct.unpack_from("=Q", body)[0])
        return b""

    def batch_forget(self, _: int, body: memoryview) -> bytes:
        count, _ = struct.unpack_from("=II", body)
        with self._lock:
            for number, lookups in struct.iter_unpack("=QQ", body[8 : 8 + 16 * count]):
                self._forget(number, lookups)
        return b""

    def _forget(self, number: int, lookups: int) -> None:
        """Count; nodes stay, as they are the client's own cache, but for those of deleted files."""
        node = self._nodes[number]
        node.lookups -= lookups
        if not node.lookups and not node.opens and not os.fstat(node.fd).st_nlink:
            node.stale = True
            del self._nodes[number], self._by_ino[node.ino]
            self._cache.pop(node.ino, None)
            os.close(node.fd)

    def mknod(self, number: int, body: memoryview) -> bytes:
        mode, _, _, _ = struct.unpack_from("=4I", body)
        parent, name = self._nodes[number], _name(body, 16)
        self._change("create", parent, name, lambda: os.mknod(name, mode, dir_fd=parent.fd))
        return self._entry(parent, name)

    def mkdir(self, number: int, body: memoryview) -> bytes:
        mode, _ = struct.unpack_from("=2I", body)
        parent, name = self._nodes[number], _name(body, 8)
        self._change("mkdir", parent, name, lambda: os.mkdir(name, mode, dir_fd=parent.fd))
        return self._entry(parent, name)

    def symlink(self, number: int, body: memoryview) -> bytes:
        parent, (name, target) = self._nodes[number], _names(body)
        self._change("symlink", parent, name, lambda: os.symlink(target, name, dir_fd=parent.fd))
        return self._entry(parent, name)

    def readlink(self, number: int, _: memoryview) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes[number].fd))

    def link(self, number: int, body: memoryview) -> bytes:
        node = self._nodes[struct.unpack_from("=Q", body)[0]]
        parent, name = self._nodes[number], _name(body, 8)

        def call() -> None:
            self._stat(node, fresh=True)
            os.link(f"/proc/self/fd/{node.fd}", name, dst_dir_fd=parent.fd)

        self._change("link", parent, name, call)
        return self._entry(parent, name)

    def unlink(self, number: int, body: memoryview) -> bytes:
        parent, name = self._nodes[number], _name(body)

        def call() -> None:
            node = self._ask(parent, name)
            if node is not None and node.silly is not None:
                raise OSError(errno.EBUSY, "in use")
            if node is not None and node.opens:
                self._put_aside(node, parent, name)
            else:
                os.unlink(name, dir_fd=parent.fd)

        self._change("unlink", parent, name, call)
        return b""

    def rmdir(self, number: int, body: memoryview) -> bytes:
        parent, name = self._nodes[number], _name(body)
        self._change("rmdir", parent, name, lambda: os.rmdir(name, dir_fd=parent.fd))
        return b""

    def rename(self, number: int, body: memoryview) -> bytes:
        parent, other = self._nodes[number], self._nodes[struct.unpack_from("=Q", body)[0]]
        old, new = _names(body, 8)

        def call() -> None:
            other.known.pop(new, None)
            node, target = self._ask(parent, old), self._ask(other, new)
            if node is not None and target is not None and target.opens and target is not node:
                self._put_aside(target, other, new)
            os.rename(old, new, src_dir_fd=parent.fd, dst_dir_fd=other.fd)
            other.known.pop(new, None)

        self._change("rename", parent, old, call, *([] if other is parent else [other]))
        return b""

    def _put_aside(self, node: _Node, parent: _Node, name: str) -> None:
        """Rename a file that is in use and was deleted ("silly rename")."""
        self._counter += 1
        aside = f".nfs{node.ino:016x}{self._counter:08x}"
        os.rename(name, aside, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        node.silly = (parent, aside)

    # -- directories --

    def opendir(self, number: int, _: memoryview) -> bytes:
        node = self._nodes[number]
        self._fault("opendir", node.name)
        with self._lock:
            self._stat(node, fresh=not self._lazy)
            return _OPENED.pack(self._handle(_Handle(node)), 0, 0)

    def readdir(self, _: int, body: memoryview) -> bytes:
        number, offset, size, *_ = _IO.unpack_from(body)
        handle = self._handles[number]
        self._fault("readdir", handle.node.name)
        with self._lock:
            if not offset:
                handle.entries = self._listed(handle.node)
        out = bytearray()
        for at, (name, ino, kind) in enumerate(handle.entries[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("=QQII", ino, at, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return bytes(out)

    def _listed(self, node: _Node) -> list[tuple[str, int, int]]:
        self._stat(node)
        known = node.listing
        if known is not None and time.monotonic() < known[1] and (self._lazy or known[0] == node.epoch):
            return known[2]
        self._stat(node, fresh=True)
        entries = [(".", node.ino, 4), ("..", node.ino, 4)]
        for name in sorted(path.name for path in Path(f"/proc/self/fd/{node.fd}").iterdir()):
            child = self._ask(node, name)
            if child is not None:
                entries.append((name, child.ino, stat.S_IFMT(self._stat(child).st_mode) >> 12))
        node.listing = (node.epoch, time.monotonic() + self._keep, entries)
        return entries

    def releasedir(self, _: int, body: memoryview) -> bytes:
        del self._handles[struct.unpack_from("=Q", body)[0]]
        return b""

    def fsyncdir(self, number: int, _: memoryview) -> bytes:
        node = self._nodes[number]
        self._fault("fsyncdir", node.name)
        with self._lock:
            self._stat(node, fresh=True)
        return b""

    def statfs(self, number: int, _: memoryview) -> bytes:
        found = os.fstatvfs(self._nodes[1].fd)
        blocks = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        self._fault("statfs", self._nodes[number].name)
        return struct.pack("=5Q4I6I", *blocks, found.f_bsize, found.f_namemax, found.f_frsize, 0, *[0] * 6)

    # -- files --

    def getattr(self, number: int, _: memoryview) -> bytes:
        node = self._nodes[number]
        self._fault("getattr", node.name)
        with self._lock:
            return struct.pack("=QII", 0, 0, 0) + self._packed(node)

    def setattr(self, number: int, body: memoryview) -> bytes:
        valid, _, _, nbytes, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = _SETATTR.unpack_from(body)
        node = self._nodes[number]
        self._fault("setattr", node.name)
        path = f"/proc/self/fd/{node.fd}"
        with self._lock:
            self._write_back(node)
            if valid & 1:
                Path(path).chmod(stat.S_IMODE(mode))
            if valid & 8:
                os.truncate(path, nbytes)
            if valid & (16 | 32):
                os.utime(path, ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
            return struct.pack("=QII", 0, 0, 0) + self._packed(node, fresh=True)

    def create(self, number: int, body: memoryview) -> bytes:
        flags, mode, _, _ = struct.unpack_from("=4I", body)
        parent, name = self._nodes[number], _name(body, 16)
        only_new = flags & os.O_EXCL

        def call() -> None:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | only_new | os.O_CLOEXEC, mode, dir_fd=parent.fd))

        self._change("create", parent, name, call)
        entry = self._entry(parent, name)
        (node,) = struct.unpack_from("=Q", entry)
        return entry + self._opened(self._nodes[node], flags)

    def open(self, number: int, body: memoryview) -> bytes:
        flags, _ = struct.unpack_from("=2I", body)
        node = self._nodes[number]
        self._fault("open", node.name)
        return self._opened(node, flags)

    def _opened(self, node: _Node, flags: int) -> bytes:
        if flags & os.O_DIRECT and not self._direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        with self._lock:
            self._stat(node, fresh=True)
            if flags & os.O_TRUNC:
                node.dirty, node.dirty_end = [], 0
                os.truncate(f"/proc/self/fd/{node.fd}", 0)
                self._stat(node, fresh=True)
            handle = self._handle(_Handle(node, node.open(os.O_RDONLY)))
            node.opens += 1
            return _OPENED.pack(handle, 0, 0)

    def _handle(self, handle: _Handle) -> int:
        self._counter += 1
        self._handles[self._counter] = handle
        return self._counter

    def read(self, _: int, body: memoryview) -> bytes:
        number, offset, size, *_ = _IO.unpack_from(body)
        handle = self._handles[number]
        self._fault("read", handle.node.name)
        with self._lock:
            self._write_back(handle.node)
            self._still_there(handle.node)
        return os.pread(handle.fd, size, offset)

    def write(self, _: int, body: memoryview) -> bytes:
        number, offset, size, *_ = _IO.unpack_from(body)
        node = self._handles[number].node
        self._fault("write", node.name)
        with self._lock:
            node.dirty.append((offset, bytes(body[_IO.size : _IO.size + size])))
            node.dirty_end = max(node.dirty_end, offset + size)
        return struct.pack("=II", size, 0)

    def fsync(self, _: int, body: memoryview) -> bytes:
        return self._synced("fsync", struct.unpack_from("=Q", body)[0])

    def flush(self, _: int, body: memoryview) -> bytes:
        return self._synced("flush", struct.unpack_from("=Q", body)[0])

    def _synced(self, op: str, number: int) -> bytes:
        node = self._handles[number].node
        try:
            fault = self._fault(op, node.name)
        except OSError:
            with self._lock:
                node.dirty, node.dirty_end = [], 0  # gone: a second fsync has nothing to say
            raise
        with self._lock:
            self._write_back(node)
        fault.fail()
        return b""

    def _write_back(self, node: _Node) -> None:
        """Send the server what it has not got."""
        dirty, node.dirty, node.dirty_end = node.dirty, [], 0
        if dirty:
            self._still_there(node)
            fd = node.open(os.O_WRONLY)
            for offset, data in dirty:
                os.pwrite(fd, data, offset)
            os.close(fd)
            self._stat(node, fresh=True)

    def _still_there(self, node: _Node) -> None:
        if not os.fstat(node.fd).st_nlink:
            node.stale = True
            raise OSError(errno.ESTALE, "deleted")

    def release(self, _: int, body: memoryview) -> bytes:
        handle = self._handles.pop(struct.unpack_from("=Q", body)[0])
        with self._lock:
            os.close(handle.fd)
            node = handle.node
            node.opens -= 1
            if node.silly is not None and not node.opens:
                parent, name = node.silly
                node.silly = None
                parent.listing = None
                with suppress(OSError):  # its directory is gone
                    os.unlink(name, dir_fd=parent.fd)
        return b""


_THREADS = 8  # calls that may hang at once, and one more


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _main(server: str, path: str, options: str) -> None:
    """Mount, and take orders from standard input until it is closed."""
    os.umask(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    client = _Client(server, **json.loads(options))
    _libc.prctl(_PDEATHSIG, signal.SIGTERM)  # killed tests keep the pipe open while one of their calls hangs here

    def unmount(*_: object) -> None:
        _libc.umount2(os.fsencode(path), _DETACH)
        os._exit(0)

    signal.signal(signal.SIGTERM, unmount)
    try:
        kernel = _Kernel(path, client)
    except OSError as error:
        _say({"error": f"{error}. It needs root (CAP_SYS_ADMIN) and /dev/fuse"})
        return
    try:
        kernel.serve(_THREADS)
        _say({"answer": None})
        for line in sys.stdin:
            _say({"answer": client.order(**json.loads(line))})
    finally:
        unmount()


if __name__ == "__main__":
    _main(*sys.argv[1:])
