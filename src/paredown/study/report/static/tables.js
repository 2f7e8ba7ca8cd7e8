// Tables that can be sorted and shortened; on narrow screens each row is a card with the names of its columns, and on others the first column
// stays in view. Roles are explicit, since browsers drop those of tables that are not displayed as tables. A table is built once and only its rows are replaced, so that sort order, focus and scroll
// position stay.
const tables = {};
const CARDS = window.matchMedia("(max-width: 34rem)"); // as in page.css
const MOST_CARDS = 8;

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
  const body = el("tbody", { role: "rowgroup" }), caption = el("caption", { class: "hide" }), more = el("button", { type: "button", onclick: () => { table.all = !table.all; table.draw(); } });
  const turn = (i) => { table.down = table.column === i ? !table.down : false; table.column = i; table.draw(); };
  const heads = columns.map((column, i) => el("th", { scope: "col", role: "columnheader", class: column.kind === "num" ? "num" : null }, el("button", { type: "button", onclick: () => turn(i) }, column.name)));
  const region = el("div", { class: "scroll", tabindex: 0, role: "region" }, el("table", { id, role: "table" }, caption, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads)), body));
  table.nodes = [region, more];
  table.draw = () => {
    const most = CARDS.matches ? MOST_CARDS : table.options.most || 25, order = inOrder(table);
    region.setAttribute("aria-label", table.options.name);
    caption.textContent = table.options.name;
    heads.forEach((head, i) => { if (table.column === i) head.setAttribute("aria-sort", table.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    const isShown = (row, i) => table.all || i < most || (table.options.chosen && table.options.chosen(row));
    body.replaceChildren(...order.filter(isShown).map((row) => rowOf(table.columns, row, table.options)));
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

// A cell; the first of a row is its head. `name` is the name of its column, which cards show.
function cellOf(name, shown, isHead, kind) {
  const isEmpty = shown === null || shown === undefined || shown === "" || shown === "–";
  return el(isHead ? "th" : "td", { class: [kind, isEmpty ? "empty" : ""].filter(Boolean).join(" ") || null, scope: isHead ? "row" : null, role: isHead ? "rowheader" : "cell", "data-name": name }, isEmpty ? "–" : shown);
}

function rowOf(columns, row, options) {
  const isChosen = options.chosen ? options.chosen(row) : false;
  const cells = columns.map((column, i) => {
    const shown = column.show ? column.show(row) : column.value(row);
    return cellOf(column.name, shown, i === 0, i === 0 && String(shown).length <= 28 ? `${column.kind || ""} nowrap` : column.kind);
  });
  return el("tr", { role: "row", class: isChosen ? "chosen" : null, "aria-current": isChosen ? "true" : null }, cells);
}
