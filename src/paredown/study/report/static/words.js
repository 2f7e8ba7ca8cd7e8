// Formatting of numbers, and helpers that build elements. Data becomes text nodes and attributes, never markup.
const NARROW = "\u00a0"; // a no-break space between a number and its unit
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(count, digits = 2) {
  if (count === null || count === undefined) return "–";
  let value = count, unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 ? Math.round(value) : value.toFixed(digits)}${NARROW}${UNITS[unit]}`;
}

function percent(share, digits = 0) { return `${(100 * share).toFixed(digits)}${NARROW}%`; }

// An error in the units of its metric: error rates in percent, losses as plain numbers.
function sayError(value, metric, digits = 2) {
  if (value === null || value === undefined) return "–";
  return metric === "error" ? percent(value, digits) : short(value);
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 100 ? `${value.toFixed(1)}${NARROW}s` : value < 6000 ? `${(value / 60).toFixed(1)}${NARROW}min` : `${(value / 3600).toFixed(1)}${NARROW}h`;
}

// A step time: in times of the baseline's if that is known, and in milliseconds.
function sayStep(row) {
  const parts = [row.step_ratio !== null ? `${row.step_ratio.toFixed(2)}x the baseline's` : "", row.step_seconds !== null ? milliseconds(row.step_seconds) : ""].filter(Boolean);
  return parts.length ? parts.join(", ") : "–";
}

// The same for a table: the ratio, or milliseconds where that is not known.
function shortStep(row) { return row.step_ratio !== null ? `${row.step_ratio.toFixed(2)}x` : row.step_seconds !== null ? milliseconds(row.step_seconds) : "–"; }

const TIMED = { measured: "measured", predicted: "predicted", prior: "as on prior tasks" };

function milliseconds(value) { return `${Number((1000 * value).toPrecision(3))}${NARROW}ms`; }

// A text whose lines do not break between a number and its unit.
function tied(text) { return text.replace(/ (?=%|\u00b1|[KMGTP]?i?B\b)/g, NARROW).replaceAll("\u00b1 ", `\u00b1${NARROW}`); }

function plural(count, word) { return `${count} ${word}${count === 1 ? "" : "s"}`; }

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child); // strings become text nodes
  }
  return node;
}

function el(tag, attributes, ...children) { return put(document.createElement(tag), attributes, children); }
function svg(tag, attributes, ...children) { return put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children); }

// Replaces the children of an element, unless they are the same nodes already, so that focus and scroll position stay.
function fill(id, ...children) {
  const node = document.getElementById(id), wanted = children.flat().filter((x) => x !== null && x !== false);
  const isThere = node.childNodes.length === wanted.length && wanted.every((child, i) => child === node.childNodes[i]);
  if (!isThere) node.replaceChildren(...wanted);
}

// The width of a text in drawings, in pixels, and a text cut to a width; "" where less than three letters would be left.
const pen = document.createElement("canvas").getContext("2d");

function widthOf(text, isStrong) {
  pen.font = `${isStrong ? "650 " : ""}12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif`;
  return pen.measureText(text).width;
}

function cut(text, width, isStrong = false) {
  if (widthOf(text, isStrong) <= width) return text;
  let most = Math.min(text.length, Math.floor(width / 3));
  while (most >= 3 && widthOf(`${text.slice(0, most)}…`, isStrong) > width) most -= 1;
  return most < 3 ? "" : `${text.slice(0, most)}…`;
}

function quoted(label) { return `“${label}”`; }

// A scale from values to pixels, linear or logarithmic, with ticks at round values.
function scale(low, high, from, to, isLog) {
  const f = isLog ? Math.log : (x) => x, g = isLog ? Math.exp : (x) => x;
  const a = f(low), b = f(high);
  const at = (value) => from + ((f(value) - a) / (b - a || 1)) * (to - from);
  const back = (share) => g(a + share * (b - a));
  return { at, back, share: (value) => (f(value) - a) / (b - a || 1), low, high, isLog };
}

function roundTicks(low, high, count, unit = 1) {
  const raw = (high - low) / unit / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power * unit;
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-9) && ticks.length < 50; i += 1) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high, base) {
  const ticks = [];
  const factors = base === 10 ? [1, 2, 5] : [1];
  for (let i = Math.floor(Math.log(low) / Math.log(base)); base ** i <= high && ticks.length < 60; i += 1) {
    for (const factor of factors) if (factor * base ** i >= low && factor * base ** i <= high) ticks.push(factor * base ** i);
  }
  return ticks;
}

function byteTicks(axis, count) {
  if (axis.isLog) return logTicks(axis.low, axis.high, axis.high / axis.low > 256 ? 4 : 2);
  let unit = 1;
  while (axis.high / unit >= 1024) unit *= 1024;
  return roundTicks(axis.low, axis.high, count, unit);
}

function byteTick(count) {
  const [number, unit] = bytes(count, 2).split(NARROW);
  return `${Number(number)}${NARROW}${unit}`;
}
