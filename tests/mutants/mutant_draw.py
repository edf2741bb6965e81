"""Mutants: drawn by chance, recorded by their texts, and found again in later versions of a file."""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping
from dataclasses import dataclass

from mutant_edits import Edit, edits

__all__ = ["Mutant", "applied", "draw", "lines_of"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed piece of one function. Texts, not numbers of lines, tell where it is."""

    file: str
    function: str  # its qualified name
    kind: str
    old: str  # whole lines
    new: str
    nth: int = 0  # among equal lines of the function


def draw(sources: Mapping[str, str], reached: Mapping[str, set[int]], *, seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants on reached lines, one a line at most, in the order of the draw.

    Each line has the same chance. Seed and sources alone decide the order of lines and the edit of each line: another
    set of reached lines leaves out mutants or adds some.
    """
    places: dict[tuple[str, int], list[Edit]] = {}
    for file, source in sorted(sources.items()):
        for edit in edits(source):
            places.setdefault((file, edit.first), []).append(edit)
    dice = random.Random(seed)  # noqa: S311 -- no secret
    order = sorted(places)
    dice.shuffle(order)
    drawn: list[Mutant] = []
    for file, line in order:
        edit = dice.choice(places[file, line])
        if len(drawn) < count and not reached.get(file, set()).isdisjoint(range(edit.first, edit.last + 1)):
            mutant = _recorded(file, sources[file], edit)
            if mutant is not None:
                drawn.append(mutant)
    return drawn


def _recorded(file: str, source: str, edit: Edit) -> Mutant | None:
    """Return the mutant; None if its file is no Python, or the same program."""
    data = source.encode()
    changed = (data[: edit.begin] + edit.text.encode() + data[edit.end :]).decode()
    try:
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            return None
        compile(changed, file, "exec")
    except SyntaxError:
        return None
    before = source.splitlines()
    lines = changed.splitlines()[edit.first - 1 : edit.last + len(changed.splitlines()) - len(before)]
    old = "\n".join(before[edit.first - 1 : edit.last])
    places = _places(source, edit.function, old)
    return Mutant(file, edit.function, edit.kind, old, "\n".join(lines), places.index(edit.first))


def lines_of(mutant: Mutant, source: str) -> range | None:
    """Return the numbers of the lines that the mutant changes in a version of its file; None if they are gone."""
    places = _places(source, mutant.function, mutant.old)
    if mutant.nth >= len(places):
        return None
    first = places[mutant.nth]
    return range(first, first + mutant.old.count("\n") + 1)


def applied(mutant: Mutant, source: str) -> str | None:
    """Return the source with the mutant in it, indented as the lines are today; None if the lines are gone."""
    place = lines_of(mutant, source)
    if place is None:
        return None
    lines = source.splitlines(keepends=True)
    today, then = (len(text) - len(text.lstrip()) for text in (lines[place.start - 1], mutant.old))
    new = "".join(" " * (today - then) + line[max(0, then - today) :] + "\n" for line in mutant.new.split("\n"))
    return "".join([*lines[: place.start - 1], new, *lines[place.stop - 1 :]])


def _places(source: str, function: str, old: str) -> list[int]:
    """Return the numbers of the lines where the old text begins, inside of the function."""
    wanted = [line.strip() for line in old.split("\n")]
    lines = [line.strip() for line in source.splitlines()]
    found: set[int] = set()
    for node, name in _functions(ast.parse(source), ""):
        if name == function:
            last = (node.end_lineno or node.lineno) - len(wanted) + 1
            found.update(at for at in range(node.lineno, last + 1) if lines[at - 1 : at - 1 + len(wanted)] == wanted)
    return sorted(found)


def _functions(scope: ast.AST, name: str) -> list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    found: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]] = []
    for node in ast.iter_child_nodes(scope):
        inner = name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                found.append((node, inner))
        found += _functions(node, inner)
    return found
