"""Runs the blocks of a page of docs/frameworks on one rank, as its reader would under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path
from typing import Any

from torch import distributed as dist

Blocks = Sequence[tuple[int, str]]
Given = Callable[[], AbstractContextManager[dict[str, Any]]]
"""What a page takes for granted: names that stand for the reader's own training script."""


def run_page(page: Path, blocks: Blocks, folder: Path, given: Given | None = None) -> None:
    """Run every block in one namespace, in ``folder``; tracebacks name the page and its lines."""
    with chdir(folder), given() if given else nullcontext({}) as names:
        namespace: dict[str, Any] = {"__name__": page.stem, **names}
        for line, source in blocks:
            exec(compile("\n" * line + source, page, "exec", dont_inherit=True), namespace)  # noqa: S102 -- our own page
            dist.barrier()
