// The heat map of ranks.

const METRICS = {
  seconds: ["seconds, from first start to last end", "seconds", "high"],
  blocking: ["seconds for which training was blocked", "seconds", "high"],
  busy: ["seconds of work, summed over items", "seconds", "high"],
  wait: ["seconds of waiting in the queue, summed over items", "seconds", "high"],
  longest: ["seconds of the longest request", "seconds", "high"],
  bytes: ["bytes", "bytes", "high"],
  throughput: ["throughput, bytes a second", "rate", "low"],
  items: ["number of items", "count", "high"],
  retries: ["retries", "count", "high"],
};
const FAR = 1.5; // an outlined rank is so many times worse than the median

function metricOf(place, id) {
  if (place.id !== "figures") {
    const title = id === "wait" && ["whole", "budget"].includes(place.id) ? "seconds of waiting for the byte budget" : METRICS[id][0];
    return { id, title, kind: METRICS[id][1], bad: METRICS[id][2] };
  }
  const kind = /seconds$/.test(id) ? "seconds" : /bytes$/.test(id) ? "bytes" : "count";
  return { id, title: id.replaceAll("_", " "), kind, bad: "high" };
}

function isFar(value, middle, metric) {
  if (Number.isNaN(value)) return false;
  if (metric.id === "retries") return value > 0 && value > FAR * middle;
  if (!(middle > 0)) return false;
  return metric.bad === "high" ? value > FAR * middle : value < middle / FAR;
}

function rankName(ranks, i) {
  const coordinates = ranks.axes.map((axis, a) => `${axis} ${ranks.coordinates[a][i]}`);
  return [`rank ${ranks.rank[i]}`, `host ${ranks.hosts[ranks.host[i]]}`, `local rank ${ranks.local[i]}`, ...coordinates];
}

// The colours span at least half of the median to 1.5 times the median, so that small differences look small.
function heatDomain(values) {
  const known = Array.from(values).filter((value) => !Number.isNaN(value));
  if (!known.length) return [0, 1];
  const middle = median(known);
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  const domain = [Math.min(low, middle / 2), Math.max(high, middle * FAR)];
  return domain[1] > domain[0] ? domain : [domain[0], domain[0] + 1];
}

function heatCells(detail, place, metric, layout, width) {
  const { ranks } = detail;
  const values = place.metrics[metric.id];
  const middle = median(values);
  const domain = heatDomain(values);
  const area = placed(ranks, layout, width);
  const cells = area.cells.map(({ i, x, y, w, h }) => {
    const value = values[i];
    const known = !Number.isNaN(value);
    const name = rankName(ranks, i);
    const text = known ? shown(value, metric.kind) : "no figure";
    const share = (value - domain[0]) / (domain[1] - domain[0]);
    const wide = w >= text.length * 6.4 + 6;
    return {
      i, rank: ranks.rank[i], x, y, w: w - (w > 16 ? 2 : 1), h: h - (h > 16 ? 2 : 1), value: known ? value : null,
      far: isFar(value, middle, metric), bright: share > 0.55, text: wide && h >= 15 ? text : "",
      number: wide && h >= 28 ? `rank ${ranks.rank[i]}` : "",
      tip: `${name.join("\n")}\n${metric.title}: ${text}${known && middle > 0 ? `\n${digits(value / middle)} × the median` : ""}`,
      aria: `${name.join(", ")}: ${text}`,
    };
  });
  return { cells, labels: area.labels, height: area.height, axes: area.axes, domain, middle };
}

function heatSpec(found, width, chosen) {
  const isLight = document.documentElement.dataset.theme === "light";
  const [onDark, onLight] = isLight ? ["#ffffff", colour("ink")] : ["#0f1722", colour("ink")];
  const centre = { signal: "datum.x + datum.w / 2" };
  const ink = { signal: `datum.value !== null && datum.bright ? '${onDark}' : '${onLight}'` };
  const text = (field, y, fontSize, fillOpacity) => mark("text", "cells", {
    x: centre, y: { signal: y }, text: { field }, fontSize, fillOpacity, align: "center", baseline: "middle", fill: ink, aria: false,
  }, { interactive: false });
  return {
    width, height: found.height,
    data: [{ name: "cells", values: found.cells }, { name: "labels", values: found.labels }],
    signals: [{ name: "chosen", value: chosen }],
    scales: [{ name: "heat", type: "linear", domain: found.domain, range: { scheme: heatColours() }, clamp: true }],
    marks: [
      mark("rect", "cells", {
        x: { field: "x" }, y: { field: "y" }, width: { field: "w" }, height: { field: "h" }, cornerRadius: 2,
        fill: { signal: "datum.value === null ? 'transparent' : scale('heat', datum.value)" },
        stroke: { signal: `datum.far ? '${colour("mark")}' : '${colour("line")}'` }, strokeWidth: { signal: "datum.far ? 2 : 0.5" },
        strokeDash: { signal: "datum.value === null ? [2, 2] : []" },
        tooltip: { field: "tip" }, description: { field: "aria" }, cursor: "pointer",
      }, { name: "cell" }),
      mark("rect", "cells", {
        x: { field: "x", offset: -2 }, y: { field: "y", offset: -2 }, width: { signal: "datum.w + 4" }, height: { signal: "datum.h + 4" },
        cornerRadius: 3, stroke: colour("ink"), strokeWidth: 1.5, strokeOpacity: { signal: "datum.rank === chosen ? 1 : 0" }, aria: false,
      }, { interactive: false }),
      text("text", "datum.number ? datum.y + datum.h * 0.66 : datum.y + datum.h / 2", 11, 1),
      text("number", "datum.y + datum.h * 0.28", 9, 0.75),
      mark("text", "labels", {
        x: { field: "x" }, y: { field: "y" }, text: { field: "text" }, align: { field: "align" }, limit: { signal: "datum.limit || 0" },
        baseline: "middle", fontSize: 11, fill: { signal: `datum.strong ? '${colour("ink")}' : '${colour("muted")}'` },
        aria: false,
      }, { interactive: false }),
    ],
  };
}

function showHeat(state) {
  const { detail } = state;
  const place = detail.places.find((candidate) => candidate.id === state.place);
  const metric = metricOf(place, state.metric);
  let found = null;
  showChart("heat-chart", (width) => {
    found = heatCells(detail, place, metric, state.layout, width);
    return { ...heatSpec(found, width, state.rank), ready: (view) => view.addEventListener("click", (event, item) => item?.datum?.rank !== undefined && state.choose(item.datum.rank)) };
  });
  heatLegend(found, metric);
  heatRanking(state, place, metric, found.middle);
}

function heatLegend(found, metric) {
  const [low, high] = found.domain.map((value) => shown(value, metric.kind));
  const ramp = element("span", { class: "scale" }, low, element("span", { class: "ramp" }), high);
  const parts = [element("span", {}, metric.title), ramp];
  if (found.cells.some((cell) => cell.far)) {
    const swatch = element("span", { class: "swatch", style: `border: 2px solid ${colour("mark")}` });
    parts.push(element("span", {}, swatch, metric.bad === "high" ? `more than ${FAR} × the median` : `less than the median / ${FAR}`));
  }
  if (found.axes) parts.push(element("span", {}, found.axes));
  byId("heat-legend").replaceChildren(...parts);
}

function heatRanking(state, place, metric, middle) {
  const { ranks } = state.detail;
  const values = place.metrics[metric.id];
  const known = Array.from(values.keys()).filter((i) => !Number.isNaN(values[i]));
  const order = known.sort((a, b) => (metric.bad === "high" ? values[b] - values[a] : values[a] - values[b]));
  const words = metric.bad === "high" ? "highest" : "lowest";
  const missing = values.length - known.length;
  byId("heat-note").textContent = known.length
    ? `${capital(place.title)}: median ${shown(middle, metric.kind)}, ${words} ${shown(values[order[0]], metric.kind)}.` +
      `${missing ? ` ${missing} of ${values.length} ranks have no figure.` : ""} The ${Math.min(6, order.length)} ${words}:`
    : "No rank has this figure.";
  byId("heat-ranking").replaceChildren(...order.slice(0, 6).map((i) => element("button",
    { type: "button", onclick: () => state.choose(ranks.rank[i]) },
    element("b", {}, `rank ${ranks.rank[i]}`), ` ${ranks.hosts[ranks.host[i]]} · ${shown(values[i], metric.kind)}`)));
}

// Arrow keys move between cells, Enter chooses the rank.
function followHeatKeys(state) {
  const host = byId("heat-chart");
  let at = null;
  const cells = () => views.get("heat-chart")?.data("cells") ?? [];
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  host.addEventListener("keydown", (event) => {
    const current = cells().find((cell) => cell.rank === at) ?? cells().find((cell) => cell.rank === state.rank) ?? cells()[0];
    if (!current) return;
    if (event.key === "Enter") state.choose(current.rank);
    else if (event.key === "Escape") byId("tip").hidden = true;
    if (!steps[event.key]) return;
    event.preventDefault();
    const next = neighbour(cells(), current, steps[event.key]);
    at = next.rank;
    const box = host.getBoundingClientRect();
    placeTip(next.tip, box.left + next.x + next.w / 2, box.top + next.y + next.h / 2);
  });
  host.addEventListener("blur", () => { byId("tip").hidden = true; });
}

function neighbour(cells, from, [dx, dy]) {
  let best = from;
  let nearest = Infinity;
  for (const cell of cells) {
    const along = (cell.x - from.x) * dx + (cell.y - from.y) * dy;
    const aside = Math.abs((cell.x - from.x) * dy) + Math.abs((cell.y - from.y) * dx);
    if (along > 0.5 && along + 3 * aside < nearest) [best, nearest] = [cell, along + 3 * aside];
  }
  return best;
}
