"""Writes golden checkpoints with the bcp of today: ``python tests/golden/write.py [NAME ...]``.

Without names it writes those that are not there yet. One that is there is never replaced: it shows the format of its
own time. A checkpoint appears only after a load has given its contents back.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
from contextlib import closing
from importlib import metadata
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:1] = [str(TESTS.parent), *(str(TESTS / name) for name in ("", "support", "jobs", "data"))]

from golden.cases import CASES, codecs_of  # noqa: E402
from golden.expected import DATA, Record, check_plain, read, store  # noqa: E402
from ranks import Ranks  # noqa: E402

import bcp  # noqa: E402 -- these need the path

LIBRARIES = ("torch", "numpy", "pyarrow", "safetensors", "megatron-core", "deepspeed", "zstandard")


def write(name: str, ranks: Ranks) -> None:
    """Write one checkpoint and its expectation, and compare them.

    Raises:
        FileExistsError: it is there already.

    """
    case, place = CASES[name], DATA / name
    if place.exists():
        raise FileExistsError(f"{place} is there, and a golden checkpoint stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / name
        made.mkdir()
        parts, facts = case.write(made / "checkpoint", lambda: ranks)
        versions = {"bcp": bcp.__version__, **{library: metadata.version(library) for library in LIBRARIES}}
        store(made, Record(case.description, case.ranks, parts, list(case.codecs), facts, versions))
        for part in read(made).parts:
            check_plain(made / "checkpoint" / part.folder, part, codecs_of(case.codecs))
        if case.tar:
            _pack(made / "checkpoint")
        shutil.copytree(made, place)
    nbytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    print(f"{name}: {nbytes:,} bytes")  # noqa: T201 -- a script


def _pack(folder: Path) -> None:
    """Replace a folder by a tar file."""
    with tarfile.open(folder.with_suffix(".tar.xz"), "x:xz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)


def main() -> None:
    """Write the checkpoints that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME", help=", ".join(CASES))
    names = parser.parse_args().names or [name for name in CASES if not (DATA / name).exists()]
    with closing(Ranks(4)) as ranks:
        for name in names:
            write(name, ranks)


if __name__ == "__main__":
    main()
