"""Builds the accelerator in ``backend.cpp``, and registers it with torch as the device type ``late``."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["DEVICES", "Backend", "build"]

SOURCE = Path(__file__).with_name("backend.cpp")
DEVICES = 2
FLAGS = ("-std=c++20", "-O0", "-shared", "-fPIC", "-w")  # torch's headers take 7 s without optimisation


def build(folder: Path) -> Path:
    """Compile the backend into a folder, if it is not there for this source and this torch; return the library.

    Raises:
        RuntimeError: there is no g++, or it fails.

    """
    root = Path(torch.__file__).parent
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("these tests compile a small accelerator: install g++ (Debian: apt-get install g++)")
    command = [compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{root / 'include'}", str(SOURCE), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-o"]
    key = hashlib.sha256("\0".join([torch.__version__, *command, SOURCE.read_text()]).encode()).hexdigest()[:16]
    library = folder / f"late-{key}.so"
    with (folder / "lock").open("w") as lock:  # two workers of pytest may need it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(command, library)
    return library


def _compile(command: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        run = subprocess.run([*command, str(made)], capture_output=True, text=True, check=False)  # noqa: S603
        if run.returncode:
            raise RuntimeError(f"g++ failed on {SOURCE}:\n{run.stderr[-4000:]}")
        made.replace(library)


class Backend:
    """The loaded backend. A process has one at most, and keeps it.

    Copies and kernels wait for ``delay`` seconds each before they run.
    """

    def __init__(self, library: Path) -> None:
        torch.utils.rename_privateuse1_backend("late")
        self._library = ctypes.CDLL(str(library))
        self._library.late_delay.argtypes = (ctypes.c_double,)
        self._library.late_busy.argtypes = (ctypes.c_double, ctypes.c_double)
        self._library.late_defects.restype = ctypes.c_char_p
        self._library.late_init()
        self.random = [torch.full((16,), index + 1, dtype=torch.uint8) for index in range(DEVICES)]
        torch._register_device_module("late", self._module())

    def _module(self) -> ModuleType:
        """Return what becomes ``torch.late``; a forked child has no device, as with CUDA."""
        parent = os.getpid()
        module = ModuleType("torch.late")
        module.is_available = lambda: True
        module.is_initialized = lambda: os.getpid() == parent
        module._is_in_bad_fork = lambda: os.getpid() != parent
        module.device_count = lambda: DEVICES
        module.current_device = torch.accelerator.current_device_index
        module.set_device = torch.accelerator.set_device_index
        module.manual_seed_all = lambda _: None
        module.get_rng_state = lambda device=None: self.random[self._index(device)].clone()
        module.get_rng_state_all = lambda: [state.clone() for state in self.random]
        module.set_rng_state = self._set_random
        return module

    def _index(self, device: object) -> int:
        return device if isinstance(device, int) else torch.accelerator.current_device_index()

    def _set_random(self, state: torch.Tensor, device: object = None) -> None:
        self.random[self._index(device)] = state.clone()

    def delay(self, seconds: float) -> None:
        """Delay each copy and kernel that starts from now on."""
        self._library.late_delay(seconds)

    def hold(self) -> None:
        """Stop all streams before their next task."""
        self._library.late_hold()

    def release(self) -> None:
        """Let all streams go on."""
        self._library.late_release()

    def busy(self, after: float = 0.1, at_most: float = 0.4) -> None:
        """Keep the current stream busy until another stream has finished a copy.

        A copy that does not wait for the current stream therefore runs first, however slow the machine is. A copy that
        waits would never finish: the stream goes on ``after`` seconds after the copy was queued.
        """
        self._library.late_busy(after, at_most)

    def side_streams(self, kind: str) -> None:
        """Choose what a new stream is: one of the "pool", the "default" one as on MPS, or "refused"."""
        self._library.late_side_streams(("pool", "default", "refused").index(kind))

    def refuse(self, number: int) -> None:
        """Let the ``number``th allocation from now on fail."""
        self._library.late_refuse(number)

    @property
    def pending(self) -> int:
        """How many copies and kernels are queued or running."""
        return int(self._library.late_pending())

    def copies(self) -> dict[str, int]:
        """Return how many copies were queued since the last call, by direction."""
        return {name: int(self._library.late_copies(kind)) for kind, name in enumerate(("h2d", "d2h", "d2d"))}

    def defects(self) -> str:
        """Return the errors of the streams since the last call."""
        return str(self._library.late_defects().decode())

    def settle(self) -> None:
        """Wait for all streams, and restore the settings, device and streams of the start in the calling thread."""
        self.release()
        self.delay(0)
        self.refuse(0)
        self.side_streams("pool")
        for device in reversed(range(DEVICES)):
            torch.accelerator.synchronize(device)
            torch._C._accelerator_setStream(torch.Stream(stream_id=0, device_index=device, device_type=_type(device)))
        self.copies()


def _type(device: int) -> int:
    return int(torch.accelerator.current_stream(device).device_type)


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
