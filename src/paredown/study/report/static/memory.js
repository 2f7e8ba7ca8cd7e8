// Memory at the peak: a bar for each plan by role, and tree maps by module whose areas are bytes.
const ROLES = ["weight", "master", "residue", "gradient", "moment1", "moment2", "activation", "error", "buffer", "input", "temporary", "libraries"];
const TEXTURES = {
  weight: null, master: "M0,3h6", residue: "dots", gradient: "M-1,5l6,-6M2,8l6,-6", moment1: "M0,1.5h6M0,4.5h6", moment2: "M3,0v6",
  activation: "M-1,1l6,6M2,-2l6,6", error: "M0,0l6,6M6,0l-6,6", buffer: "dots", input: "M1.5,0v6M4.5,0v6", temporary: "M0,3h6M3,0v6", libraries: "dots",
};
const OUTSIDE = "outside of modules";
const MOST_GROUPS = 20;
const MOST_SCALE = 2; // a budget above so many times the largest peak is named, and bars fill the width

function roleOf(name) { return ROLES.includes(name) ? name : "buffer"; }

function textures() {
  const made = ROLES.map((role) => {
    const texture = TEXTURES[role];
    const inner = texture === "dots" ? svg("circle", { cx: 3, cy: 3, r: 0.9, class: "texture dots" }) : texture ? svg("path", { d: texture, class: "texture" }) : null;
    const ground = svg("rect", { width: 6, height: 6 });
    ground.style.fill = `var(--${role})`;
    return svg("pattern", { id: `role-${role}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, ground, inner);
  });
  return svg("svg", { width: 0, height: 0, "aria-hidden": "true", class: "hide" }, svg("defs", {}, made));
}

function tile(role, x, y, width, height) {
  return svg("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), class: "tile", fill: `url(#role-${roleOf(role)})` });
}

// A tile with a tooltip: `key` is its own on the page, `name` says whose bytes these are.
function namedTile(key, name, role, nbytes, total, at) {
  const node = tile(role, at.x, at.y, at.width, at.height);
  node.setAttribute("role", "img");
  return withTip(node, key, `${name}, ${role}`, [["at the peak", bytes(nbytes)], ["share of the plan", percent(nbytes / total, 1)]], [at.x + at.width / 2, at.y]);
}

function legendOf(kept) {
  const present = ROLES.filter((role) => kept.some((row) => row.by_role[role] > 0));
  return el("ul", { class: "legend" }, present.map((role) => el("li", {}, svg("svg", { width: 22, height: 14, "aria-hidden": "true" }, tile(role, 0, 0, 22, 14)), role)));
}

function rolesOf(row) { return ROLES.filter((role) => row.by_role[role] > 0).map((role) => [role, row.by_role[role]]); }

function drawBars(study, kept, budget, label, shown, width) {
  const largest = Math.max(...kept.map((row) => row.peak_bytes), 1), most = 1.02 * (budget < MOST_SCALE * largest ? Math.max(largest, budget) : largest), step = 50, height = kept.length * step + 20;
  const x = (nbytes) => (nbytes / most) * width;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Bytes at the peak by role, a bar for each plan; the table below has the same numbers. Arrow keys go from part to part." });
  const texts = [];
  kept.forEach((row, i) => {
    const top = i * step + 18, isShown = row.label === shown, kind = isShown ? "halo strong" : "halo";
    const name = `${isShown ? "▸ " : ""}${calledOf(study, row.label)}${row.label === label ? ", picked" : ""}`;
    const share = study.full_bytes ? ` · ${percent(row.peak_bytes / study.full_bytes)}` : "";
    texts.push(svg("text", { x: 0, y: top - 5, class: kind }, cut(name, width - 150, isShown)));
    texts.push(svg("text", { x: width, y: top - 5, "text-anchor": "end", class: kind }, `${bytes(row.peak_bytes)}${share}`));
    let at = 0;
    for (const [role, nbytes] of rolesOf(row)) {
      root.append(namedTile(`bar:${row.label}:${role}`, calledOf(study, row.label), role, nbytes, row.peak_bytes, { x: x(at), y: top, width: x(nbytes), height: 22 }));
      const text = cut(role, x(nbytes) - 10);
      if (text === role) root.append(svg("text", { x: x(at) + 5, y: top + 15.5, class: "halo" }, text));
      at += nbytes;
    }
  });
  if (budget && budget < most) {
    const end = x(budget) > width - 130;
    root.append(svg("line", { x1: x(budget), x2: x(budget), y1: 16, y2: height - 6, class: "budget" }));
    root.append(svg("text", { x: x(budget) + (end ? -6 : 6), y: height - 8, "text-anchor": end ? "end" : "start", class: "strong" }, `budget ${bytes(budget)}`));
  }
  if (budget && budget >= most) root.append(svg("text", { x: width, y: height - 8, "text-anchor": "end", class: "strong" }, `budget ${bytes(budget)}, further right`));
  root.append(...texts);
  steppable(root, [...root.querySelectorAll("[data-key]")]);
  return root;
}

function rolesTable(study, kept) {
  const names = kept.map((row) => calledOf(study, row.label)), present = ROLES.filter((role) => kept.some((row) => row.by_role[role] > 0));
  const row = (name, show) => el("tr", { role: "row" }, cellOf("role", name, true), kept.map((one, i) => cellOf(names[i], show(one), false, "num")));
  const head = el("tr", { role: "row" }, ["role", ...names].map((name, i) => el("th", { scope: "col", role: "columnheader", class: i ? "num" : null }, name)));
  const rows = present.map((role) => row(role, (one) => bytes(one.by_role[role] || 0)));
  rows.push(row("peak", (one) => bytes(one.peak_bytes)), row("at least to at most", (one) => `${bytes(one.low_bytes)} – ${bytes(one.high_bytes)}`));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Bytes by role" }, el("table", { role: "table" }, el("thead", { class: "bare", role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, rows)));
}

// --- by module --------------------------------------------------------------------------------------------------------

// Groups of modules by the first `depth` parts of their paths.
function grouped(places, depth) {
  const groups = new Map();
  for (const [module, role, nbytes] of places) {
    const name = module ? module.split(".").slice(0, depth).join(".") : OUTSIDE;
    if (!groups.has(name)) groups.set(name, { name, nbytes: 0, parts: new Map() });
    const group = groups.get(name);
    group.nbytes += nbytes;
    group.parts.set(role, (group.parts.get(role) || 0) + nbytes);
  }
  return [...groups.values()].sort((a, b) => b.nbytes - a.nbytes);
}

function depthFor(places) {
  let depth = 1;
  while (depth < 5 && grouped(places, depth + 1).length <= MOST_GROUPS && grouped(places, depth + 1).length > grouped(places, depth).length) depth += 1;
  return depth;
}

// A squarified tree map: a row along the shorter side grows while that makes its tiles more square. Items have nbytes, largest first.
function squarify(items, x, y, width, height) {
  const placed = [];
  let rest = items.filter((item) => item.nbytes > 0), total = rest.reduce((sum, item) => sum + item.nbytes, 0);
  while (rest.length && width > 0.5 && height > 0.5) {
    const side = Math.min(width, height), unit = (width * height) / total;
    let count = 1, worst = Infinity;
    for (let n = 1; n <= rest.length; n += 1) {
      const sum = rest.slice(0, n).reduce((s, item) => s + item.nbytes, 0) * unit, across = sum / side;
      const ratio = Math.max(...rest.slice(0, n).map((item) => { const along = (item.nbytes * unit) / across; return Math.max(along / across, across / along); }));
      if (ratio > worst) break;
      worst = ratio; count = n;
    }
    const row = rest.slice(0, count), taken = row.reduce((s, item) => s + item.nbytes, 0), across = (taken * unit) / side;
    let at = 0;
    for (const item of row) {
      const along = (item.nbytes / taken) * side;
      placed.push(width >= height ? { item, x, y: y + at, width: across, height: along } : { item, x: x + at, y, width: along, height: across });
      at += along;
    }
    if (width >= height) { x += across; width -= across; } else { y += across; height -= across; }
    rest = rest.slice(count); total -= taken;
  }
  return placed;
}

// The name of a module if it fits into `width`, or else its last part if that has more than two letters.
function nameIn(name, width) {
  const last = name.split(".").pop();
  return [name, `…${last}`].find((text, i) => (i === 0 || last.length > 2) && widthOf(text, true) <= width) || "";
}

function drawMap(row, depth, width, height, most) {
  const share = Math.sqrt(row.peak_bytes / most), w = width * share, h = height * share;
  const said = `Bytes at the peak of ${row.label} by module and role; the table of roles has the sums. Arrow keys go from part to part.`;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": said });
  root.append(svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: height - 1, class: "ghost" }));
  for (const group of squarify(grouped(row.places, depth), 0, 0, w, h)) {
    const parts = [...group.item.parts].map(([role, nbytes]) => ({ role, nbytes })).sort((a, b) => b.nbytes - a.nbytes);
    for (const part of squarify(parts, group.x, group.y, group.width, group.height)) {
      root.append(namedTile(`map:${row.label}:${group.item.name}:${part.item.role}`, group.item.name, part.item.role, part.item.nbytes, row.peak_bytes, part));
    }
    root.append(svg("rect", { x: group.x, y: group.y, width: group.width, height: group.height, class: "frame" }));
    const name = nameIn(group.item.name, group.width - 10);
    if (name && group.height > 18) root.append(svg("text", { x: group.x + 5, y: group.y + 15, class: "halo strong" }, name));
    const size = bytes(group.item.nbytes, 1);
    if (name && widthOf(size) < group.width - 10 && group.height > 34) root.append(svg("text", { x: group.x + 5, y: group.y + 30, class: "halo" }, size));
  }
  steppable(root, [...root.querySelectorAll("[data-key]")]);
  return root;
}

function drawMaps(study, kept, shownLabel, width) {
  const first = kept.find((row) => row.label === study.written) || kept[0], second = kept.find((row) => row.label === shownLabel);
  const shown = second && second !== first ? [first, second] : [first];
  const each = width >= 800 ? (width - 24) / 2 : width, height = Math.round(Math.min(0.72 * each, 380));
  const most = Math.max(...shown.map((row) => row.peak_bytes)), depth = depthFor(first.places);
  return shown.filter((row) => row.places.length).map((row) => el("figure", {}, el("figcaption", {}, el("strong", {}, calledOf(study, row.label)), ` · ${bytes(row.peak_bytes)}`), drawMap(row, depth, each, height, most)));
}
