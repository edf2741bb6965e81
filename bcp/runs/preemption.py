"""Notices that this process is going to be ended: by a signal, or by a callable that asks the cloud.

A handler written in Python does not run while the main thread is in a long call of C: a compilation, a matrix product,
a wait. So the handler that Python has in C writes the signal's number to a pipe, which a thread reads. An event loop
may own that way (``signal.set_wakeup_fd``). Then our handler in Python writes to the pipe, and loops run it at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from bcp._log import log
from bcp.errors import InputError
from bcp.runtime.process import in_forked_child, process_lock

__all__ = ["Preemption"]

Notice = Callable[[], float | bool | None]

_CLOSE_SECONDS = 1.0  # a notice callable may hang; its thread is left behind then
_LEAST_EVERY = 0.001  # seconds
_END = b"\0"  # no signal has that number


class Preemption:
    """Tells a run that its process is going to be ended, so that the run can save and stop in time.

    Making one changes nothing in the process. :class:`bcp.Run` installs it when it begins and closes it when it ends.
    Forked processes, as a dataloader's workers, have the handlers that were there before. A handler of yours that is
    there before is called after bcp's.

    Attributes:
        reason: why the process is going to be ended, as ``"SIGTERM"``; None until then.
        deadline: ``time.monotonic()`` at which it is expected to be killed; None until then.

    Example:
        >>> import bcp
        >>> bcp.Preemption(grace_seconds=120.0).seconds_left()
        inf

    """

    def __init__(
        self,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace_seconds: float = 30.0,
        notice: Notice | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        """Describe how the end announces itself.

        Args:
            signals: which signals announce it. SLURM sends SIGUSR1 where it is told to: ``--signal=USR1@300``.
            grace_seconds: time from a signal to the kill. torchrun and Kubernetes have 30.
            notice: asked again and again in a thread of its own. False and None are no notice, True is one with
                ``grace_seconds`` left, a number is one with that many.
            poll_seconds: time between two questions.

        Raises:
            InputError: a signal cannot be caught, or another argument cannot be used.

        """
        self._signals = _checked(signals)
        self._grace = _seconds("grace_seconds", grace_seconds, least=0.0)
        self._every = _seconds("poll_seconds", poll_seconds, least=_LEAST_EVERY)
        if notice is not None and not callable(notice):
            raise InputError(f"notice={notice!r} cannot be called; pass a function without arguments, or None")
        self._notice = notice
        self.reason: str | None = None
        self.deadline: float | None = None
        self._asked: Callable[[str], None] | None = None
        self._lock = process_lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._told = False
        self._pid = 0
        self._earlier: dict[int, Any] = {}
        self._arrived: list[int] = []
        self._handling = set[int]()
        self._pipe: tuple[int, int] | None = None

    def __repr__(self) -> str:
        names = ", ".join(map(_name, self._signals))
        return f"<Preemption by {names or 'notice'}: {self.reason or ('waits' if self._asked else 'not installed')}>"

    def seconds_left(self) -> float:
        """Return the seconds until the expected kill, 0 or more; infinity if nothing has announced it."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def install(self, asked: Callable[[str], None]) -> None:
        """Begin to listen. Signals need the main thread; elsewhere a warning is logged and the notice alone is left.

        Args:
            asked: called once with the reason, in a thread of ours; at once if there was a reason before.

        Raises:
            InputError: it is installed already.

        """
        if self._asked is not None:
            raise InputError(f"{self!r} is in use; close the other run first, or pass a Preemption of its own")
        self._asked, self._told, self._closing = asked, False, threading.Event()
        if self._signals:
            self._install_signals()
        if self._notice is not None:
            self._begin(self._ask_again_and_again, "bcp-notice")
        if self.reason is not None:
            self._begin(self._tell, "bcp-preemption-told")

    def close(self) -> None:
        """Stop listening, and put back the handlers that were there before if ours are still there. Idempotent."""
        if self._asked is None:
            return
        self._closing.set()
        self._wake(_END)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_SECONDS)
        self._threads, self._asked = [], None
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        _installed.discard(self)  # in another thread handlers stay, and pass on

    # -- signals -----------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "signals are not watched: only the main thread can; make the run there",
                signals=[_name(number) for number in self._signals],
            )
            return
        self._put_back()  # of a close in another thread
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, end == self._pipe[0])
        self._pid, self._arrived = os.getpid(), []
        _installed.add(self)
        self._begin(self._read, "bcp-preemption")
        self._take_wakeup_fd(self._pipe[1])
        for number in self._signals:
            earlier = signal.getsignal(number)
            if earlier is None:
                log.warning("a signal is not watched: a library in C handles it", signal=_name(number))
                continue
            self._earlier[number] = earlier
            signal.signal(number, self._handle)

    @staticmethod
    def _take_wakeup_fd(end: int) -> None:
        """Let signals be written to the pipe, unless an event loop has that way already."""
        others = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, as little as possible; then call the handler that was there before."""
        earlier, active = self._earlier.get(number), os.getpid() == self._pid and self._asked is not None
        if active:
            self._arrived.append(number)
            self._wake(bytes([number]))
        elif earlier is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not callable(earlier) or (active and earlier is signal.default_int_handler):
            return
        if number not in self._handling:
            self._handling.add(number)  # it may itself call us: installed over ours, and ours again over it
            try:
                earlier(number, frame)
            finally:
                self._handling.discard(number)

    def _wake(self, word: bytes) -> None:
        """Write to the pipe; a full one wakes the thread as well."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                os.write(self._pipe[1], word)

    def _read(self) -> None:
        """Read the pipe until it is closed: numbers of all signals that Python handles arrive there."""
        assert self._pipe is not None  # noqa: S101 -- made before the thread
        while True:
            numbers = set(os.read(self._pipe[0], 4096))
            while self._arrived:
                numbers.add(self._arrived.pop())
            for number in numbers & self._earlier.keys():
                self._note(_name(number), self._grace)
            if self._closing.is_set():
                return

    def _put_back(self) -> None:
        """Put the earlier handlers back where ours still are; main thread only."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, earlier)
        if self._pipe is not None:
            others = signal.set_wakeup_fd(-1)
            if others not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(others, warn_on_full_buffer=False)
            pipe, self._pipe = self._pipe, None
            for end in pipe:
                os.close(end)

    def after_fork(self) -> None:
        """Forget everything in a forked child: neither its signals nor its pipe are the parent's business."""
        self._threads, self._asked = [], None
        self._put_back()

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals' numbers."""
        return self._signals

    # -- notices -----------------------------------------------------------------------------------

    def _ask_again_and_again(self) -> None:
        """Ask the notice callable until there is a notice; an error is no notice."""
        complained = False
        while self.reason is None:
            try:
                seconds = self._answer()
            except Exception as error:  # noqa: BLE001 -- it is the user's code
                if not complained:
                    log.warning(
                        "notice() failed; it is asked again, and its next errors are not logged",
                        error=repr(error),
                    )
                complained, seconds = True, None
            if seconds is not None:
                self._note(f"spot notice: {seconds:.0f} s left", seconds)
                return
            if self._closing.wait(self._every):
                return

    def _answer(self) -> float | None:
        """Return the seconds left that the callable tells of, or None."""
        assert self._notice is not None  # noqa: S101 -- else there is no such thread
        answer = self._notice()
        if answer is None or answer is False:
            return None
        seconds = self._grace if answer is True else float(answer)
        if math.isnan(seconds):
            raise ValueError("the notice is not a number of seconds")
        return max(0.0, seconds)

    # -- both --------------------------------------------------------------------------------------

    def _note(self, reason: str, seconds: float) -> None:
        """Remember the first reason and the soonest deadline, and tell the run."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)
            self.reason = self.reason or reason
        self._tell()

    def _tell(self) -> None:
        """Call ``asked``, once."""
        with self._lock:
            asked, reason, told, self._told = self._asked, self.reason, self._told, True
        if told or asked is None or reason is None:
            return
        try:
            asked(reason)
        except Exception as error:  # noqa: BLE001 -- the thread has to go on; nobody else is there to hear it
            log.error(
                "a run could not be told that its process is going to end",
                reason=reason,
                error=repr(error),
            )

    def _begin(self, function: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)


def _checked(signals: Iterable[int]) -> tuple[int, ...]:
    """Return signals that can be caught, each one once."""
    try:
        numbers = tuple(dict.fromkeys(int(number) for number in signals))
    except (TypeError, ValueError) as error:
        raise InputError(f"signals={signals!r} are no signals; pass e.g. (signal.SIGTERM,)") from error
    for number in numbers:
        if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
            raise InputError(f"{_name(number)} of signals={signals!r} cannot be caught; pass e.g. (signal.SIGTERM,)")
    return numbers


def _name(number: int) -> str:
    """Name a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _seconds(name: str, value: float, least: float) -> float:
    """Return a finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise InputError(f"{name}={value!r}; pass a number of seconds, {least:g} or more")
    return float(value)


# -- forks: a child has the earlier handlers from its first moment ------------------------------------

_installed: set[Preemption] = set()
_masks = threading.local()


def _before_fork() -> None:
    """Hold signals back: the child's handler in C would write to the parent's pipe before it is taken down."""
    signals = {number for preemption in _installed for number in preemption.signals}
    _masks.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if signals else None


def _after_fork_in_parent() -> None:
    if getattr(_masks, "earlier", None) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.earlier)


def _after_fork_in_child() -> None:
    signals = {number for preemption in _installed for number in preemption.signals}
    for preemption in list(_installed):
        preemption.after_fork()
    _installed.clear()
    if signals and _becomes_loader_worker():
        threading.Thread(target=_obey_parent, args=(signals,), name="bcp-preemption", daemon=True).start()
    else:
        _after_fork_in_parent()


# -- workers of torch's DataLoader: torchrun and SLURM signal the whole process group ------------------
#
# The last steps need the workers' batches, and the loader raises an error in the training process when a worker dies.
# So the signals stay blocked in a worker from its first moment. It still ends with its parent, which it watches.


def _becomes_loader_worker() -> bool:
    """Return whether the fork that is under way makes a worker of torch's DataLoader.

    Multiprocessing tells the child about its target only after the hooks of the fork, so the caller's frame is asked.
    """
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    frame = sys._getframe()  # noqa: SLF001 -- no public name; multiprocessing's Popen._launch is a caller of this one
    while worker is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_launch" and "process_obj" in frame.f_locals:
            target = getattr(frame.f_locals["process_obj"], "_target", None)
            return target is worker._worker_loop  # noqa: SLF001 -- its only name
    return False


def _obey_parent(signals: set[int]) -> None:
    """End when the parent itself sends SIGTERM; ignore the signals of everybody else."""
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
            os._exit(0)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
in_forked_child(_after_fork_in_child)
