// Memory at the peak: a bar for each plan, by role.
const ROLES = ["weight", "master", "residue", "gradient", "moment1", "moment2", "activation", "error", "buffer", "input", "temporary", "libraries"];
const TEXTURES = {
  weight: null, master: "M0,3h6", residue: "dots", gradient: "M-1,5l6,-6M2,8l6,-6", moment1: "M0,1.5h6M0,4.5h6", moment2: "M3,0v6",
  activation: "M-1,1l6,6M2,-2l6,6", error: "M0,0l6,6M6,0l-6,6", buffer: "dots", input: "M1.5,0v6M4.5,0v6", temporary: "M0,3h6M3,0v6", libraries: "dots",
};
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
    texts.push(svg("text", { x: 0, y: top - 5, class: kind }, cut(name, width - 150, isShown)));
    texts.push(svg("text", { x: width, y: top - 5, "text-anchor": "end", class: kind }, bytes(row.peak_bytes)));
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
