"""The page in a real browser: its numbers against those of the recording, after real events of the DOM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from servers.chromium import Tab, browser, tab
from telemetry.synthetic import Case, made

from bcp.telemetry.page import page
from bcp.telemetry.recording import EVENTS, FailureRecord, RankRecord, Recording

Show = Callable[..., Tab]


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    with browser() as address:
        yield address


@pytest.fixture
def show(chromium: str, tmp_path: Path) -> Iterator[Show]:
    """Open pages of recordings; at the end none of them may have complained or asked for anything."""
    opened = []

    def opening(*recordings: Recording, width: int = 1280, dark: bool = False, **more: Any) -> Tab:
        path = tmp_path / f"report-{len(opened)}.html"
        path.write_text(page(recordings, **more), encoding="utf-8")
        context = tab(chromium, width=width, dark=dark)
        opened.append((context, context.__enter__(), path))
        opened[-1][1].open(path)
        return opened[-1][1]

    yield opening
    for context, shown, path in opened:
        complaints, requests = shown.complaints(), shown.requests()
        shown.run("localStorage.clear()")  # pages of one browser share a chosen theme
        context.__exit__(None, None, None)
        assert complaints == []
        assert requests == [path.as_uri()]


@pytest.fixture(scope="module")
def saved() -> Recording:
    case = Case(axes={"pp": 2, "dp": 4, "tp": 8}, slow_ranks={17: 2.6}, slow_hosts={5: 1.4}, flaky=0.05, probed=11e9)
    return made(case)


def rows_of(recording: Recording, **wanted: object) -> list[dict[str, Any]]:
    events = recording.events
    for name, value in wanted.items():
        events = events.filter(pc.equal(events[name], value))
    rows: list[dict[str, Any]] = events.to_pylist()
    return rows


def heat(shown: Tab) -> dict[int, float | None]:
    return {cell["rank"]: cell["value"] for cell in shown.run("bcpReport.heat()")["cells"]}


def wall(rows: list[dict[str, Any]]) -> float:
    return max(row["start"] + row["seconds"] for row in rows) - min(row["start"] for row in rows)


FIGURES: dict[tuple[str, str], Callable[[list[dict[str, Any]]], float]] = {
    ("stage:upload", "seconds"): wall,
    ("stage:upload", "wait"): lambda rows: math.fsum(row["waited"] for row in rows),
    ("stage:upload", "bytes"): lambda rows: sum(row["nbytes"] for row in rows),
    ("stage:upload", "throughput"): lambda rows: sum(row["nbytes"] for row in rows) / wall(rows),
    ("stage:d2h", "busy"): lambda rows: math.fsum(row["seconds"] for row in rows),
    ("stage:checksum", "items"): len,
    ("phase:commit", "seconds"): wall,
    ("request:part", "longest"): lambda rows: max(row["seconds"] for row in rows),
    ("request:part", "retries"): lambda rows: sum(row["status"] == "again" for row in rows),
    ("request:part", "bytes"): lambda rows: sum(row["nbytes"] for row in rows if row["status"] == "ok"),
}


def test_cells_of_the_heat_map_are_the_numbers_of_the_recording(show: Show, saved: Recording) -> None:
    shown = show(saved)
    for (place, metric), figure in FIGURES.items():
        kind, _, name = place.partition(":")
        shown.choose("heat-place", place)
        shown.choose("heat-metric", metric)
        found = heat(shown)
        assert found == pytest.approx(
            {rank: figure(rows_of(saved, rank=rank, kind=kind, name=name)) for rank in range(64)}, rel=1e-5
        )


def test_figures_of_the_whole_save_are_those_of_the_reports(show: Show, saved: Recording) -> None:
    shown = show(saved)
    names = {"seconds": "seconds", "blocking": "blocking_seconds", "bytes": "nbytes", "retries": "retries"}
    for metric, figure in names.items():
        shown.choose("heat-metric", metric)
        wanted = {record.rank: record.figures[figure] for record in saved.ranks}
        assert heat(shown) == pytest.approx(wanted, rel=1e-6)
    shown.choose("heat-place", "figures")
    shown.choose("heat-metric", "state_nbytes")
    assert heat(shown) == {record.rank: record.figures["state_nbytes"] for record in saved.ranks}


def test_drawn_cells_say_and_colour_their_numbers(show: Show, saved: Recording) -> None:
    shown = show(saved)
    drawn = shown.run(
        "Array.from(document.querySelectorAll('#heat-chart .cell path'), path =>"
        " [path.getAttribute('aria-label'), path.getAttribute('fill'), path.getAttribute('stroke')])"
    )
    assert len(drawn) == 64
    labels = [label for label, _, _ in drawn]
    assert labels[17].startswith("rank 17, host node-002, local rank 1, pp 0, dp 2, tp 1: ")
    assert float(labels[17].rpartition(": ")[2].removesuffix(" s")) == pytest.approx(
        saved.ranks[17].figures["seconds"], abs=0.01
    )
    darkness = {label: sum(map(int, fill[4:-1].split(","))) for label, fill, _ in drawn}
    assert min(darkness, key=darkness.__getitem__) == labels[17]
    outlined = [label for label, _, stroke in drawn if stroke == drawn[17][2]]
    assert labels[17] in outlined
    assert len(outlined) < 12


def test_a_cell_tells_rank_host_and_value_under_the_mouse_and_chooses_the_rank(show: Show, saved: Recording) -> None:
    shown = show(saved)
    x, y = shown.run(
        "(() => { const cell = document.querySelectorAll('#heat-chart .cell path')[42]; cell.scrollIntoView({block:"
        " 'center', behavior: 'instant'}); const box = cell.getBoundingClientRect(); return [box.x + box.width / 2,"
        " box.y + box.height / 2]; })()"
    )
    shown.mouse("mouseMoved", x, y)
    shown.until("!document.getElementById('tip').hidden")
    tip = shown.run("document.getElementById('tip').textContent")
    assert tip.splitlines()[:6] == ["rank 42", "host node-005", "local rank 2", "pp 1", "dp 1", "tp 2"]
    assert "median" in tip
    shown.mouse("mousePressed", x, y)
    shown.mouse("mouseReleased", x, y)
    shown.until("document.getElementById('rank').value === '42'")
    shown.run("bcpReport.drawn()")
    assert shown.run("bcpReport.timeline().rank") == 42


def test_arrangements_show_every_rank_in_a_place_of_its_own(show: Show, saved: Recording) -> None:
    shown = show(saved)
    for layout in ("topology", "hosts", "grid"):
        shown.choose("heat-layout", layout)
        cells = shown.run("bcpReport.heat()")["cells"]
        assert sorted(cell["rank"] for cell in cells) == list(range(64))
        assert len({(cell["x"], cell["y"]) for cell in cells}) == 64
        if layout == "hosts":  # a host is a row
            rows = {cell["rank"]: cell["y"] for cell in cells}
            assert all(rows[rank] == rows[rank // 8 * 8] for rank in range(64))
    assert shown.run("document.getElementById('heat-layout').options.length") == 3


def test_arrow_keys_and_enter_choose_a_rank(show: Show, saved: Recording) -> None:
    shown = show(saved)
    shown.choose("rank", "0")
    shown.run("bcpReport.drawn()")
    shown.run("document.getElementById('heat-chart').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        shown.press(key)
    assert shown.run("document.getElementById('tip').textContent").startswith("rank 10\n")
    shown.press("Enter")
    assert shown.run("document.getElementById('rank').value") == "10"


def test_bars_of_the_timeline_are_the_events_of_the_rank(show: Show, saved: Recording) -> None:
    shown = show(saved)
    first = shown.run("bcpReport.timeline().rank")
    assert first == max(saved.ranks, key=lambda record: record.figures["seconds"]).rank
    for rank in (first, 40):
        shown.choose("rank", str(rank))
        shown.run("bcpReport.drawn()")
        found = shown.run("bcpReport.timeline()")
        rows = rows_of(saved, rank=rank)
        bars = [
            [b["kind"], b["name"], b["item"], b["nbytes"], b["status"], b["start"], b["end"]] for b in found["bars"]
        ]
        wanted = [
            [r["kind"], r["name"], r["item"], r["nbytes"], r["status"], r["start"], r["start"] + r["seconds"]]
            for r in rows
        ]
        for one, other in zip(sorted(bars), sorted(wanted), strict=True):
            assert one[:5] == other[:5]
            assert one[5:] == pytest.approx(other[5:], abs=1e-5)
        waits = sorted([wait["end"] - wait["start"], wait["end"]] for wait in found["waits"])
        expected = sorted([row["waited"], row["start"]] for row in rows if row["waited"] > 0)
        for one_wait, other_wait in zip(waits, expected, strict=True):
            assert one_wait == pytest.approx(other_wait, abs=1e-5)
        drawn = shown.run("document.querySelectorAll('#timeline-chart .bar path').length")
        assert drawn == len(rows)


def test_drawn_bars_lie_where_their_times_are(show: Show, saved: Recording) -> None:
    shown = show(saved)
    found = shown.run("bcpReport.timeline()")
    boxes = shown.run(
        "Array.from(document.querySelectorAll('#timeline-chart .bar path'), path => { const box = path.getBBox();"
        " const at = path.transform.baseVal.consolidate()?.matrix ?? {e: 0, f: 0};"
        " return [at.e + box.x, at.e + box.x + box.width, at.f + box.y]; })"
    )
    width = max(right for _, right, _ in boxes) / max(bar["end"] for bar in found["bars"])
    for bar, (left, right, y) in zip(found["bars"], boxes, strict=True):
        assert left == pytest.approx(bar["start"] * width, abs=1.5)
        assert right == pytest.approx(max(bar["end"] * width, left + 1), abs=1.5)
        assert y == pytest.approx(bar["y"], abs=1)
    lanes: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for bar in found["bars"]:
        lanes.setdefault((bar["kind"], bar["name"], bar["y"]), []).append((bar["start"], bar["end"]))
    for spans in lanes.values():
        spans.sort()
        assert all(end <= start + 1e-5 for (_, end), (start, _) in pairwise(spans))


def test_buttons_and_dragging_change_the_time_range_of_both_charts(show: Show, saved: Recording) -> None:
    shown = show(saved)
    low, high = shown.run("bcpReport.timeline().span")
    shown.run("document.querySelector('[data-zoom=in]').click()")
    closer = shown.run("bcpReport.timeline().span")
    assert closer == pytest.approx([low + (high - low) / 4, high - (high - low) / 4])
    shown.run("document.querySelector('[data-zoom=all]').click()")
    assert shown.run("bcpReport.timeline().span") == pytest.approx([low, high])
    left, right, y = shown.run(
        "(() => { const host = document.getElementById('timeline-chart'); host.scrollIntoView({block: 'center',"
        " behavior: 'instant'}); const box = host.getBoundingClientRect(); return [box.left + 300, box.left + 600,"
        " box.top + box.height / 2]; })()"
    )
    shown.mouse("mouseMoved", left, y)
    shown.mouse("mousePressed", left, y)
    shown.mouse("mouseMoved", right, y)
    shown.mouse("mouseReleased", right, y)
    start, end = shown.run("bcpReport.timeline().span")
    assert low < start < end < high


def test_queues_are_counted_from_waits(show: Show, saved: Recording) -> None:
    shown = show(saved)
    rank = shown.run("bcpReport.timeline().rank")
    queues = shown.run("bcpReport.queue()")
    assert [queue["stage"] for queue in queues] == ["d2h", "serialize", "upload", "checksum"]
    for queue in queues:
        rows = rows_of(saved, rank=rank, kind="stage", name=queue["stage"])
        assert queue["rows"][-1]["items"] == 0
        for this, following in pairwise(queue["rows"]):
            at = (this["time"] + following["time"]) / 2
            if following["time"] - this["time"] > 1e-4:
                assert this["items"] == sum(row["start"] - row["waited"] <= at < row["start"] for row in rows)


def test_throughput_latencies_and_balance_have_all_bytes_and_requests(show: Show, saved: Recording) -> None:
    shown = show(saved)
    note = shown.run("document.getElementById('throughput-note').textContent")
    assert "probed limit of the storage, 11.0 GB/s" in note
    rates = shown.run("bcpReport.throughput()")
    moved = sum(row["nbytes"] for row in rows_of(saved, kind="request", status="ok") if row["name"] in ("part", "put"))
    total = sum(one["rate"] * (other["time"] - one["time"]) for one, other in pairwise(rates))
    assert total == pytest.approx(moved / 1e9, rel=1e-3)
    counts: dict[tuple[str, str], int] = {}
    for row in shown.run("bcpReport.latency()"):
        key = (row["verb"], row["status"])
        counts[key] = counts.get(key, 0) + row["count"]
    assert counts == {key: len(rows_of(saved, kind="request", name=key[0], status=key[1])) for key in counts}
    assert sum(counts.values()) == len(rows_of(saved, kind="request"))
    balance = {row["rank"]: row["bytes"] for row in shown.run("bcpReport.balance()")}
    assert balance == {record.rank: record.figures["nbytes"] for record in saved.ranks}
    slowest = max(rows_of(saved, kind="request"), key=lambda row: row["seconds"])
    cells = shown.run(
        "Array.from(document.querySelectorAll('#slowest tbody tr:first-child td'), cell => cell.textContent)"
    )
    assert cells[0] == str(slowest["rank"])
    assert cells[2] == slowest["item"]


def test_failures_come_first_and_the_guilty_rank_first_among_them(show: Show) -> None:
    recording = made(Case(ranks=8, failing=5))
    shown = show(recording, findings=[["Storage answered 503."]])
    assert shown.run("Array.from(document.querySelectorAll('section:not([hidden])'))[0].id") == "failures"
    text = shown.run("document.getElementById('failures').innerText")
    guilty = recording.failures[0]
    title = f"Rank 5 on {guilty.host} failed in stage upload"
    assert text.splitlines()[2] == title or text.splitlines()[1] == title
    for part in (guilty.item, guilty.file, *guilty.tensors, *guilty.notes, *(message for _, message in guilty.errors)):
        assert part in text
    assert "7 more ranks report this failure" in text
    assert shown.run("document.getElementById('rank').value") == "5"
    assert "Call to failure" in shown.run("document.getElementById('tiles').innerText")


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\"'`${window.hacked = 1}\\u0022 {{data}} --> <!--",
    "\u2028\u2029\u202e \u00e9\u4e2d\U0001f600 \x00\x1b[31m",
    "datum.value; window.hacked = 1",
    "__proto__",
]


def hostile_recording() -> Recording:
    rows = [
        [0, kind, text, text, 10, float(i), 0.5, 0.25 if kind == "stage" else 0.0, 1, "failed", text]
        for i, text in enumerate(HOSTILE)
        for kind in ("phase", "budget", "stage", "request")
    ]
    events = pa.table(
        [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), EVENTS, strict=True)], schema=EVENTS
    )
    everything = "\n".join(HOSTILE)
    return Recording(
        kind="save", path=everything, operation=HOSTILE[0], step=3, run=HOSTILE[1], background=False,
        version=HOSTILE[0],
        world_size=2, time=0.0, events=events,
        ranks=[
            RankRecord(rank=0, host=everything, local_rank=0, coordinates={HOSTILE[0]: 0}, figures={HOSTILE[0]: 1.0}),
            RankRecord(rank=1, host=HOSTILE[1], local_rank=0, coordinates={HOSTILE[0]: 1}, figures={"__proto__": 1.0}),
        ],
        failures=[
            FailureRecord(
                rank=0, host=HOSTILE[0], time=0.0, phase=HOSTILE[1], stage=HOSTILE[0], item=everything, tensors=HOSTILE,
                file=HOSTILE[1], errors=[(HOSTILE[0], everything)], notes=HOSTILE,
            )
        ],
    )  # fmt: skip


def test_hostile_texts_are_shown_and_never_run(show: Show) -> None:
    recording = hostile_recording()
    shown = show(recording, findings=[HOSTILE])
    assert shown.run("document.getElementById('title').textContent") == recording.path
    texts = shown.run("Array.from(document.querySelectorAll('#findings li'), item => item.textContent)")
    assert texts == HOSTILE
    assert shown.run("document.title") != ""
    for place in shown.run("Array.from(document.getElementById('heat-place').options, option => option.value)"):
        shown.run(f"bcpReport.heat({place!r})" if place.isprintable() and "'" not in place else "bcpReport.heat()")
    bars = shown.run("bcpReport.timeline().bars")
    assert {bar["item"] for bar in bars} == set(HOSTILE)
    assert {bar["said"] for bar in bars} == set(HOSTILE)
    shown.run(
        "document.querySelector('#timeline-chart .bar path')"
        ".dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    assert shown.run("typeof window.hacked") == "undefined"
    assert shown.run("document.querySelectorAll('img, iframe, object, a').length") == 0
    assert shown.run("document.scripts.length") == 4  # Vega's text, the data, the page's script, Vega


def test_a_thousand_ranks_fit(show: Show, tmp_path: Path) -> None:
    case = Case(
        ranks=1024,
        parts=9,
        axes={"pp": 8, "dp": 16, "tp": 8},
        slow_ranks={517: 3.0},
        slow_hosts={40: 1.9},
        probed=180e9,
    )
    recording = made(case)
    assert recording.events.num_rows > 1024 * 60
    shown = show(recording)
    path = next(tmp_path.glob("*.html"))
    assert path.stat().st_size < 5_000_000
    shown.choose("heat-place", "stage:upload")
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(recording, kind="stage", name="upload"):
        by_rank.setdefault(row["rank"], []).append(row)
    assert heat(shown) == pytest.approx({rank: wall(rows) for rank, rows in by_rank.items()}, rel=1e-5)
    assert shown.run("document.querySelectorAll('#heat-chart .cell path').length") == 1024
    assert shown.run("bcpReport.timeline().rank") == 517


def test_a_run_has_trends_and_a_box_to_choose(show: Show) -> None:
    steps = [made(Case(ranks=4, step=100 * n, seed=n, time=1e9 + n, path=f"run/{n}", run="r")) for n in range(1, 6)]
    steps[2] = made(Case(ranks=4, step=300, seed=3, time=1e9 + 3, path="run/3", failing=1))
    load = made(Case(kind="load", ranks=4, step=200, time=1e9 + 3.5, path="run/2", run="r"))
    shown = show(*reversed(steps), load)
    wanted = [
        {"at": entry.step, "kind": entry.kind, "value": max(record.figures["seconds"] for record in entry.ranks)}
        for entry in (*steps[:2], load, *steps[3:])
    ]
    found = [row for row in shown.run("bcpReport.trend('seconds')") if row["at"] != 300]
    assert found == [pytest.approx(row) for row in wanted]
    failures = {(row["at"], row["kind"]): row["value"] for row in shown.run("bcpReport.trend('failures')")}
    assert [key for key, value in failures.items() if value] == [(300, "save")]
    assert shown.run("document.getElementById('title').textContent") == "run/5"
    assert "Also failed" in shown.run("document.getElementById('failures').innerText")
    shown.choose("recording", "3")  # in the order of time
    shown.run("bcpReport.drawn()")
    assert shown.run("document.getElementById('title').textContent") == "run/2"
    assert "stage:read" in shown.run(
        "Array.from(document.getElementById('heat-place').options, option => option.value)"
    )
    assert "Bytes loaded" in shown.run("document.getElementById('tiles').innerText")
    assert {bar["name"] for bar in shown.run("bcpReport.timeline().bars")} >= {"read", "h2d", "open", "finish"}


def test_a_recording_without_events_or_ranks_can_be_shown(show: Show) -> None:
    full = made(Case(ranks=2))
    none = dataclasses.replace(full, events=EVENTS.empty_table())
    shown = show(none, dataclasses.replace(none, ranks=[], step=None, time=full.time + 1))
    assert shown.run("document.getElementById('left-out').innerText") == "This recording has no records of ranks."
    shown.choose("recording", "0")
    shown.run("bcpReport.drawn()")
    assert heat(shown) == pytest.approx({record.rank: record.figures["seconds"] for record in full.ranks}, rel=1e-6)
    assert "no events" in shown.run("document.getElementById('timeline-chart').dataset.empty")


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_both_themes(show: Show, saved: Recording, *, dark: bool) -> None:
    shown = show(saved, made(Case(ranks=8, failing=2, time=2e9)), width=390, dark=dark)
    assert shown.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert shown.run("document.documentElement.scrollWidth") <= 390
    wide = shown.run("Array.from(document.querySelectorAll('.chart svg'), svg => svg.getBoundingClientRect().right)")
    assert max(wide) <= 390


def test_themes_can_be_chosen_and_print_is_light(show: Show, saved: Recording) -> None:
    shown = show(saved)
    cell = "document.querySelector('#heat-chart .cell path').getAttribute('fill')"
    light = shown.run(cell)
    shown.choose("theme", "dark")
    shown.run("bcpReport.drawn()")
    dark = shown.run(cell)
    assert dark != light
    shown.run("dispatchEvent(new Event('beforeprint'))")
    shown.run("bcpReport.drawn()")
    assert shown.run(cell) == light
    shown.run("dispatchEvent(new Event('afterprint'))")
    shown.run("bcpReport.drawn()")
    assert shown.run(cell) == dark
