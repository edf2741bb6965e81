"""Imports at first use, which no fork interrupts.

A process forked in the middle of an import has the module half made, and waits for ever for the thread that would
finish it. So imports at first use take one lock of the process, and a fork in another thread waits for this lock. An
import inside of a function takes it, too::

    with importing:
        import fsspec

"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from bcp.runtime.process import fork_lock

__all__ = ["imported", "importing", "lazy_names"]

Access = tuple[Callable[[str], Any], Callable[[], list[str]]]

importing = fork_lock()


def imported(name: str) -> Any:
    """Import a module by its name, under the lock of imports. Raises ImportError as the import does."""
    with importing:
        return import_module(name)


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], public: Collection[str], together: Collection[str] = ()
) -> Access:
    """Return ``__getattr__`` and ``__dir__`` of a module that imports names at their first use (PEP 562).

    Args:
        package: name of the module.
        homes: the names that each other module defines, as in ``"register as register_planner"`` for a new name.
            A module without names is itself the attribute.
        public: the names that ``dir()`` lists, the lazy ones among them.
        together: modules that are imported as one, with the first name of any of them.

    """
    found: dict[str, tuple[str, str]] = {}
    for home, names in homes.items():
        found |= {name.rpartition(" as ")[2]: (home, name.partition(" as ")[0]) for name in names}
        found |= {} if names else {home.rpartition(".")[2]: (home, "")}

    def attribute(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = found[name]
        with importing:
            for module in together if home in together else [home]:
                import_module(module)
        value = getattr(sys.modules[home], original) if original else sys.modules[home]
        setattr(sys.modules[package], name, value)
        return value

    return attribute, lambda: sorted(public)
