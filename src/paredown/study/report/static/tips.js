// Tooltips of drawings: under the pointer, at keyboard focus, and after a tap. Escape closes one; it stays open while the pointer is on it.
// A chart is one tab stop, inside of which arrow keys move the focus.
const tips = new WeakMap(); // an element to its name, its rows, and its place in the drawing: { name, rows, at }
const tip = { node: null, target: null, timer: 0 };
const REACH = 16; // pixels from the pointer to a mark that counts as pointed at
const LINGER = 150; // milliseconds in which the pointer may move from a mark to its tooltip

// Gives `node` a tooltip. `key` is its own on the page, so that a redrawn chart finds it again; `name` is its accessible name.
function withTip(node, key, name, rows, at) {
  tips.set(node, { name, rows, at });
  return put(node, { "data-key": key, "aria-label": name, tabindex: -1 }, []);
}

// Makes `nodes` one tab stop of `root`, at `first`.
function steppable(root, nodes, first = nodes[0]) {
  if (!nodes.length) return;
  const stopAt = (node) => { for (const other of nodes) other.setAttribute("tabindex", other === node ? 0 : -1); };
  stopAt(first || nodes[0]);
  root.addEventListener("focusin", (event) => { if (nodes.includes(event.target)) stopAt(event.target); });
  root.addEventListener("keydown", (event) => {
    const i = nodes.indexOf(event.target);
    const next = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (i < 0 || next === undefined) return;
    event.preventDefault();
    if (nodes[next]) nodes[next].focus();
  });
}

// The place of an element in the window.
function anchorOf(target) {
  const root = target.ownerSVGElement, box = root.getBoundingClientRect(), { at } = tips.get(target), size = box.width / root.viewBox.baseVal.width;
  return { x: box.left + size * at[0], y: box.top + size * at[1] };
}

// The element with a tooltip that an event points at; on charts of class `near` the nearest one within reach.
function tipTarget(event) {
  if (!(event.target instanceof Element)) return null;
  const own = event.target.closest("[data-key]"), chart = event.target.closest("svg.near");
  let found = null, least = REACH;
  for (const node of chart ? chart.querySelectorAll("[data-key]") : []) {
    const at = anchorOf(node), away = Math.hypot(at.x - event.clientX, at.y - event.clientY);
    if (away <= least) { found = node; least = away; }
  }
  return found || own;
}

// Stops the closing of the tooltip.
function stay() { window.clearTimeout(tip.timer); tip.timer = 0; }

function showTip(target, point) {
  const { name, rows } = tips.get(target), at = point || anchorOf(target);
  stay();
  if (tip.target && tip.target !== target) tip.target.removeAttribute("aria-describedby");
  tip.target = target;
  target.setAttribute("aria-describedby", "tip");
  tip.node.replaceChildren(el("strong", { "aria-hidden": "true" }, name), el("dl", {}, rows.flatMap(([what, value]) => [el("dt", {}, what), el("dd", {}, value)])));
  tip.node.hidden = false;
  const { width, height } = tip.node.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(wide - width - 8, at.x - width / 2)), above = at.y - height - 14;
  tip.node.style.left = `${left + window.scrollX}px`;
  tip.node.style.top = `${(above >= 4 ? above : at.y + 18) + window.scrollY}px`;
}

function hideTip() {
  stay();
  if (tip.target) tip.target.removeAttribute("aria-describedby");
  tip.target = null;
  tip.node.hidden = true;
}

// Closes the tooltip after a moment, or goes back to that of the element with keyboard focus.
function leaveTip() {
  stay();
  tip.timer = window.setTimeout(() => {
    const focused = document.activeElement;
    tip.timer = 0;
    if (!tips.has(focused) || !focused.matches(":focus-visible")) hideTip(); else if (focused !== tip.target) showTip(focused);
  }, LINGER);
}

// Where the tooltip of a large element opens: at the pointer. Those of marks open at the mark, and so do all by keyboard.
function pointOf(target, event) { return target.closest("svg.near") || !event.detail && event.type === "click" ? null : { x: event.clientX, y: event.clientY }; }

function setUpTips() {
  tip.node = el("div", { id: "tip", class: "tip", role: "tooltip", hidden: true });
  document.body.append(tip.node);
  document.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return; // taps are clicks
    if (tip.node.contains(event.target)) return stay();
    const target = tipTarget(event);
    if (target && target === tip.target) stay();
    else if (target) showTip(target, pointOf(target, event));
    else if (tip.target && !tip.timer) leaveTip();
  });
  document.documentElement.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch" && tip.target) leaveTip(); });
  document.addEventListener("click", (event) => {
    if (tip.node.contains(event.target)) return;
    const target = tipTarget(event);
    if (target) showTip(target, pointOf(target, event)); else if (event.detail) hideTip();
  }, true);
  document.addEventListener("focusin", (event) => { if (tips.has(event.target) && event.target.matches(":focus-visible")) showTip(event.target); });
  document.addEventListener("focusout", (event) => { if (event.target === tip.target) hideTip(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
}

// Before charts are redrawn: the keys of the element with focus and of the element whose tooltip is open. After it: the same again.
function heldFocus() {
  const keyOf = (node) => (node && tips.has(node) ? node.dataset.key : null);
  return { focus: keyOf(document.activeElement), open: keyOf(tip.target) };
}

function restoreFocus(held) {
  if (!held.focus && !held.open) return;
  const find = (key) => (key ? [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key) : null);
  const focused = find(held.focus), open = find(held.open);
  if (focused && focused !== document.activeElement) focused.focus({ preventScroll: true });
  if (open) { if (open !== tip.target) showTip(open); } else hideTip();
}
