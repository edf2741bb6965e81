"""Read a hostile pickle: no class and no function of the file is ever imported or called.

The reader of a format lists all allowed names, and gives each a function or constant of its own. Every other name is an
error. The unpickler is the one in Python of Python's library. The one in C takes the memory of a claim before it looks
at the bytes of the pickle.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bcp.errors import CheckpointError, CorruptError

__all__ = ["Allowed", "Call", "Opaque", "Record", "unpickled"]

_FAULTS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
_KEYS = (str, int, float, bool, bytes, type(None))
"""Types of keys. The hash of a deeply nested key would overflow the stack of C."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a reader, in the place of a class or function of the pickle."""

    function: Callable[..., Any]


@dataclass(slots=True, eq=False)
class Record:
    """An object of a known class, not made: its arguments and its state in the pickle."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default=None)

    def get(self, attribute: str) -> Any:
        """Return an attribute of the object; None if its state lacks the name."""
        return self.state.get(attribute) if isinstance(self.state, dict) else None

    @classmethod
    def named(cls, name: str) -> Call:
        """Return what makes records of a class."""
        return Call(lambda *arguments: cls(name, arguments))


Allowed = Mapping[tuple[str, str], Any]
"""What stands for a module's name: a :class:`Call`, or a constant."""


class Opaque(dict[tuple[str, str], Any]):
    """Allowed names, and all names of some packages: objects of their classes become records.

    No such package is imported. Use it where a file has many classes beside the tensors, as arguments of a job.
    """

    def __init__(self, allowed: Allowed, packages: tuple[str, ...]) -> None:
        super().__init__(allowed)
        self._packages = packages

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, tuple) and str(name[0]).startswith(self._packages))

    def __missing__(self, name: tuple[str, str]) -> Call:
        return Record.named(".".join(name))


def unpickled(data: bytes, allowed: Allowed, where: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of a pickle.

    Args:
        data: the pickle.
        allowed: all possible names.
        where: its name in messages.
        persistent: makes a value of a persistent id; None: there may be none.

    Raises:
        CheckpointError: the pickle names something else, or has a set or another type of keys.
        CorruptError: it is truncated or damaged.

    """
    reader = _Unpickler(io.BytesIO(data), allowed, where, persistent)
    try:
        return reader.load()
    except _FAULTS as error:
        raise CorruptError(
            f"{where} is damaged: {type(error).__name__}: {str(error)[:200]}; get the file again"
        ) from error


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 -- the unpickler in Python has no other name
    """Builds constants, containers, and results of the reader's functions."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO, allowed: Allowed, where: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._allowed = allowed
        self._where = where
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if (module, name) not in self._allowed:
            raise CheckpointError(
                f"{self._where} names {str(module)[:80]}.{str(name)[:80]}, which bcp does not read; nothing of it was "
                "run: load the file with the library that saved it, if you trust it, and save it with bcp.save"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for a persistent id."""
        if self._persistent is None:
            raise pickle.UnpicklingError("it has a persistent id")
        return self._persistent(pid)

    def _called(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Call) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("it calls what is no function")
        return function.function(*arguments)

    def load_reduce(self) -> None:
        """Call a function of the reader."""
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        """Make an object, as by a call."""
        self.load_reduce()

    def load_build(self) -> None:
        """Give a record its state."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # attributes of a module's OrderedDict have no use here
            raise pickle.UnpicklingError("it sets the state of what is no object")

    def load_setitem(self) -> None:
        """Put one value into a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def load_setitems(self) -> None:
        """Put values into a dict."""
        self._put(self.pop_mark())

    def load_dict(self) -> None:
        """Make a dict of the values behind the mark."""
        items = self.pop_mark()
        self.append({})
        self._put(items)

    def _put(self, items: list[Any]) -> None:
        found, keys = self.stack[-1], items[::2]
        if not isinstance(found, dict):
            raise pickle.UnpicklingError("it sets items of no dict")
        if strange := {type(key).__name__ for key in keys if type(key) not in _KEYS and not isinstance(key, Record)}:
            raise CheckpointError(
                f"{self._where} has a key of type {min(strange)}, which bcp does not read; save it anew with strings "
                "or ints as keys"
            )
        found.update(zip(keys, items[1::2], strict=True))

    def load_set(self) -> None:
        """Refuse a set: protocols before 4 name its class."""
        raise CheckpointError(f"{self._where} has a set, which bcp does not read; save it anew with a list")

    def load_refused(self) -> None:
        """Refuse the opcode."""
        raise pickle.UnpicklingError("it has an opcode that no writer of tensors uses")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,  # noqa: SLF001 -- as above
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.EMPTY_SET[0]: load_set,
        pickle.FROZENSET[0]: load_set,
        **dict.fromkeys(
            (
                opcode[0]
                for opcode in (
                    pickle.NEWOBJ_EX,
                    pickle.INST,
                    pickle.OBJ,
                    pickle.EXT1,
                    pickle.EXT2,
                    pickle.EXT4,
                    pickle.BYTEARRAY8,  # zeroes the claimed memory
                    pickle.NEXT_BUFFER,
                    pickle.READONLY_BUFFER,
                )
            ),
            load_refused,
        ),
    }
