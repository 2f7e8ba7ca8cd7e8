// Tables that can be put in order and cut short. What the reader chose is kept in `kept`, so that new data does not undo it.
const tableKept = {};

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1; // unknown comes last
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

// columns: {name, value(row), show(row)?, kind: "num" | "why" | ...}; options: name, most, chosen(row), onRow(row), order
function sortable(id, columns, rows, options = {}) {
  const kept = (tableKept[id] = tableKept[id] || { column: options.column ?? null, down: options.down ?? false, all: false });
  const most = options.most || 25;
  const body = el("tbody"), more = el("button", { type: "button" });
  const heads = columns.map((column, i) => el("th", { scope: "col", class: column.kind === "num" ? "num" : "" },
    el("button", { type: "button", onclick: () => { kept.down = kept.column === i ? !kept.down : false; kept.column = i; draw(); } }, column.name)));
  const draw = () => {
    heads.forEach((head, i) => { if (kept.column === i) head.setAttribute("aria-sort", kept.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    const order = kept.column === null ? rows : [...rows].sort((a, b) => {
      const [x, y] = [columns[kept.column].value(a), columns[kept.column].value(b)], known = compare(x, y);
      return kept.down && x !== null && y !== null ? -known : known;
    });
    const shown = kept.all ? order : order.slice(0, most);
    body.replaceChildren(...shown.map((row) => rowOf(columns, row, options)));
    more.hidden = rows.length <= most;
    more.textContent = kept.all ? `Show ${most} rows` : `Show all ${rows.length} rows`;
  };
  more.addEventListener("click", () => { kept.all = !kept.all; draw(); });
  draw();
  const table = el("table", { id }, el("caption", { class: "hide" }, options.name), el("thead", {}, el("tr", {}, heads)), body);
  return [el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": options.name }, table), more];
}

function rowOf(columns, row, options) {
  const isChosen = options.chosen ? options.chosen(row) : false;
  const cells = columns.map((column, i) => {
    const shown = column.show ? column.show(row) : column.value(row);
    return el(i === 0 ? "th" : "td", { class: column.kind, scope: i === 0 ? "row" : null }, shown === null || shown === undefined || shown === "" ? "–" : shown);
  });
  return el("tr", { class: isChosen ? "chosen" : null, "aria-current": isChosen ? "true" : null }, cells);
}

function plainTable(id, name, columns, rows) {
  const head = el("tr", {}, columns.map((column) => el("th", { scope: "col", class: column.kind === "num" ? "num" : null }, column.name)));
  const table = el("table", { id }, el("caption", { class: "hide" }, name), el("thead", {}, head), el("tbody", {}, rows.map((row) => rowOf(columns, row, {}))));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table);
}
