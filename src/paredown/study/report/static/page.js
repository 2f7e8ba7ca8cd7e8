// The page: its state (record, task, budget), its sections, and updates from the event stream of a served page.
const state = { record: JSON.parse(document.getElementById("record").textContent), task: null, budget: null, asked: false, shown: null, slots: "", role: "" };

function studyNow() {
  const studies = state.record.studies;
  return studies.find((study) => study.task === state.task) || studies[0] || null;
}

function labelNow(study) { return study.marks.length ? pickAt(study, state.budget) : study.picked || null; }

function wide(id) { const node = document.getElementById(id); return Math.max(240, Math.floor(node ? node.clientWidth : 600)); }

// --- sections ---------------------------------------------------------------------------------------------------------

const SECTIONS = [
  { id: "progress", name: "Progress", has: (record) => record.progress.length > 0, build: buildProgress, draw: drawProgress },
  { id: "step", name: "Memory over one training step", has: (record, study) => study && hasSteps(study), build: buildStep, draw: drawStepSection },
  { id: "frontier", name: "Memory against error", has: (record, study) => study && study.marks.length > 0, build: buildFrontier, draw: drawFrontierSection },
  { id: "memory", name: "Memory at the peak", has: (record, study) => study && study.kept.length > 0, build: buildMemory, draw: drawMemory },
  { id: "slots", name: "Slots", has: (record, study) => study && study.kept.some((row) => row.slots.length), build: buildSlots, draw: drawSlots },
  { id: "trials", name: "Trials", has: (record, study) => runsOf(record, study).length > 0, build: () => [el("div", { id: "trials-table" })], draw: drawTrials },
  { id: "curves", name: "Training curves", has: (record, study) => runsOf(record, study).some((run) => run.curve.length > 1), build: () => [el("div", { id: "curves-charts" })], draw: drawCurvesSection },
  { id: "guards", name: "Guard actions", has: (record) => record.actions.length > 0, build: () => [el("div", { id: "guards-table" })], draw: drawActions },
  { id: "given", name: "Asked and given", has: (record) => record.changes.length + record.given.length > 0, build: buildGiven, draw: drawGiven },
  { id: "made", name: "Provenance", has: (record, study) => madeRows(record).length + record.notes.length + (study ? study.notes.length : 0) > 0, build: () => [el("div", { id: "made-list" })], draw: drawMade },
];

// The runs of a task, and runs of tasks without a study, such as longer trainings under the picked plan.
function runsOf(record, study) { return record.runs.filter((run) => !study || run.task === study.task || !record.studies.some((other) => other.task === run.task)); }

function buildProgress() { return [el("div", { id: "progress-rows" })]; }

function drawProgress(record) {
  fill("progress-rows", record.progress.map((row) => {
    const finished = Object.values(row.by_status).reduce((a, b) => a + b, 0), total = finished + row.waiting + row.running;
    const ended = Object.entries(row.by_status).map(([status, num]) => `${num} ${status.replaceAll("_", " ")}`).join(", ");
    const bar = el("span"); bar.style.width = `${total ? (100 * finished) / total : 0}%`;
    return el("div", {}, el("p", {}, el("strong", {}, row.sweep), `: ${finished} of ${total} trials finished${ended ? ` (${ended})` : ""}, ${row.running} running, ${row.waiting} waiting`),
      el("div", { class: "done", role: "progressbar", "aria-label": row.sweep, "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": finished }, bar));
  }));
}

function buildStep() { return [el("div", { id: "step-chart" }), el("ul", { class: "legend", id: "step-legend" })]; }

function drawStepSection(record, study, label) {
  fill("step-chart", drawStep(study, label, state.budget, wide("step-chart")));
  fill("step-legend", stepLegend(study, stepRows(study, label)));
}

function buildFrontier() {
  const slider = el("input", { type: "range", id: "budget", min: 0, max: 400, step: 1, "aria-describedby": "budget-hint" });
  slider.addEventListener("input", () => moveTo(budgetAt(studyNow(), Number(slider.value) / 400)));
  slider.addEventListener("keydown", (event) => {
    const direction = { PageUp: 1, PageDown: -1 }[event.key];
    if (direction) { event.preventDefault(); stepPlan(direction); }
  });
  return [
    el("p", { class: "caption", id: "frontier-caption" }),
    el("div", { id: "frontier-chart" }),
    el("ul", { class: "legend", id: "frontier-legend" }),
    el("div", { class: "slider" }, el("label", { for: "budget" }, "Budget: ", el("output", { id: "budget-said", for: "budget" })), slider,
      el("div", { class: "steps" }, el("button", { type: "button", id: "less", onclick: () => stepPlan(-1) }, "← less memory"), el("button", { type: "button", id: "more", onclick: () => stepPlan(1) }, "less error →"),
        el("button", { type: "button", id: "asked", onclick: () => moveTo(studyNow().budget_bytes) }), el("span", { class: "hint", id: "budget-hint" }, "Arrow keys move the budget, Page Up and Page Down go to the next plan."))),
    el("div", { class: "words", id: "words", role: "status", "aria-live": "polite" }),
    el("details", { id: "statistics" }, el("summary", {}, "The statistics, and why this plan"), el("div", { id: "statistics-said" })),
    el("details", { id: "rules" }, el("summary", {}, "The plan, rule by rule"), el("ul", { id: "rules-list" })),
    el("details", { id: "plans" }, el("summary", {}, "All plans as a table"), el("div", { id: "plans-table" })),
  ];
}

function budgetAt(study, share) { const [low, high, isLog] = bytesRange(study); return Math.round(scale(low, high, 0, 1, isLog).back(share)); }

function moveTo(budget) { state.budget = budget; state.asked = budget !== studyNow().budget_bytes; state.shown = null; drawAll(); }

function stepPlan(direction) {
  const study = studyNow(), sizes = study.picks.map(([nbytes]) => nbytes), budget = state.budget ?? Infinity;
  const next = direction > 0 ? sizes.find((nbytes) => nbytes > budget) : [...sizes].reverse().find((nbytes) => nbytes < (state.budget === null ? Infinity : sizes.filter((n) => n <= budget).pop() ?? -1));
  if (next !== undefined) moveTo(next);
}

function drawFrontierSection(record, study, label) {
  const [low, high, isLog] = bytesRange(study), slider = document.getElementById("budget"), { budget } = state;
  const said = budget === null ? "none given" : `${bytes(budget)}${study.full_bytes ? `, ${percent(budget / study.full_bytes)} of the baseline` : ""}`;
  if (budget === null) slider.value = "400";
  else if (document.activeElement !== slider || Math.abs(budgetAt(study, Number(slider.value) / 400) - budget) > 1) slider.value = String(Math.round(400 * scale(low, high, 0, 1, isLog).share(budget)));
  const shown = markOf(study, label), time = shown && shown.step_source ? `; step time ${sayStep(shown)}` : "";
  slider.setAttribute("aria-valuetext", budget === null ? said : `${said}; ${label === null ? "no plan fits" : label}${time}`);
  document.getElementById("budget-said").textContent = said;
  const back = document.getElementById("asked");
  back.hidden = budget === study.budget_bytes;
  back.textContent = study.budget_bytes === null ? "no budget" : "requested budget";
  document.getElementById("less").disabled = !study.picks.length || budget !== null && (label === null || label === study.picks[0][1]);
  document.getElementById("more").disabled = budget === null || !study.picks.some(([nbytes]) => nbytes > budget);
  fill("frontier-caption", `Each mark is a plan: left is less memory, down is less ${study.metric}. ${sayEdge(study)}`);
  fill("frontier-legend", frontierLegend(study));
  fill("frontier-chart", drawFrontier(study, budget, label, wide("frontier-chart"), moveTo));
  const lines = sayChoice(study, budget, label), words = document.getElementById("words");
  if (words.textContent !== lines.join("")) words.replaceChildren(...lines.map((line) => el("p", {}, line)));
  fill("statistics-said", sayStatistics(study, budget, label).map((line) => el("p", {}, line)));
  const mark = markOf(study, label);
  document.getElementById("rules").hidden = !mark || !mark.words.length;
  fill("rules-list", (mark ? mark.words : []).map((line) => el("li", {}, line)));
  fill("plans-table", plansTable(study, label));
}

function frontierLegend(study) {
  const { marks } = study, isTried = (mark) => mark.error !== null && mark.measured !== null, dot = (kind) => svg("circle", { cx: 13, cy: 8, r: 5, class: kind });
  return [
    marks.some(isTried) && ["tried in trials", dot("dot filled")],
    marks.some((mark) => mark.error !== null && mark.measured === null) && ["predicted from other tasks, not tried", dot("dot")],
    marks.some((mark) => mark.on_front) && ["the plan to pick for each amount of memory", svg("path", { d: "M0,4H13V12H26", class: "front" })],
    marks.some((mark) => mark.label === (study.picked || study.written) && mark.low !== null && mark.high > mark.low) && [`where the ${study.metric} is likely`, svg("path", { d: "M9,2h8m-4,0V14m-4,0h8", class: "band" })],
    marks.some((mark) => mark.error === null) && ["no run finished", svg("path", { d: "M8,3l10,10m0,-10l-10,10", class: "cross" })],
  ].filter(Boolean).map(legendRow);
}

function plansTable(study, label) {
  const error = (value) => sayError(value, study.metric);
  return sortable("plans-rows", [
    { name: "plan", value: (mark) => mark.label, show: (mark) => calledOf(study, mark.label) },
    { name: "predicted peak", value: predictedOf, show: (mark) => bytes(predictedOf(mark)), kind: "num" },
    { name: "measured peak", value: (mark) => mark.measured_bytes, show: (mark) => bytes(mark.measured_bytes), kind: "num" },
    ...(hasPosterior(study) ? [{ name: `measured ${study.metric}`, value: (mark) => mark.measured, show: (mark) => error(mark.measured), kind: "num" }] : []),
    { name: hasPosterior(study) ? "posterior mean" : study.metric, value: (mark) => mark.error, show: (mark) => error(mark.error), kind: "num" },
    { name: "interval", value: (mark) => mark.high, show: (mark) => (mark.low !== null ? `${error(mark.low)} – ${error(mark.high)}` : "–"), kind: "num" },
    ...(study.marks.some((mark) => mark.step_source) ? [{ name: "step time", value: (mark) => mark.step_ratio ?? mark.step_seconds, show: (mark) => `${shortStep(mark)}${mark.step_source && mark.step_source !== "measured" ? ` (${TIMED[mark.step_source]})` : ""}`, kind: "num" }] : []),
    { name: "trials", value: (mark) => mark.num_trials, kind: "num" },
    { name: "Pareto front", value: (mark) => (mark.on_front ? "yes" : "no") },
    { name: "note", value: (mark) => mark.note, kind: "why" },
  ], study.marks, { name: `Plans of ${study.task}`, chosen: (mark) => mark.label === label });
}

function buildMemory() {
  const plan = el("select", { id: "memory-plan" });
  plan.addEventListener("change", () => { state.shown = plan.value; drawAll(); });
  return [el("p", { class: "caption" }, "Bytes of live tensors at the moment of peak memory, predicted from the trace of the step."), el("div", { class: "words", id: "memory-words" }), el("div", { id: "memory-legend" }), el("div", { id: "memory-bars" }),
    el("div", { class: "tools" }, el("label", { for: "memory-plan" }, "Compare the baseline with"), plan),
    el("details", {}, el("summary", {}, "The same as a table"), el("div", { id: "memory-table" })), el("div", { id: "memory-notes" })];
}

function drawMemory(record, study, label) {
  const order = [...study.kept].sort((a, b) => b.peak_bytes - a.peak_bytes), width = wide("memory-bars");
  document.getElementById("memory-words").hidden = study.marks.length > 0 || !study.reason; // with marks it is above
  fill("memory-words", el("p", {}, study.reason));
  fill("memory-legend", legendOf(order));
  const shown = keptLabel(study, label), select = document.getElementById("memory-plan"), names = order.map((row) => row.label);
  if (select.dataset.names !== JSON.stringify(names)) { select.dataset.names = JSON.stringify(names); select.replaceChildren(...names.map((name) => el("option", { value: name }, calledOf(study, name)))); }
  select.value = shown;
  fill("memory-bars", drawBars(study, order, study.marks.length || study.budget_bytes ? state.budget : null, label, shown, width));
  fill("memory-table", rolesTable(study, order));
  fill("memory-notes", [...new Set(order.flatMap((row) => row.notes))].slice(0, 10).map((note) => el("p", { class: "hint" }, `Note: ${note}`)));
}

// The plan whose memory and slots are shown: the selected one, the one picked for the budget, else the smallest.
function keptLabel(study, label) {
  for (const name of [state.shown, label]) if (study.kept.some((row) => row.label === name)) return name;
  return [...study.kept].sort((a, b) => a.peak_bytes - b.peak_bytes)[0].label;
}

function buildSlots() {
  const search = el("input", { type: "search", id: "slots-search", "aria-label": "Only slots whose name has", placeholder: "name has …" });
  search.addEventListener("input", () => { state.slots = search.value; drawAll(); });
  const role = el("select", { id: "slots-role", "aria-label": "Role" });
  role.addEventListener("change", () => { state.role = role.value; drawAll(); });
  return [el("p", { class: "caption", id: "slots-caption" }), el("div", { class: "tools" }, search, role), el("div", { id: "slots-table" })];
}

function drawSlots(record, study, label) {
  const row = study.kept.find((kept) => kept.label === keptLabel(study, label)), all = row.slots;
  const counts = {};
  for (const slot of all) counts[slot[5]] = (counts[slot[5]] || 0) + 1;
  fill("slots-caption", `Under ${calledOf(study, row.label)}: ${plural(all.length, "slot")}, ${Object.entries(counts).map(([what, num]) => `${num} ${what}`).join(", ")}.`);
  const roles = [...new Set(all.map((slot) => slot[1]))], select = document.getElementById("slots-role");
  if (select.options.length !== roles.length + 1) select.replaceChildren(el("option", { value: "" }, "every role"), ...roles.map((role) => el("option", { value: role }, role)));
  select.value = roles.includes(state.role) ? state.role : "";
  const shown = all.filter((slot) => (!select.value || slot[1] === select.value) && slot[0].toLowerCase().includes(state.slots.toLowerCase()));
  fill("slots-table", sortable("slots-rows", [
    { name: "slot", value: (slot) => slot[0], kind: "format" },
    { name: "role", value: (slot) => slot[1] },
    { name: "baseline", value: (slot) => slot[2], show: (slot) => bytes(slot[2]), kind: "num" },
    { name: "stored", value: (slot) => slot[3], show: (slot) => bytes(slot[3]), kind: "num" },
    { name: "format", value: (slot) => slot[4], kind: "format nowrap" },
    { name: "what", value: (slot) => slot[5] },
    { name: "why", value: (slot) => slot[6], kind: "why" },
  ], shown, { name: `Slots under ${row.label}`, most: 20, column: 2, down: true }));
}

function drawTrials(record, study) {
  const runs = runsOf(record, study), metric = study ? study.metric : "error", tasks = new Set(runs.map((run) => run.task));
  fill("trials-table", sortable("trials-rows", [
    { name: "plan", value: (run) => run.plan, show: (run) => calledOf(study, run.plan) },
    { name: "seed", value: (run) => run.seed, kind: "num" },
    { name: "ended", value: (run) => run.status, show: (run) => run.status.replaceAll("_", " "), kind: "nowrap" },
    { name: metric, value: (run) => run.error, show: (run) => sayError(run.error, metric), kind: "num" },
    { name: "loss", value: (run) => run.loss, show: (run) => short(run.loss), kind: "num" },
    { name: "predicted", value: (run) => run.predicted_bytes, show: (run) => bytes(run.predicted_bytes), kind: "num" },
    { name: "measured", value: (run) => run.measured_bytes, show: (run) => bytes(run.measured_bytes), kind: "num" },
    ...(runs.some((run) => run.step_seconds !== null) ? [{ name: "step", value: (run) => run.step_seconds, show: (run) => (run.step_seconds === null ? "–" : milliseconds(run.step_seconds)), kind: "num" }] : []),
    { name: "time", value: (run) => run.seconds, show: (run) => seconds(run.seconds), kind: "num" },
    ...(runs.some((run) => run.finished_at) ? [{ name: "finished (UTC)", value: (run) => run.finished_at || null, show: (run) => run.finished_at.replace("T", " ").replace("Z", ""), kind: "nowrap" }] : []),
    ...(runs.some((run) => run.host) ? [{ name: "host", value: (run) => run.host || null, kind: "nowrap" }] : []),
    ...(tasks.size > 1 ? [{ name: "task", value: (run) => run.task, kind: "why" }] : []),
    { name: "why", value: (run) => run.reason, kind: runs.some((run) => run.reason) ? "why" : "" },
  ], runs, { name: "Trials" }));
}

function drawCurvesSection(record, study, label) {
  const runs = runsOf(record, study).filter((run) => run.curve.length > 1), tasks = [...new Set(runs.map((run) => run.task))].slice(0, 6);
  fill("curves-charts", tasks.flatMap((task) => {
    const own = runs.filter((run) => run.task === task);
    return [tasks.length > 1 ? el("h3", {}, task) : null, curvesLegend(study, own, label), drawCurves(study, own, label, wide("curves-charts"))];
  }));
}

function drawActions(record) {
  fill("guards-table", sortable("guards-rows", [
    { name: "step", value: (row) => row.step, kind: "num" }, { name: "slot", value: (row) => row.slot, kind: "format" }, { name: "from", value: (row) => row.before, kind: "format nowrap" },
    { name: "to", value: (row) => row.after, kind: "format nowrap" }, { name: "why", value: (row) => row.why, kind: "why" }], record.actions, { name: "Guard actions" }));
}

function buildGiven() {
  return [el("p", { class: "caption", id: "given-said" }), el("div", { id: "changes-table" }), el("details", { id: "given-all" }, el("summary", {}, "Every slot"), el("div", { id: "given-all-table" }))];
}

function drawGiven(record) {
  const columns = [{ name: "slot", value: (row) => row.slot, kind: "format" }, { name: "asked", value: (row) => row.asked, kind: "format nowrap" }, { name: "given", value: (row) => row.given, kind: "format nowrap" }, { name: "why", value: (row) => row.reason, kind: "why" }];
  fill("given-said", record.changes.length ? `${plural(record.changes.length, "difference")} between the formats that the plan asks for and those that were used.` : "Every slot is stored as the plan asks.");
  fill("changes-table", record.changes.length ? sortable("changes-rows", columns, record.changes, { name: "Asked and given", most: 12 }) : []);
  document.getElementById("given-all").hidden = !record.given.length;
  fill("given-all-table", sortable("given-rows", columns, record.given, { name: "Every slot, asked and given" }));
}

function madeRows(record) {
  const devices = [...new Set(record.runs.map((run) => run.device).filter(Boolean))];
  return [["device", devices.join(", ")], ["commit", record.commit], ...Object.entries(record.versions)].filter(([, value]) => value);
}

function drawMade(record, study) {
  const rows = madeRows(record), notes = [...record.notes, ...(study ? study.notes : [])];
  fill("made-list", [el("dl", { class: "meta" }, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])), ...notes.map((note) => el("p", { class: "hint" }, note))]);
}

// --- all of it ---------------------------------------------------------------------------------------------------------

function drawAll() {
  const held = heldFocus();
  const { record } = state, study = studyNow();
  if (!state.asked) state.budget = study ? study.budget_bytes : null;
  document.title = record.title;
  fill("title", record.title);
  fill("lead", tied(study ? record.summaries[record.studies.indexOf(study)] : "No results yet."));
  fill("fine", sayFine(record, study));
  drawChooser(record, study);
  const label = study ? labelNow(study) : null, shown = SECTIONS.filter((section) => section.has(record, study));
  for (const section of SECTIONS) showSection(section, shown.includes(section));
  for (const section of shown) section.draw(record, study, label);
  const links = shown.map((section) => section.id).join(" "), nav = document.getElementById("nav");
  document.getElementById("contents").hidden = !shown.length;
  if (nav.dataset.links !== links) { nav.dataset.links = links; nav.replaceChildren(...shown.map((section) => el("a", { href: `#${section.id}` }, section.name))); }
  restoreFocus(held);
}

function showSection(section, isShown) {
  let node = document.getElementById(section.id);
  if (!node && isShown) {
    node = el("section", { id: section.id, "aria-labelledby": `${section.id}-name` }, el("h2", { id: `${section.id}-name` }, section.name), section.build());
    const later = SECTIONS.slice(SECTIONS.indexOf(section) + 1).map((other) => document.getElementById(other.id)).find(Boolean);
    document.getElementById("main").insertBefore(node, later || null);
  }
  if (node) node.hidden = !isShown;
}

// What the numbers of the first sentence are, and where they come from.
function sayFine(record, study) {
  if (!study) return "";
  const seeds = hasPosterior(study) ? 0 : markOf(study, study.picked)?.num_trials ?? 0, devices = [...new Set(record.runs.map((run) => run.device).filter(Boolean))];
  const finished = record.progress.flatMap((row) => Object.values(row.by_status)).reduce((a, b) => a + b, 0), num = Math.max(finished, record.runs.length);
  return [
    study.budget_bytes !== null ? `Budget: ${bytes(study.budget_bytes)}${shareOf(study, study.budget_bytes)}.` : "",
    seeds > 1 ? `${study.metric === "error" ? "Errors are shares of wrong answers," : "Losses are"} means of ${seeds} runs ± standard error.` : seeds ? "One run each." : num ? `${plural(num, "trial")}.` : "",
    devices.length ? `Measured on ${devices.join(", ")}.` : "",
    record.studies.length > 1 ? `${record.studies.length} tasks.` : "",
  ].filter(Boolean).join(" ");
}

function drawChooser(record, study) {
  const chooser = document.getElementById("chooser"), select = document.getElementById("task"), names = record.studies.map((one) => one.task);
  chooser.hidden = names.length < 2;
  if (JSON.stringify(names) !== select.dataset.names) { select.dataset.names = JSON.stringify(names); select.replaceChildren(...names.map((name) => el("option", { value: name }, name))); }
  if (study) select.value = study.task;
}

function setUpTheme() {
  const button = document.getElementById("theme"), system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = window.localStorage.getItem("paredown-theme"); } catch { chosen = null; } // some browsers have no storage for files
  const show = () => {
    const theme = chosen || (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { window.localStorage.setItem("paredown-theme", chosen); } catch { /* used until the page is closed */ }
    show();
  });
  system.addEventListener("change", show);
  show();
}

function setUpLive(address) {
  const said = document.getElementById("live"), source = new EventSource(address);
  said.hidden = false;
  said.textContent = "connecting";
  source.addEventListener("record", (event) => {
    state.record = JSON.parse(event.data);
    drawAll();
    said.classList.remove("lost");
    said.textContent = "live";
  });
  source.addEventListener("trouble", (event) => { said.classList.add("lost"); said.textContent = JSON.parse(event.data); });
  source.addEventListener("error", () => { said.classList.add("lost"); said.textContent = "connection lost; trying again"; });
}

document.body.prepend(textures());
setUpTips();
document.getElementById("nav").addEventListener("click", () => { document.getElementById("contents").open = false; });
setUpTheme();
document.getElementById("task").addEventListener("change", (event) => { state.task = event.target.value; state.asked = false; state.shown = null; drawAll(); });
document.getElementById("foot").append(document.body.dataset.live ? "Served by paredown on this machine, read-only." : "Made by paredown. This page is one file: it loads nothing and sends nothing.");
drawAll();
let lastWidth = document.body.clientWidth;
new ResizeObserver(() => { if (document.body.clientWidth !== lastWidth) { lastWidth = document.body.clientWidth; drawAll(); } }).observe(document.body);
if (document.body.dataset.live) setUpLive(document.body.dataset.live);
