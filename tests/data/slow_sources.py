"""Sources for worker processes, importable so that they can be pickled."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np


class Growing:
    """Samples of 1 to 7 times their index."""

    def __init__(self, size: int = 300) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[int]:
        return [index + 1] * (1 + index % 7)


class Failing(Growing):
    """Sample 13 cannot be read."""

    def __getitem__(self, index: int) -> list[int]:
        if index == 13:
            raise KeyError("no such page")
        return super().__getitem__(index)


class Exiting(Growing):
    """Reading sample 13 ends the process, in one of two ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> list[int]:
        if index == 13 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 13:
            os._exit(3)
        return super().__getitem__(index)


class Silent(Growing):
    """No sample is ever read: the process waits."""

    def __getitem__(self, index: int) -> list[int]:
        time.sleep(3600)
        return super().__getitem__(index)


class Noted(Growing):
    """Every reading is written to a file."""

    def __init__(self, path: str, size: int = 300) -> None:
        super().__init__(size)
        self.path = path

    def __getitem__(self, index: int) -> list[int]:
        with Path(self.path).open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        return super().__getitem__(index)


class Wide(Growing):
    """Samples of a megabyte."""

    def __getitem__(self, index: int) -> list[int]:
        return np.full(131_072, index + 1)


class Locked(Growing):
    """Can be pickled, and not unpickled."""

    def __setstate__(self, state: object) -> None:
        raise PermissionError("the key is lost")


class Verbose(Growing):
    """No sample can be read, and the reason is long, in characters of many bytes."""

    def __getitem__(self, index: int) -> list[int]:
        raise OSError("\U0001f4be" * 30_000)
