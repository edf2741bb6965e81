// Where the heat map draws each rank: over the parallel topology, over hosts, or as a plain grid.

const MOST_HEIGHT = 560;
const SMALLEST = 9;
const LARGEST = { width: 84, height: 36 };
const ENOUGH = 60; // wide enough for a figure: wider cells are worth nothing
const GAP = 18;

function layoutsOf(ranks) {
  const layouts = [];
  const axes = usedAxes(ranks);
  if (axes.length) layouts.push(["topology", `parallel topology (${axes.map((axis) => axis.name.toUpperCase()).join(" × ")})`]);
  if (ranks.hosts.length > 1 || !axes.length) layouts.push(["hosts", "host × local rank"]);
  layouts.push(["grid", "order of ranks"]);
  return layouts;
}

function usedAxes(ranks) {
  return ranks.axes
    .map((name, i) => ({ name, values: ranks.coordinates[i], labels: distinct(ranks.coordinates[i]) }))
    .filter((axis) => axis.labels.length > 1);
}

function distinct(values) {
  return Array.from(new Set(values)).sort((a, b) => a - b);
}

// Returns blocks of cells before any size is known: {title, rows: [label], columns: [label], rowTitle, columnTitle, cells: [[rank's place, row, column]]}.
function blocksOf(ranks, layout) {
  const count = ranks.rank.length;
  if (layout === "topology") return topologyBlocks(ranks, usedAxes(ranks), count);
  if (layout === "hosts") return hostBlocks(ranks, count);
  const size = Math.min(count, count > 256 ? 32 : count > 64 ? 16 : 8);
  const rows = Array.from({ length: Math.ceil(count / size) }, (_, i) => String(ranks.rank[i * size]));
  const cells = Array.from({ length: count }, (_, i) => [i, Math.floor(i / size), i % size]);
  return [{ title: "", rows, columns: Array.from({ length: size }, (_, i) => `+${i}`), rowTitle: "rank", columnTitle: "", cells }];
}

function topologyBlocks(ranks, axes, count) {
  const across = axes.at(-1);
  const down = axes.length > 1 ? axes.at(-2) : { name: "", values: new Int32Array(count), labels: [0] };
  const outer = axes.slice(0, -2);
  const blocks = new Map();
  for (let i = 0; i < count; i++) {
    const title = outer.map((axis) => `${axis.name} ${axis.values[i]}`).join(", ");
    if (!blocks.has(title)) blocks.set(title, []);
    blocks.get(title).push([i, down.labels.indexOf(down.values[i]), across.labels.indexOf(across.values[i])]);
  }
  const labels = (axis) => axis.labels.map(String);
  return Array.from(blocks, ([title, cells]) => turned({
    title, cells, rows: labels(down), columns: labels(across), rowTitle: down.name, columnTitle: across.name,
  }));
}

// Many rows of few columns become few rows of many columns.
function turned(block) {
  if (block.rows.length <= 32 || block.rows.length <= block.columns.length) return block;
  return {
    ...block, rows: block.columns, columns: block.rows, rowTitle: block.columnTitle, columnTitle: block.rowTitle,
    cells: block.cells.map(([i, row, column]) => [i, column, row]),
  };
}

function hostBlocks(ranks, count) {
  const locals = distinct(ranks.local);
  const taken = new Map(); // two ranks of one host may tell the same local rank
  const cells = Array.from({ length: count }, (_, i) => {
    let column = locals.indexOf(ranks.local[i]);
    while (taken.has(`${ranks.host[i]} ${column}`)) column++;
    taken.set(`${ranks.host[i]} ${column}`, i);
    return [i, ranks.host[i], column];
  });
  const most = Math.max(locals.length, ...cells.map(([, , column]) => column + 1));
  const columns = Array.from({ length: most }, (_, i) => String(locals[i] ?? "+"));
  return [turned({ title: "", rows: ranks.hosts, columns, rowTitle: "host", columnTitle: "local rank", cells })];
}

// Cuts blocks that are too wide at the smallest size of cells.
function cut(blocks, width) {
  return blocks.flatMap((block) => {
    const room = Math.max(4, Math.floor((width - labelWidth(block)) / (SMALLEST + 1)));
    if (block.columns.length <= room) return [block];
    const size = Math.ceil(block.columns.length / Math.ceil(block.columns.length / room));
    return Array.from({ length: Math.ceil(block.columns.length / size) }, (_, part) => ({
      ...block, columns: block.columns.slice(part * size, (part + 1) * size),
      cells: block.cells.filter(([, , column]) => Math.floor(column / size) === part).map(([i, row, column]) => [i, row, column - part * size]),
    }));
  });
}

function labelWidth(block) {
  if (block.rows.length < 2) return 4;
  return Math.min(150, 12 + Math.max(...block.rows.map((label) => label.length)) * 7);
}

// Returns {cells: [{i, x, y, w, h}], labels: [{x, y, text, align}], height, axes}; axes is a text.
function placed(ranks, layout, width) {
  const blocks = cut(blocksOf(ranks, layout), width);
  const rows = Math.max(...blocks.map((block) => block.rows.length));
  const columns = Math.max(...blocks.map((block) => block.columns.length));
  const left = Math.max(...blocks.map(labelWidth));
  const top = (blocks.some((block) => block.title) ? 16 : 0) + 16;
  const best = bestSize(blocks.length, rows, columns, left, top, width);
  const cells = [];
  const labels = [];
  blocks.forEach((block, place) => {
    const x0 = (place % best.across) * (left + columns * best.w + GAP) + left;
    const y0 = Math.floor(place / best.across) * (top + rows * best.h + GAP) + top;
    for (const [i, row, column] of block.cells) cells.push({ i, x: x0 + column * best.w, y: y0 + row * best.h, w: best.w, h: best.h });
    labels.push(...blockLabels(block, x0, y0, left, best));
  });
  const lines = Math.ceil(blocks.length / best.across);
  const [{ rowTitle, columnTitle }] = blocks;
  const axes = [rows > 1 && rowTitle ? `rows: ${rowTitle}` : "", columnTitle ? `columns: ${columnTitle}` : ""].filter(Boolean).join(", ");
  return { cells, labels, height: lines * (top + rows * best.h + GAP), axes };
}

function bestSize(count, rows, columns, left, top, width) {
  let best = null;
  for (let across = 1; across <= count; across++) {
    const lines = Math.ceil(count / across);
    const w = Math.min(LARGEST.width, Math.floor(((width - across * (left + GAP) + GAP) / (across * columns)) * 4) / 4);
    if (w < SMALLEST && across > 1) break;
    const high = (MOST_HEIGHT - lines * (top + GAP)) / (lines * rows);
    const h = Math.max(Math.min(w, 12), Math.min(LARGEST.height, Math.floor(Math.min(high, w)), Math.floor(w)));
    const score = Math.min(w, ENOUGH, 2.5 * h) * h - (lines * (top + rows * h) > MOST_HEIGHT * 1.5 ? 1e4 : 0);
    if (!best || score >= best.score) best = { across, w: Math.min(w, Math.max(3 * h, SMALLEST)), h, score };
  }
  return best;
}

function blockLabels(block, x0, y0, left, { w, h }) {
  const labels = [];
  if (block.title) labels.push({ x: x0, y: y0 - 24, text: block.title, align: "left", strong: true });
  const everyRow = Math.ceil(12 / h);
  block.rows.forEach((label, i) => {
    if (i % everyRow === 0 && block.rows.length > 1) labels.push({ x: x0 - 6, y: y0 + (i + 0.5) * h, text: label, align: "right", limit: left - 8 });
  });
  const every = Math.ceil((Math.max(...block.columns.map((label) => label.length)) * 6.5 + 6) / w);
  block.columns.forEach((label, i) => {
    const fits = i % every === 0 && (i === 0 || i + every <= block.columns.length);
    if (fits) labels.push({ x: x0 + (every > 1 ? 0 : w / 2) + i * w, y: y0 - 8, text: label, align: every > 1 ? "left" : "center" });
  });
  return labels;
}
