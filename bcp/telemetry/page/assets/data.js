// Unpacks the data, and writes numbers for readers.

async function inflated(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const ARRAYS = {
  int8: Int8Array, int16: Int16Array, int32: Int32Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array,
  float32: Float32Array, float64: Float64Array,
};

function unpacked(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const start = Math.ceil((4 + length) / 8) * 8;
  const text = new TextDecoder().decode(new Uint8Array(buffer, 4, length));
  return JSON.parse(text, (key, value) => {
    if (value === null || typeof value !== "object" || !Array.isArray(value.$)) return value;
    const [type, offset, count] = value.$;
    return new ARRAYS[type](buffer, start + offset, count);
  });
}

const BYTE_UNITS = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12], ["PB", 1e15]];
const SECOND_UNITS = [["µs", 1e-6], ["ms", 1e-3], ["s", 1]];

// The unit in which the largest number of an axis has one to three digits before the point.
function unitFor(kind, most) {
  if (kind === "count" || kind === "ratio") return { name: "", factor: 1 };
  const units = kind === "seconds" ? SECOND_UNITS : BYTE_UNITS;
  const [name, factor] = units.filter(([, size]) => most >= size).pop() ?? units[0];
  return { name: kind === "rate" ? `${name}/s` : name, factor };
}

function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

function shown(value, kind) {
  if (value === null || value === undefined || Number.isNaN(value)) return "unknown";
  if (kind === "count") return Math.round(value).toLocaleString("en-US");
  if (kind === "ratio") return digits(value);
  if (kind === "seconds" && value >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  const unit = unitFor(kind, Math.abs(value));
  return `${digits(value / unit.factor)} ${unit.name}`;
}

function moment(seconds) {
  return new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");
}

function median(values) {
  const sorted = Array.from(values).filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  if (!sorted.length) return NaN;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function byId(id) {
  return document.getElementById(id);
}

// Makes an element. Texts become text nodes, so nothing in the data is read as HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, title, disabled]) => element("option", { value, disabled }, title)));
  if (entries.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

function table(host, heads, rows) {
  const cell = (tag, content, type) => element(tag, { class: type || null }, content);
  host.replaceChildren(
    element("thead", {}, element("tr", {}, ...heads.map(([title, type]) => cell("th", title, type)))),
    element("tbody", {}, ...rows.map((row) => element("tr", { "aria-current": row.current ? "true" : null },
      ...row.cells.map((content, i) => cell("td", content?.text ?? content, `${heads[i][1] || ""} ${content?.type || ""}`.trim()))))),
  );
}
