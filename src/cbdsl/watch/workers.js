"use strict";
// The workers of a run: a tile and a row for each. Only changes are written, so that a thousand workers are fast.

const STATES = ["here", "late", "away", "unseen", "done", "banned"];
const [, NAME, STATE, , CLAIM, , , , , , BAN] = [...Array(12).keys()];
const COLUMNS = ["#", "worker", "state", "this round", "claim", "invited", "accepted", "declined", "refuted", "silent", "ban", "messages refused"];
const SHOWN = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 10];  // the reason for a ban comes last: it is long

function showWorkers(changed) {
  const rows = view.replay ? view.replay.workers : changed;
  const table = get("workers"), fresh = [];
  if (!table.tHead.rows.length) makeHead(table);
  for (const row of rows) {
    if (!view.cells.has(row[0])) fresh.push(makeRow(row));
    writeRow(row);
  }
  table.tBodies[0].append(...fresh);
  if (fresh.length || view.sort[0] !== 0) sortRows();
  get("mosaic").hidden = view.cells.size < 25;  // the table shows so few at once
  showFilters();
  filterRows();
}

function makeHead(table) {
  const head = table.tHead.insertRow();
  SHOWN.forEach((column) => {
    const cell = document.createElement("th"), button = document.createElement("button");
    button.type = "button";
    button.textContent = COLUMNS[column];
    button.addEventListener("click", () => { view.sort = [column, view.sort[0] === column ? -view.sort[1] : column > 3 ? -1 : 1]; sortRows(); });
    cell.append(button);
    head.append(cell);
  });
}

function makeRow(row) {
  const made = document.createElement("tr"), tile = document.createElement("i");
  const cells = SHOWN.map(() => made.insertCell());
  view.cells.set(row[0], { made, cells, text: [] });
  view.tiles.set(row[0], tile);
  get("mosaic").append(tile);
  return made;
}

// A cell's text: empty for a count of zero, so that other counts stand out.
function wordsOf(column, value) {
  if (column === CLAIM) return value === null ? "" : decimal(value);
  return column > CLAIM && !value ? "" : String(value);
}

function writeRow(row) {
  const { made, cells, text } = view.cells.get(row[0]), tile = view.tiles.get(row[0]);
  SHOWN.forEach((column, index) => {
    const words = wordsOf(column, row[column]);
    if (text[index] !== words) {
      cells[index].textContent = words;
      text[index] = words;
    }
  });
  made.row = row;
  made.className = `${row[STATE]} ${row[3]}`;
  tile.className = row[STATE] || row[3] || "in";
  tile.title = `${row[NAME]}: ${row[STATE] || row[3] || "in the run"}`;
}

function sortRows() {
  const [column, direction] = view.sort, body = get("workers").tBodies[0];
  const rank = (value) => (column === 2 ? STATES.indexOf(value) : value === null || value === "" ? -Infinity : value);
  const before = (a, b) => (a === b ? 0 : a < b ? -1 : 1);
  const rows = [...view.cells.values()].map((one) => one.made);
  rows.sort((a, b) => direction * before(rank(a.row[column]), rank(b.row[column])) || a.row[0] - b.row[0]);
  if (rows.some((row, index) => body.rows[index] !== row)) body.append(...rows);
}

function showFilters() {
  const counts = new Map();
  for (const { made } of view.cells.values()) if (made.row[STATE]) counts.set(made.row[STATE], (counts.get(made.row[STATE]) || 0) + 1);
  const buttons = ["", ...STATES.filter((state) => counts.has(state))].map((state) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `chip ${state}${view.filter === state ? " chosen" : ""}`;
    button.textContent = state ? `${counts.get(state)} ${state}` : `all ${view.cells.size}`;
    button.addEventListener("click", () => { view.filter = state; showFilters(); filterRows(); });
    return button;
  });
  get("filters").replaceChildren(...buttons);
}

function filterRows() {
  for (const { made } of view.cells.values()) {
    const words = `${made.row[0]} ${made.row[NAME]}`.toLowerCase();
    const hidden = (view.filter !== "" && made.row[STATE] !== view.filter) || !words.includes(view.search);
    if (made.hidden !== hidden) made.hidden = hidden;
  }
}
