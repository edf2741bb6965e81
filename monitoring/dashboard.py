"""The Grafana dashboard of bcp's metrics: ``python -m monitoring.dashboard`` writes ``monitoring/grafana.json``.

Its queries have the names that OpenTelemetry's exporter for Prometheus gives to the metrics, with their units.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models

__all__ = ["ROWS", "Panel", "Query", "Row", "as_json"]

PATH = Path(__file__).with_name("grafana.json")
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${source}")


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        text: in PromQL; ``JOB`` stands for the selector of the job, ``SPAN`` for the window of averages.
        legend: name of each series.
    """

    text: str
    legend: str = ""

    @property
    def expression(self) -> str:
        """The query in PromQL, with Grafana's variables."""
        return self.text.replace("JOB", 'job=~"$job"').replace("SPAN", "[$window]")


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: its title.
        about: the meaning of its values.
        unit: in Grafana's words, as in ``s`` and ``Bps``.
        queries: its queries.
        width: columns, of 24.
        big: whether it shows the latest value alone.
        stacked: whether its series are parts of a whole.
    """

    title: str
    about: str
    unit: str
    queries: Sequence[Query]
    width: int = 8
    big: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one title."""

    title: str
    panels: Sequence[Panel]


def _mean(metric: str, by: str, more: str = "") -> str:
    """Return the mean of a histogram in the window, of the slowest rank."""
    labels = ", ".join(dict.fromkeys([by, "job", "instance"]))
    total, count = (f"sum by ({labels}) (rate({metric}_{part}{{JOB{more}}}SPAN))" for part in ("sum", "count"))
    return f"max by ({by}) ({total} / ({count} > 0))"


def _quantile(share: float, metric: str, by: str = "", more: str = "") -> str:
    """Return a quantile of a histogram in the window, over all ranks."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{JOB{more}}}SPAN)))"


SAVE, LOAD = ', kind="save"', ', kind="load"'
WRITE = ', kind="save", phase="write"'

RISK = Row(
    "What would be lost now",
    [
        Panel(
            "Age of the newest checkpoint",
            "Time since the newest durable checkpoint was committed.",
            "s",
            [Query("min by (job) (bcp_checkpoint_age_seconds{JOB})", "{{job}}")],
            width=6,
            big=True,
        ),
        Panel(
            "Work at risk",
            "Rank-hours of work that the newest durable checkpoint lacks.",
            "h",
            [Query("max by (job) (bcp_work_at_risk_seconds{JOB}) / 3600", "{{job}}")],
            width=6,
            big=True,
        ),
        Panel(
            "Last durable step",
            "Step of the newest durable checkpoint.",
            "none",
            [Query("max by (job) (bcp_checkpoint_step{JOB})", "{{job}}")],
            width=6,
            big=True,
        ),
        Panel(
            "Corrupt blocks",
            "Loads that ended at a block whose bytes are not those that were saved.",
            "none",
            [Query("sum by (job) (bcp_corrupt_blocks_total{JOB})", "{{job}}")],
            width=6,
            big=True,
        ),
        Panel(
            "Age over time",
            "A saw-tooth: each tooth is as high as the time between two commits.",
            "s",
            [Query("min by (job) (bcp_checkpoint_age_seconds{JOB})", "{{job}}")],
            width=12,
        ),
        Panel(
            "Work at risk over time",
            "Rank-seconds since the call of the newest durable save, or the end of the newest load.",
            "s",
            [Query("max by (job) (bcp_work_at_risk_seconds{JOB})", "{{job}}")],
            width=12,
        ),
    ],
)

SAVES = Row(
    "Saves",
    [
        Panel(
            "Save by phase",
            "Mean of the slowest rank. The snapshot is a part of the phase write.",
            "s",
            [Query(_mean("bcp_phase_duration_seconds", "phase", SAVE + ', phase!="snapshot"'), "{{phase}}")],
            stacked=True,
        ),
        Panel(
            "Blocking beside background",
            "Mean of the slowest rank: training waits for the first, and goes on during the second.",
            "s",
            [
                Query(_mean("bcp_save_blocking_seconds", "job"), "blocking"),
                Query(
                    f"clamp_min({_mean('bcp_save_durable_seconds', 'job')} - "
                    f"{_mean('bcp_save_blocking_seconds', 'job')}, 0)",
                    "background",
                ),
            ],
            stacked=True,
        ),
        Panel(
            "Stages of a save",
            "Mean of the slowest rank, from a stage's first item to its last one. Stages overlap.",
            "s",
            [Query(_mean("bcp_stage_duration_seconds", "stage", SAVE), "{{stage}}")],
        ),
        Panel(
            "Stall",
            "Time that training lost in one save: blocking, and optimizer steps that waited.",
            "s",
            [
                Query(_quantile(0.5, "bcp_save_stall_seconds"), "p50"),
                Query(_quantile(0.99, "bcp_save_stall_seconds"), "p99"),
            ],
        ),
        Panel(
            "Training lost to saves",
            "Share of the time in which the slowest rank stood still for saves.",
            "percentunit",
            [Query("max by (job) (sum by (job, instance) (rate(bcp_save_stall_seconds_sum{JOB}SPAN)))", "{{job}}")],
        ),
        Panel(
            "Lag",
            "Time from the end of the snapshot to the commit.",
            "s",
            [
                Query(_quantile(0.5, "bcp_save_lag_seconds"), "p50"),
                Query(_quantile(0.99, "bcp_save_lag_seconds"), "p99"),
            ],
        ),
        Panel(
            "Throughput",
            "Bytes of all ranks in one second of saving, and of loading.",
            "Bps",
            [
                Query(
                    'sum by (job) (rate(bcp_bytes_total{JOB, kind="save"}SPAN)) / '
                    "(max by (job) (sum by (job, instance) (rate(bcp_save_durable_seconds_sum{JOB}SPAN))) > 0)",
                    "save",
                ),
                Query(
                    'sum by (job) (rate(bcp_bytes_total{JOB, kind="load"}SPAN)) / '
                    "(max by (job) (rate(bcp_load_duration_seconds_sum{JOB}SPAN)) > 0)",
                    "load",
                ),
            ],
        ),
        Panel(
            "Straggler ratio",
            "Mean writing time of the slowest rank, divided by that of the median rank.",
            "none",
            [
                Query(
                    f"{_mean('bcp_phase_duration_seconds', 'job', WRITE)} / quantile by (job) "
                    f"(0.5, rate(bcp_phase_duration_seconds_sum{{JOB{WRITE}}}SPAN) / "
                    f"(rate(bcp_phase_duration_seconds_count{{JOB{WRITE}}}SPAN) > 0))",
                    "{{job}}",
                )
            ],
        ),
        Panel(
            "Not written twice",
            "Share of the state that a rank did not write because a replica on another rank did.",
            "percentunit",
            [
                Query(
                    "sum by (job) (rate(bcp_dedup_bytes_total{JOB}SPAN)) / "
                    "(sum by (job) (rate(bcp_dedup_bytes_total{JOB}SPAN)) + "
                    '(sum by (job) (rate(bcp_bytes_total{JOB, kind="save"}SPAN)) > 0))',
                    "{{job}}",
                )
            ],
        ),
        Panel(
            "Slowest ranks",
            "The five ranks that write longest, by their addresses.",
            "s",
            [
                Query(
                    f"topk(5, {_mean('bcp_phase_duration_seconds', 'instance', WRITE)})",
                    "{{instance}}",
                )
            ],
        ),
    ],
)

LOADS = Row(
    "Loads",
    [
        Panel(
            "Load",
            "Time of a load.",
            "s",
            [
                Query(_quantile(0.5, "bcp_load_duration_seconds"), "p50"),
                Query(_quantile(0.99, "bcp_load_duration_seconds"), "p99"),
            ],
        ),
        Panel(
            "Load by phase",
            "Mean of the slowest rank.",
            "s",
            [Query(_mean("bcp_phase_duration_seconds", "phase", LOAD), "{{phase}}")],
            stacked=True,
        ),
        Panel(
            "Stages of a load",
            "Mean of the slowest rank, from a stage's first item to its last one. Stages overlap.",
            "s",
            [Query(_mean("bcp_stage_duration_seconds", "stage", LOAD), "{{stage}}")],
        ),
    ],
)

TIERS = Row(
    "Memory tier",
    [
        Panel(
            "Age of the newest state in each tier",
            "Time since the call of the newest save that the tier holds: work that is lost if nothing nearer is left.",
            "s",
            [Query("min by (tier) (bcp_tier_age_seconds{JOB})", "{{tier}}")],
        ),
        Panel(
            "The two ends of a save",
            "Mean of the slowest rank: until the memory of the hosts has the snapshot, and until it is durable.",
            "s",
            [
                Query(_mean("bcp_save_released_seconds", "job"), "released"),
                Query(_mean("bcp_save_durable_seconds", "job"), "durable"),
            ],
        ),
        Panel(
            "Queue to storage",
            "Bytes of all ranks' snapshots that are on their way.",
            "bytes",
            [Query("sum by (job) (bcp_drain_bytes{JOB})", "{{job}}")],
        ),
        Panel(
            "Snapshots on their way to storage",
            "On the rank that has most. More than one means that storage is slower than the training saves.",
            "none",
            [Query("max by (job) (bcp_drain_snapshots{JOB})", "{{job}}")],
        ),
        Panel(
            "Events",
            "What happened to snapshots since the job's start, on the rank that has seen most.",
            "none",
            [Query("max by (event) (bcp_tier_events_total{JOB})", "{{event}}")],
        ),
        Panel(
            "Bytes that resumptions read",
            "From the memory of the own host, and from other hosts, by all ranks.",
            "bytes",
            [Query("sum by (place) (bcp_tier_read_bytes_total{JOB})", "{{place}}")],
        ),
    ],
)

STORAGE = Row(
    "Storage",
    [
        Panel(
            "Request latency, p50",
            "Half of the attempts take longer.",
            "s",
            [Query(_quantile(0.5, "bcp_storage_request_seconds", "backend, operation"), "{{backend}} {{operation}}")],
        ),
        Panel(
            "Request latency, p99",
            "One attempt of a hundred takes longer.",
            "s",
            [Query(_quantile(0.99, "bcp_storage_request_seconds", "backend, operation"), "{{backend}} {{operation}}")],
        ),
        Panel(
            "Requests",
            "Attempts by their end: answered, made again, failed for good.",
            "reqps",
            [
                Query(
                    "sum by (backend, status) (rate(bcp_storage_request_seconds_count{JOB}SPAN))",
                    "{{backend}} {{status}}",
                )
            ],
        ),
        Panel(
            "Failed attempts",
            "Share of the attempts that got no answer.",
            "percentunit",
            [
                Query(
                    'sum by (backend) (rate(bcp_storage_request_seconds_count{JOB, status!="ok"}SPAN)) / '
                    "sum by (backend) (rate(bcp_storage_request_seconds_count{JOB}SPAN))",
                    "{{backend}}",
                )
            ],
        ),
        Panel(
            "Retries",
            "Requests that were made again.",
            "none",
            [Query("sum by (kind) (increase(bcp_retries_total{JOB}SPAN))", "{{kind}}")],
        ),
        Panel(
            "Failures by stage",
            "Saves and loads that failed since the job's start, on all ranks. The guilty rank has no PeerError.",
            "none",
            [
                Query(
                    "sum by (kind, stage, error_type) (bcp_failures_total{JOB})",
                    "{{kind}}, {{stage}}: {{error_type}}",
                )
            ],
        ),
    ],
)

NOW = Row(
    "Under way",
    [
        Panel(
            "Queue occupancy",
            "Items that wait for a stage, on the rank where most wait. The stage behind a full queue is the slow one.",
            "none",
            [Query("max by (stage) (bcp_queue_occupancy{JOB})", "{{stage}}")],
            width=12,
        ),
        Panel(
            "Staging memory",
            "Host memory that parts have borrowed, on the rank that has most.",
            "bytes",
            [Query("max by (job) (bcp_staging_bytes{JOB})", "{{job}}")],
            width=12,
        ),
    ],
)

ROWS: Sequence[Row] = (RISK, SAVES, LOADS, TIERS, STORAGE, NOW)


def _built(panel: Panel) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel = _stat(panel) if panel.big else _graph(panel)
    for query, name in zip(panel.queries, "ABC", strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(name)
        built = built.with_target(target.instant() if panel.big else target.range())
    return built


def _stat(panel: Panel) -> stat.Panel:
    built = stat.Panel().title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE)
    return built.height(4).span(panel.width).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _graph(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE)
    built = (
        built.height(8)
        .span(panel.width)
        .min(0)
        .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL)).fill_opacity(40)
    return built


def _variables(board: dashboard.Dashboard) -> dashboard.Dashboard:
    """Add the variables: data source, job, and window."""
    jobs = dashboard.QueryVariable("job").label("Job").query("label_values(bcp_staging_bytes, job)").datasource(SOURCE)
    jobs = jobs.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    window = dashboard.CustomVariable("window").label("Window of averages").values("5m,10m,30m,1h,6h,1d")
    return (
        board.with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
        .with_variable(jobs)
        .with_variable(window.current(models.VariableOption(selected=True, text="30m", value="30m")))
    )


def as_json() -> str:
    """Return the dashboard as Grafana reads it."""
    board = dashboard.Dashboard("bcp checkpoints").uid("bcp-checkpoints").tags(["bcp", "checkpoints"])
    board = _variables(board.time("now-6h", "now").refresh("30s").timezone("browser").editable())
    numbers = count(1)
    for row in ROWS:
        board = board.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            board = board.with_panel(_built(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def main() -> None:
    """Write the file, or check with ``--check`` that this program makes the same."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is another one")
    made = as_json()
    if parser.parse_args().check:
        raise SystemExit(made != PATH.read_text())
    PATH.write_text(made)


if __name__ == "__main__":
    main()
