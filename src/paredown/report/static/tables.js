// Tables that can be sorted and shortened. A table is built once and only its rows are replaced, so that sort order, focus and scroll
// position stay.
const tables = {};

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

// columns: {name, value(row), show(row)?, kind: "num" | "why" | ...}; options: name, most, chosen(row), column and down: the first order
function sortable(id, columns, rows, options = {}) {
  const names = columns.map((column) => column.name).join("\n");
  if (!tables[id] || tables[id].names !== names) tables[id] = makeTable(id, columns, options, names);
  Object.assign(tables[id], { columns, rows, options });
  tables[id].draw();
  return tables[id].nodes;
}

function makeTable(id, columns, options, names) {
  const table = { names, column: options.column ?? null, down: options.down ?? false, all: false };
  const body = el("tbody"), caption = el("caption", { class: "hide" }), more = el("button", { type: "button", onclick: () => { table.all = !table.all; table.draw(); } });
  const turn = (i) => { table.down = table.column === i ? !table.down : false; table.column = i; table.draw(); };
  const heads = columns.map((column, i) => el("th", { scope: "col", class: column.kind === "num" ? "num" : null }, el("button", { type: "button", onclick: () => turn(i) }, column.name)));
  const region = el("div", { class: "scroll", tabindex: 0, role: "region" }, el("table", { id }, caption, el("thead", {}, el("tr", {}, heads)), body));
  table.nodes = [region, more];
  table.draw = () => {
    const most = table.options.most || 25, order = inOrder(table);
    region.setAttribute("aria-label", table.options.name);
    caption.textContent = table.options.name;
    heads.forEach((head, i) => { if (table.column === i) head.setAttribute("aria-sort", table.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    body.replaceChildren(...(table.all ? order : order.slice(0, most)).map((row) => rowOf(table.columns, row, table.options)));
    more.hidden = order.length <= most;
    more.textContent = table.all ? `Show ${most} rows` : `Show all ${order.length} rows`;
  };
  return table;
}

function inOrder(table) {
  if (table.column === null) return table.rows;
  const { value } = table.columns[table.column], isKnown = (x) => x !== null && x !== undefined;
  return [...table.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return table.down && isKnown(x) && isKnown(y) ? -compare(x, y) : compare(x, y); // unknown values come last in both directions
  });
}

function rowOf(columns, row, options) {
  const isChosen = options.chosen ? options.chosen(row) : false;
  const cells = columns.map((column, i) => {
    const shown = column.show ? column.show(row) : column.value(row);
    const kind = i === 0 && String(shown).length <= 28 ? `${column.kind || ""} nowrap` : column.kind;
    return el(i === 0 ? "th" : "td", { class: kind, scope: i === 0 ? "row" : null }, shown === null || shown === undefined || shown === "" ? "–" : shown);
  });
  return el("tr", { class: isChosen ? "chosen" : null, "aria-current": isChosen ? "true" : null }, cells);
}
