"""The run: rounds, in which everybody has a turn; one at a time, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.speed import disk
from benchmarks.speed.cases import CASES, SMALL_BYTES, YARDSTICK, Case
from benchmarks.speed.crew import Crew, LibraryFailedError
from benchmarks.speed.libraries import missing
from benchmarks.speed.raw import COPY, READ_WARM, READS_COLD, WRITES, Raw
from benchmarks.speed.samples import RAW, Samples

__all__ = ["Run"]


@dataclass(slots=True)
class Run:
    """One run of the benchmark.

    Attributes:
        nbytes: size of the state.
        rounds: how often the libraries that goals are about have their turn.
        folder: where checkpoints are written, on the disk that is measured.
        libraries: who may take part.
        quick: let others than bcp take part once, or not at all.
        samples: what was measured so far.
        say: told what is going on.
    """

    nbytes: int
    rounds: int
    folder: Path
    libraries: Sequence[str]
    quick: bool = False
    samples: Samples = field(default_factory=Samples)
    say: Callable[[str], None] = print

    _raw: Raw | None = None

    def part(self, name: str) -> None:
        """Measure one part: its cases take turns, and in each the libraries."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cases = [case for case in CASES if case.part == name]
        for number in range(self.rounds):
            for case in cases:
                for library in self.libraries:
                    if self._plays(library, case, number) and self._there(library):
                        self.say(f"\n{case.name}, round {number + 1}: {library}")
                        self._turn(library, case)

    def _plays(self, library: str, case: Case, number: int) -> bool:
        """Say whether it is this library's turn."""
        plays = case.plays_quickly if self.quick else case.plays
        return plays(library, number, self.rounds)

    def clean(self) -> None:
        """Remove all files."""
        disk.remove(self.folder)

    def _there(self, library: str) -> bool:
        """Say whether a library can take part; of one that cannot, this is told once."""
        if library not in self.samples.absent and (why := missing(library)):
            self.samples.absent[library] = why
            self.say(f"\n{library}: {why}")
        return library not in self.samples.absent

    def _turn(self, library: str, case: Case) -> None:
        """Let one library save in one set of processes, and load in another, as a job that is resumed would."""
        nbytes = SMALL_BYTES if case.tensors else self.nbytes
        kept = self.folder / "kept"
        try:
            with Crew(library, case, nbytes, filled=True) as crew:
                self._save(crew, kept)
                digests = crew.digest()
                if case.backgrounds:
                    self._save_in_background(crew, self.folder / "other")
            with Crew(library, case, nbytes, filled=False) as crew:
                self._load(crew, kept, digests)
        except LibraryFailedError as error:
            self.samples.absent[library] = f"failed: {str(error).strip().splitlines()[-1]}"
            self.say(str(error))
        finally:
            disk.remove(kept)
            disk.remove(self.folder / "other")

    def _save(self, crew: Crew, path: Path) -> None:
        """Save in every way; in the first one twice, because a first save may take longer."""
        for number, way in enumerate([crew.ways["saves"][0], *crew.ways["saves"]]):
            if number == 1:
                self._limits(crew, "write", WRITES)
            disk.remove(path)
            self._measure(crew, "save", way, path, first=number == 0)

    def _save_in_background(self, crew: Crew, path: Path) -> None:
        """Save in every background way twice."""
        self._limits(crew, "copy", [COPY])
        for way in crew.ways["backgrounds"]:
            for first in (True, False):
                disk.remove(path)
                self._measure(crew, "background", way, path, first=first)

    def _load(self, crew: Crew, path: Path, digests: list[str]) -> None:
        """Load in every way, cold and warm, and look at what was loaded."""
        for way in crew.ways["loads"]:
            for kind, prepare, limits in (("cold", disk.cool, READS_COLD), ("warm", disk.warm_up, [READ_WARM])):
                self._limits(crew, f"{kind} load", limits)
                crew.clear()
                prepare(path)
                self._measure(crew, f"{kind} load", way, path, cached=disk.cached_share(path))
                if crew.digest() != digests:
                    raise LibraryFailedError(f"{crew.library}: {way}: what was loaded is not what was saved")

    def _measure(self, crew: Crew, kind: str, way: str, path: Path, *, first: bool = False, **more: float) -> None:
        """Measure once."""
        values = crew.measure(kind.rpartition(" ")[2], way, path) | more
        self._take(f"first {kind}" if first else kind, crew.library, way, crew.case, values)

    def _limits(self, crew: Crew, kind: str, ways: Sequence[str]) -> None:
        """Measure what the machine can do, where this is the library to compare it with."""
        if crew.library != YARDSTICK or crew.case.tensors:
            return
        if self._raw is None:
            self._raw = Raw(crew.nbytes, self.folder / "raw")
        for way in ways:
            try:
                self._take(kind, RAW, way, crew.case, {"seconds": self._raw.ways[way]()})
            except OSError as error:  # a file system without O_DIRECT: the other ways remain
                self.say(f"  {RAW}: {way}: {error}")

    def _take(self, kind: str, library: str, way: str, case: Case, values: Mapping[str, float]) -> None:
        """Keep and tell a measurement."""
        self.samples.add(kind, library, way, values, case.name)
        self.say(f"  {library + ': ' + way:<48}{kind:<18}{values['seconds']:8.3f} s")
