// The chart of memory and error with the budget line, and the picked plan as text. Filled marks stand at measured errors, hollow ones at posterior means.
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
function calledOf(study, label) { return study && label && label === study.written && label !== BASELINE ? `${BASELINE} (${label})` : label; }

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

// Whether errors on the chart are posterior means; without a posterior they are means of trials.
function hasPosterior(study) { return study.marks.some((mark) => mark.error !== null && mark.error !== mark.measured); }

// Where the mark of a plan stands: at its measured error, or at the predicted one if it was not measured.
function shownError(mark) { return mark.error === null ? null : mark.measured ?? mark.error; }

function errorRange(study) {
  const known = study.marks.filter((mark) => mark.error !== null);
  if (!known.length) return [0, 1, false];
  const means = known.flatMap((mark) => [mark.error, shownError(mark)]), top = Math.max(...means), bottom = Math.min(...means);
  const isLog = bottom > 0 && top / bottom > 15;
  if (isLog) return [bottom / 1.5, top * 1.5, true];
  const high = Math.max(top, Math.min(Math.max(...known.map((mark) => mark.high ?? mark.error)), top + 0.8 * (top - bottom || top || 1)));
  const low = Math.min(bottom, Math.max(Math.min(...known.map((mark) => mark.low ?? mark.error)), bottom - 0.8 * (top - bottom || top || 1)));
  const pad = 0.06 * (high - low || Math.abs(high) || 1);
  return [study.metric === "error" ? Math.max(0, low - pad) : low - pad, high + pad, false];
}

function frontierFrame(study, width) {
  const height = Math.round(Math.max(270, Math.min(400, 0.6 * width)));
  const [b0, b1, bLog] = bytesRange(study), [e0, e1, eLog] = errorRange(study);
  const x = scale(b0, b1, EDGE.left, width - EDGE.right, bLog), y = scale(e0, e1, height - EDGE.bottom, EDGE.top, eLog);
  const inside = (value) => Math.max(EDGE.top, Math.min(height - EDGE.bottom, y.at(Math.max(value, eLog ? e0 : -Infinity))));
  return { x, y, width, height, inside, left: EDGE.left, right: width - EDGE.right, top: EDGE.top, bottom: height - EDGE.bottom };
}

// The pixels of a mark: `y` of the dot or cross, `mean` of the posterior mean if that is drawn apart, `band` of the interval,
// `whisker` from the predicted to the measured peak, of the picked plan only.
function placeOf(study, mark, frame, isPicked) {
  const at = { mark, x: frame.x.at(mark.nbytes), y: frame.top + 10, mean: null, band: null, whisker: null, size: mark.on_front ? 5.5 : 4 };
  if (mark.error === null) return at;
  at.y = frame.inside(shownError(mark));
  if (mark.measured !== null && mark.error !== mark.measured) at.mean = frame.inside(mark.error);
  if (isPicked && mark.measured_bytes !== null) at.whisker = [frame.x.at(predictedOf(mark)), frame.x.at(mark.measured_bytes)];
  const hasBand = mark.on_front || isPicked || study.marks.length <= MOST_BANDS;
  if (hasBand && mark.low !== null && mark.high !== null && mark.high > mark.low) at.band = [frame.inside(mark.high), frame.inside(mark.low)];
  return at;
}

function drawFrontier(study, budget, label, width, onPick) {
  const frame = frontierFrame(study, width), { height, x, y } = frame;
  const said = `Memory and error of ${plural(study.marks.length, "plan")}; the table below has the same numbers. Arrow keys go from plan to plan, Enter moves the budget to a plan.`;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": said, class: "chart near" });
  root.append(svg("defs", {}, svg("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { x1: 0, y1: 0, x2: 0, y2: 8, class: "hatch" }))));
  drawAxes(root, study, x, y, width, height);
  const lines = [drawBudget(root, study, budget, frame), ...drawFront(root, study, frame)];
  const places = study.marks.map((mark) => placeOf(study, mark, frame, mark.label === label));
  const labels = labelled(study, label).map((mark) => places.find((place) => place.mark === mark));
  const placed = placeLabels(labels.map((place) => ({ place, isStrong: place.mark.label === label, text: `${place.mark.label === label ? "picked: " : ""}${calledOf(study, place.mark.label)}` })), places, lines, frame);
  root.append(...placed.map(drawLeader).filter(Boolean));
  const order = [...places].sort((a, b) => a.mark.on_front - b.mark.on_front || (a.mark.measured !== null) - (b.mark.measured !== null));
  root.append(...order.map((place) => drawMark(study, place, place.mark.label === label, onPick)), ...placed.map(drawLabel));
  root.addEventListener("click", (event) => { const found = tipTarget(event); if (found) onPick(markOf(study, found.dataset.label).nbytes); });
  const nodes = [...root.querySelectorAll("[data-label]")].sort((a, b) => tips.get(a).at[0] - tips.get(b).at[0]);
  steppable(root, nodes, nodes.find((node) => node.dataset.label === label));
  return root;
}

// The line of the budget and its name, which does not cover the name of the axis. Returns the box of the line.
function drawBudget(root, study, budget, frame) {
  const at = Math.max(frame.left, Math.min(frame.right, frame.x.at(budget))), text = `budget ${bytes(budget)}`;
  root.append(svg("rect", { x: at, y: frame.top, width: frame.right - at, height: frame.bottom - frame.top, class: "over" }));
  root.append(svg("line", { x1: at, x2: at, y1: frame.top - 8, y2: frame.bottom, class: "budget" }));
  const end = at + widthOf(text, true) + 8 > frame.width, start = Math.max(at + 6, widthOf(axisName(study, frame.y)) + 14);
  root.append(svg("text", { x: end ? at - 6 : start, y: frame.top - 12, "text-anchor": end ? "end" : "start", class: "strong" }, text));
  return box(at, frame.top, at, frame.bottom);
}

// The steps of the best plan within each budget. Returns their boxes.
function drawFront(root, study, frame) {
  const front = study.picks.map(([, name]) => markOf(study, name)).filter((mark) => mark && mark.error !== null);
  if (!front.length) return [];
  const corners = front.map((mark) => [frame.x.at(mark.nbytes), frame.y.at(mark.error)]);
  const steps = corners.map(([x, y], i) => (i ? `H${x}V${y}` : `M${x},${y}`)).join("");
  root.append(svg("path", { d: `${steps}H${frame.right}`, class: "front" }));
  return corners.flatMap(([x, y], i) => [box(x, y, i + 1 < corners.length ? corners[i + 1][0] : frame.right, y), ...(i ? [box(x, Math.min(y, corners[i - 1][1]), x, Math.max(y, corners[i - 1][1]))] : [])]);
}

function axisName(study, y) { return `${study.metric}${y.isLog ? ", log." : ""}`; }

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
  for (const tick of byteTicks(x, width / 90)) {
    const at = x.at(tick);
    if (at - last < 64) continue;
    last = at;
    root.append(svg("line", { x1: at, x2: at, y1: bottom, y2: bottom + 5, class: "axis" }));
    root.append(svg("text", { x: at, y: bottom + 19, "text-anchor": "middle", class: "soft" }, byteTick(tick)));
  }
  root.append(svg("text", { x: (EDGE.left + width - EDGE.right) / 2, y: height - 6, "text-anchor": "middle", class: "soft" }, `peak memory of a step${x.isLog ? ", logarithmic" : ""}`));
  root.append(svg("text", { x: 2, y: EDGE.top - 12, class: "soft" }, axisName(study, y)));
}

function drawMark(study, place, isPicked, onPick) {
  const { mark, x, y, mean, band, whisker } = place;
  const press = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onPick(mark.nbytes); } };
  const group = svg("g", { class: mark.on_front || isPicked ? "" : "aside", "data-label": mark.label, role: "button", onkeydown: press });
  withTip(group, `plan:${mark.label}`, calledOf(study, mark.label), markRows(study, mark), [x, y]);
  if (mark.error === null) { group.append(svg("path", { d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10`, class: "cross" })); return group; }
  if (band) group.append(svg("path", { d: `M${x - 4},${band[0]}h8m-4,0V${band[1]}m-4,0h8`, class: mean === null ? "band" : "band light" }));
  if (mean !== null) group.append(svg("path", { d: `M${x},${y}V${mean}`, class: "stem" }), svg("path", { d: `M${x},${mean - 4.5}l4.5,4.5l-4.5,4.5l-4.5,-4.5z`, class: "mean" }));
  if (whisker) group.append(svg("path", { d: `M${whisker[0]},${y}H${whisker[1]}m0,-4v8`, class: "band whisker" }));
  if (isPicked) group.append(svg("circle", { cx: x, cy: y, r: 10, class: "ring" }));
  group.append(svg("circle", { cx: x, cy: y, r: place.size, class: mark.measured !== null ? "dot filled" : "dot" }));
  return group;
}

function labelled(study, label) {
  const names = [...new Set([label, study.written])].filter(Boolean);
  return names.map((name) => markOf(study, name)).filter((mark) => mark && mark.error !== null);
}

// The rows of the tooltip of a plan.
function markRows(study, mark) {
  const error = (value) => sayError(value, study.metric), rows = [["peak memory, predicted", bytes(predictedOf(mark))]];
  if (mark.measured_bytes !== null) rows.push(["peak memory, measured", bytes(mark.measured_bytes)]);
  if (mark.error !== null && mark.measured !== null) rows.push([`${study.metric}, measured`, `${error(mark.measured)} in ${plural(mark.num_trials, "trial")}`]);
  if (mark.error !== null && mark.error !== mark.measured) rows.push([mark.measured !== null ? "posterior mean" : `${study.metric}, predicted`, error(mark.error)]);
  if (mark.error !== null && mark.low !== null && mark.high > mark.low) rows.push(["interval", `${error(mark.low)} to ${error(mark.high)}`]);
  if (mark.step_source) rows.push([`step time, ${TIMED[mark.step_source]}`, sayStep(mark)]);
  if (mark.note) rows.push(["note", mark.note]);
  return rows;
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
  lines.push(`Within ${bytes(budget)}${shareOf(study, budget)} use ${quoted(label)}: ${peak}, ${study.metric} ${sayError(shownError(mark), study.metric)}${sayBand(study, mark)}; ${mark.step_source ? `step time ${sayStep(mark)} (${TIMED[mark.step_source]})` : "its step time was not measured"}.`);
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
  const error = (value) => sayError(value, study.metric), hasBand = mark.low !== null && mark.high !== null && mark.high > mark.low;
  const between = hasBand ? `between ${error(mark.low)} and ${error(mark.high)}` : "";
  if (mark.measured === null) return `${between ? `, ${between}` : ""}, not measured`;
  const trials = `measured in ${plural(mark.num_trials, "trial")}`;
  if (mark.error === mark.measured) return `${between ? `, ${between}` : ""}, ${trials}`;
  return `, ${trials} (posterior mean ${error(mark.error)}${between ? `, ${between}` : ""})`;
}

// The error of a plan less that of another: of measured errors if both plans were measured, else of posterior means.
function differenceOf(a, b) {
  const isMeasured = a.measured !== null && b.measured !== null;
  return { isMeasured, value: isMeasured ? a.measured - b.measured : a.error - b.error };
}

// Whether the intervals of two plans overlap; false if one has none.
function doOverlap(a, b) { return [a, b].every((mark) => mark.low !== null && mark.high > mark.low) && a.low <= b.high && b.low <= a.high; }

function sayAgainst(study, mark) {
  if (!study.full_bytes || mark.label === study.written) return mark.label === study.written ? "This is the baseline: nothing is packed." : "";
  const written = markOf(study, study.written);
  const less = `The baseline takes ${bytes(study.full_bytes)}, ${(study.full_bytes / predictedOf(mark)).toFixed(1)} times as much`;
  if (!written || written.error === null || mark.error === null) return `${less}.`;
  const { value: d, isMeasured } = differenceOf(mark, written), known = isMeasured ? "" : ", by posterior means,";
  const doubt = d !== 0 && doOverlap(mark, written) ? " (the intervals overlap)" : "";
  return `${less}; its ${study.metric}${known} is ${d === 0 ? "the same" : `${sayDifference(d, study.metric)} ${d > 0 ? "lower" : "higher"}`}${doubt}.`;
}

// The name of the errors that plans are picked by.
function meanName(study) { return hasPosterior(study) ? `posterior mean of the ${study.metric}` : study.metric; }

function sayNeighbours(study, mark) {
  const i = study.picks.findIndex(([, label]) => label === mark.label), lines = [];
  if (i < 0 || mark.error === null) return lines;
  const up = study.picks[i + 1], down = study.picks[i - 1];
  if (up) lines.push(`With ${bytes(up[0] - mark.nbytes)} more, ${quoted(calledOf(study, up[1]))} would bring the ${meanName(study)} to ${sayError(markOf(study, up[1]).error, study.metric)}.`);
  if (down) lines.push(`With less than ${bytes(study.picks[i][0])} it would be ${quoted(down[1])}, ${meanName(study)} ${sayError(markOf(study, down[1]).error, study.metric)}.`);
  return lines;
}
