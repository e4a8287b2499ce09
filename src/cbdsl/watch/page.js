"use strict";
// The page of one folder: shows a run or a table of runs from the messages of /events.
// Names and reasons come from untrusted workers; they are only ever written as text.

const get = (id) => document.getElementById(id);
const [ROUND, ACCURACY, SCORE, UP, DOWN, SECONDS, TRAIN, WAIT, UPLOAD, VERIFY] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const roughly = (value) => `${Number((100 * value).toFixed(2))} %`;
const plain = (value) => value === 0 || (Math.abs(value) < 1000 && Math.abs(value) >= 1e-3);
// The main metric of the run: a share in percent, or a number in the target's unit.
const shares = (kind) => !kind || kind.share;
const result = (value) => (shares(run.facts && run.facts.metric) ? percent(value) : decimal(value));
const resultTick = (value) => (shares(run.facts && run.facts.metric) ? roughly(value) : decimal(value));
const headline = (kind) => `Test ${kind.title.replace("test ", "")}${kind.share ? "" : ` (${kind.better} is better)`}`;
const decimal = (value) => (plain(value) ? String(Number(value.toPrecision(4))) : value.toExponential(1));
const known = (value, format) => (value === null || value === undefined ? "–" : format(value));

function size(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") {
      return `${unit === "B" || count >= 100 || Number.isInteger(count) ? Math.round(count) : count.toFixed(1)} ${unit}`;
    }
    count /= 1000;
  }
}

function seconds(value) {
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

const run = { facts: null, points: [], latest: null, workers: new Map(), verdicts: [], events: [] };
const view = { replay: null, filter: "", search: "", sort: [0, 1], cells: new Map(), tiles: new Map(), longest: 0 };
let charts = null;

function makeCharts() {
  const at = (index) => (point) => point[index];
  const split = (point) => point[TRAIN] !== null;
  charts = [
    new Chart(get("chart-accuracy"), "Test accuracy", [{ name: "", style: "one", value: at(ACCURACY) }], { format: result, tick: resultTick }),
    new Chart(get("chart-score"), "Score of the global model", [{ name: "", style: "two", value: at(SCORE) }], { format: decimal }),
    new Chart(get("chart-bytes"), "Bytes so far", [
      { name: "FedAvg up", style: "other", value: (point) => (run.facts.fedavg ? run.facts.fedavg * point[ROUND] : null) },
      { name: "down", style: "two", value: at(DOWN) },
      { name: "up", style: "one", value: at(UP) },
    ], { format: size, log: true }),
    new Chart(get("chart-seconds"), "Round time", [
      { name: "train", style: "one", value: at(TRAIN) },
      { name: "wait", style: "other", value: at(WAIT) },
      { name: "upload", style: "two", value: at(UPLOAD) },
      { name: "verify", style: "three", value: at(VERIFY) },
      { name: "", style: "one", value: (point) => (split(point) ? null : point[SECONDS]) },
    ], { format: seconds, stacked: true }),
  ];
}

// --- the run

function take(news) {
  if (news.whole) {
    run.points = [];
    run.workers.clear();
    view.cells.clear();
    view.tiles.clear();
    get("workers").tBodies[0].replaceChildren();
    get("mosaic").replaceChildren();
  }
  run.facts = news.facts;
  run.points.push(...news.points);
  run.latest = news.latest;
  run.verdicts = news.verdicts;
  run.events = news.events;
  for (const row of news.workers) run.workers.set(row[0], row);
  if (view.replay && view.replay.round > news.facts.round) view.replay = null;
  show(view.replay ? [] : news.workers);
}

function show(changed) {
  const started = performance.now();
  const shown = view.replay || { ...run, round: run.facts.round, best: run.facts.best, banned: run.facts.banned, uploads: run.facts.uploads };
  showHead(run.facts);
  showSlider(run.facts);
  if (shown.latest) showFigures(run.facts, shown);
  const points = [...run.points];
  if (run.latest && (!points.length || points[points.length - 1][ROUND] < run.latest[ROUND])) points.push(run.latest);
  for (const chart of charts) chart.draw(points, view.replay ? view.replay.round : null);
  showStates(run.facts, shown);
  showWorkers(changed);
  showVerdicts(shown);
  view.longest = Math.max(view.longest, performance.now() - started);
  document.body.dataset.longest = view.longest.toFixed(1);  // milliseconds that an update took
  document.body.dataset.round = run.facts.round;
}

function showHead(facts) {
  get("run").hidden = false;
  get("sweep").hidden = true;
  document.title = `${facts.round}/${facts.rounds} ${facts.folder}`;
  get("folder").textContent = facts.folder;
  const words = { waiting: "waiting for the run to begin", running: "running", stopped: "stopped", finished: "finished" };
  get("status").textContent = words[facts.status];
  get("status").className = `pill ${facts.status}`;
  const attack = facts.byzantine ? `, ${facts.byzantine} attackers (${facts.attack})` : "";
  get("about").textContent = facts.status === "waiting" ? "There is no spec.toml in the folder yet." : [
    facts.preset, facts.method, `${facts.workers.toLocaleString("en")} workers${attack}`, `model ${facts.model}`,
    facts.codec && `codec ${facts.codec}`, `seed ${facts.seed}`,
  ].filter(Boolean).join(" · ");
}

function showSlider(facts) {
  const slider = get("slider");
  slider.max = Math.max(1, facts.round);
  slider.disabled = facts.round < 2;
  if (!view.replay) slider.value = facts.round;
  get("where").textContent = `round ${view.replay ? view.replay.round : facts.round} of ${facts.rounds}`;
  get("live").hidden = !view.replay;
  get("live").textContent = facts.status === "running" ? "back to now" : "back to the last round";
}

function showFigures(facts, shown) {
  const now = shown.latest, fedavg = facts.fedavg * shown.round;
  charts[0].rename(headline(facts.metric));
  get("metric").textContent = facts.metric.title;
  get("accuracy").textContent = known(now[ACCURACY], result);
  get("best").textContent = `best round ${known(shown.best, result)}`;
  get("score").textContent = known(now[SCORE], decimal);
  get("up").textContent = size(now[UP]);
  const models = `${shown.uploads.toLocaleString("en")} models`, times = decimal(Number((fedavg / now[UP]).toPrecision(3)));
  get("saved").textContent = fedavg && now[UP] ? `FedAvg: ${size(fedavg)}, ${times} times as much` : models;
  get("down").textContent = size(now[DOWN]);
  const wire = facts.wire || {};
  get("wire").textContent = wire.sent && !view.replay ? `MQTT: ${size(wire.sent)} sent, ${size(wire.received)} received` : "payload alone";
  get("banned").textContent = shown.banned;
  get("refused").textContent = facts.served ? `${facts.refused.toLocaleString("en")} messages refused` : "workers";
  get("seconds").textContent = known(now[SECONDS], seconds);
  const phases = [["train", TRAIN], ["wait", WAIT], ["upload", UPLOAD], ["verify", VERIFY]].filter((one) => now[one[1]] !== null);
  const split = phases.map(([name, index]) => `${name} ${seconds(now[index])}`).join(", ");
  get("split").textContent = split || `${seconds(facts.seconds)} in all`;
}

function showStates(facts, shown) {
  const states = facts.states, gone = facts.status === "finished";
  const present = gone ? states.done : states.here + states.late;
  const total = Object.assign(document.createElement("span"), { textContent: `of ${facts.workers.toLocaleString("en")}` });
  get("present").replaceChildren(`${present.toLocaleString("en")} `, total);
  const others = STATES.filter((state) => states[state] && state !== (gone ? "done" : "here")).map((state) => `${states[state]} ${state}`);
  const words = [...(gone ? ["to the end"] : []), ...others].join(", ") || "all connected";
  get("states").textContent = view.replay ? `as of now: ${words}` : words;
  const bans = [...(view.replay ? view.replay.workers : run.workers.values())].filter((row) => row[BAN]);
  get("bans-section").hidden = !bans.length;
  get("bans").replaceChildren(...bans.slice(0, 200).map((row) => item(row[NAME], row[BAN])));
  get("events-section").hidden = !run.events.length;
  get("events").replaceChildren(...[...run.events].reverse().map(([when, words]) => item(new Date(1000 * when).toLocaleTimeString("en-GB"), words)));
}

function item(first, rest) {
  const made = document.createElement("li"), name = document.createElement("b");
  name.textContent = first;
  made.append(name, ` ${rest}`);
  return made;
}

function showVerdicts(shown) {
  get("verdicts-title").textContent = `${shown.verdicts.length ? "Verdicts of" : "No verdicts in"} round ${shown.round}`;
  get("verdicts").parentElement.hidden = !shown.verdicts.length;
  const rows = shown.verdicts.slice(0, 200).map((row) => [row[0], row[1], known(row[2], decimal), known(row[3], decimal), row[4]]);
  fill(get("verdicts"), ["worker", "outcome", "claimed", "measured", "reason"], rows);
}

function fill(table, head, rows) {
  table.tHead.replaceChildren();
  table.tBodies[0].replaceChildren();
  const top = table.tHead.insertRow();
  for (const word of head) top.append(Object.assign(document.createElement("th"), { textContent: word }));
  for (const row of rows) {
    const made = table.tBodies[0].insertRow();
    for (const word of row) word instanceof Node ? made.insertCell().append(word) : (made.insertCell().textContent = word);
  }
}

// --- many runs

function showSweep(news) {
  get("run").hidden = true;
  get("sweep").hidden = false;
  document.title = news.facts.folder;
  get("folder").textContent = news.facts.folder;
  const done = news.runs.filter((one) => one.done).length;
  get("status").textContent = done === news.runs.length ? "finished" : `${done} of ${news.runs.length} runs finished`;
  get("status").className = `pill ${done === news.runs.length ? "finished" : "running"}`;
  get("about").textContent = "Each run has a page of its own.";
  const rows = news.runs.map((one) => {
    const link = document.createElement("a"), bar = document.createElement("progress");
    link.href = `runs/${encodeURIComponent(one.name)}/`;
    link.textContent = one.name;
    bar.max = one.rounds || 1;
    bar.value = one.round;
    return [link, ...one.values, `${one.round} of ${one.rounds}`, bar, known(one.accuracy, shares(one.metric) ? percent : decimal), one.banned || ""];
  });
  fill(get("runs"), ["run", ...news.columns, "round", "", news.title, "banned"], rows);
  document.body.dataset.runs = news.runs.length;
}

// --- input of the user, and messages of the server

async function replay(round) {
  const answer = await fetch(`round?number=${round}`);
  if (!answer.ok || Number(get("slider").value) !== round) return;
  view.replay = await answer.json();
  show([]);
}

function live() {
  view.replay = null;
  show([...run.workers.values()]);
}

get("slider").addEventListener("input", () => {
  const round = Number(get("slider").value);
  round >= run.facts.round ? live() : replay(round);
});
get("live").addEventListener("click", live);
window.addEventListener("resize", () => run.facts && show([]));
get("search").addEventListener("input", () => { view.search = get("search").value.toLowerCase(); filterRows(); });

makeCharts();
const events = new EventSource("events");
const lose = (lost) => { get("lost").hidden = !lost; get("status").hidden = lost; };
events.onopen = () => lose(false);
events.onerror = () => lose(true);
events.onmessage = (message) => {
  const news = JSON.parse(message.data);
  if (news.facts.kind === "sweep") showSweep(news);
  else if (news.facts.kind === "run") take(news);
};
