// Training losses by step; the picked plan and the baseline have their own line styles and entries in the legend.
const FRAME = { left: 52, right: 14, top: 14, bottom: 40 };

function drawCurves(study, runs, label, width) {
  const height = Math.round(Math.max(220, Math.min(320, 0.45 * width)));
  const points = runs.flatMap((run) => run.curve);
  const losses = points.map(([, loss]) => loss), low = Math.min(...losses), high = Math.max(...losses);
  const isLog = low > 0 && high / low > 20, pad = 0.05 * (high - low || 1);
  const x = scale(0, Math.max(...points.map(([step]) => step)), FRAME.left, width - FRAME.right, false);
  const y = isLog ? scale(low / 1.1, high * 1.1, height - FRAME.bottom, FRAME.top, true) : scale(low - pad, high + pad, height - FRAME.bottom, FRAME.top, false);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Training loss of ${plural(runs.length, "run")} by step. Arrow keys go from run to run.`, class: "chart" });
  for (const tick of isLog ? logTicks(y.low, y.high, 10) : roundTicks(y.low, y.high, height / 60)) {
    root.append(svg("line", { x1: FRAME.left, x2: width - FRAME.right, y1: y.at(tick), y2: y.at(tick), class: "grid" }));
    root.append(svg("text", { x: FRAME.left - 8, y: y.at(tick) + 4, "text-anchor": "end", class: "soft" }, short(tick)));
  }
  for (const tick of roundTicks(0, x.high, width / 110)) root.append(svg("text", { x: x.at(tick), y: height - FRAME.bottom + 18, "text-anchor": "middle", class: "soft" }, short(tick)));
  root.append(svg("text", { x: (FRAME.left + width) / 2, y: height - 4, "text-anchor": "middle", class: "soft" }, `step; training loss${isLog ? ", logarithmic" : ""}`));
  const kind = (run) => (run.plan === label ? 2 : study && run.plan === study.written ? 1 : 0);
  for (const run of [...runs].sort((a, b) => kind(a) - kind(b))) {
    const d = run.curve.map(([step, loss], i) => `${i ? "L" : "M"}${x.at(step).toFixed(1)},${y.at(loss).toFixed(1)}`).join("");
    const line = svg("g", { role: "img" }, svg("path", { d, class: "reach" }), svg("path", { d, class: `line${["", " written", " main"][kind(run)]}` })), [step, loss] = run.curve[run.curve.length - 1];
    root.append(withTip(line, `run:${run.task}:${run.plan}:${run.seed}`, calledOf(study, run.plan), [["seed", String(run.seed)], ["ended", run.status.replaceAll("_", " ")], [`loss at step ${step}`, short(loss)]], [x.at(step), y.at(loss)]));
  }
  steppable(root, [...root.querySelectorAll("[data-key]")]);
  return root;
}

function curvesLegend(study, runs, label) {
  const stroke = (kind) => svg("svg", { width: 34, height: 12, "aria-hidden": "true" }, svg("path", { d: "M1,6H33", class: `line ${kind}` }));
  const isDrawn = (name) => name && runs.some((run) => run.plan === name), written = study ? study.written : "";
  const rows = [];
  if (isDrawn(label)) rows.push(el("li", {}, stroke("main"), `${label}, picked`));
  if (isDrawn(written) && written !== label) rows.push(el("li", {}, stroke("written"), calledOf(study, written)));
  const others = new Set(runs.map((run) => run.plan).filter((plan) => plan !== label && plan !== written));
  if (others.size) rows.push(el("li", {}, stroke(""), others.size === 1 ? [...others][0] : `${others.size} other plans`));
  return el("ul", { class: "legend" }, rows);
}
