// Several recordings: trends over the steps, and a table to choose one.

const TRENDS = [
  ["blocking", "Training blocked", "seconds"], ["seconds", "Call to durable, or to loaded", "seconds"], ["throughput", "Throughput of all ranks", "rate"],
  ["retries", "Retries of requests", "count"], ["failures", "Failures", "count"],
];

// Training waits for all of a save that is not in the background.
function blockedOf(recording) {
  return recording.kind === "save" && !recording.background ? recording.headline.seconds : recording.headline.blocking;
}

function trendRows(recordings, id) {
  const steps = recordings.every((recording) => recording.step !== null);
  return recordings.map((recording, place) => ({
    place, kind: recording.kind, at: steps ? recording.step : place + 1, failed: recording.failures.length > 0,
    value: id === "failures" ? Number(recording.failures.length > 0) : id === "blocking" ? blockedOf(recording) : recording.headline[id],
  })).filter((row) => row.value !== null);
}

function trendSpec(state, [id, title, kind], width) {
  const rows = trendRows(state.recordings, id);
  if (!rows.length) return "No recording has this figure.";
  const unit = unitFor(kind, Math.max(...rows.map((row) => row.value)));
  const fills = { save: colour("stage-0"), load: colour("stage-2") };
  const points = rows.map((row) => ({
    ...row, size: row.value / unit.factor, fill: row.failed ? colour("bad") : fills[row.kind],
    tip: `${row.kind} ${titleOf(state.recordings[row.place])}\n${title}: ${id === "failures" ? (row.value ? "failed" : "none") : shown(row.value, kind)}`,
  }));
  const lines = ["save", "load"].map((name) => ({ name, values: points.filter((point) => point.kind === name) })).filter((line) => line.values.length);
  const steps = state.recordings.every((recording) => recording.step !== null);
  return {
    ...plot(width, 120, 52),
    data: [{ name: "points", values: points }, ...lines],
    scales: [
      { name: "x", type: "linear", domain: { data: "points", field: "at" }, range: "width", zero: false, padding: 10 },
      { name: "y", type: "linear", domain: { data: "points", field: "size" }, range: "height", zero: true, nice: true, domainMin: 0, ...(Math.max(...points.map((point) => point.size)) > 0 ? {} : { domainMax: 1 }) },
    ],
    axes: [
      { scale: "x", orient: "bottom", title: steps ? "training step" : "number in the order of time", tickMinStep: 1, tickCount: 5, format: "~s" },
      { scale: "y", orient: "left", title: unit.name || null, grid: true, tickCount: kind === "count" ? Math.max(1, Math.min(3, Math.max(...points.map((point) => point.size)))) : 4, ...(kind === "count" ? { tickMinStep: 1, format: "d" } : {}) },
    ],
    marks: [
      ...lines.map((line) => mark("line", line.name, { x: { scale: "x", field: "at" }, y: { scale: "y", field: "size" }, stroke: fills[line.name], strokeWidth: 1.5, strokeOpacity: 0.6, aria: false })),
      mark("symbol", "points", { x: { scale: "x", field: "at" }, y: { scale: "y", field: "size" }, size: 46, fill: { field: "fill" }, tooltip: { field: "tip" }, description: { field: "tip" }, cursor: "pointer" }),
    ],
    ready: (view) => view.addEventListener("click", (event, item) => item?.datum?.place !== undefined && state.show(item.datum.place)),
  };
}

function titleOf(recording) {
  const name = recording.step === null ? recording.path : `step ${recording.step}`;
  return `${name}, ${moment(recording.time)}`;
}

function showTrends(state) {
  byId("trends").hidden = state.recordings.length < 2;
  if (state.recordings.length < 2) return;
  const loads = state.recordings.filter((recording) => recording.kind === "load").length;
  byId("trends-note").textContent = `Saves: ${state.recordings.length - loads}. Loads: ${loads}. Saves are blue, loads are orange, failed ones are red. A click shows one above.`;
  const host = byId("trend-charts");
  host.replaceChildren(...TRENDS.map(([id, title]) => element("div", {}, element("h3", {}, title), element("div", { class: "chart", id: `trend-${id}` }))));
  for (const trend of TRENDS) showChart(`trend-${trend[0]}`, (width) => trendSpec(state, trend, width));
  recordingsTable(state);
}

function recordingsTable(state) {
  const n = "number";
  table(byId("recordings"), [["Time"], ["Kind"], ["Step", n], ["Ranks", n], ["Bytes", n], ["Seconds", n], ["Blocking", n], ["Throughput", n], ["Retries", n], ["End"]],
    state.recordings.map((recording, place) => ({
      current: place === state.place_in_run,
      cells: [
        element("button", { class: "link", type: "button", onclick: () => state.show(place) }, moment(recording.time)), recording.kind,
        recording.step === null ? "" : String(recording.step), shown(recording.world_size, "count"), shown(recording.headline.bytes, "bytes"), shown(recording.headline.seconds, "seconds"),
        shown(blockedOf(recording), "seconds"), shown(recording.headline.throughput, "rate"), shown(recording.headline.retries, "count"),
        recording.failures.length ? { text: "failed", type: "bad" } : "done",
      ],
    })));
}
