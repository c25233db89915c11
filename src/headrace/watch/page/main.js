// The page of runs: keeps what the server has told, and draws it.

import { Chart, bytes, duration, short } from "./chart.js";
import { LaneStore, Lanes, PARTS } from "./lanes.js";
import * as panels from "./panels.js";
import { follow } from "./stream.js";

const { at, make, say } = panels;
const RECENT_BINS = 120;
const MOST_BESIDE = 7;

let order = [];
let rows = {};
let selected = namesInAddress();
let curves = new Map();
let lanes = {};
let processes = [];
let servers = null;
let averaging = null;
let numbers = [];
let run = null;
let token = "";
let stop = () => {};
let heardAt = 0;

// Calls at once, then at most once in so many milliseconds; the last call is never left out.
function spaced(draw, ms) {
  let timer = 0, again = false;
  return function call() {
    if (timer) {
      again = true;
      return;
    }
    again = false;
    draw();
    timer = setTimeout(() => {
      timer = 0;
      if (again) call();
    }, ms);
  };
}
const curvesSoon = spaced(() => drawCurves(), 250);
const lanesSoon = spaced(() => drawLanes(), 400);

const chart = (id, options) => new Chart(at(id).querySelector(".chart"), options);
const charts = {
  loss: chart("loss", { name: "Loss", x: "examples", y: "loss", showX: short, showY: short }),
  metric: chart("metric", { name: "Metric", x: "examples", y: "", showX: short, showY: short }),
  rate: chart("rate", { name: "Examples a second", x: "", y: "examples/s", showX: duration, showY: short, fromZero: true }),
  staleness: chart("staleness", { name: "Mean staleness", x: "", y: "updates", showX: duration, showY: short, fromZero: true }),
  traffic: chart("traffic", { name: "Traffic by server", x: "", y: "", showX: duration, showY: (value) => `${bytes(value)}/s`, fromZero: true }),
  numbers: chart("numbers", { name: "Logged numbers", x: "", y: "", showX: duration, showY: short }),
  drift: chart("drift", { name: "Drift", x: "", y: "of the mean's norm", showX: duration, showY: short, fromZero: true }),
};
const picture = new Lanes(at("lanes-canvas"));
at("parts").replaceChildren(
  ...PARTS.map(([colour, name]) => {
    const box = make("span", { class: "box" });
    box.style.background = `var(--${colour})`;
    return make("li", {}, box, name);
  }),
);

// The picture of the run's own strategy stands beside the others: staleness of servers, drift of averaging, else lanes.
function place() {
  const own = ["staleness", "drift", "lanes"].map(at).find((each) => !each.hidden);
  for (const each of [...at("curves").querySelectorAll(".own")]) if (each !== own) at("more").prepend(each);
  if (own && own.parentElement !== at("curves")) {
    at("curves").append(own);
    own.open = true;
  }
}

// Of a run that has ended the whole is looked at, until someone chooses.
let chosen = false;
function settleTime() {
  const wanted = run.status === "running" || run.status === "no run yet" ? "recent" : "lanes";
  if (!chosen) document.querySelector(`input[name=time][value=${wanted}]`).checked = true;
}

function namesInAddress() {
  return new URLSearchParams(location.hash.slice(1)).getAll("run");
}

function select(names) {
  location.hash = new URLSearchParams(names.map((name) => ["run", name])).toString();
}

function forget() {
  curves = new Map();
  lanes = { lanes: new LaneStore(), recent: new LaneStore() };
  processes = [];
  servers = averaging = run = null;
  numbers = [];
}

function connect() {
  stop();
  forget();
  stop = follow(() => selected, token, {
    open: () => {
      forget();
      panels.complaints([]);
      for (const id of ["lanes", "staleness", "traffic", "drift", "numbers", "servers", "memory", "evaluations", "saves", "journal", "metric", "spent"]) at(id).hidden = true;
      at("ask").hidden = true;
      chosen = false;
    },
    message: take,
    lost: (text) => {
      say(at("status"), `${run ? `${panels.statusText(run.status)}; ` : ""}${text}, trying again`);
      say(at("age"), "");
    },
    refused,
  });
}

function refused(error) {
  if (error.status === 401) {
    at("ask").hidden = false;
    say(at("refused"), token ? "the token is another one" : "");
    say(at("status"), "a token is needed");
    at("token").focus();
  } else if (error.status === 404 && selected.length) {
    // The run is gone, or another server has come: what it has is looked at.
    history.replaceState(null, "", location.pathname);
    selected = [];
    setTimeout(connect, 500);
  } else say(at("status"), error.message);
}

function take(message) {
  heardAt = performance.now();
  if (message.order) order = message.order;
  if (message.rows) Object.assign(rows, message.rows);
  if (!selected.length && message.detail) selected = [message.detail.name];
  if (message.order || message.rows) panels.runs(order, rows, selected, choose, compare);
  for (const [name, each] of Object.entries(message.shown)) takeCurves(name, each);
  if (message.detail) takeDetail(message.detail);
  if (Object.keys(message.shown).length) curvesSoon();
  status();
  // The directory that was waited for has runs below it.
  if (run && !run.strategy && message.order && !order.includes(selected[0])) {
    selected = [];
    connect();
  }
}

const choose = (name) => select([name, ...selected.slice(1).filter((each) => each !== name)]);
const compare = (name, wanted) => {
  const others = selected.filter((each) => each !== name);
  select(wanted ? [...others.slice(0, MOST_BESIDE), name] : others);
};

function takeCurves(name, message) {
  const empty = { loss: { examples: [], seconds: [], losses: new Map() }, evaluations: [], rates: { seconds: [], rate: [] } };
  const known = message.whole || !curves.has(name) ? empty : curves.get(name);
  if (message.loss) {
    const { first, count, examples, seconds, losses } = message.loss;
    const renewed = (old, values) => old.slice(0, first).concat(values).slice(0, count);
    known.loss.examples = renewed(known.loss.examples, examples);
    known.loss.seconds = renewed(known.loss.seconds, seconds);
    for (const [name, values] of Object.entries(losses)) {
      // A set whose first turn came later has no loss before.
      known.loss.losses.set(name, renewed(known.loss.losses.get(name) || new Array(first).fill(null), values));
    }
  }
  if (message.evaluations) known.evaluations = message.evaluations;
  if (message.rates) known.rates = message.rates;
  curves.set(name, known);
  if (name === selected[0] && (message.evaluations || message.whole)) panels.evaluations(known.evaluations);
}

function takeDetail(message) {
  run = message.run;
  curvesSoon();
  settleTime();
  panels.head(run);
  panels.facts(run);
  if (message.complaints) panels.complaints(message.complaints);
  if (message.whole) lanes = { lanes: new LaneStore(), recent: new LaneStore() };
  if (message.lanes) lanes.lanes.take(message.lanes, message.whole, Infinity);
  if (message.recent) lanes.recent.take(message.recent, message.whole, RECENT_BINS);
  if (message.processes) {
    processes = message.processes;
    panels.processes(processes);
  }
  if (message.parts) panels.spent(message.parts, PARTS);
  if (message.journal) panels.journal(message.journal);
  if (message.saves) panels.saves(message.saves);
  if (message.servers) {
    servers = message.servers;
    panels.servers(servers);
    drawServers();
  }
  if (message.averaging) {
    averaging = message.averaging;
    drawDrift();
  }
  if (message.numbers) {
    numbers = message.numbers;
    drawNumbers();
  }
  lanesSoon();
  place();
}

const pairs = (xs, ys) => xs.map((x, index) => [x, ys[index]]);
const style = (index) => ({ colour: `series-${index % 8}`, dashes: ["none", "6 3", "2 2"][Math.floor(index / 8) % 3] });

// Faults, resumptions and an early end as lines across a chart of this axis.
const marks = (axis) => (run ? run.marks : []).map((each) => [each[axis], each.text]);

function drawCurves() {
  const by = document.querySelector("input[name=by]:checked").value;
  const names = selected.filter((name) => curves.has(name));
  const alone = names.length === 1;
  const losses = [], metrics = [], rates = [];
  const told = names.length ? curves.get(names[0]).evaluations.flatMap((each) => Object.keys(each.metrics)) : [];
  const metric = told.find((name) => name !== "loss");
  names.forEach((name, index) => {
    const { loss, evaluations, rates: rate } = curves.get(name);
    for (const [set, values] of loss.losses) {
      const own = set === "" ? "training" : set;
      const form = set === "" || !alone ? style(index) : style(losses.length);
      losses.push({ name: alone ? own : set === "" ? name : `${name}, ${set}`, ...form, points: pairs(loss[by], values) });
    }
    const of = (key) => evaluations.filter((each) => Number.isFinite(each.metrics[key])).map((each) => [each[by], each.metrics[key]]);
    const seen = of("loss"), dots = { name: alone ? "evaluation" : `${name}, evaluation`, ...style(alone ? 1 : index), dots: true };
    if (seen.length) losses.push({ ...dots, points: seen });
    if (metric !== undefined) metrics.push({ name: alone ? metric : name, ...style(index), points: of(metric), marked: true });
    rates.push({ name: alone ? "rate" : name, ...style(index), points: pairs(rate.seconds, rate.rate) });
  });
  const axis = { x: by === "examples" ? "examples" : "of training", showX: by === "examples" ? short : duration, marks: marks(by) };
  charts.loss.show(losses, { ...axis, logarithmic: at("logarithmic").checked });
  at("metric").hidden = metric === undefined;
  say(at("metric-head"), `${metric}, by evaluations`);
  charts.metric.show(metrics, { ...axis, name: metric });
  charts.rate.show(rates, { x: "of the run", marks: marks("time_s") });
}

function drawServers() {
  charts.staleness.show([{ name: "mean", ...style(0), points: servers.staleness }], { x: "of the run", marks: marks("time_s") });
  const traffic = servers.servers.filter((each) => each.traffic.length);
  charts.traffic.show(traffic.map((each, index) => ({ name: `server ${each.rank}`, ...style(index), points: each.traffic })), { x: "of the run", marks: marks("time_s") });
}

function drawDrift() {
  at("drift").hidden = !averaging.time_s.length;
  place();
  charts.drift.show([{ name: "drift", ...style(0), points: pairs(averaging.time_s, averaging.drift) }], { x: "of the run", marks: marks("time_s") });
  const period = averaging.period.at(-1);
  say(at("drift").querySelector("p"), period === undefined ? "" : `the period is ${period} rounds: ${averaging.why}`);
}

// One number at a time, of all ranks that have logged it.
function drawNumbers() {
  const base = (each) => each.name.replace(/\/rank-\d+$/, "");
  const names = [...new Set(numbers.map(base))];
  panels.choices(at("number"), names);
  at("numbers").hidden = !names.length;
  const shown = numbers.filter((each) => base(each) === at("number").value);
  const curves = shown.map((each, index) => ({ name: each.name, ...style(index), points: pairs(each.time_s, each.values), marked: true }));
  charts.numbers.show(curves, { name: at("number").value, x: "of the run", marks: marks("time_s") });
}

function drawLanes() {
  const kind = document.querySelector("input[name=time]:checked").value;
  at("lanes").hidden = !lanes[kind].bins.size;
  place();
  const lost = new Map(processes.map((each) => [each.rank, each.lost]));
  picture.show(lanes[kind], lost, kind === "recent" ? RECENT_BINS : 0, marks("time_s"));
}

function status() {
  if (!run || !selected.length) {
    say(at("status"), "live");
    return;
  }
  say(at("title"), selected[0]);
  const mood = panels.mood(run.status);
  at("status").className = mood;
  at("ended").hidden = !run.words;
  say(at("ended"), run.words);
  at("headline").classList.toggle("alert", mood === "bad" || mood === "ended");
  at("headline").classList.toggle("asked", mood === "ended");
  document.title = `${selected[0]}: ${panels.statusText(run.status)}, headrace watch`;
  say(at("status"), run.missing > 0 ? `${panels.statusText(run.status)}; older events are being read` : panels.statusText(run.status));
}

// Told beside the status, which is read out when it changes: this changes all the time.
function age() {
  if (performance.now() - heardAt > 5000 || !run || run.age_s === null) return;
  const seconds = run.age_s + (performance.now() - heardAt) / 1000;
  const isOld = run.status === "running" && seconds > 10;
  say(at("age"), run.status === "running" ? (isOld ? `nothing written for ${duration(seconds)}` : "live") : "");
  at("age").className = isOld ? "bad" : "quiet";
}

for (const each of document.querySelectorAll("input[name=by], #logarithmic")) each.addEventListener("change", drawCurves);
for (const each of document.querySelectorAll("input[name=time]")) each.addEventListener("change", () => {
  chosen = true;
  drawLanes();
});
at("number").addEventListener("change", drawNumbers);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  at("curves").focus();
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value;
  connect();
});
addEventListener("hashchange", () => {
  const names = namesInAddress();
  if (names.join("\n") === selected.join("\n")) return;
  selected = names;
  panels.runs(order, rows, selected, choose, compare);
  connect();
});
setInterval(age, 1000);
drawCurves();
connect();
