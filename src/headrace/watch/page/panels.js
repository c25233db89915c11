// Tables and lines of the page. Every text comes by textContent: names of runs, hosts and errors may hold anything.

import { bytes, duration, short } from "./chart.js";

export const at = (id) => document.getElementById(id);

// Sets a text only where it has changed, so that a screen reader is not told the same again.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The same; what stands between backticks is code, which someone copies.
function sayCoded(element, text) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  const pieces = text.split("`");
  if (pieces.length % 2 === 0) say(element, text);
  else element.replaceChildren(...pieces.map((each, n) => (n % 2 ? make("code", {}, each) : each)));
}

export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// Puts a node where another one is, if they differ: what someone is about to click, or has marked, stays.
function settle(cell, content) {
  if (typeof content === "string") {
    if (cell.firstElementChild) cell.replaceChildren(content);
    else say(cell, content);
    return;
  }
  const old = cell.firstElementChild;
  if (!old || !old.isEqualNode(content)) cell.replaceChildren(content);
  else if (content.type === "checkbox") old.checked = content.checked;
}

function resize(parent, count, made) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(made(parent.children.length));
}

// Shows rows in a place. `heads` are names of columns; one that begins with ~ holds words. A cell is a text or an element.
export function fill(place, heads, rows) {
  const kinds = heads.map((head) => (head.startsWith("~") ? "words" : null));
  const names = heads.map((head) => head.replace(/^~/, ""));
  if (place.dataset.heads !== names.join("\n")) {
    place.dataset.heads = names.join("\n");
    const head = make("tr", {}, ...names.map((name, n) => make("th", { scope: "col", class: kinds[n] }, name)));
    place.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody")));
  }
  const body = place.querySelector("tbody");
  const cell = (n) => (n === 0 ? make("th", { scope: "row", class: kinds[0] }) : make("td", { class: kinds[n] }));
  resize(body, rows.length, () => make("tr", {}, ...names.map((_, n) => cell(n))));
  rows.forEach((cells, row) => cells.forEach((content, n) => settle(body.children[row].children[n], content)));
}

// The names that a list offers; what someone has chosen stays.
export function choices(list, names) {
  if ([...list.options].map((each) => each.value).join("\n") === names.join("\n")) return;
  const chosen = list.value;
  list.replaceChildren(...names.map((name) => make("option", { selected: name === chosen }, name)));
}

function section(id, shown) {
  at(id).hidden = !shown;
  return at(id).querySelector(".scroll");
}

const NAMES = { ok: "finished", running: "running", failed: "failed", interrupted: "interrupted" };
const MOODS = { ok: "good", running: "live", "no run yet": "live", interrupted: "ended" };
export const mood = (status) => MOODS[status] || "bad";
export const statusText = (status) => NAMES[status] || status;

// Names and values, of which those that change are told anew.
function define(place, pairs) {
  resize(place, pairs.length, () => make("div", {}, make("dt"), make("dd")));
  pairs.forEach(([name, value], index) => {
    const [term, told] = place.children[index].children;
    say(term, name);
    say(told, value);
  });
}

// What a run says at a glance: how far it is, a sentence, four values.
export function head(run) {
  const known = run.rounds > 0;
  const goesOn = run.status === "running" && run.step > 0 && run.rounds > run.step;
  const left = goesOn ? `about ${duration((run.until_s * (run.rounds - run.step)) / run.step)} left` : "";
  const epochs = run.an_epoch && run.batch ? Math.round(run.rounds / Math.ceil(run.an_epoch / run.batch)) : 0;
  const epoch = epochs && run.epochs !== null ? `epoch ${Math.min(epochs, 1 + Math.floor(run.epochs))} of ${epochs}` : "";
  at("progress").hidden = !known;
  const bar = at("progress").querySelector("progress");
  if (known) [bar.max, bar.value] = [run.rounds, Math.min(run.step, run.rounds)];
  say(at("progress").querySelector("span"), [`step ${run.step} of ${run.rounds}`, epoch, left].filter(Boolean).join(", "));
  sayCoded(at("headline"), run.headline);
  define(at("tiles"), run.tiles);
}

export function facts(run) {
  const epochs = run.epochs === null ? "" : `, ${short(run.epochs)} epochs`;
  const pairs = [
    ["command", run.command || "–"],
    ["model", run.model || "–"],
    ["optimizer", run.optimizer || "–"],
    ["strategy", `${run.strategy || "–"}${run.workers ? `, ${run.workers} workers` : ""}`],
    ["device", run.threads ? `${run.device}, ${run.threads} thread${run.threads === 1 ? "" : "s"}` : run.device || "–"],
    ["global batch", short(run.batch)],
    ["steps", `${run.step}${run.rounds ? `/${run.rounds}` : ""}${epochs}`],
    ["examples", run.examples === null ? "being counted" : short(run.examples)],
    ["loss", short(run.loss)],
    [run.status === "running" ? "examples/s now" : "examples/s", short(run.rate)],
    ["time", duration(run.until_s)],
    ["checkpoints", String(run.checkpoints)],
    ["largest memory", run.peak],
    ["started", run.started_at.replace("T", " ") || "–"],
    ["versions", Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", ") || "–"],
  ];
  if (run.attempts > 1) pairs.push(["attempts", String(run.attempts)]);
  if (run.missing > 0) pairs.push(["not read yet", `${(100 * run.missing).toFixed(0)} % of the events`]);
  define(at("facts"), pairs);
  say(at("configuration").querySelector("summary span"), [run.model, run.optimizer].filter(Boolean).join("; "));
}

const MOST_BARS = 8;

// One bar a worker: the parts of its mean step, as wide as they are long.
export function spent(message, parts) {
  const order = ["wait", "compute", "exchange", "update", "other"];
  const names = new Map(parts);
  const total = (seconds) => seconds.reduce((a, b) => a + b, 0);
  const rows = message.ranks.slice(0, MOST_BARS).map((rank, index) => [rank, message.seconds[index]]);
  const most = Math.max(...rows.map(([, seconds]) => total(seconds)));
  at("spent").hidden = !(most > 0);
  at("spent").querySelector(".bars").replaceChildren(...rows.map(([rank, seconds]) => {
    const told = order.map((part, n) => `${names.get(part)} ${duration(seconds[n])}`).join(", ");
    const bar = make("div", { class: "bar", role: "img", "aria-label": `rank ${rank}, a step: ${told}`, title: told });
    order.forEach((part, n) => {
      const piece = make("span");
      piece.style.background = `var(--${part})`;
      piece.style.width = `${(100 * seconds[n]) / most}%`;
      bar.append(piece);
    });
    return make("div", { class: "row" }, make("span", { class: "quiet" }, `rank ${rank}`), bar, make("span", {}, duration(total(seconds))));
  }));
  const rest = message.ranks.length - rows.length;
  if (rest > 0) at("spent").querySelector(".bars").append(make("p", { class: "quiet" }, `and ${rest} more workers`));
}

export function complaints(lines) {
  at("complaints").hidden = !lines.length;
  at("complaints").querySelector("ul").replaceChildren(...lines.map((line) => make("li", {}, line)));
}

const SHARES = ["compute", "exchange", "update", "input", "between"];

export function processes(list) {
  const workers = list.filter((each) => each.role === "worker");
  fill(
    at("processes"),
    ["rank", "~host", "~device", "state", "step", "last step", ...SHARES.map((name) => `${name} %`), "heard of at"],
    workers.map((each) => [
      String(each.rank), each.host, each.device, state(each.state), each.step === null ? "–" : String(each.step),
      duration(each.step_s), ...SHARES.map((_, n) => (each.shares ? each.shares[n].toFixed(0) : "–")), duration(each.time_s),
    ]),
  );
  const told = list.filter((each) => each.peak !== null || each.parameters !== null);
  fill(
    section("memory", told.length),
    ["rank", "role", "largest", "parameters", "optimizer"],
    told.map((each) => [String(each.rank), each.role, bytes(each.peak), bytes(each.parameters), bytes(each.optimizer)]),
  );
}

const STATES = { lost: "bad", failed: "bad", unfinished: "bad", interrupted: "ended" };
const state = (name) => (STATES[name] ? make("span", { class: STATES[name] }, name) : name);

export function servers(message) {
  fill(
    section("servers", message.servers.length),
    ["rank", "busy", "moved", "now", "queue", "longest", "shards", "~rows held"],
    message.servers.map((each) => [
      String(each.rank), each.busy === null ? "–" : `${(100 * each.busy).toFixed(0)} %`, bytes(each.moved),
      each.traffic.length ? `${bytes(each.traffic.at(-1)[1])}/s` : "–", short(each.queue_mean), short(each.queue_longest),
      short(each.shards), each.rows.map(([name, held, evicted]) => `${name} ${held}${evicted ? `, ${evicted} evicted` : ""}`).join("; "),
    ]),
  );
  at("traffic").hidden = !message.servers.some((each) => each.traffic.length);
  at("staleness").hidden = !message.updates;
  const refused = Object.entries(message.refused).map(([why, count]) => `${count} refused: ${why}`);
  const told = `${short(message.updates)} updates of shards: mean ${short(message.mean)}, 99 % at most ${short(message.p99)}, largest ${short(message.largest)}`;
  say(at("staleness").querySelector("p"), [told, ...refused].join("; "));
}

export function evaluations(list) {
  const names = [...new Set(list.flatMap((each) => Object.keys(each.metrics)))].slice(0, 8);
  fill(
    section("evaluations", list.length),
    ["step", "examples", "after", ...names],
    list.slice(-12).reverse().map((each) => [
      String(each.step), short(each.examples), duration(each.seconds), ...names.map((name) => short(each.metrics[name])),
    ]),
  );
}

export function saves(message) {
  const rows = message.saved.slice(0, 12).map((each) => [
    `step ${each.step}`, duration(each.time_s), bytes(each.bytes), duration(each.stall_s), duration(each.write_s),
  ]);
  const snapshots = message.snapshots.map((each) => [
    `snapshot ${each.count} of server ${each.rank}`, duration(each.time_s), bytes(each.bytes), duration(each.pause_s), "–",
  ]);
  fill(
    section("saves", rows.length + snapshots.length),
    ["what", "at", "size", "training stood still", "written in"],
    [...rows, ...snapshots],
  );
}

const BAD = ["failed", "lost", "not finite"];
const MOST_FAULTS = 3;

export function journal(message) {
  // The end of a run has its own line above.
  const faults = message.lines.filter((each) => BAD.includes(each.kind));
  at("faults").hidden = !faults.length;
  const rest = faults.length - MOST_FAULTS;
  at("faults").replaceChildren(
    ...faults.slice(0, MOST_FAULTS).map((each) => {
      const who = each.rank < 0 ? "" : `, rank ${each.rank}`;
      return make("li", {}, make("span", { class: "bad" }, each.kind), ` at ${duration(each.time_s)}${who}: ${each.text}`);
    }),
    ...(rest > 0 ? [make("li", { class: "quiet" }, `${rest} more below`)] : []),
  );
  say(at("journal").querySelector("summary span"), message.lines.length ? message.lines[0].text : "");
  // What has been unfolded stays so when lines come before it.
  const open = new Set([...at("journal").querySelectorAll("details[open]")].map((each) => each.dataset.key));
  fill(
    section("journal", message.lines.length),
    ["at", "~what", "rank", "~text"],
    message.lines.map((each) => [
      duration(each.time_s), BAD.includes(each.kind) ? make("span", { class: "bad" }, each.kind) : each.kind,
      each.rank < 0 ? "launcher" : String(each.rank), text(each, open),
    ]),
  );
}

function text(line, open) {
  if (!line.detail) return line.text;
  const key = `${line.time_s}/${line.rank}`;
  return make("details", { "data-key": key, open: open.has(key) }, make("summary", {}, line.text), make("pre", {}, line.detail));
}

// The list of runs: a button looks at a run, a box draws its curves beside.
export function runs(order, rows, selected, choose, compare) {
  fill(
    section("runs", order.length > 1),
    ["~run", "~strategy", "workers", "~status", "steps", "loss", "examples/s", "beside"],
    order.filter((name) => rows[name]).map((name) => {
      const row = rows[name];
      const first = selected[0] === name;
      const look = make("button", { class: "name", type: "button", "aria-current": first ? "true" : null, onclick: () => choose(name) }, name);
      const box = make("input", { type: "checkbox", "aria-label": `draw the curves of ${name}`, disabled: first, onchange: (event) => compare(name, event.target.checked) });
      box.checked = selected.includes(name);
      return [look, row.strategy, short(row.workers), state(statusText(row.status)), short(row.step), short(row.loss), short(row.rate), box];
    }),
  );
}
