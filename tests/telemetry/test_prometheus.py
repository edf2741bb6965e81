"""Metrics of a real job, as they arrive at a real Prometheus; the dashboard's queries and the alerts on them."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import scraped
from by_torchrun import started
from servers.prometheus import Prometheus, promtool

from monitoring import dashboard

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3600)]
MONITORING = Path(dashboard.__file__).parent
RANKS = ("0", "1")
ROUNDS = 2
DEADLINE = 1200.0
"""Seconds of each wait; alone, the longest one takes 20."""

HISTOGRAMS = {
    f"bcp_{name}_seconds"
    for name in (
        *("save_blocking", "save_stall", "save_released", "save_durable", "save_lag", "load_duration"),
        *("stage_duration", "phase_duration", "storage_request"),
    )
}
OTHERS = {
    *("bcp_bytes_total", "bcp_retries_total", "bcp_failures_total", "bcp_dedup_bytes_total"),
    *("bcp_corrupt_blocks_total", "bcp_checkpoint_age_seconds", "bcp_checkpoint_step", "bcp_work_at_risk_seconds"),
    *("bcp_queue_occupancy", "bcp_staging_bytes", "bcp_drain_snapshots", "bcp_drain_bytes"),
    *("bcp_tier_age_seconds", "bcp_tier_events_total", "bcp_tier_read_bytes_total"),
}


def eventually(met: Callable[[], bool], alive: Callable[[], object]) -> None:
    """Wait until a condition is met of which nothing tells; fail after :data:`DEADLINE`."""
    deadline = time.monotonic() + DEADLINE
    while not met():
        alive()
        assert time.monotonic() < deadline, f"nothing has happened for {DEADLINE:.0f} s"
        time.sleep(0.02)


@dataclass
class Scraped:
    """A job that has done its rounds, and the Prometheus that knows.

    Attributes:
        live: queue occupancy of the stage that waited, and staging memory, of each rank in the first save.
        reports: of all saves and loads that went well, and errors of those that failed, by rank.
        ended: when the last round had ended, by ``time.time()``.
    """

    prometheus: Prometheus
    live: list[tuple[float, float]]
    reports: Mapping[str, Mapping[str, list[Any]]]
    ended: float

    def value(self, rank: str, query: str) -> float:
        """Return the one value of a query, in which RANK stands for the label of the rank."""
        (value,) = self.prometheus.query(query.replace("RANK", f'dl_rank="{rank}"')).values()
        return value

    def kept(self, rank: str, *, durable: bool) -> list[Any]:
        """Return the reports of saves into memory, of those that stay there or of those that became durable."""
        return self.reports[rank]["kept"][int(durable) :: 2]

    def sums(self, rank: str, name: str, field: str) -> Any:
        return sum(report[field] for report in self.reports[rank][name])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    process = started(len(RANKS), scraped.__file__, str(folder))

    def alive() -> None:
        if process.poll() is not None:
            out, errors = process.communicate()
            pytest.fail(f"the job has ended: {out[-3000:]}{errors[-10000:]}")

    try:
        eventually(lambda: all((folder / f"target-{rank}").exists() for rank in RANKS), alive)
        data = tmp_path_factory.mktemp("prometheus")
        targets = [(folder / f"target-{rank}").read_text() for rank in RANKS]
        with Prometheus(data, targets) as prometheus:
            yield rounds(folder, prometheus, alive)
        (folder / "end").touch()
        out, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, out[-3000:] + errors[-10000:]
    finally:
        process.terminate()  # which ends its ranks too
        process.communicate()


def rounds(folder: Path, prometheus: Prometheus, alive: Callable[[], object]) -> Scraped:
    """Let the job do its rounds; Prometheus sees each of them."""
    live: list[tuple[float, float]] = []
    reports: dict[str, dict[str, list[Any]]] = {rank: {} for rank in RANKS}
    for number in range(1, ROUNDS + 1):
        (folder / f"begin-{number}").touch()
        waits = 'min(bcp_queue_occupancy{stage="wait"})' if number > 1 else "count(up == 1)"
        enough = float(scraped.PARTS - 1 if number > 1 else len(RANKS))
        eventually(lambda: enough in prometheus.query(waits).values(), alive)  # noqa: B023 -- called here
        if number > 1:
            queues, staging = (
                prometheus.query(f"{query} + on(dl_rank) 0 * bcp_staging_bytes")
                for query in ('bcp_queue_occupancy{stage="wait"}', "bcp_staging_bytes")
            )
            live += zip(queues.values(), staging.values(), strict=True)
        (folder / f"release-{number}").touch()
        done = [folder / f"done-{number}-{rank}" for rank in RANKS]
        eventually(lambda: all(path.exists() for path in done), alive)  # noqa: B023 -- called here
        for rank, path in zip(RANKS, done, strict=True):
            for name, found in json.loads(path.read_text()).items():
                reports[rank].setdefault(name, []).extend(found)
        ended = time.time()
        scrapes = f"count(timestamp(bcp_staging_bytes) > {ended + 1})"
        eventually(lambda: prometheus.query(scrapes).get(()) == len(RANKS), alive)  # noqa: B023 -- called here
    return Scraped(prometheus, live, reports, ended)


def test_every_metric_arrives_from_every_rank(job: Scraped) -> None:
    parts = {f"{name}_{part}" for name, part in product(HISTOGRAMS, ("bucket", "count", "sum"))}
    assert {name for name in job.prometheus.names() if name.startswith("bcp_")} == OTHERS | parts
    for name in OTHERS | parts:
        ranks = {dict(labels)["dl_rank"] for labels in job.prometheus.query(name)}
        assert ranks == set(RANKS), name
    assert job.value("0", "target_info{RANK}") == 1


@pytest.mark.parametrize("rank", RANKS)
def test_durations_are_those_of_the_reports(job: Scraped, rank: str) -> None:
    saved, loaded, kept = (job.reports[rank][name] for name in ("saved", "loaded", "kept"))
    assert (len(saved), len(loaded), len(kept)) == (3 * ROUNDS, ROUNDS, 2 * ROUNDS)
    background = [report for report in saved if report["path"].endswith("1")]
    waited = [report for report in saved if report not in background]
    assert job.value(rank, 'bcp_save_blocking_seconds_count{RANK, background="true"}') == len([*background, *kept])
    blocking = job.value(rank, 'bcp_save_blocking_seconds_sum{RANK, background="true"}')
    assert blocking == pytest.approx(sum(report["blocking_seconds"] for report in [*background, *kept]))
    stall = job.value(rank, 'bcp_save_stall_seconds_sum{RANK, background="false"}')
    assert stall == pytest.approx(sum(report["seconds"] for report in waited))
    durable = job.value(rank, "sum(bcp_save_durable_seconds_sum{RANK})")
    later = sum(report["seconds"] for report in job.kept(rank, durable=True))
    assert blocking < durable <= job.sums(rank, "saved", "seconds") + later + 1e-9
    assert job.value(rank, "bcp_save_released_seconds_count{RANK}") == len(kept)
    assert 0 < job.value(rank, "sum(bcp_save_lag_seconds_sum{RANK})") < durable
    assert job.value(rank, "bcp_load_duration_seconds_count{RANK}") == 2 * ROUNDS, "a load and a resumption in each"
    assert job.value(rank, "bcp_load_duration_seconds_sum{RANK}") > job.sums(rank, "loaded", "seconds")
    for stage in ("d2h", "upload"):
        seconds = job.value(rank, f'bcp_stage_duration_seconds_sum{{RANK, kind="save", stage="{stage}"}}')
        assert seconds == pytest.approx(sum(report["stage_seconds"].get(stage, 0) for report in [*saved, *kept]))
    commits = job.value(rank, 'bcp_phase_duration_seconds_count{RANK, kind="save", phase="commit"}')
    assert commits == len([*saved, *kept])


@pytest.mark.parametrize("rank", RANKS)
def test_counters_are_those_of_the_reports(job: Scraped, rank: str) -> None:
    drained = sum(report["nbytes"] for report in job.kept(rank, durable=True))
    assert job.value(rank, 'bcp_bytes_total{RANK, kind="save"}') == job.sums(rank, "saved", "nbytes") + drained
    assert job.value(rank, 'bcp_bytes_total{RANK, kind="memory"}') == job.sums(rank, "kept", "nbytes")
    assert job.value(rank, 'bcp_bytes_total{RANK, kind="load"}') >= job.sums(rank, "loaded", "nbytes")
    dedup = job.sums(rank, "saved", "dedup_saved_bytes") + job.sums(rank, "kept", "dedup_saved_bytes")
    assert job.value(rank, "bcp_dedup_bytes_total{RANK}") == dedup
    assert job.value(rank, 'bcp_retries_total{RANK, kind="save"}') == scraped.RETRIES * ROUNDS
    again = 'sum(bcp_storage_request_seconds_count{RANK, backend="flaky", status="again"})'
    assert job.value(rank, again) == scraped.RETRIES * ROUNDS
    by_kind = f'sum by (kind, error_type) (bcp_failures_total{{dl_rank="{rank}"}})'  # a peer's end is seen in any stage
    failures = {
        (labels["kind"], labels["error_type"]): value
        for labels, value in ((dict(labels), value) for labels, value in job.prometheus.query(by_kind).items())
    }
    kinds = ("save", "load") * ROUNDS
    assert failures == Counter(zip(kinds, job.reports[rank]["failed"], strict=True))


@pytest.mark.parametrize("rank", RANKS)
def test_the_memory_tier_tells_its_events(job: Scraped, rank: str) -> None:
    events = job.prometheus.query(f'bcp_tier_events_total{{dl_rank="{rank}"}} > 0')
    counts = {dict(labels)["event"]: value for labels, value in events.items()}
    assert counts["released"] == 2 * ROUNDS
    assert counts["draining"] == ROUNDS
    assert counts["durable"] >= ROUNDS, "also of those that the runs came back from, on rank 0"
    assert {*counts} == {"released", "draining", "durable"}
    assert job.value(rank, "bcp_drain_snapshots{RANK}") == job.value(rank, "bcp_drain_bytes{RANK}") == 0
    ages = job.prometheus.query(f'bcp_tier_age_seconds{{dl_rank="{rank}"}}')
    assert {dict(labels)["tier"] for labels in ages} == {"memory", "storage"}
    assert job.value(rank, 'bcp_tier_read_bytes_total{RANK, place="own host"}') > 0


def test_replicas_and_corrupt_blocks_are_counted_over_all_ranks(job: Scraped) -> None:
    assert sum(job.sums(rank, "saved", "dedup_saved_bytes") for rank in RANKS) > 0
    assert job.value("", "sum(bcp_corrupt_blocks_total)") == ROUNDS
    assert job.value("", 'sum(bcp_failures_total{stage="compress", error_type="StageError"})') == ROUNDS


@pytest.mark.parametrize("rank", RANKS)
def test_gauges_tell_of_the_newest_checkpoint(job: Scraped, rank: str) -> None:
    assert job.value(rank, "bcp_checkpoint_step{RANK}") == 10 * ROUNDS + 3
    since = "timestamp(bcp_checkpoint_age_seconds{RANK}) - bcp_checkpoint_age_seconds{RANK}"
    committed = job.value(rank, since)
    assert job.ended - DEADLINE < committed <= job.ended + 1
    risk = job.value(rank, f"bcp_work_at_risk_seconds{{RANK}} / {len(RANKS)} - bcp_checkpoint_age_seconds{{RANK}}")
    assert 0 < risk < DEADLINE


def test_gauges_of_queues_and_memory_are_live(job: Scraped) -> None:
    assert len(job.live) == len(RANKS)
    for waiting, nbytes in job.live:
        assert waiting == scraped.PARTS - 1
        assert nbytes > (scraped.PARTS - 1) * scraped.MIB
    for rank in RANKS:
        assert job.value(rank, "bcp_staging_bytes{RANK}") == 0
        assert job.value(rank, 'bcp_queue_occupancy{RANK, stage="wait"}') == 0


# -- dashboard and alerts ----------------------------------------------------------------------------

PANELS = [panel for row in dashboard.ROWS for panel in row.panels]


def test_the_dashboard_is_what_its_generator_makes() -> None:
    written = (MONITORING / "grafana.json").read_text()
    assert written == dashboard.as_json(), "python -m monitoring.dashboard"
    board = json.loads(written)
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels] == [panel.title for panel in PANELS]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert expressions == [query.expression for panel in PANELS for query in panel.queries]


@pytest.mark.parametrize("panel", PANELS, ids=[panel.title for panel in PANELS])
def test_every_query_of_the_dashboard_returns_data(job: Scraped, panel: dashboard.Panel) -> None:
    for query in panel.queries:
        expression = query.expression.replace("$window", "2h")  # all rounds have been in these hours
        found = job.prometheus.query(expression.replace("$job", "train"))
        assert found, query.expression
        assert any(math.isfinite(value) for value in found.values()), (query.expression, found)


def test_the_dashboard_shows_every_metric() -> None:
    queries = " ".join(query.expression for panel in PANELS for query in panel.queries)
    assert not [name for name in HISTOGRAMS | OTHERS if name not in queries]


def test_the_rules_of_the_alerts_are_right() -> None:
    promtool("check", "rules", MONITORING / "alerts.yml")
    promtool("test", "rules", Path(__file__).with_name("alert_rules.yml"))
