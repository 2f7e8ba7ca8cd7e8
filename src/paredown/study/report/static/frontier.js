// The chart of memory and error with the budget line, and the picked plan as text. Filled marks are plans that were tried, hollow ones are predicted.
const BASELINE = "baseline";
const MOST_TIES = 5;
const EDGE = { left: 58, right: 14, top: 30, bottom: 44 };

function pickAt(study, budget) {
  if (budget === null) return study.picked || null;
  let found = null;
  for (const [nbytes, label] of study.picks) if (nbytes <= budget) found = label;
  if (found !== null && budget === study.budget_bytes && study.picked) return study.picked;
  return found;
}

// The name of a plan on the page: the baseline is named as such, with its label if that is another.
function calledOf(study, label) { return study && label && label === study.written && label !== BASELINE ? `${BASELINE} (${label})` : label; }

// Predicted bytes; `nbytes`, where the mark is drawn, is the measured peak where there is one.
function predictedOf(mark) { return mark.predicted_bytes ?? mark.nbytes; }

function markOf(study, label) { return study.marks.find((mark) => mark.label === label) || null; }

// Whether a mark is within the range of the chart; the others are drawn at its edge and counted.
function isInside(mark, range) { return mark.error === null || (mark.error <= range.top && mark.nbytes <= range.right); }

// The range of plans that matter: the baseline, the picked plan, the budget, the most accurate plan, and those near to them.
function rangeOf(study) {
  const known = study.marks.filter((mark) => mark.error !== null), least = Math.min(...known.map((mark) => mark.error), Infinity);
  const own = known.filter((mark) => mark.label === study.picked || mark.label === study.written || mark.error === least);
  const errors = own.map((mark) => mark.error), high = Math.max(...errors, 0), top = high + Math.max(2 * (high - least), (study.metric === "error" ? 1 : 0.1) * Math.abs(high));
  const needed = [...own.map((mark) => mark.nbytes), study.full_bytes ?? 0, study.budget_bytes ?? 0];
  return { top, right: study.written ? 1.25 * Math.max(...needed) : Infinity };
}

function bytesRange(study) {
  const range = rangeOf(study), all = study.marks.map((mark) => mark.nbytes).filter((n) => n > 0 && n <= range.right).concat([study.budget_bytes, study.full_bytes].filter((n) => n > 0 && n <= range.right));
  if (!all.length) return [0, 1, false];
  const low = Math.min(...all), high = Math.max(...all);
  const isLog = high / low > 8;
  return isLog ? [low / 1.15, high * 1.15, true] : [Math.max(0, low - 0.08 * (high - low || high)), high + 0.06 * (high - low || high), false];
}

// Whether errors are posterior means; without a posterior they are means of trials.
function hasPosterior(study) { return study.marks.some((mark) => mark.error !== null && mark.error !== mark.measured); }

// The errors of the chart, with the intervals of the baseline and the picked plan; never so few that noise fills it.
function errorRange(study) {
  const { top } = rangeOf(study), isOwn = (mark) => mark.label === study.picked || mark.label === study.written, isRate = study.metric === "error";
  const known = study.marks.filter((mark) => mark.error !== null && mark.error <= top).flatMap((mark) => (isOwn(mark) ? [mark.error, mark.low ?? mark.error, Math.min(top, mark.high ?? mark.error)] : [mark.error]));
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known), span = Math.max(high - low, (isRate ? 0.5 : 0.1) * Math.abs(high)) || 1;
  const middle = (low + high) / 2, pad = 0.62 * span;
  return [isRate ? Math.max(0, middle - pad) : middle - pad, middle + pad];
}

function frontierFrame(study, width) {
  const height = Math.round(Math.max(270, Math.min(400, 0.6 * width)));
  const [b0, b1, bLog] = bytesRange(study), [e0, e1] = errorRange(study);
  const x = scale(b0, b1, EDGE.left, width - EDGE.right, bLog), y = scale(e0, e1, height - EDGE.bottom, EDGE.top, false);
  const frame = { x, y, width, height, left: EDGE.left, right: width - EDGE.right, top: EDGE.top, bottom: height - EDGE.bottom };
  const within = (value, low, high) => Math.max(low, Math.min(high, value));
  return { ...frame, across: (nbytes) => within(x.at(nbytes), frame.left, frame.right), inside: (error) => within(y.at(error), frame.top, frame.bottom) };
}

// The pixels of a mark: `y` of the dot or cross, `band` of the interval of the baseline and the picked plan.
function placeOf(study, mark, frame, isPicked, range) {
  const at = { mark, x: frame.across(mark.nbytes), y: frame.top + 4, band: null, size: mark.on_front ? 5.5 : 4, isEdge: !isInside(mark, range) };
  if (mark.error === null) return at;
  at.y = frame.inside(mark.error);
  const hasBand = (isPicked || mark.label === study.written) && mark.low !== null && mark.high > mark.low;
  if (hasBand) at.band = [frame.inside(mark.high), frame.inside(mark.low)];
  return at;
}

function drawFrontier(study, budget, label, width, onPick) {
  const frame = frontierFrame(study, width), { height, x, y } = frame, range = rangeOf(study);
  const said = `Memory and error of ${plural(study.marks.length, "plan")}; the table below has the same numbers. Arrow keys go from plan to plan, Enter moves the budget to a plan.`;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": said, class: "chart near" });
  root.append(svg("defs", {}, svg("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { x1: 0, y1: 0, x2: 0, y2: 8, class: "hatch" }))));
  drawAxes(root, study, x, y, width, height);
  const lines = [...(budget === null ? [] : [drawBudget(root, study, budget, frame)]), ...drawFront(root, study, frame)];
  const places = study.marks.map((mark) => placeOf(study, mark, frame, mark.label === label, range));
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

// How many plans are at the edge of the chart, as text; "" where there are none.
function sayEdge(study) {
  const range = rangeOf(study), away = study.marks.filter((mark) => !isInside(mark, range)), high = away.filter((mark) => mark.error > range.top);
  const parts = [high.length ? `${plural(high.length, "plan")} with more error than the chart shows` : "", away.length > high.length ? `${plural(away.length - high.length, "plan")} with more memory` : ""].filter(Boolean);
  return parts.length ? `At the edge: ${parts.join(", ")}.` : "";
}

// The line of the budget and its name, which does not cover the name of the axis. Returns the box of the line.
function drawBudget(root, study, budget, frame) {
  const at = Math.max(frame.left, Math.min(frame.right, frame.x.at(budget))), text = `budget ${bytes(budget)}`;
  root.append(svg("rect", { x: at, y: frame.top, width: frame.right - at, height: frame.bottom - frame.top, class: "over" }));
  root.append(svg("line", { x1: at, x2: at, y1: frame.top - 8, y2: frame.bottom, class: "budget" }));
  const end = at + widthOf(text, true) + 8 > frame.width, start = Math.max(at + 6, widthOf(study.metric) + 14);
  root.append(svg("text", { x: end ? at - 6 : start, y: frame.top - 12, "text-anchor": end ? "end" : "start", class: "strong" }, text));
  return box(at, frame.top, at, frame.bottom);
}

// The steps along the front. Returns their boxes.
function drawFront(root, study, frame) {
  const front = study.marks.filter((mark) => mark.on_front);
  if (!front.length) return [];
  const corners = front.map((mark) => [frame.across(mark.nbytes), frame.inside(mark.error)]);
  const steps = corners.map(([x, y], i) => (i ? `H${x}V${y}` : `M${x},${y}`)).join("");
  root.append(svg("path", { d: `${steps}H${frame.right}`, class: "front" }));
  return corners.flatMap(([x, y], i) => [box(x, y, i + 1 < corners.length ? corners[i + 1][0] : frame.right, y), ...(i ? [box(x, Math.min(y, corners[i - 1][1]), x, Math.max(y, corners[i - 1][1]))] : [])]);
}

function drawAxes(root, study, x, y, width, height) {
  for (const tick of roundTicks(y.low, y.high, height / 55)) {
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
  root.append(svg("text", { x: 2, y: EDGE.top - 12, class: "soft" }, study.metric));
}

function drawMark(study, place, isPicked, onPick) {
  const { mark, x, y, band } = place;
  const press = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onPick(mark.nbytes); } };
  const group = svg("g", { class: mark.on_front || isPicked ? "" : "aside", "data-label": mark.label, role: "button", onkeydown: press });
  withTip(group, `plan:${mark.label}`, calledOf(study, mark.label), markRows(study, mark), [x, y]);
  if (mark.error === null) { group.append(svg("path", { d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10`, class: "cross" })); return group; }
  if (band) group.append(svg("path", { d: `M${x - 4},${band[0]}h8m-4,0V${band[1]}m-4,0h8`, class: "band" }));
  if (isPicked) group.append(svg("circle", { cx: x, cy: y, r: 10, class: "ring" }));
  const kind = mark.measured !== null ? "dot filled" : "dot";
  group.append(place.isEdge ? svg("path", { d: `M${x},${y - 5}l5,8h-10z`, class: kind }) : svg("circle", { cx: x, cy: y, r: place.size, class: kind }));
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

// What the chart shows for this budget, in one or two sentences.
function sayChoice(study, budget, label) {
  const mark = markOf(study, label);
  if (!mark) {
    const least = study.picks[0];
    return budget === null ? ["No budget was given. Move the slider to see the best plan within one."] : [`No plan fits ${bytes(budget)}.${least ? ` The smallest plan, ${quoted(least[1])}, needs ${bytes(least[0])}.` : ""}`];
  }
  const about = mark.error !== mark.measured ? "about " : "", time = mark.step_source ? `, each step ${mark.step_source === "measured" ? "" : "about "}${mark.step_ratio !== null ? `${mark.step_ratio.toFixed(1)}x as long` : milliseconds(mark.step_seconds)}` : "";
  const lines = [`Within ${bytes(budget)}${shareOf(study, budget)}: ${quoted(calledOf(study, label))}, ${mark.measured_bytes === null ? "predicted " : ""}peak ${bytes(mark.nbytes)}, ${study.metric} ${about}${sayError(mark.error, study.metric, 1)}${time}.`];
  if (mark.nbytes > budget) lines.push(`Its measured peak is ${bytes(mark.nbytes - budget)} above this budget.`);
  return lines.concat(sayBetter(study, mark, budget));
}

// Why plans with less memory and less error than this one are not taken; they are on the chart, and not on the line.
function sayBetter(study, mark, budget) {
  const better = study.marks.filter((other) => other !== mark && other.error !== null && mark.error !== null && other.nbytes <= mark.nbytes && other.error <= mark.error && (other.nbytes < mark.nbytes || other.error < mark.error));
  const why = (other) => (
    predictedOf(other) > budget ? `is predicted to need ${bytes(predictedOf(other))}`
      : mark.num_trials && !other.num_trials ? "was not tried, its error is only predicted"
        : other.step_ratio !== null && mark.step_ratio !== null && other.step_ratio > mark.step_ratio ? `has slower steps, ${other.step_ratio.toFixed(1)}x against ${mark.step_ratio.toFixed(1)}x`
          : doOverlap(other, mark) ? "differs by less than chance does" : "is better by these numbers");
  const shown = better.slice(0, MOST_TIES).map((other) => `${quoted(calledOf(study, other.label))} ${why(other)}`);
  const more = better.length > MOST_TIES ? `; and ${better.length - MOST_TIES} more` : "";
  return better.length ? [`${plural(better.length, "plan")} with less memory and less ${study.metric} ${better.length === 1 ? "is" : "are"} not taken: ${shown.join("; ")}${more}.`] : [];
}

// The statistics of that plan, and the reason of the pick.
function sayStatistics(study, budget, label) {
  const mark = markOf(study, label), lines = [study.band];
  if (mark && mark.error !== null) {
    lines.push(`${quoted(calledOf(study, label))}: ${meanName(study)} ${sayError(mark.error, study.metric)}${sayInterval(study, mark)}; ${mark.measured === null ? "it was not tried" : mark.measured === mark.error ? plural(mark.num_trials, "trial") : `${sayError(mark.measured, study.metric)} measured in ${plural(mark.num_trials, "trial")}`}.`);
    const written = markOf(study, study.written);
    if (written && written !== mark && written.error !== null) lines.push(`The ${meanName(study)} of the baseline is ${sayError(written.error, study.metric)}${sayInterval(study, written)}${doOverlap(mark, written) ? "; the intervals overlap" : ""}.`);
    if (mark.note) lines.push(`Note: ${mark.note}.`);
  }
  if (study.marks.some((other) => other.num_trials) && hasPosterior(study)) lines.push("A plan that was not tried is picked only where its posterior mean and one standard deviation together are lower, so that hollow marks can lie below the line.");
  if (budget === study.budget_bytes && study.reason) lines.push(study.reason);
  if (label && label === study.picked && study.ties.length && !study.reason.includes(study.ties[0])) {
    const more = study.ties.length - MOST_TIES;
    lines.push(`May be as good: ${study.ties.slice(0, MOST_TIES).map(quoted).join(", ")}${more > 0 ? ` and ${more} more` : ""}.`);
  }
  return lines.filter(Boolean);
}

function sayInterval(study, mark) { return mark.low !== null && mark.high > mark.low ? `, between ${sayError(mark.low, study.metric)} and ${sayError(mark.high, study.metric)}` : ""; }

// Whether the intervals of two plans overlap; false if one has none.
function doOverlap(a, b) { return [a, b].every((mark) => mark.low !== null && mark.high > mark.low) && a.low <= b.high && b.low <= a.high; }

// The name of the errors that plans are picked by.
function meanName(study) { return hasPosterior(study) ? `posterior mean of the ${study.metric}` : `mean ${study.metric}`; }
