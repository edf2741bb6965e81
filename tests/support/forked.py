"""Programs of tests as forks of a process that has imported what they need: each begins seconds of CPU time sooner.

:class:`Forked` is a :class:`subprocess.Popen` for commands of Python. ::

    job = Forked([sys.executable, "train.py", "4"], stdout=subprocess.PIPE, text=True)

The program is ``__main__`` of a process of its own, with the files, the folder, the variables and the session that
``Popen`` would give to it, and it ends as Python ends. Its parent is the process that forks (``fork_server.py``). One
process of tests has one of these, and its programs use it too. A test of imports uses ``Popen``.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fork_server

__all__ = ["VARIABLE", "Child", "Forked", "adopt", "run_forked"]

VARIABLE = "TESTS_FORK_AT"
"""Names the socket of the process that forks, for the programs that it has started."""

_PIPES = ["p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"]
_ARGUMENTS = ["executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags"]
_ARGUMENTS += ["shell", *_PIPES, "restore_signals", "gid", "gids", "uid", "umask", "start_new_session"]
_ARGUMENTS += ["process_group"]
"""What ``Popen`` gives to its function that starts a program, behind the words of the command."""
_SUBREAPER = 36
_own: list[bytes] = []
"""The socket of the server that forks children of this process."""


class _Ordered(subprocess.Popen[Any]):
    """A program of Python in a process of its own, from a server that forks."""

    is_adopted = False

    def _execute_child(self, args: Sequence[str | os.PathLike[str]], *rest: Any) -> None:
        """Start it: the one function of Popen that does so."""
        given = dict(zip(_ARGUMENTS, rest, strict=True))
        pipes = [given.pop(name) for name in _PIPES]
        cwd, env = given["cwd"], given["env"]
        address = _own[0] if self.is_adopted else _address()
        order = fork_server.Order(
            words=[os.fspath(word) for word in args[1:]],
            folder=str(Path.cwd() if cwd is None else Path(cwd).absolute()),
            environ={**(os.environ if env is None else env), VARIABLE: _address().hex()},
            has_session=given["start_new_session"],
            is_adopted=self.is_adopted,
        )
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        files = [place if file == -1 else file for place, file in enumerate([pipes[0], pipes[3], pipes[5]])]
        fork_server.send(self._connection, order, files)
        self.pid = fork_server.read_number(self._connection)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # Popen's own


class Child(_Ordered):
    """A program whose parent is this process, as torchrun's ranks need one; behind :func:`adopt`."""

    is_adopted = True


class Forked(_Ordered):
    """A program whose parent is the server of the tests."""

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return process and status as ``os.waitpid`` does."""
        self._connection.setblocking(wait_flags != os.WNOHANG)
        try:
            status = fork_server.read_number(self._connection)
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]  # Popen's own
            try:
                if self.returncode is None and (end := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(end[1])  # type: ignore[attr-defined]  # Popen's own
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]  # Popen's own
        return self.returncode


def run_forked(command: Sequence[Any], *, timeout: float | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as :func:`subprocess.run` does with ``capture_output`` and ``text``."""
    pipe = subprocess.PIPE
    with Forked(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **how) as job:
        try:
            out, errors = job.communicate(timeout=timeout)
        except BaseException:
            job.kill()
            raise
    return subprocess.CompletedProcess(list(command), job.returncode, out, errors)


def adopt() -> bool:
    """Fork a server for the children of this process, which has one thread. Returns False at the end of each child."""
    with _listener() as listener:
        pipe, end = os.pipe()
        if os.fork() == 0:
            os.setsid()  # Ctrl-C and signals for the group are not for it
            os.close(end)
            fork_server.serve(listener, pipe)
            return False
        _own.append(listener.getsockname())
    os.close(pipe)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    return True


def _address() -> bytes:
    """Return the socket of the process that forks; start this process, unless a parent has done so."""
    if address := os.environ.get(VARIABLE):
        return bytes.fromhex(address)
    with _listener() as listener:
        pipe, _ = os.pipe()  # whose other end nobody closes before this process ends
        for file in (listener.fileno(), pipe):
            os.set_inheritable(file, True)  # noqa: FBT003 -- so in the standard library
        command = [sys.executable, fork_server.__file__, str(listener.fileno()), str(pipe)]
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        os.posix_spawn(sys.executable, command, {**os.environ, "PYTHONPATH": paths})
        os.environ[VARIABLE] = listener.getsockname().hex()
    os.close(pipe)
    return _address()


def _listener() -> socket.socket:
    """Return a socket at an address that the system chooses, without a file."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(128)
    return listener
