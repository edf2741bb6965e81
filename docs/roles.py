"""How the API reference reads docstrings: roles such as ``:class:`Run``` become plain code, ``::`` a colon."""

from __future__ import annotations

import re

from griffe import Docstring, Extension

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]*)`")
LITERAL = re.compile(r"::$", re.MULTILINE)


class Roles(Extension):
    """Rewrite the text of every docstring before it is parsed."""

    def on_instance(self, *, obj: object, **_: object) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""
        docstring = getattr(obj, "docstring", None)
        if isinstance(docstring, Docstring):
            docstring.value = LITERAL.sub(":", ROLE.sub(r"`\1`", docstring.value))
