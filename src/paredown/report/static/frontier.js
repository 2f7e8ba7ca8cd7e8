// The chart of memory and error with the budget line, and the picked plan as text.
const BASELINE = "baseline";
const MOST_TIES = 5;
const MOST_BANDS = 30; // with more plans only those on the Pareto front have an interval
const EDGE = { left: 58, right: 14, top: 30, bottom: 44 };

function pickAt(study, budget) {
  let found = null;
  for (const [nbytes, label] of study.picks) if (nbytes <= budget) found = label;
  if (found !== null && budget === study.budget_bytes && study.picked) return study.picked;
  return found;
}

// The name of a plan on the page: the baseline is named as such, with its label if that is another.
function calledOf(study, label) { return label && label === study.written && label !== BASELINE ? `${BASELINE} (${label})` : label; }

// Predicted bytes; `nbytes`, where the mark is drawn, is larger if trials took more than predicted.
function predictedOf(mark) { return mark.predicted_bytes ?? mark.nbytes; }

function markOf(study, label) { return study.marks.find((mark) => mark.label === label) || null; }

function bytesRange(study) {
  const all = study.marks.flatMap((mark) => [mark.nbytes, mark.predicted_bytes, mark.measured_bytes]).concat([study.full_bytes, study.budget_bytes]).filter((n) => n > 0);
  if (!all.length) return [0, 1, false];
  const low = Math.min(...all), high = Math.max(...all);
  const isLog = high / low > 8;
  return isLog ? [low / 1.15, high * 1.15, true] : [Math.max(0, low - 0.08 * (high - low || high)), high + 0.06 * (high - low || high), false];
}

function errorRange(study) {
  const known = study.marks.filter((mark) => mark.error !== null);
  if (!known.length) return [0, 1, false];
  const means = known.map((mark) => mark.error), top = Math.max(...means), bottom = Math.min(...means);
  const isLog = bottom > 0 && top / bottom > 15;
  if (isLog) return [bottom / 1.5, top * 1.5, true];
  const high = Math.min(Math.max(...known.map((mark) => mark.high ?? mark.error)), top + 0.8 * (top - bottom || top || 1));
  const low = Math.max(Math.min(...known.map((mark) => mark.low ?? mark.error)), bottom - 0.8 * (top - bottom || top || 1));
  const pad = 0.06 * (high - low || Math.abs(high) || 1);
  return [study.metric === "error" ? Math.max(0, low - pad) : low - pad, high + pad, false];
}

function drawFrontier(study, budget, label, width, onPick) {
  const height = Math.round(Math.max(270, Math.min(400, 0.6 * width)));
  const [b0, b1, bLog] = bytesRange(study), [e0, e1, eLog] = errorRange(study);
  const x = scale(b0, b1, EDGE.left, width - EDGE.right, bLog), y = scale(e0, e1, height - EDGE.bottom, EDGE.top, eLog);
  const inside = (value) => Math.max(EDGE.top, Math.min(height - EDGE.bottom, y.at(Math.max(value, eLog ? e0 : -Infinity))));
  const said = `Memory and error of ${plural(study.marks.length, "plan")}; the table below has the same numbers.`;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said, class: "chart" });
  root.append(svg("defs", {}, svg("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { x1: 0, y1: 0, x2: 0, y2: 8, class: "hatch" }))));
  drawAxes(root, study, x, y, width, height);
  const at = Math.max(EDGE.left, Math.min(width - EDGE.right, x.at(budget)));
  root.append(svg("rect", { x: at, y: EDGE.top, width: width - EDGE.right - at, height: height - EDGE.top - EDGE.bottom, class: "over" }));
  root.append(svg("line", { x1: at, x2: at, y1: EDGE.top - 8, y2: height - EDGE.bottom, class: "budget" }));
  const end = at > width - 130;
  root.append(svg("text", { x: at + (end ? -6 : 6), y: EDGE.top - 12, "text-anchor": end ? "end" : "start", class: "strong" }, `budget ${bytes(budget)}`));
  const front = study.picks.map(([, name]) => markOf(study, name)).filter((mark) => mark && mark.error !== null);
  if (front.length) {
    const steps = front.map((mark, i) => `${i ? `H${x.at(mark.nbytes)}V${y.at(mark.error)}` : `M${x.at(mark.nbytes)},${y.at(mark.error)}`}`).join("");
    root.append(svg("path", { d: `${steps}H${width - EDGE.right}`, class: "front" }));
  }
  const order = [...study.marks].sort((a, b) => a.on_front - b.on_front || (a.measured !== null) - (b.measured !== null));
  for (const mark of order) root.append(drawMark(study, mark, x, y, inside, mark.label === label, onPick));
  const boxes = [];
  for (const mark of labelled(study, label)) root.append(drawLabel(calledOf(study, mark.label), mark, x, y, width, mark.label === label, boxes));
  return root;
}

function drawAxes(root, study, x, y, width, height) {
  const yTicks = y.isLog ? logTicks(y.low, y.high, 10) : roundTicks(y.low, y.high, height / 55);
  for (const tick of yTicks) {
    const text = study.metric === "error" ? `${Number((100 * tick).toPrecision(6))} %` : short(tick);
    root.append(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y.at(tick), y2: y.at(tick), class: "grid" }));
    root.append(svg("text", { x: EDGE.left - 8, y: y.at(tick) + 4, "text-anchor": "end", class: "soft" }, text));
  }
  const bottom = height - EDGE.bottom;
  root.append(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: bottom, y2: bottom, class: "axis" }));
  let last = -Infinity;
  for (const tick of byteTicks(x, width / 110)) {
    const at = x.at(tick);
    if (at - last < 64) continue;
    last = at;
    root.append(svg("line", { x1: at, x2: at, y1: bottom, y2: bottom + 5, class: "axis" }));
    root.append(svg("text", { x: at, y: bottom + 19, "text-anchor": "middle", class: "soft" }, byteTick(tick)));
  }
  root.append(svg("text", { x: (EDGE.left + width - EDGE.right) / 2, y: height - 6, "text-anchor": "middle", class: "soft" }, `peak memory of a step${x.isLog ? ", logarithmic" : ""}`));
  root.append(svg("text", { x: 2, y: EDGE.top - 12, class: "soft" }, `${study.metric}${y.isLog ? ", log." : ""}`));
}

function drawMark(study, mark, x, y, inside, isPicked, onPick) {
  const at = x.at(mark.nbytes);
  const group = svg("g", { class: mark.on_front || isPicked ? "" : "aside", "data-label": mark.label, onclick: () => onPick(mark.nbytes) });
  group.append(svg("title", {}, sayMark(study, mark)));
  if (mark.error === null) {
    const top = EDGE.top + 10;
    group.append(svg("path", { d: `M${at - 5},${top - 5}l10,10m0,-10l-10,10`, class: "cross" }));
    return group;
  }
  const height = inside(mark.error);
  const hasBand = mark.on_front || isPicked || study.marks.length <= MOST_BANDS;
  if (hasBand && mark.low !== null && mark.high !== null && mark.high > mark.low) {
    const [a, b] = [inside(mark.high), inside(mark.low)];
    group.append(svg("path", { d: `M${at - 4},${a}h8m-4,0V${b}m-4,0h8`, class: "band", fill: "none" }));
  }
  if (mark.measured_bytes !== null && isPicked) {
    group.append(svg("path", { d: `M${x.at(predictedOf(mark))},${height}H${x.at(mark.measured_bytes)}m0,-4v8`, class: "band", fill: "none" }));
  }
  if (isPicked) group.append(svg("circle", { cx: at, cy: height, r: 10, class: "ring" }));
  group.append(svg("circle", { cx: at, cy: height, r: mark.on_front ? 5.5 : 4, class: mark.measured !== null ? "dot filled" : "dot" }));
  return group;
}

function labelled(study, label) {
  const names = [...new Set([label, study.written])].filter(Boolean);
  return names.map((name) => markOf(study, name)).filter((mark) => mark && mark.error !== null);
}

// A label above its mark, or below it if another label is there; `boxes` are the places already taken.
function drawLabel(name, mark, x, y, width, isPicked, boxes) {
  const at = x.at(mark.nbytes), end = at > 0.6 * width;
  const text = cut(`${isPicked ? "picked: " : ""}${name}`, end ? at - EDGE.left - 14 : width - at - 30, isPicked);
  const size = widthOf(text, isPicked), left = end ? at - 14 - size : at + 14;
  const isFree = (top) => !boxes.some((box) => left < box.left + box.size && box.left < left + size && Math.abs(top - box.top) < 16);
  const top = [-10, 20, -28, 38].map((shift) => y.at(mark.error) + shift).find(isFree) ?? y.at(mark.error) - 10;
  boxes.push({ left, size, top });
  return svg("text", { x: at + (end ? -14 : 14), y: top, "text-anchor": end ? "end" : "start", class: `halo${isPicked ? " strong" : ""}` }, text);
}

function sayMark(study, mark) {
  const said = [`${calledOf(study, mark.label)}: ${bytes(predictedOf(mark))} predicted`];
  if (mark.measured_bytes !== null) said.push(`${bytes(mark.measured_bytes)} measured`);
  if (mark.error !== null) said.push(`${study.metric} ${sayError(mark.error, study.metric)}${mark.low !== null ? ` (${sayError(mark.low, study.metric)} to ${sayError(mark.high, study.metric)})` : ""}`);
  said.push(mark.measured !== null ? `measured in ${plural(mark.num_trials, "trial")}` : "not measured");
  if (mark.note) said.push(mark.note);
  return said.join(", ");
}

// --- as text -------------------------------------------------------------------------------------------------------

function shareOf(study, nbytes) { return study.full_bytes ? ` (${percent(nbytes / study.full_bytes)} of the baseline)` : ""; }

function sayPick(study, budget, label) {
  if (label === null) {
    const least = study.picks.length ? study.picks[0] : null;
    const needs = least ? ` The smallest plan, ${quoted(least[1])}, needs ${bytes(least[0])}.` : "";
    return [`No plan fits ${bytes(budget)}.${needs}`, ...(budget === study.budget_bytes && study.reason ? [study.reason] : [])];
  }
  const mark = markOf(study, label), lines = [];
  const beyond = mark.predicted_bytes !== null ? `, predicted, ${bytes(mark.nbytes)} with the excess of trials over predictions` : ", predicted";
  const peak = `${bytes(predictedOf(mark))} at the peak${mark.measured_bytes !== null ? ` (measured ${bytes(mark.measured_bytes)})` : beyond}`;
  lines.push(`Within ${bytes(budget)}${shareOf(study, budget)} use ${quoted(label)}: ${peak}, ${study.metric} ${sayError(mark.error, study.metric)}${sayBand(study, mark)}.`);
  if (mark.measured_bytes !== null && mark.measured_bytes > budget) lines.push(`The measured peak is ${bytes(mark.measured_bytes - budget)} above this budget. Budgets are compared with predictions, which leave out memory of libraries and fragmentation.`);
  if (mark.note) lines.push(`Note: ${mark.note}.`);
  const against = sayAgainst(study, mark);
  if (against) lines.push(against);
  lines.push(...sayNeighbours(study, mark));
  if (budget === study.budget_bytes && study.reason) lines.push(study.reason);
  if (label === study.picked && study.ties.length && !study.reason.includes(study.ties[0])) {
    const more = study.ties.length - MOST_TIES;
    lines.push(`May be as good: ${study.ties.slice(0, MOST_TIES).map(quoted).join(", ")}${more > 0 ? ` and ${more} more` : ""}.`);
  }
  return lines;
}

function sayBand(study, mark) {
  const known = mark.measured !== null ? `, measured in ${plural(mark.num_trials, "trial")}` : ", not measured";
  if (mark.low === null || mark.high === null || mark.high <= mark.low) return known;
  return `, between ${sayError(mark.low, study.metric)} and ${sayError(mark.high, study.metric)}${known}`;
}

// Whether the intervals of two plans overlap; false if one has none.
function doOverlap(a, b) { return [a, b].every((mark) => mark.low !== null && mark.high > mark.low) && a.low <= b.high && b.low <= a.high; }

function sayAgainst(study, mark) {
  if (!study.full_bytes || mark.label === study.written) return mark.label === study.written ? "This is the baseline: nothing is packed." : "";
  const written = markOf(study, study.written);
  const less = `The baseline takes ${bytes(study.full_bytes)}, ${(study.full_bytes / predictedOf(mark)).toFixed(1)} times as much`;
  if (!written || written.error === null || mark.error === null) return `${less}.`;
  const d = mark.error - written.error, known = written.measured === null ? ", predicted," : "";
  const doubt = d !== 0 && doOverlap(mark, written) ? " (the intervals overlap)" : "";
  return `${less}; its ${study.metric}${known} is ${d === 0 ? "the same" : `${sayDifference(d, study.metric)} ${d > 0 ? "lower" : "higher"}`}${doubt}.`;
}

function sayNeighbours(study, mark) {
  const i = study.picks.findIndex(([, label]) => label === mark.label), lines = [];
  if (i < 0 || mark.error === null) return lines;
  const up = study.picks[i + 1], down = study.picks[i - 1];
  if (up) lines.push(`With ${bytes(up[0] - mark.nbytes)} more, ${quoted(calledOf(study, up[1]))} would bring the ${study.metric} to ${sayError(markOf(study, up[1]).error, study.metric)}.`);
  if (down) lines.push(`With less than ${bytes(study.picks[i][0])} it would be ${quoted(down[1])}, ${study.metric} ${sayError(markOf(study, down[1]).error, study.metric)}.`);
  return lines;
}
