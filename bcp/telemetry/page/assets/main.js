// Puts the page together, and follows its controls.

const MOST_FAILURES = 50;

function failureCard(failure) {
  const where = failure.stage ? `stage ${failure.stage}` : failure.phase ? `phase ${failure.phase}` : "an unknown place";
  const rows = [
    ["Phase", failure.phase], ["Item", failure.item && element("code", {}, failure.item)],
    ["Tensors", failure.tensors.length ? element("code", {}, failure.tensors.join(", ")) : ""],
    ["File", failure.file && element("code", {}, failure.file)], ["Attempt", failure.attempt ? String(failure.attempt) : ""],
    ["Rank to blame", failure.guilty !== null && failure.guilty !== failure.rank ? `rank ${failure.guilty}` : ""],
    ["Time", moment(failure.time)],
    ["Error", failure.errors.length ? element("ol", {}, ...failure.errors.map(([type, message]) => element("li", {}, element("code", {}, `${type}: ${message}`)))) : ""],
    ["Notes", failure.notes.length ? element("code", {}, failure.notes.join("\n")) : ""],
  ].filter(([, value]) => value);
  return element("div", { class: "failure" },
    element("h3", {}, `Rank ${failure.rank} on ${failure.host} failed in ${where}`),
    element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
}

function showFailures(state) {
  const { failures } = state.recording;
  const others = state.recordings.filter((recording) => recording !== state.recording && recording.failures.length);
  byId("failures").hidden = !failures.length && !others.length;
  const first = [...failures].sort((a, b) => Number(b.guilty === b.rank) - Number(a.guilty === a.rank) || Number(Boolean(b.stage)) - Number(Boolean(a.stage)) || a.rank - b.rank);
  const own = first.filter((failure) => failure.guilty === null || failure.guilty === failure.rank).length || 1;
  const shownFirst = first.slice(0, Math.min(own, 3));
  const rest = first.slice(shownFirst.length);
  const parts = shownFirst.map(failureCard);
  if (rest.length) {
    parts.push(element("details", {}, element("summary", {}, `${rest.length} more ${rest.length === 1 ? "rank reports" : "ranks report"} this failure`),
      ...rest.slice(0, MOST_FAILURES).map(failureCard), rest.length > MOST_FAILURES ? `and ${rest.length - MOST_FAILURES} more` : null));
  }
  if (others.length) {
    parts.push(element("p", {}, "Also failed: ", ...others.slice(-10).flatMap((recording, i) => [i ? ", " : "",
      element("button", { class: "link", type: "button", onclick: () => state.show(state.recordings.indexOf(recording)) }, `${recording.kind} of ${titleOf(recording)}`)])));
  }
  byId("failures-list").replaceChildren(...parts);
}

function showHighlights(state) {
  byId("highlights").hidden = !state.highlights.length;
  byId("highlights-list").replaceChildren(...state.highlights.map((text) => element("li", {}, text)));
}

function showSummary(state) {
  const { recording } = state;
  const { headline } = recording;
  const save = recording.kind === "save";
  const present = headline.ranks < recording.world_size ? `${shown(headline.ranks, "count")} have records` : `${shown(headline.hosts, "count")} ${headline.hosts === 1 ? "host" : "hosts"}`;
  const failed = recording.failures.length > 0;
  const tiles = [
    [save ? "Bytes written" : "Bytes loaded", shown(headline.bytes, "bytes"), headline.deduplicated ? `${shown(headline.deduplicated, "bytes")} of replicas spared` : ""],
    [failed ? "Call to failure" : save ? "Call to commit" : "Call to loaded", shown(headline.seconds, "seconds"), recording.background ? "in the background" : "training waited"],
    save ? ["Training blocked", shown(blockedOf(recording), "seconds"), "longest of all ranks"] : null,
    ["Throughput", shown(headline.throughput, "rate"), "all ranks"],
    ["Ranks", shown(recording.world_size, "count"), present],
    recording.step === null ? null : ["Step", String(recording.step), ""],
    ["Retries", shown(headline.retries, "count"), `${shown(headline.requests, "count")} requests`, headline.retries > 0],
  ].filter((tile) => tile && tile[1] !== "unknown");
  byId("tiles").replaceChildren(...tiles.map(([name, value, more, warn]) => element("div", { class: warn ? "warn" : null },
    element("dt", {}, name), element("dd", {}, value, more ? element("small", {}, more) : null))));
  byId("findings").replaceChildren(...recording.findings.map((text) => element("li", {}, text)));
  byId("kicker").textContent = ["bcp report", recording.kind, recording.run].filter(Boolean).join(" · ");
  byId("title").textContent = recording.path;
  byId("subtitle").textContent = [recording.step === null ? "" : `step ${recording.step}`, moment(recording.time), `operation ${recording.operation}`].filter(Boolean).join(" · ");
  document.title = `bcp ${recording.kind}: ${recording.path}`;
}

function showDetail(state) {
  const { detail } = state;
  const complete = Boolean(detail?.ranks.rank.length);
  byId("detail").hidden = !complete;
  byId("left-out").hidden = complete;
  byId("left-out").textContent = detail
    ? "This recording has no records of ranks."
    : "Ranks and events of this recording are left out to keep the page small. A report of this checkpoint alone has them.";
  for (const id of charts.keys()) if (!id.startsWith("trend-")) charts.delete(id);
  if (!complete) return;
  if (!detail.places.some((place) => place.id === state.place)) state.place = "whole";
  options(byId("heat-place"), detail.places.map((place) => [place.id, place.title]), state.place);
  const layouts = layoutsOf(detail.ranks);
  if (!layouts.some(([id]) => id === state.layout)) state.layout = layouts[0][0];
  options(byId("heat-layout"), layouts, state.layout);
  state.rank = rankOptions(state);
  showMetrics(state);
  showTimeline(state);
  showThroughput(state);
  showStorage(state);
  showBalance(state);
}

function showMetrics(state) {
  const place = state.detail.places.find((candidate) => candidate.id === state.place);
  const ids = Object.keys(place.metrics);
  if (!ids.includes(state.metric)) state.metric = ids[0];
  options(byId("heat-metric"), ids.map((id) => [id, metricOf(place, id).title]), state.metric);
  showHeat(state);
}

function rankOptions(state) {
  const { ranks, places, events } = state.detail;
  const { seconds } = places[0].metrics;
  const order = Array.from(ranks.rank.keys()).sort((a, b) => (seconds ? seconds[b] - seconds[a] : 0) || a - b);
  const present = new Set(events.rank);
  options(byId("rank"), order.map((i) => {
    const time = seconds && !Number.isNaN(seconds[i]) ? ` · ${shown(seconds[i], "seconds")}` : "";
    const here = present.has(ranks.rank[i]);
    return [ranks.rank[i], `rank ${ranks.rank[i]} · ${ranks.hosts[ranks.host[i]]}${time}${here ? "" : " · no timeline here"}`, !here];
  }));
  const guilty = state.recording.failures.map((failure) => ranks.rank.indexOf(failure.guilty ?? failure.rank)).filter((i) => i >= 0);
  const first = [...guilty, ...order].find((i) => present.has(ranks.rank[i])) ?? order[0];
  if (first === undefined) return null;
  byId("rank").value = ranks.rank[first];
  return ranks.rank[first];
}

function showRecording(state, place) {
  state.place_in_run = place;
  state.recording = state.recordings[place];
  state.detail = state.recording.detail;
  byId("recording").value = place;
  showFailures(state);
  showSummary(state);
  showDetail(state);
  if (state.recordings.length > 1) recordingsTable(state);
  const { events } = state.recording.headline;
  const drawn = state.detail?.events.rank.length ?? 0;
  byId("footer").textContent = [
    `bcp ${state.recording.version}`, `${shown(events, "count")} events${drawn < events ? `, of which this page has ${shown(drawn, "count")}` : ""}`,
    state.recording.dropped ? `${shown(state.recording.dropped, "count")} more events were not recorded` : "",
  ].filter(Boolean).join(" · ");
}

function newState(data) {
  const state = { ...data, place: "whole", metric: "seconds", layout: "", rank: null, span: [0, 1], end: 1 };
  state.show = (place) => { showRecording(state, place); byId("main").scrollIntoView({ block: "start" }); };
  state.choose = (rank) => {
    state.rank = rank;
    byId("rank").value = rank;
    views.get("heat-chart")?.signal("chosen", rank).run();
    showTimeline(state);
  };
  return state;
}

function followControls(state) {
  const on = (id, event, act) => byId(id).addEventListener(event, act);
  on("recording", "change", () => showRecording(state, Number(byId("recording").value)));
  on("heat-place", "change", () => { state.place = byId("heat-place").value; showMetrics(state); });
  on("heat-metric", "change", () => { state.metric = byId("heat-metric").value; showHeat(state); });
  on("heat-layout", "change", () => { state.layout = byId("heat-layout").value; showHeat(state); });
  on("rank", "change", () => state.choose(Number(byId("rank").value)));
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(state, button.dataset.zoom));
  followHeatKeys(state);
  followTheme(() => { drawAll(); if (charts.has("heat-chart")) { showHeat(state); showStorage(state); } });
  followSize();
}

// For scripts and tests: the numbers that the page shows. heat() first chooses the place and figure that it is given.
function publish(state) {
  const rows = (id, name) => views.get(id)?.data(name).map((row) => ({ ...row })) ?? [];
  window.bcpReport = {
    ready: performance.now(),
    recordings: state.recordings.length,
    drawn: allDrawn,
    async heat(place = state.place, metric = state.metric) {
      if (place !== state.place || metric !== state.metric) {
        Object.assign(state, { place, metric });
        byId("heat-place").value = place;
        showMetrics(state);
      }
      await allDrawn();
      return { place: state.place, metric: state.metric, cells: rows("heat-chart", "cells").map(({ rank, value, x, y }) => ({ rank, value, x, y })) };
    },
    timeline: () => ({ rank: state.rank, span: state.span, bars: rows("timeline-chart", "bars"), waits: rows("timeline-chart", "waits") }),
    queue: () => timelineOf(state, state.rank).groups.filter((group) => group.kind === "stage").map((group, i) => ({ stage: group.title, rows: rows("queue-chart", `queue${i}`) })),
    throughput: () => rows("throughput-chart", "rates"),
    latency: () => rows("latency-chart", "counts").map(({ verb, status, count }) => ({ verb, status, count })),
    balance: () => rows("balance-chart", "bars").map(({ rank, bytes }) => ({ rank, bytes })),
    trend: (id) => rows(`trend-${id}`, "points").map(({ at, kind, value }) => ({ at, kind, value })),
  };
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to unpack the page; one from 2023 or later does");
  const [code, buffer] = await Promise.all([inflated("bcp-vega"), inflated("bcp-data")]);
  document.head.append(element("script", {}, new TextDecoder().decode(code)));
  const state = newState(unpacked(buffer));
  followControls(state);
  const several = state.recordings.length > 1;
  byId("recording-label").hidden = !several;
  options(byId("recording"), state.recordings.map((recording, place) => [place, `${recording.kind} · ${titleOf(recording)}${recording.failures.length ? " · failed" : ""}`]));
  byId("main").hidden = false;
  showHighlights(state);
  showRecording(state, state.recordings.length - 1);
  showTrends(state);
  await allDrawn();
  publish(state);
}

start().catch((error) => {
  byId("problem").hidden = false;
  byId("problem").textContent = `The page cannot be shown: ${error.message}`;
  console.error(error);
});
