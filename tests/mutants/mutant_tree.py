"""A scratch copy of a tree: mutants are written there, and tests run there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Scratch", "scratch_of"]

LINKED = (".venv", ".cache")
PLUGINS = Path(__file__).resolve().parent  # an older tree has no plugin


class Scratch:
    """The copy. Files of the tree itself are never written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._python = folder / ".venv/bin/python"
        self._changes = 0

    def sources(self) -> dict[str, str]:
        """Return the source files of bcp, by their paths. The conformance suites in bcp.testing are tests, too."""
        files = {str(path.relative_to(self.folder)): path for path in sorted((self.folder / "bcp").rglob("*.py"))}
        return {name: path.read_text() for name, path in files.items() if not name.startswith("bcp/testing/")}

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Write another text into a file of the copy, for as long as the block runs."""
        path = self.folder / file
        before = path.read_bytes()
        self._write(path, text.encode())
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, data: bytes) -> None:
        """Write with a time of its own: Python takes compiled code for the file's if size and second are equal."""
        path.write_bytes(data)
        self._changes += 1
        second = path.stat().st_ctime + self._changes * 10
        os.utime(path, (second, second))

    def pytest(self, *arguments: str, seconds: float | None, environment: Mapping[str, str]) -> tuple[int | None, str]:
        """Run tests in one process; return the exit code and the output. The code is None if the time was over.

        All processes of the run end with it. Their priority is lower than the caller's.
        """
        command = [str(self._python if self._python.exists() else sys.executable), "-m", "pytest", *arguments]
        paths = os.pathsep.join([str(self.folder), str(PLUGINS)])
        compiled = {"PYTHONPYCACHEPREFIX": str(self.folder / ".compiled"), "PYTHONDONTWRITEBYTECODE": ""}
        more = {"PYTHONPATH": paths, **compiled, **environment}
        running = subprocess.Popen(  # noqa: S603 -- pytest
            command,
            cwd=self.folder,
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, ""
        else:
            return running.returncode, output
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


@contextmanager
def scratch_of(tree: Path) -> Iterator[Scratch]:
    """Make the copy of a tree: files that git knows, and new ones that git does not ignore.

    One process at a time works on the copy of a tree; another one waits.
    """
    tree = tree.resolve()
    name = f"bcp-mutants-{os.getuid()}-{hashlib.sha256(str(tree).encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"],  # noqa: S607 -- the user's git
            cwd=tree,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for each in filter(None, listed.split("\0")):
            if (tree / each).is_file():
                (folder / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / each, folder / each)
        for each in LINKED:
            if (tree / each).exists() and not (folder / each).exists():
                (folder / each).symlink_to((tree / each).resolve())
        try:
            yield Scratch(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
