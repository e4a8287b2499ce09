"use strict";
// Sorts tables, which are complete without it. Each heading becomes a button: ascending, descending, original order.
const EMPTY = ["", "–"];

function key(row, column) {
  const cell = row.cells[column];
  return "sort" in cell.dataset ? Number(cell.dataset.sort) : cell.textContent.trim();
}

function compare(one, other) {
  const kinds = [typeof one === "number", typeof other === "number"];
  if (kinds[0] && kinds[1]) return one - other;
  return kinds[0] ? -1 : kinds[1] ? 1 : one.localeCompare(other, "en", { numeric: true });
}

function sort(table, given, head, column) {
  const next = { ascending: "descending", descending: "" };
  const order = next[head.getAttribute("aria-sort")] ?? "ascending";
  for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
  if (order) head.setAttribute("aria-sort", order);
  const sign = order === "descending" ? -1 : 1;
  const known = given.filter((row) => !EMPTY.includes(key(row, column)));
  const sorted = known.sort((one, other) => sign * compare(key(one, column), key(other, column)));
  const empty = given.filter((row) => EMPTY.includes(key(row, column)));
  table.tBodies[0].append(...(order ? [...sorted, ...empty] : given));
}

for (const table of document.querySelectorAll("table")) {
  const given = [...table.tBodies[0].rows];
  if (given.length < 2) continue;
  table.classList.add("sortable");
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, given, head, column));
    head.append(button);
  });
}
