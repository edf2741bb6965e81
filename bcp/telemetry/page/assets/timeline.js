// The timeline of one rank and its queues, with one time range for both.

const KIND_TITLES = { phase: "phases", budget: "byte budget", request: "storage requests" };
const AXIS = 38;

// Returns the rows of events of one rank: [first, past the last].
function eventRows(events, rank) {
  const find = (wanted) => {
    let [low, high] = [0, events.rank.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events.rank[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  };
  return [find(rank), find(rank + 1)];
}

// Returns {groups: [{title, kind, colour, lanes, bars}], end}; groups in the order of drawing.
function timelineOf(state, rank) {
  const { events } = state.detail;
  const [first, last] = eventRows(events, rank);
  const groups = new Map();
  let end = 0;
  for (let row = first; row < last; row++) {
    const kind = state.kinds[events.kind[row]];
    const name = events.names[events.name[row]];
    const key = events.group[row];
    if (!groups.has(key)) groups.set(key, { key, kind, title: KIND_TITLES[kind] ?? name, lanes: 0, bars: [] });
    const group = groups.get(key);
    group.lanes = Math.max(group.lanes, events.lane[row] + 1);
    group.bars.push({
      kind, name, item: events.items[events.item[row]], nbytes: events.bytes[row], start: events.start[row],
      end: events.start[row] + events.seconds[row], waited: events.waited[row], attempt: events.attempt[row],
      status: state.statuses[events.status[row]], said: events.words[events.said[row]], lane: events.lane[row],
    });
    end = Math.max(end, events.start[row] + events.seconds[row]);
  }
  const order = Array.from(groups.values()).sort((a, b) =>
    state.kinds.indexOf(a.kind) - state.kinds.indexOf(b.kind) || a.bars[0].start - b.bars[0].start);
  for (const group of order) group.colour = groupColour(state, group);
  return { groups: order, end };
}

function groupColour(state, { kind, title }) {
  if (kind !== "stage") return kind;
  const stages = state.detail.places.filter((place) => place.id.startsWith("stage:")).map((place) => place.id.slice(6));
  return `stage-${Math.max(0, stages.indexOf(title)) % 8}`;
}

function barTip(bar) {
  const lines = [
    bar.kind === "phase" ? `phase ${bar.name}` : bar.kind === "budget" ? "wait for the byte budget" : bar.kind === "stage" ? `stage ${bar.name}` : `request ${bar.name}`,
    bar.item,
    `${shown(bar.end - bar.start, "seconds")}, from ${bar.start.toFixed(3)} s to ${bar.end.toFixed(3)} s`,
    bar.waited > 0 ? `${shown(bar.waited, "seconds")} in the queue before` : "",
    bar.nbytes > 0 ? `${shown(bar.nbytes, "bytes")}, ${shown(bar.nbytes / Math.max(bar.end - bar.start, 1e-9), "rate")}` : "",
    bar.attempt > 1 || bar.status !== "ok" ? `attempt ${bar.attempt}: ${bar.status === "again" ? "failed, made again" : bar.status}` : "",
    bar.said,
  ];
  return lines.filter(Boolean).join("\n");
}

function timelineRows(groups) {
  const bars = [];
  const waits = [];
  const labels = [];
  let y = 4;
  for (const group of groups) {
    const height = Math.max(5, Math.min(18, 160 / group.lanes));
    labels.push({ y: y + Math.min(group.lanes * height, height) / 2, text: group.title, colour: group.colour, top: y - 4 });
    for (const bar of group.bars) {
      const at = y + bar.lane * height;
      const fill = bar.status === "failed" ? colour("bad") : bar.status === "again" ? colour("warn") : colour(group.colour);
      const tip = barTip(bar);
      const inside = bar.kind === "phase" ? bar.name : ""; // phases have no line of their own
      bars.push({ ...bar, y: at, h: height * 0.68, fill, tip, inside });
      if (bar.waited > 0) waits.push({ start: bar.start - bar.waited, end: bar.start, y: at + height * 0.72, h: height * 0.2, fill, item: bar.item, name: bar.name, tip });
    }
    y += group.lanes * height + 9;
  }
  return { bars, waits, labels, height: y };
}

function gutter(width) {
  return width < 560 ? 104 : 118;
}

const START = "scale('x', datum.start)";
const WIDTH = "max(1, scale('x', datum.end) - scale('x', datum.start))";

function timelineSpec(state, width) {
  const { groups } = timelineOf(state, state.rank);
  if (!groups.length) return "There are no events of this rank on the page.";
  const { bars, waits, labels, height } = timelineRows(groups);
  const left = gutter(width);
  const at = { x: { signal: START }, width: { signal: WIDTH }, y: { field: "y" }, height: { field: "h" }, fill: { field: "fill" }, tooltip: { field: "tip" } };
  return {
    ...timeAxis(state, width, height), padding: { left, right: 12, top: 4, bottom: AXIS },
    data: [{ name: "bars", values: bars }, { name: "waits", values: waits }, { name: "labels", values: labels }],
    marks: [
      mark("rule", "labels", { x: -left, x2: { signal: "width" }, y: { field: "top" }, stroke: colour("grid"), aria: false }, { interactive: false }),
      clipped([
        mark("rect", "waits", { ...at, fillOpacity: 0.45, aria: false }),
        mark("rect", "bars", { ...at, stroke: colour("panel"), strokeWidth: { signal: `${WIDTH} > 4 ? 0.75 : 0` }, description: { field: "tip" } }, { name: "bar" }),
        mark("text", "bars", {
          x: { signal: `max(0, ${START}) + 5` }, y: { signal: "datum.y + datum.h / 2" }, text: { signal: "min(width, scale('x', datum.end)) - max(0, scale('x', datum.start)) > 34 ? datum.inside : ''" }, baseline: "middle", fontSize: 10,
          limit: { signal: `max(1, min(width, scale('x', datum.end)) - max(0, ${START}) - 8)` },
          fill: colour("panel"), aria: false,
        }, { interactive: false }),
      ]),
      mark("text", "labels", { x: -8, y: { field: "y" }, text: { field: "text" }, align: "right", baseline: "middle", fontSize: 12, fill: colour("ink"), limit: left - 12, aria: false }, { interactive: false }),
    ],
    ready: followBrush(state, left),
  };
}

function clipped(marks) {
  return { type: "group", clip: true, encode: { update: { width: { signal: "width" }, height: { signal: "height" } } }, marks };
}

function timeAxis(state, width, height) {
  return {
    width: width - gutter(width) - 12, height,
    signals: [{ name: "span", value: state.span }],
    scales: [{ name: "x", type: "linear", domain: { signal: "span" }, range: "width", zero: false, nice: false }],
    axes: [{ scale: "x", orient: "bottom", title: "seconds since the first rank's call", grid: true, tickCount: { signal: "max(3, width / 90)" } }],
  };
}

function queueRows(group) {
  const changes = group.bars.flatMap((bar) => [[bar.start - bar.waited, 1], [bar.start, -1]]).sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  const rows = [];
  let waiting = 0;
  for (const [time, change] of changes) {
    waiting += change;
    if (rows.length && rows.at(-1).time === time) rows.at(-1).items = waiting;
    else rows.push({ time, items: waiting });
  }
  return rows;
}

function queueSpec(state, width) {
  const groups = timelineOf(state, state.rank).groups.filter((group) => group.kind === "stage");
  if (!groups.length) return "This rank has no stages on the page.";
  const queues = groups.map((group) => ({ ...group, rows: queueRows(group) }));
  const most = Math.max(1, ...queues.flatMap((queue) => queue.rows.map((row) => row.items)));
  const [row, gap] = [44, 12];
  const data = queues.map((queue, i) => ({ name: `queue${i}`, values: [{ time: 0, items: 0 }, ...queue.rows, { time: state.end, items: 0 }] }));
  return {
    ...timeAxis(state, width, queues.length * (row + gap)), padding: { left: gutter(width), right: 12, top: 8, bottom: AXIS },
    data,
    marks: queues.map((queue, i) => queueRow(queue, i, row, i * (row + gap), most, gutter(width))),
  };
}

function queueRow(queue, i, height, y, most, left) {
  const area = mark("area", `queue${i}`, {
    x: { scale: "x", field: "time" }, y: { scale: "y", field: "items" }, y2: { scale: "y", value: 0 }, interpolate: "step-after",
    fill: colour(queue.colour), fillOpacity: 0.75, description: `queue of stage ${queue.title}: at most ${Math.max(0, ...queue.rows.map((row) => row.items))} items`,
  });
  return {
    type: "group",
    encode: { update: { y: { value: y }, width: { signal: "width" }, height: { value: height } } },
    scales: [{ name: "y", type: "linear", domain: [0, most], range: [height, 0] }],
    axes: [{ scale: "y", orient: "left", values: [0, most], grid: true, format: "d", domain: false, ticks: false, labelPadding: 4 }],
    marks: [
      { ...clipped([area]) },
      { type: "text", interactive: false, encode: { update: { x: { value: -26 }, y: { value: height / 2 - 7 }, text: { value: queue.title }, align: { value: "right" }, baseline: { value: "middle" }, fontSize: { value: 12 }, fill: { value: colour("ink") }, limit: { value: left - 30 }, aria: { value: false } } } },
      { type: "text", interactive: false, encode: { update: { x: { value: -26 }, y: { value: height / 2 + 8 }, text: { value: "items" }, align: { value: "right" }, baseline: { value: "middle" }, fontSize: { value: 11 }, fill: { value: colour("muted") }, aria: { value: false } } } },
    ],
  };
}

function showTimeline(state) {
  const found = timelineOf(state, state.rank);
  state.end = Math.max(found.end * 1.01, 1e-6);
  state.span = [0, state.end];
  showChart("timeline-chart", (width) => timelineSpec(state, width));
  showChart("queue-chart", (width) => queueSpec(state, width));
  byId("rank-line").textContent = rankLine(state);
}

function rankLine(state) {
  const { ranks, places } = state.detail;
  const i = ranks.rank.indexOf(state.rank);
  const whole = places[0].metrics;
  const parts = [rankName(ranks, i).join(" · ")];
  const middle = whole.seconds ? median(whole.seconds) : NaN;
  if (whole.seconds) parts.push(`${shown(whole.seconds[i], "seconds")}${middle > 0 ? `, ${digits(whole.seconds[i] / middle)} × the median of all ranks` : ""}`);
  if (state.recording.background && whole.blocking && !Number.isNaN(whole.blocking[i])) parts.push(`blocked training for ${shown(whole.blocking[i], "seconds")}`);
  if (whole.wait && whole.wait[i] > 0) parts.push(`waited ${shown(whole.wait[i], "seconds")} for the byte budget`);
  if (whole.retries?.[i] > 0) parts.push(`${shown(whole.retries[i], "count")} retries`);
  return parts.join(" · ");
}

function setSpan(state, low, high) {
  const size = Math.min(Math.max(high - low, state.end / 1e5), state.end);
  const start = Math.min(Math.max(low, 0), state.end - size);
  state.span = [start, start + size];
  for (const id of ["timeline-chart", "queue-chart"]) views.get(id)?.signal("span", state.span).run();
}

function zoom(state, how) {
  const [low, high] = state.span;
  const size = high - low;
  const changes = { in: [size / 4, -size / 4], out: [-size / 2, size / 2], left: [-size / 3, -size / 3], right: [size / 3, size / 3] };
  if (how === "all") setSpan(state, 0, state.end);
  else setSpan(state, low + changes[how][0], high + changes[how][1]);
}

function followBrush(state, left) {
  return (view, host) => {
    const brush = element("div", { id: "brush", hidden: true });
    host.append(brush);
    let from = null;
    const place = (event) => Math.min(Math.max(event.clientX - host.getBoundingClientRect().left, left), left + view.width());
    const drag = (event) => {
      const to = place(event);
      brush.hidden = Math.abs(to - from) < 6;
      brush.style.left = `${Math.min(from, to)}px`;
      brush.style.width = `${Math.abs(to - from)}px`;
    };
    const stop = (event) => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", stop);
      const to = place(event);
      if (!brush.hidden) setSpan(state, ...[from, to].sort((a, b) => a - b).map((x) => view.scale("x").invert(x - left)));
      brush.hidden = true;
    };
    host.onpointerdown = (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return;
      from = place(event);
      addEventListener("pointermove", drag);
      addEventListener("pointerup", stop);
    };
  };
}
