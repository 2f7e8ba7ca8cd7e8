// Memory over one training step: the baseline and a plan, as predicted operation by operation, with the measured peaks and the budget.
const PHASES = [["forward", 0.42], ["backward", 0.5], ["update", 0.08]]; // and their shares of the width
const AREA = { left: 58, right: 14, top: 26, bottom: 28 };

function hasSteps(study) { return study.kept.some((row) => row.phases.length); }

// The baseline and the plan that the chart compares; one of them where there is no other.
function stepRows(study, label) {
  const rows = study.kept.filter((row) => row.phases.length), plan = rows.find((row) => row.label === keptLabel(study, label));
  const first = rows.find((row) => row.label === study.written);
  return [first, plan === first ? null : plan].filter(Boolean);
}

function measuredPeak(study, label) { return markOf(study, label)?.measured_bytes ?? null; }

// The corners of a line over the step, (x, y), and the corner of its peak.
function cornersOf(row, x, y) {
  const corners = [], peak = { x: x(0), y: Infinity };
  let start = 0;
  row.phases.forEach((phase, i) => {
    const share = PHASES[i][1];
    phase.forEach((nbytes, k) => {
      const [from, to] = [x(start + (share * k) / phase.length), x(start + (share * (k + 1)) / phase.length)];
      corners.push([from, y(nbytes)], [to, y(nbytes)]);
      if (y(nbytes) < peak.y) Object.assign(peak, { x: (from + to) / 2, y: y(nbytes) });
    });
    start += share;
  });
  return { corners, peak };
}

function sayPeak(study, row) {
  const measured = measuredPeak(study, row.label);
  return measured === null ? [`peak ${bytes(row.peak_bytes)}`, "predicted"] : [`peak ${bytes(measured)}`, `predicted: ${bytes(row.peak_bytes)}`];
}

function drawStep(study, label, budget, width) {
  const rows = stepRows(study, label), height = Math.round(Math.max(250, Math.min(350, 0.6 * width)));
  const largest = Math.max(...rows.flatMap((row) => [row.peak_bytes, measuredPeak(study, row.label) ?? 0]));
  const most = 1.06 * (budget !== null && budget < MOST_SCALE * largest ? Math.max(largest, budget) : largest);
  const x = (share) => AREA.left + share * (width - AREA.left - AREA.right), y = (nbytes) => height - AREA.bottom - (nbytes / most) * (height - AREA.top - AREA.bottom);
  const calls = rows.map((row) => (row.label === study.written ? "baseline" : row.label === study.picked ? "with the plan" : cut(`with ${row.label}`, 0.35 * width)));
  const said = rows.map((row, i) => `${calls[i]}: ${sayPeak(study, row).join(", ")}`).join("; ");
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "chart", "aria-label": `Memory over one training step. ${said}.${budget !== null ? ` The budget is ${bytes(budget)}.` : ""}` });
  for (const tick of byteTicks({ low: 0, high: most, isLog: false }, height / 60)) {
    root.append(svg("line", { x1: x(0), x2: x(1), y1: y(tick), y2: y(tick), class: "grid" }), svg("text", { x: x(0) - 8, y: y(tick) + 4, "text-anchor": "end", class: "soft" }, byteTick(tick)));
  }
  const lines = rows.map((row, i) => ({ row, name: calls[i], kind: calls[i] === "baseline" ? "before" : "after", ...cornersOf(row, x, y) }));
  for (const { corners, kind } of lines) {
    const d = corners.map(([left, top], i) => `${i ? "L" : "M"}${left.toFixed(1)},${top.toFixed(1)}`).join("");
    root.append(svg("path", { d: `${d}L${x(1)},${y(0)}H${x(0)}Z`, class: `area ${kind}` }), svg("path", { d, class: `outline ${kind}` }));
  }
  root.append(...phaseNames(x, height));
  if (budget !== null) root.append(...budgetLine(budget, x, y, budget > most));
  const floors = [...lines.slice(1).map(({ peak }) => peak.y), height - AREA.bottom];
  for (const [i, line] of lines.entries()) root.append(...peakLabel(study, line, floors[i], x, y));
  return root;
}

function phaseNames(x, height) {
  let start = 0;
  return PHASES.flatMap(([name, share], i) => {
    const middle = x(start + share / 2), from = x(start);
    start += share;
    return [i ? svg("line", { x1: from, x2: from, y1: AREA.top, y2: height - AREA.bottom, class: "phase" }) : null, svg("text", { x: i === 2 ? x(1) : middle, y: height - AREA.bottom + 18, "text-anchor": i === 2 ? "end" : "middle", class: "soft" }, name)].filter(Boolean);
  });
}

function budgetLine(budget, x, y, isAbove) {
  if (isAbove) return [svg("text", { x: x(1), y: AREA.top - 8, "text-anchor": "end", class: "strong" }, `budget ${bytes(budget)}, further up`)];
  return [svg("line", { x1: x(0), x2: x(1), y1: y(budget), y2: y(budget), class: "budget" }), svg("text", { x: x(1) - 4, y: y(budget) - 6, "text-anchor": "end", class: "halo strong" }, `budget ${bytes(budget)}`)];
}

// The name and numbers of a line inside of its area, or above it where that is too low, and a dot at the measured peak.
function peakLabel(study, { row, name, peak, kind }, floor, x, y) {
  const measured = measuredPeak(study, row.label), [first, second] = sayPeak(study, row), at = x(PHASES[0][1]), room = floor - peak.y;
  const top = room < 60 ? peak.y - 24 : kind === "before" ? peak.y + Math.min(0.4 * room, 70) : floor - 21;
  return [
    svg("text", { x: at, y: top, "text-anchor": "middle", class: "halo strong" }, `${name}: ${first}`),
    svg("text", { x: at, y: top + 15, "text-anchor": "middle", class: "halo soft" }, second),
    measured === null ? null : svg("circle", { cx: peak.x, cy: y(measured), r: 5, class: `peak ${kind}` }),
  ].filter(Boolean);
}

function stepLegend(study, rows) {
  const hasMeasured = rows.some((row) => measuredPeak(study, row.label) !== null);
  return [["predicted, operation by operation", svg("path", { d: "M1,12L8,5L16,9L25,3", class: "outline after" })], hasMeasured && ["measured peak", svg("circle", { cx: 13, cy: 8, r: 5, class: "peak after" })]].filter(Boolean).map(legendRow);
}

function legendRow([name, ...inner]) { return el("li", {}, svg("svg", { width: 26, height: 16, "aria-hidden": "true" }, inner), name); }
