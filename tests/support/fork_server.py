"""The process that forks the programs of tests; :mod:`forked` starts it and sends it orders.

Run as a script: ``python fork_server.py LISTENER PIPE``, with the numbers of two open files. The end of the pipe is the
end of the server. Each connection is one program: an order with its three files comes in; the number of the process
goes out, and its status once it has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
import types
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Order", "read_number", "send", "serve"]

# An optimizer imports torch._dynamo.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.tensor"]
PRELOADED += ["bcp._api", "bcp.runs.run", "bcp.extend", "bcp.telemetry", "bcp.policies", "bcp.testing"]

_NUMBER = struct.Struct("!I")


@dataclass(frozen=True)
class Order:
    """What a program is.

    Attributes:
        words: of its command, behind ``python``.
        folder: where it works.
        environ: its variables.
        has_session: whether it leads a session of its own.
        is_adopted: whether its parent is the process behind the server, which adopts orphans.
    """

    words: list[str]
    folder: str
    environ: dict[str, str]
    has_session: bool
    is_adopted: bool


def send(connection: socket.socket, order: Order, files: Sequence[int]) -> None:
    """Send an order, and the program's standard files."""
    text = json.dumps(asdict(order)).encode()
    socket.send_fds(connection, [_NUMBER.pack(len(text))], files)
    connection.sendall(text)


def read_number(connection: socket.socket) -> int:
    """Read a number. Raises BlockingIOError where none has come and the socket does not wait."""
    return int(_NUMBER.unpack(_read(connection, _NUMBER.size))[0])


def _read(connection: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        if not (more := connection.recv(size - len(text))):
            raise ConnectionError("the process that forks programs has ended")
        text += more
    return text


class _Server:
    """Forks a process for each order, and tells of its end."""

    def __init__(self, listener: socket.socket, pipe: int) -> None:
        self.listener = listener
        self.pipe = pipe
        self.programs: dict[int, socket.socket] = {}

    def serve(self) -> Order:
        """Return in each program, with its order; never in the server."""
        ends, end = socket.socketpair()
        os.set_blocking(end.fileno(), False)
        signal.set_wakeup_fd(end.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with ends, end, selectors.DefaultSelector() as selector:
            for file in (self.listener, self.pipe, ends):
                selector.register(file, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.pipe:
                        os._exit(0)
                    elif key.fileobj is ends:
                        ends.recv(4096)
                        self.reap()
                    elif order := self.fork(self.listener.accept()[0]):
                        return order

    def fork(self, connection: socket.socket) -> Order | None:
        """Read an order and follow it. Returns the order in the program."""
        head, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
        order = Order(**json.loads(_read(connection, *_NUMBER.unpack(head))))
        if pid := os.fork():
            for file in files:
                os.close(file)
            if order.is_adopted:
                os.waitpid(pid, 0)
                connection.close()
            else:
                self.programs[pid] = connection
                connection.sendall(_NUMBER.pack(pid))
            return None
        if order.is_adopted:
            _be_orphan(connection)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for open_socket in (connection, self.listener, *self.programs.values()):
            open_socket.close()
        for place, file in enumerate(files):  # which are behind 2: the server has files there
            os.dup2(file, place)
        return order

    def reap(self) -> None:
        """Tell of all programs that have ended."""
        while self.programs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self.programs.pop(pid) as connection, contextlib.suppress(OSError):  # perhaps nobody waits for it
                connection.sendall(_NUMBER.pack(status))


def _be_orphan(connection: socket.socket) -> None:
    """Go on in a child, and tell its number once the new parent has it: until then, this one could not wait for it."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)
    connection.sendall(_NUMBER.pack(os.getpid()))


def _become(order: Order) -> None:
    """Make this process the one of an order, but for its program."""
    given = {sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    os.closerange(3, max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1)
    if order.has_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(order.environ)
    os.chdir(order.folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *(path for path in sys.path if path not in given)]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import_module("torch").set_num_threads(int(threads))


def _program(words: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Return the code of a program, and the names of its module."""
    while words[0] in ("-u", "-W"):
        if words[0] == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # a text file
        else:
            warnings._processoptions([words[1]])  # type: ignore[attr-defined]
        words = words[1 if words[0] == "-u" else 2 :]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, str(Path.cwd()))
        code = compile(f"runpy.run_module({words[1]!r}, run_name='__main__', alter_sys=True)", "<fork>", "exec")
        return code, {"runpy": runpy}
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # multiprocessing has the second name for it
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        return compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__
    script = Path(words[0]).absolute()
    main.__file__ = str(script)
    sys.argv = list(words)
    sys.path.insert(0, str(script.parent))
    return compile(script.read_text(), script, "exec", dont_inherit=True), main.__dict__


def serve(listener: socket.socket, pipe: int) -> None:
    """Fork programs until the pipe ends. Returns in each program, when that has run to its end."""
    gc.collect()
    gc.freeze()
    order = _Server(listener, pipe).serve()
    _become(order)
    exec(*_program(order.words))  # noqa: S102 -- the program of a test


if __name__ == "__main__":
    for _name in PRELOADED:
        import_module(_name)
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
