// Throughput, latencies of storage requests, and the balance of bytes over ranks.

const STATUS_TITLES = { ok: "answered", again: "failed and made again", failed: "failed for good" };
const STATUS_COLOURS = { ok: "good", again: "warn", failed: "bad" };

function plot(width, height, left) {
  return { width: width - left - 14, height, padding: { left, right: 14, top: 12, bottom: AXIS } };
}

function showThroughput(state) {
  const { throughput } = state.detail;
  const { probed } = state.recording;
  const verb = state.recording.kind === "save" ? "written" : "read";
  const most = throughput ? Math.max(...throughput.bytes) / throughput.seconds : 0;
  const limit = probed ? ` The dashed line is the probed limit of the storage, ${shown(probed, "rate")}.` : " The limit of the storage was not probed.";
  byId("throughput-note").textContent = throughput
    ? `Bytes ${verb} a second by all ranks together, from ${throughput.source}; the highest is ${shown(most, "rate")}.${limit}` : "";
  showChart("throughput-chart", (width) => throughputSpec(throughput, probed, width));
}

function throughputSpec(throughput, probed, width) {
  if (!throughput) return "No event tells which bytes moved when.";
  const rates = Array.from(throughput.bytes, (bytes) => bytes / throughput.seconds);
  const most = Math.max(...rates, probed || 0) * 1.08 || 1;
  const unit = unitFor("rate", most);
  const rows = rates.map((rate, i) => ({ time: i * throughput.seconds, rate: rate / unit.factor }));
  rows.push({ time: rates.length * throughput.seconds, rate: rows.at(-1).rate });
  const spec = {
    ...plot(width, 200, 62),
    data: [{ name: "rates", values: rows }, { name: "limit", values: probed ? [{ rate: probed / unit.factor }] : [] }],
    scales: [
      { name: "x", type: "linear", domain: [0, rows.at(-1).time], range: "width" },
      { name: "y", type: "linear", domain: [0, most / unit.factor], range: "height", nice: true },
    ],
    axes: [
      { scale: "x", orient: "bottom", title: "seconds since the first rank's call", tickCount: { signal: "width / 90" } },
      { scale: "y", orient: "left", title: unit.name, grid: true, tickCount: 5 },
    ],
    marks: [
      mark("area", "rates", { x: { scale: "x", field: "time" }, y: { scale: "y", field: "rate" }, y2: { scale: "y", value: 0 }, interpolate: "step-after", fill: colour("stage-0"), fillOpacity: 0.55, description: "throughput over time" }),
      mark("rule", "limit", { x: 0, x2: { signal: "width" }, y: { scale: "y", field: "rate" }, stroke: colour("mark"), strokeWidth: 1.5, strokeDash: { signal: "[6, 4]" }, description: "probed limit" }),
      mark("text", "limit", { x: { signal: "width - 4" }, y: { scale: "y", field: "rate", offset: 12 }, text: "probed limit", align: "right", baseline: "middle", fontSize: 11, fill: colour("mark"), aria: false }),
    ],
  };
  return spec;
}

function latencyRows(latency, verbs) {
  const rows = [];
  for (const [place, verb] of verbs.entries()) {
    const groups = latency.counts.filter((group) => group.verb === verb);
    const totals = Array.from({ length: latency.edges.length - 1 }, (_, bin) => groups.reduce((sum, group) => sum + group.counts[bin], 0));
    const most = Math.max(...totals);
    for (let bin = 0; bin < totals.length; bin++) {
      let base = 0;
      for (const status of ["failed", "again", "ok"]) {
        const count = groups.find((group) => group.status === status)?.counts[bin] ?? 0;
        if (!count) continue;
        const height = Math.max(status === "ok" ? 1 : 3, (count / most) * 40);
        const range = `${shown(latency.edges[bin], "seconds")} to ${shown(latency.edges[bin + 1], "seconds")}`;
        rows.push({ place, low: latency.edges[bin], high: latency.edges[bin + 1], base, height, status, count, verb, fill: colour(STATUS_COLOURS[status]), tip: `${verb}, ${range}\n${shown(count, "count")} requests ${STATUS_TITLES[status]}` });
        base += height;
      }
    }
  }
  return rows;
}

function logTicks(low, high, width) {
  const decades = Math.log10(high / low);
  const steps = (width / decades) > 220 ? [1, 2, 5] : [1];
  const first = Math.floor(Math.log10(low));
  const ticks = Array.from({ length: Math.ceil(decades) + 2 }, (_, i) => steps.map((step) => step * 10 ** (first + i))).flat();
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

function latencySpec(detail, width) {
  if (!detail.latency) return "There are no events of storage requests.";
  const verbs = detail.verbs.map((row) => row.verb);
  const [row, left] = [54, gutter(width) - 20];
  const { edges } = detail.latency;
  const spec = {
    ...plot(width, verbs.length * row, left),
    data: [
      { name: "counts", values: latencyRows(detail.latency, verbs) },
      { name: "verbs", values: detail.verbs.map((verb, place) => ({ ...verb, place, number: `${shown(verb.count, "count")} ×` })) },
    ],
    scales: [{ name: "x", type: "log", domain: [edges[0], edges.at(-1)], range: "width" }],
    axes: [{ scale: "x", orient: "bottom", title: "latency (logarithmic)", grid: true, values: logTicks(edges[0], edges.at(-1), width), encode: { labels: { update: { text: { signal: "datum.value < 0.001 ? format(datum.value * 1e6, '~g') + ' µs' : datum.value < 1 ? format(datum.value * 1e3, '~g') + ' ms' : format(datum.value, '~g') + ' s'" } } } } }],
    marks: [
      mark("rule", "verbs", { x: -left, x2: { signal: "width" }, y: { signal: `(datum.place + 1) * ${row}` }, stroke: colour("grid"), aria: false }),
      mark("rect", "counts", {
        x: { signal: "scale('x', datum.low) + 0.5" }, x2: { signal: "scale('x', datum.high) - 0.5" },
        y: { signal: `(datum.place + 1) * ${row} - datum.base - datum.height` }, height: { field: "height" },
        fill: { field: "fill" }, tooltip: { field: "tip" }, description: { field: "tip" },
      }),
      mark("text", "verbs", { x: -8, y: { signal: `datum.place * ${row} + 26` }, text: { field: "verb" }, align: "right", baseline: "middle", fontSize: 12, fill: colour("ink"), limit: left - 12, aria: false }),
      mark("text", "verbs", { x: -8, y: { signal: `datum.place * ${row} + 41` }, text: { field: "number" }, align: "right", baseline: "middle", fontSize: 11, fill: colour("muted"), aria: false }),
    ],
  };
  return spec;
}

function showStorage(state) {
  const { detail } = state;
  showChart("latency-chart", (width) => latencySpec(detail, width));
  const statuses = ["ok", "again", "failed"].filter((status) => detail.latency?.counts.some((group) => group.status === status));
  byId("latency-legend").replaceChildren(...statuses.map((status) => element("span", {},
    element("span", { class: "swatch", style: `background: ${colour(STATUS_COLOURS[status])}` }), STATUS_TITLES[status])));
  const n = "number";
  table(byId("verbs"), [["Request"], ["Count", n], ["Bytes", n], ["Median", n], ["99th percentile", n], ["Longest", n], ["Made again", n], ["Failed", n]],
    detail.verbs.map((row) => ({ cells: [
      row.verb, shown(row.count, "count"), shown(row.bytes, "bytes"), shown(row.p50, "seconds"), shown(row.p99, "seconds"), shown(row.longest, "seconds"),
      { text: shown(row.again, "count"), type: row.again ? "warn" : "" }, { text: shown(row.failed, "count"), type: row.failed ? "bad" : "" },
    ] })));
  table(byId("slowest"), [["Rank", n], ["Request"], ["Object", "text"], ["Bytes", n], ["Seconds", n], ["Started", n], ["Attempt", n], ["End", "text"]],
    detail.slowest.map((row) => ({ cells: [
      element("button", { class: "link", type: "button", onclick: () => state.choose(row.rank) }, String(row.rank)), row.verb, row.key, shown(row.bytes, "bytes"),
      shown(row.seconds, "seconds"), shown(row.start, "seconds"), String(row.attempt),
      { text: STATUS_TITLES[row.status] + (row.said ? `: ${row.said}` : ""), type: { again: "warn", failed: "bad" }[row.status] || "" },
    ] })));
  byId("storage").hidden = !detail.latency;
}

function balanceOf(detail) {
  const place = detail.places.find((candidate) => candidate.metrics.bytes);
  return place && { title: place.title, values: place.metrics.bytes };
}

function showBalance(state) {
  const { ranks } = state.detail;
  const found = balanceOf(state.detail);
  const known = found ? Array.from(found.values.keys()).filter((i) => !Number.isNaN(found.values[i])) : [];
  const mean = known.reduce((sum, i) => sum + found.values[i], 0) / known.length;
  const most = known.reduce((best, i) => (best === null || found.values[i] > found.values[best] ? i : best), null);
  byId("balance-note").textContent = known.length
    ? `Bytes of each rank, ${found.title}: mean ${shown(mean, "bytes")}, most ${shown(found.values[most], "bytes")} on rank ${ranks.rank[most]}, ${digits(found.values[most] / (mean || 1))} × the mean.` : "";
  showChart("balance-chart", (width) => {
    if (!known.length) return "No rank tells its bytes.";
    return balanceSpec(known.map((i) => ({ rank: ranks.rank[i], bytes: found.values[i], tip: `${rankName(ranks, i).join("\n")}\n${shown(found.values[i], "bytes")}\n${digits(found.values[i] / (mean || 1))} × the mean` })), mean, width);
  });
}

function balanceSpec(rows, mean, width) {
  const unit = unitFor("bytes", Math.max(...rows.map((row) => row.bytes)));
  const bars = rows.map((row, place) => ({ ...row, place, size: row.bytes / unit.factor, far: row.bytes > FAR * mean }));
  return {
    ...plot(width, 160, 62),
    data: [{ name: "bars", values: bars }, { name: "mean", values: [{ size: mean / unit.factor }] }],
    scales: [
      { name: "x", type: "linear", domain: [-0.5, rows.length - 0.5], range: "width", zero: false },
      { name: "y", type: "linear", domain: { data: "bars", field: "size" }, range: "height", zero: true, nice: true },
      { name: "label", type: "linear", domain: [0, rows.length - 1], range: [{ signal: "scale('x', 0)" }, { signal: "scale('x', " + (rows.length - 1) + ")" }], zero: false },
    ],
    axes: [
      { scale: "x", orient: "bottom", title: "rank, in order", tickMinStep: 1, tickCount: { signal: `min(${rows.length}, width / 60)` }, encode: { labels: { update: { text: { signal: "datum.value >= 0 && datum.value === floor(datum.value) && data('bars')[datum.value] ? data('bars')[datum.value].rank : ''" } } } } },
      { scale: "y", orient: "left", title: unit.name, grid: true, tickCount: 4 },
    ],
    marks: [
      mark("rect", "bars", {
        x: { signal: "scale('x', datum.place - 0.5) + (width / length(data('bars')) > 4 ? 1 : 0)" }, x2: { signal: "scale('x', datum.place + 0.5)" },
        y: { scale: "y", field: "size" }, y2: { scale: "y", value: 0 }, fill: { signal: `datum.far ? '${colour("mark")}' : '${colour("stage-0")}'` },
        tooltip: { field: "tip" }, description: { signal: "'rank ' + datum.rank" },
      }),
      mark("rule", "mean", { x: 0, x2: { signal: "width" }, y: { scale: "y", field: "size" }, stroke: colour("ink"), strokeDash: { signal: "[3, 3]" }, description: "mean" }),
    ],
  };
}
