"""The command line on a large checkpoint: memory of each command, and its speed beside a raw read or copy.

    python -m benchmarks.tools [--gib 8] [--folder DIR] [--quick] [--json FILE] [--check]

A process of its own saves a checkpoint. Then each command runs in a new process, once on a small checkpoint, so that
all is imported, and once on the large one. Memory is the peak of the second run above what was resident before it.
Speed is that of the same run's raw read or raw copy of the same files: files are cold, and a copy ends with fsync. The
table of contents of 405B parameters on 8,960 ranks is that of benchmarks.scale.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter

from benchmarks.figures import Figures, parser
from benchmarks.llama import Job
from benchmarks.planning import plan
from benchmarks.speed.disk import cool, files_of, nbytes_of, remove

GIB, STEP, THREADS = 1 << 30, 8 << 20, 2
MOST_MEMORY, LEAST_SPEED, SHOW_SECONDS = 1.0, 0.8, 2.0

SAVE = """\
import sys, torch, bcp
path, nbytes = sys.argv[1], int(sys.argv[2])
count = max(nbytes >> 26, 1)
made = [torch.Generator().manual_seed(n) for n in range(count)]
model = {f"layers.{n}.w": torch.randn(nbytes // count // 4, generator=made[n]) for n in range(count)}
bcp.save(path, {"model": model}, options=bcp.SaveOptions(record=False))
"""

RUN = """\
import json, sys, time
from pathlib import Path
from bcp.cli import main
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
small, large = json.loads(sys.argv[1])
first = main(small)
Path("/proc/self/clear_refs").write_text("5")
before, began = status("VmRSS"), time.perf_counter()
code = main(large)
seconds = time.perf_counter() - began
print(json.dumps([first, code, seconds, status("VmHWM") - before]), file=sys.stderr)
"""


def main() -> int:
    """Run everything."""
    options = parser(__doc__)
    options.add_argument("--gib", type=float, help="size of the checkpoint, 8 by default")
    options.add_argument("--folder", metavar="DIR", help="where the files go; a new folder below it is removed")
    chosen = options.parse_args()
    nbytes = int((chosen.gib or (0.5 if chosen.quick else 8)) * GIB)
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        bench = Bench(Path(folder), nbytes, figures, repeat=1 if chosen.quick else 2)
        bench.prepare()
        bench.look()
        bench.compare()
        bench.copy()
        if not chosen.quick:
            show_large(Path(folder), figures)
    return figures.close(chosen)


class Bench:
    """A large and a small checkpoint, and commands on them."""

    def __init__(self, folder: Path, nbytes: int, figures: Figures, repeat: int) -> None:
        self.folder, self.figures, self.repeat = folder, figures, repeat
        self.large, self.small = folder / "large", folder / "small"
        self.asked = self.nbytes = nbytes

    def prepare(self) -> None:
        """Save both checkpoints."""
        for path, nbytes in ((self.large, self.nbytes), (self.small, 1 << 20)):
            subprocess.run([sys.executable, "-c", SAVE, str(path), str(nbytes)], check=True)  # noqa: S603 -- our own
        self.nbytes = nbytes_of(self.large)

    def look(self) -> None:
        """Read the large checkpoint."""
        self.figures.head(f"verify of {self.nbytes / GIB:.1f} GiB, beside a raw read")
        raw = min(self._raw_read() for _ in range(2))
        self.figures.add("raw read", self.nbytes / raw / 1e9, "GB/s")
        self._measure("verify", ["verify"], raw, [])

    def compare(self) -> None:
        """Compare the checkpoint with one whose blocks all differ."""
        self.figures.head("diff of two checkpoints without an equal block, beside a raw read of both")
        other, less = self.folder / "other", self.folder / "less"
        program = SAVE.replace("manual_seed(n)", "manual_seed(n + 1000)")
        for path, nbytes in ((other, self.asked), (less, 1 << 20)):
            subprocess.run([sys.executable, "-c", program, str(path), str(nbytes)], check=True)  # noqa: S603 -- our own
        cool(other)
        first, second = ["diff", str(self.small), str(less)], ["diff", str(self.large), str(other)]
        seconds, peak = self._run(first, second, status=1)
        self.figures.add("diff: memory", peak / GIB, "GiB", MOST_MEMORY)
        self.figures.add("diff: speed", 2 * self.nbytes / seconds / 1e9, "GB/s")
        remove(other)

    def copy(self) -> None:
        """Copy and export the large checkpoint."""
        self.figures.head("copies and exports, beside a raw copy")
        raw = min(self._raw_copy() for _ in range(2))
        self.figures.add("raw copy", self.nbytes / raw / 1e9, "GB/s")
        for words in (["cp"], ["export", "safetensors"], ["export", "hf"], ["export", "torch"], ["export", "dcp"]):
            self._measure(" ".join(words), words, raw, ["goal"])

    def _measure(self, name: str, words: Sequence[str], raw: float, goals: Sequence[str]) -> None:
        """Run a command, and compare it with a raw way."""
        best, most = float("inf"), 0.0
        for _ in range(self.repeat):
            pairs = []
            for size, source in (("s", self.small), ("l", self.large)):
                targets = [str(self.folder / f"{goal}-{size}") for goal in goals]
                pairs.append([*words, str(source), *targets])
            seconds, peak = self._run(pairs[0], pairs[1])
            best, most = min(best, seconds), max(most, peak)
            for size in "sl":
                for goal in goals:
                    remove(self.folder / f"{goal}-{size}")
        self.figures.add(f"{name}: memory above imports", most / GIB, "GiB", MOST_MEMORY)
        self.figures.add(f"{name}: speed / raw", raw / best, "", LEAST_SPEED, least=True)

    def _run(self, small: Sequence[str], large: Sequence[str], status: int = 0) -> tuple[float, float]:
        """Run a command in a new process; return seconds, and peak memory above that before it."""
        cool(self.large)
        os.sync()
        command = [sys.executable, "-c", RUN, json.dumps([list(small), list(large)])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own
        first, code, seconds, peak = json.loads(done.stderr.splitlines()[-1])
        if (first, code) != (status, status):
            raise RuntimeError(f"bcp {' '.join(large)} ended with {code}: {done.stdout}{done.stderr}")
        if large[0] not in ("verify", "diff"):
            began = perf_counter()
            os.sync()  # counted: a raw copy ends with fsync
            seconds += perf_counter() - began
        return seconds, peak

    def _raw_read(self) -> float:
        cool(self.large)
        began = perf_counter()
        in_pieces(self.large, lambda *_: None)
        return perf_counter() - began

    def _raw_copy(self) -> float:
        """Copy all files by two threads, with fsync."""
        cool(self.large)
        goal = self.folder / "raw"
        goal.mkdir()
        began = perf_counter()
        opened: dict[Path, int] = {}
        try:
            for number, file in enumerate(files_of(self.large)):
                opened[file] = os.open(goal / str(number), os.O_WRONLY | os.O_CREAT)
                os.posix_fallocate(opened[file], 0, file.stat().st_size)
            in_pieces(self.large, lambda file, data, start: os.pwrite(opened[file], data, start))
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        seconds = perf_counter() - began
        remove(goal)
        return seconds


Work = Callable[[Path, memoryview, int], object]


def in_pieces(folder: Path, work: Work) -> None:
    """Read all files of a folder by pieces, in two threads, and hand each piece to ``work(file, data, start)``."""
    todo: SimpleQueue[tuple[Path, int]] = SimpleQueue()
    for file in files_of(folder):
        for start in range(0, file.stat().st_size, STEP):
            todo.put((file, start))

    def run() -> None:
        buffer = bytearray(STEP)
        while True:
            try:
                file, start = todo.get_nowait()
            except Empty:
                return
            with reading(file) as descriptor:
                count = os.preadv(descriptor, [buffer], start)
            work(file, memoryview(buffer)[:count], start)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """Open a file by descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def show_large(folder: Path, figures: Figures) -> None:
    """Show the table of contents of a very large job."""
    figures.head("show of 405B parameters on 8,960 ranks")
    with redirect_stdout(StringIO()):
        planned = plan(Job(8, 70, 16, "B"), Figures())
    path = folder / "405b"
    path.mkdir()
    (path / "metadata.arrow").write_bytes(planned.metadata)
    command = [sys.executable, "-m", "bcp", "show", str(path)]

    def seconds() -> float:
        began = perf_counter()
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 -- our own
        return perf_counter() - began

    figures.measure("bcp show, from the start of the process", seconds, "s", SHOW_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
