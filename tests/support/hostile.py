"""Pickles that call something, and files of ``torch.save`` with another pickle."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Evil", "repickled"]


class Evil:
    """An object whose pickle makes a folder, or makes another call with one argument."""

    def __init__(self, argument: object, function: Callable[..., Any] = os.mkdir) -> None:
        self.call = function, (os.fspath(argument) if isinstance(argument, Path) else argument,)

    def __reduce__(self) -> Any:
        return self.call


def repickled(path: Path, pickled: bytes) -> None:
    """Give a file of ``torch.save`` another pickle."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for name, data in entries.items():
            new.writestr(name, pickled if name.endswith("/data.pkl") else data)
    path.write_bytes(made.getvalue())
