"""Edits of a source file that each change what one function does. Pure: text in, edits out."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Edit", "edits"]

SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
}
"""An operator's pattern in the source, and its replacement."""

OTHER_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "logger", "logging", "warnings"}


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of the bytes ``begin:end`` of a file."""

    begin: int
    end: int
    text: str
    kind: str
    function: str  # its qualified name
    first: int  # the edited code's lines, the first and the last one
    last: int


def edits(source: str) -> list[Edit]:
    """Return all edits, in the order of the source. Docstrings, texts, errors, and lines of logs stay as they are."""
    return sorted(_Finder(source).found(), key=lambda edit: (edit.begin, edit.end, edit.text))


class _Finder:
    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._tree = ast.parse(source)

    def found(self) -> Iterator[Edit]:
        yield from self._in_body(self._tree, "")

    def _in_body(self, scope: ast.AST, name: str) -> Iterator[Edit]:
        """Go through the functions and classes of a scope."""
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                yield from self._in_body(node, f"{name}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name != "__repr__":
                    for statement in node.body:
                        yield from self._in_code(statement, name + node.name)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                yield from self._in_body(node, name)

    def _in_code(self, node: ast.AST, function: str) -> Iterator[Edit]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in node.body:
                yield from self._in_code(inner, f"{function}.{getattr(node, 'name', '')}")
            return
        if _is_text(node):
            return
        for begin, end, text, kind in self._of(node):
            yield Edit(begin, end, text, kind, function, self._line(begin), self._line(max(begin, end - 1)))
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.AnnAssign) and child is node.annotation:
                continue
            yield from self._in_code(child, function)

    def _of(self, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        for kind, each in _KINDS:
            for begin, end, text in each(self, node):
                yield begin, end, text, kind

    # -- kinds --------------------------------------------------------------------------------

    def operators(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, parts, parts[1:], strict=False):
                yield from self._operator(operator, left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator(node.op, left, right)
        elif isinstance(node, ast.BinOp):
            yield from self._operator(node.op, node.left, node.right)

    def _operator(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[tuple[int, int, str]]:
        if type(operator) not in SWAPPED or any(isinstance(each, ast.JoinedStr) for each in (left, right)):
            return
        pattern, other = SWAPPED[type(operator)]
        begin = self._span(left)[1]
        between = self._bytes[begin : self._span(right)[0]].decode()
        if match := re.fullmatch(rf"[\s)]*({pattern})[\s(]*", between):
            yield begin + len(between[: match.start(1)].encode()), begin + len(between[: match.end(1)].encode()), other

    def augmented(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            begin = self._span(node.target)[1]
            between = self._bytes[begin : self._span(node.value)[0]]
            at = begin + between.index(b"=") - 1
            yield at, at + 1, "-" if isinstance(node.op, ast.Add) else "+"

    def conditions(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._span(node)[0], self._span(node.operand)[0], ""
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
            begin, end = self._span(node.test)
            yield begin, end, f"not ({self._bytes[begin:end].decode()})"

    def constants(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = node.value
            yield *self._span(node), repr(not value if isinstance(value, bool) else value + 1)

    def calls(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if not isinstance(node, ast.Call):
            return
        if isinstance(node.func, ast.Name) and node.func.id in OTHER_CALLS:
            yield *self._span(node.func), OTHER_CALLS[node.func.id]
        given = sorted([*node.args, *node.keywords], key=lambda each: self._span(each)[0])
        for before, word in zip([None, *given], given, strict=False):
            if isinstance(word, ast.keyword) and word.arg:
                begin, end = self._span(word)
                if before is not None or len(given) == 1:
                    yield begin if before is None else self._span(before)[1], end, ""

    def returned(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield *self._span(node), "return None"

    def removed(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        gone = isinstance(node, ast.Raise | ast.Delete | ast.Continue | ast.Break | ast.AugAssign)
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
        kept = isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Attribute | ast.Subscript) for to in node.targets
        )
        if gone or called or kept:
            yield *self._span(node), "pass"

    # -- places -------------------------------------------------------------------------------

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Return the node's first byte, and the byte after its last one."""
        place = [getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")]
        return self._starts[place[0] - 1] + place[1], self._starts[place[2] - 1] + place[3]

    def _line(self, at: int) -> int:
        return self._bytes.count(b"\n", 0, at) + 1


_KINDS: list[tuple[str, Callable[[_Finder, ast.AST], Iterator[tuple[int, int, str]]]]] = [
    ("operator", _Finder.operators),
    ("operator", _Finder.augmented),
    ("condition", _Finder.conditions),
    ("constant", _Finder.constants),
    ("argument", _Finder.calls),
    ("return", _Finder.returned),
    ("removed", _Finder.removed),
]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.AST) -> bool:
    """Whether the code makes a text for people: a docstring, a text with values, an error's arguments, a line of a log.

    A ``raise`` without arguments, and one as a whole, may be edited.
    """
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr):
        value = node.value
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _is_text(value))
    if isinstance(node, ast.Call):
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        owner = getattr(function, "value", None)
        return name.endswith(("Error", "Warning")) or (isinstance(owner, ast.Name) and owner.id in LOGGERS)
    return False
