"""What CPython keeps of a class's special methods beside its attributes.

``torch.Tensor`` has no ``__getitem__`` of its own. When one is set and taken away again, the class stays a sequence for
C, and ``torch.tensor([torch.tensor(0)])`` fails in the rest of the process. So the C functions are put back as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_TABLES = ((96, 36), (104, 10), (112, 3))
"""In ``PyTypeObject``, 64 bit: where the pointers to number, sequence and mapping methods are; how many these have."""

Functions = list[list[int]]


class Slots:
    """The C functions of a class and its subclasses, at one moment."""

    def __init__(self, root: type) -> None:
        self.root = root
        self.found = {kind: _functions(kind) for kind in _kinds(root)}

    def restore(self) -> None:
        """Put them back; a subclass that is new gets what it would have inherited."""
        changed = _functions(self.root)
        for kind in _kinds(self.root):
            now, before = _functions(kind), self.found.get(kind)
            for table, (offset, count) in enumerate(_TABLES):
                for index in range(count if now[table] else 0):
                    if before is not None:
                        wanted = before[table][index]
                    elif now[table][index] == changed[table][index]:
                        wanted = self.found[self.root][table][index]
                    else:
                        continue
                    if wanted != now[table][index]:
                        _table(kind, offset, count)[index] = wanted


def _kinds(root: type) -> Iterator[type]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def _table(kind: type, offset: int, count: int) -> ctypes.Array[ctypes.c_size_t] | None:
    pointer = ctypes.c_size_t.from_address(id(kind) + offset).value
    return (ctypes.c_size_t * count).from_address(pointer) if pointer else None


def _functions(kind: type) -> Functions:
    return [list(_table(kind, offset, count) or ()) for offset, count in _TABLES]
