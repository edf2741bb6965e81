"""All reports on one screen: a line for each healthy check, and the findings of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from bcp._doctor.meeting import RankPlace
from bcp._doctor.report import Report, in_words, ranks_in_words, span, while_short
from bcp._messages.doctor import Finding

__all__ = ["Job", "Screen", "ascii_only", "screen", "subject"]

_CHECKS = ("store", "addresses", "reach", "clocks", "storage", "versions")
_MOST = 4  # findings of one check on the screen
_APART_SECONDS = 1.0  # from here on, clocks are worth a warning
_CLOCKS = "set the hosts' clocks by a time server (chrony, ntp): certificates and dates of checkpoints need them"
_VERSIONS = "install the same versions on all hosts: differences may fail in any operation"
_UNHEARD = "see what these ranks print: they have lost the store, hang or are dead"


@dataclass(frozen=True, slots=True)
class Job:
    """Facts of the job, besides the ranks' reports.

    Attributes:
        place: rank 0's.
        names: of the hosts; none if the ranks have not met.
        host_of: the index of each rank's host.
        seconds: the duration of the meeting.
        path: the storage path, if there is one.
    """

    place: RankPlace
    names: Sequence[str] = ()
    host_of: Sequence[int] = ()
    seconds: float = 0.0
    path: str | None = None

    def hosts(self, ranks: Iterable[int]) -> list[str]:
        """Return the names of the ranks' hosts, in order."""
        return [self.names[index] for index in sorted({self.host_of[rank] for rank in ranks if self.host_of})]


@dataclass(frozen=True, slots=True)
class Screen:
    """The text that rank 0 prints.

    Attributes:
        lines: in ASCII.
        healthy: whether there is nothing worse than a warning.
    """

    lines: Sequence[str]
    healthy: bool


def screen(job: Job, reports: Sequence[Report]) -> Screen:
    """Return the screen for these reports; rank 0's comes first."""
    lines, bad, warned = [_head(job, reports[0])], list[str](), False
    for check in _CHECKS:
        if findings := _said(check, job, reports):
            bad.append(check)
            lines += _block("FAIL", check, findings, sum(report.more.get(check, 0) for report in reports))
        elif warnings := _warnings(check, job, reports):
            warned = True
            lines += _block("warn", check, warnings)
        elif text := _WELL[check](job, reports) if job.names and check in _WELL else "":
            lines.append(_line("ok", check, text))
    if not job.names:
        lines.append(_line("", "", "all other checks need all ranks"))
    well = "healthy, but see the warnings" if warned else "healthy"
    lines.append(f"not healthy: {', '.join(bad)}" if bad else well)
    return Screen([ascii_only(line) for line in lines], healthy=not bad)


def subject(ranks: Iterable[int], hosts: Sequence[str], *, of_host: bool = False) -> str:
    """Name the ranks or hosts of a finding, as in ``"ranks 0-7 (host h1)"``."""
    where = in_words("host", hosts) if hosts else ""
    if of_host and where:
        return where
    return f"{ranks_in_words(ranks)} ({where})" if where else ranks_in_words(ranks)


def ascii_only(text: str) -> str:
    """Return a text as one line of ASCII, which every terminal shows."""
    return " ".join(text.split("\n")).encode("ascii", "backslashreplace").decode()


def _head(job: Job, own: Report) -> str:
    ranks = f"{job.place.world_size} rank{'s' * (job.place.world_size > 1)}"
    hosts = f" on {len(job.names)} host{'s' * (len(job.names) > 1)} ({span(job.names)})" if job.names else ""
    return f"bcp doctor: {ranks}{hosts}, {_versions(own)}"


def _line(state: str, check: str, text: str) -> str:
    return f"{state:5} {check:10} {text}".rstrip()


def _block(state: str, check: str, remedies: Mapping[str, str], more: int = 0) -> Iterator[str]:
    """Yield the lines of an unhealthy check; ``remedies`` has its findings, each with a remedy."""
    texts = list(remedies)
    yield _line(state, check, texts[0])
    yield from (_line("", "", text) for text in texts[1:_MOST])
    if more := more + max(0, len(texts) - _MOST):
        yield _line("", "", f"and {more} more")
    yield from (_line("", "", f"-> {do}") for do in dict.fromkeys(remedies.values()) if do)


# -- findings ---------------------------------------------------------------------------------


def _said(check: str, job: Job, reports: Sequence[Report]) -> dict[str, str]:
    """Return the findings of a check, each with a remedy; equal findings of several ranks are one."""
    ranks_of: dict[Finding, list[int]] = {}
    for report in reports:
        for finding in report.findings:
            if finding.check == check:
                ranks_of.setdefault(finding, []).append(report.rank)
    remedies = {
        f"{subject(ranks, job.hosts(ranks), of_host=finding.of_host)} {finding.text}": finding.do
        for finding, ranks in ranks_of.items()
    }
    heard = {report.rank for report in reports}
    unheard = [rank for rank in range(len(job.host_of)) if rank not in heard]
    if check == "store" and unheard:
        remedies[f"no report has come from {subject(unheard, job.hosts(unheard))}"] = _UNHEARD
    return remedies


def _warnings(check: str, job: Job, reports: Sequence[Report]) -> dict[str, str]:
    """Return the warnings of a check, each with a remedy."""
    if check == "clocks":
        ahead = {report.rank: (-way.ahead, way.seconds / 2) for report in reports if (way := report.clock) is not None}
        return {
            f"{subject([rank], job.hosts([rank]), of_host=True)} is {abs(apart):.1f} s "
            f"{'ahead of' if apart > 0 else 'behind'} rank 0 ({job.hosts([0])[0]})": _CLOCKS
            for rank, (apart, unsure) in ahead.items()
            if abs(apart) - unsure > _APART_SECONDS
        }
    if check == "versions":
        ranks_of: dict[str, list[int]] = {}
        for report in reports:
            ranks_of.setdefault(_versions(report), []).append(report.rank)
        if len(ranks_of) > 1:
            return {f"{subject(ranks, job.hosts(ranks))}: {text}": _VERSIONS for text, ranks in ranks_of.items()}
    return {}


# -- healthy checks, empty if nothing is known ------------------------------------------------


def _store(job: Job, reports: Sequence[Report]) -> str:
    if job.place.world_size == 1:
        return "one process alone needs none"
    slowest = _duration(max(report.store_seconds for report in reports))
    return f"{job.place.store} answers in {slowest}; all {job.place.world_size} ranks came within {job.seconds:.1f} s"


def _addresses(_: Job, reports: Sequence[Report]) -> str:
    addresses = {ip_address(report.address) for report in reports if report.address}
    texts = [str(address) for address in sorted(addresses, key=lambda address: (address.version, int(address)))]
    interfaces = list(dict.fromkeys(report.interface for report in reports if report.interface))
    return f"{' to '.join(dict.fromkeys([texts[0], texts[-1]]))} ({while_short(interfaces)})" if texts else ""


def _reach(job: Job, reports: Sequence[Report]) -> str:
    hosts, slowest = len(job.names), _duration(max(report.slowest for report in reports))
    if hosts == 1:
        alone = job.place.world_size == 1
        return "one process alone" if alone else f"one host: all ranks reach their leader, {slowest} at most"
    leaders = {job.host_of.index(index) for index in range(hosts)}
    ways, wanted = sum(report.ways for report in reports if report.rank in leaders), hosts * (hosts - 1)
    many = f"all {ways}" if ways == wanted else f"{ways} of {wanted}"
    return f"{many} ways between hosts, {slowest} at most" if ways else ""


def _clocks(_: Job, reports: Sequence[Report]) -> str:
    ways = [report.clock for report in reports if report.clock is not None]
    return f"within {_duration(max(abs(way.ahead) + way.seconds / 2 for way in ways))}" if ways else ""


def _storage(job: Job, _: Sequence[Report]) -> str:
    if job.path is None:
        return "not tried: no PATH was given"
    shared = ", shared by all hosts" if len(job.names) > 1 else ""
    return f"{job.path}: writable from {'all ranks' if job.place.world_size > 1 else 'here'}{shared}"


_WELL = {"store": _store, "addresses": _addresses, "reach": _reach, "clocks": _clocks, "storage": _storage}


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(0.1, 1000 * seconds):.1f} ms"
