"""Publish or pull a version, and die within a write: ``killed_publication.py publish|pull ROOT VERSION WRITE``."""

from __future__ import annotations

import sys
from pathlib import Path

from published import die_at, stepped, weights

import bcp


def main(what: str, root: Path, version: int, number: int) -> None:
    model = weights()
    for step in range(2, version + 1):
        model = stepped(model, step)
    writes = die_at(number)
    if what == "publish":
        bcp.publish(model, root / "published", version, anchor_every=2, keep=2, claim_seconds=0, cache=root / "cache")
    else:
        bcp.Subscriber(root / "published", root / "engine").pull(version=version)
    sys.stdout.write(str(writes()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
