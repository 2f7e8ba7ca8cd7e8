// Training losses by step; the picked plan and the baseline have their own line styles and entries in the legend.
const FRAME = { left: 52, right: 14, top: 14, bottom: 40 };

function drawCurves(study, runs, label, width) {
  const height = Math.round(Math.max(220, Math.min(320, 0.45 * width)));
  const points = runs.flatMap((run) => run.curve);
  const losses = points.map(([, loss]) => loss), low = Math.min(...losses), high = Math.max(...losses);
  const isLog = low > 0 && high / low > 20, pad = 0.05 * (high - low || 1);
  const x = scale(0, Math.max(...points.map(([step]) => step)), FRAME.left, width - FRAME.right, false);
  const y = isLog ? scale(low / 1.1, high * 1.1, height - FRAME.bottom, FRAME.top, true) : scale(low - pad, high + pad, height - FRAME.bottom, FRAME.top, false);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Training loss of ${plural(runs.length, "run")} by step.` });
  for (const tick of isLog ? logTicks(y.low, y.high, 10) : roundTicks(y.low, y.high, height / 60)) {
    root.append(svg("line", { x1: FRAME.left, x2: width - FRAME.right, y1: y.at(tick), y2: y.at(tick), class: "grid" }));
    root.append(svg("text", { x: FRAME.left - 8, y: y.at(tick) + 4, "text-anchor": "end", class: "soft" }, short(tick)));
  }
  for (const tick of roundTicks(0, x.high, width / 110)) root.append(svg("text", { x: x.at(tick), y: height - FRAME.bottom + 18, "text-anchor": "middle", class: "soft" }, short(tick)));
  root.append(svg("text", { x: (FRAME.left + width) / 2, y: height - 4, "text-anchor": "middle", class: "soft" }, `step; training loss${isLog ? ", logarithmic" : ""}`));
  const kind = (run) => (run.plan === label ? 2 : run.plan === study.written ? 1 : 0);
  for (const run of [...runs].sort((a, b) => kind(a) - kind(b))) {
    const d = run.curve.map(([step, loss], i) => `${i ? "L" : "M"}${x.at(step).toFixed(1)},${y.at(loss).toFixed(1)}`).join("");
    root.append(svg("path", { d, class: `line${["", " written", " main"][kind(run)]}` }, svg("title", {}, `${run.plan}, seed ${run.seed}, ${run.status}`)));
  }
  return root;
}

function curvesLegend(study, runs, label) {
  const stroke = (kind) => svg("svg", { width: 34, height: 12, "aria-hidden": "true" }, svg("path", { d: "M1,6H33", class: `line ${kind}` }));
  const isDrawn = (name) => name && runs.some((run) => run.plan === name);
  const rows = [];
  if (isDrawn(label)) rows.push(el("li", {}, stroke("main"), `${label}, picked`));
  if (isDrawn(study.written) && study.written !== label) rows.push(el("li", {}, stroke("written"), calledOf(study, study.written)));
  const others = new Set(runs.map((run) => run.plan).filter((plan) => plan !== label && plan !== study.written));
  if (others.size) rows.push(el("li", {}, stroke(""), others.size === 1 ? [...others][0] : `${others.size} other plans`));
  return el("ul", { class: "legend" }, rows);
}
