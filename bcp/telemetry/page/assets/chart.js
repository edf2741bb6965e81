// Views of Vega: made, shown again after changes of size and colours, and their tooltips.

const charts = new Map(); // id of the element -> function of the width that returns a specification, or a text for none
const views = new Map(); // id of the element -> the view that it shows
const drawings = new Map(); // id of the element -> the promise of its view
const MOST_SVG_MARKS = 6000;

const noFiles = { load() { throw new Error("the page loads nothing"); }, sanitize() { throw new Error("the page links nothing"); } };

function showChart(id, build) {
  charts.set(id, build);
  drawChart(id);
}

function drawChart(id) {
  const host = byId(id);
  const spec = charts.get(id)(Math.max(host.clientWidth, 200));
  host.classList.toggle("empty", typeof spec === "string");
  if (typeof spec === "string") {
    host.dataset.empty = spec;
    forget(id);
    host.replaceChildren();
    return;
  }
  const drawing = embedded(host, spec);
  drawings.set(id, drawing);
  drawing.then(({ view, canvas }) => {
    if (drawings.get(id) !== drawing) return view.finalize(); // drawn again in the meantime
    forget(id);
    views.set(id, view);
    host.replaceChildren(canvas);
    return spec.ready?.(view, host);
  });
}

function forget(id) {
  views.get(id)?.finalize();
  views.delete(id);
}

async function embedded(host, spec) {
  const marks = (spec.data || []).reduce((count, data) => count + (data.values?.length || 0), 0);
  const canvas = element("div");
  const { view } = await vegaEmbed(canvas, themed(spec), {
    mode: "vega", actions: false, defaultStyle: false, renderer: marks > MOST_SVG_MARKS ? "canvas" : "svg", hover: true,
    tooltip: showTip, loader: noFiles, logLevel: 2,
  });
  return { view, canvas };
}

async function allDrawn() {
  await Promise.all(drawings.values());
}

function drawAll() {
  for (const id of charts.keys()) if (byId(id)) drawChart(id);
}

function themed({ ready, ...spec }) {
  const font = getComputedStyle(document.body).fontFamily;
  const axis = {
    labelColor: colour("muted"), titleColor: colour("muted"), tickColor: colour("line"), domainColor: colour("line"),
    gridColor: colour("grid"), labelFont: font, titleFont: font, titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 12,
  };
  return { background: null, autosize: "none", ...spec, config: { axis, text: { font }, events: { timer: false } } };
}

function showTip(handler, event, item, value) {
  const tip = byId("tip");
  tip.hidden = !value;
  if (!value) return;
  const touch = event.touches?.[0] ?? event.changedTouches?.[0] ?? event;
  placeTip(String(value), touch.clientX, touch.clientY);
}

function placeTip(text, x, y) {
  const tip = byId("tip");
  tip.hidden = false;
  tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
}

function followSize() {
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
}

// A mark that draws rows of data, with functions or constants for its channels.
function mark(type, data, update, more = {}) {
  const value = (channel) => (channel !== null && typeof channel === "object" ? channel : { value: channel });
  return {
    type, from: { data }, interactive: more.interactive ?? true, name: more.name, clip: more.clip,
    encode: { update: Object.fromEntries(Object.entries(update).map(([name, channel]) => [name, value(channel)])) },
  };
}
