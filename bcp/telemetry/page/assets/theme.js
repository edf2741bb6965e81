// Colours: those of the style sheet for light, dark and print.

const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem("bcp-report-colours", value);
    return localStorage.getItem("bcp-report-colours") || "auto";
  } catch {
    return value || "auto"; // a browser may refuse storage to files
  }
}

function applyTheme() {
  const wanted = byId("theme").value;
  const name = printing ? "light" : wanted === "auto" ? (dark.matches ? "dark" : "light") : wanted;
  document.documentElement.dataset.theme = name;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function heatColours() {
  return [0, 1, 2, 3, 4].map((step) => colour(`heat-${step}`));
}

function followTheme(redraw) {
  byId("theme").value = stored();
  applyTheme();
  const changed = () => { applyTheme(); redraw(); };
  byId("theme").addEventListener("change", () => { stored(byId("theme").value); changed(); });
  dark.addEventListener("change", changed);
  addEventListener("beforeprint", () => { printing = true; changed(); });
  addEventListener("afterprint", () => { printing = false; changed(); });
}
