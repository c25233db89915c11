// Curves as SVG, with a cursor for mouse and keyboard whose values are read out.

const SVG = "http://www.w3.org/2000/svg";
const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 999.5e12) return powered(value);
  if (size >= 99995) {
    const [factor, letter] = LARGE.find((row) => size >= row[0] * 0.9995);
    return (value / factor).toPrecision(3) + letter;
  }
  if (size >= 999.5) return value.toFixed(0);
  return size < 1e-4 ? powered(value) : String(Number(value.toPrecision(3)));
}

const powered = (value) => value.toExponential(2).replace(/\.?0+e/, "e");

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const row = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([factor]) => value >= factor * 0.9995);
  return row ? `${Number((value / row[0]).toPrecision(3))} ${row[1]}` : `${Math.round(value)} B`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds) % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

const CLOCK_S = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

// Round numbers from low to high, about as many as wanted; of times, whole minutes and hours.
export function ticks(low, high, wanted, ofTime = false) {
  const raw = (high - low) / wanted;
  // Steps that are lost in rounding lead nowhere.
  if (!(raw > 1e-12 * Math.max(Math.abs(low), Math.abs(high))) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const round = [1, 2, 5, 10].find((each) => each * power >= raw) * power;
  const step = (ofTime && raw > 10 && CLOCK_S.find((each) => each >= raw)) || round;
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) found.push(index * step || 0);
  return found;
}

function powers(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    for (const factor of high - low > 2 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(factor);
      if (at >= low - 1e-9 && at <= high + 1e-9) found.push(at);
    }
  }
  return found;
}

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

export function swatch(style) {
  const made = element("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": "true" });
  const line = { x1: 0, x2: 24, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": style.dashes || "none" };
  made.append(element("line", { ...line, stroke: `var(--${style.colour})` }));
  return made;
}

const MOST_MARKED = 60;
const dot = (place, fill) => element("circle", { cx: place.split(" ")[0], cy: place.split(" ")[1], r: 3, fill });

const LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 34;

export class Chart {
  #svg = element("svg", { role: "img", tabindex: "0" });
  #key = document.createElement("ul");
  #told = document.createElement("output");
  #series = [];
  #options;
  #cursor = null;
  #view = null;

  // `options`: name, x and y (names of the axes), showX and showY (values as text).
  constructor(place, options) {
    this.#options = options;
    this.#key.className = "key";
    place.append(this.#key, this.#svg, this.#told);
    this.#svg.setAttribute("aria-label", options.name);
    new ResizeObserver(() => this.#draw()).observe(this.#svg);
    this.#svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.#svg.addEventListener("pointerleave", () => this.#point(null));
    this.#svg.addEventListener("keydown", (event) => this.#step(event));
  }

  // Each of `series` has name, colour (a style variable), dashes, points ([x, y]) and perhaps dots, alone or marked on a line.
  show(series, changes = {}) {
    this.#series = series;
    Object.assign(this.#options, changes);
    this.#draw();
  }

  #draw() {
    const width = this.#svg.clientWidth, height = this.#svg.clientHeight;
    if (width < 80) return;
    const { logarithmic, name } = this.#options;
    const good = ([x, y]) => Number.isFinite(x) && Number.isFinite(y) && y !== null && (!logarithmic || y > 0);
    const shown = this.#series.map((each) => ({ ...each, points: each.points.filter(good) }));
    const all = shown.flatMap((each) => each.points);
    this.#keys(shown);
    if (!all.length) {
      this.#view = null;
      this.#svg.setAttribute("aria-label", `${name}: nothing to draw yet`);
      this.#svg.replaceChildren(element("text", { x: LEFT, y: height / 2 }, "nothing to draw yet"));
      return;
    }
    const scaled = (y) => (logarithmic ? Math.log10(y) : y);
    const marks = (this.#options.marks || []).filter(([x]) => Number.isFinite(x));
    const xs = [...all.map(([x]) => x), ...marks.map(([x]) => x)], ys = all.map(([, y]) => scaled(y));
    const low = (values) => values.reduce((a, b) => Math.min(a, b));
    const high = (values) => values.reduce((a, b) => Math.max(a, b));
    const x0 = Math.min(0, low(xs)), x1 = Math.max(high(xs), x0 + 1e-9);
    let y0 = low(ys), y1 = high(ys);
    if (!logarithmic && y0 > 0 && (y0 < 0.5 * y1 || this.#options.fromZero)) y0 = 0;
    if (y1 <= y0) [y0, y1] = [y0 - 0.5 * Math.abs(y0 || 1), y1 + 0.5 * Math.abs(y1 || 1)];
    const toX = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const toY = (y) => height - BOTTOM - ((scaled(y) - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
    this.#view = { shown, toX, toY, height, width };
    const parts = this.#axes(x0, x1, y0, y1, width, height);
    for (const each of shown) {
      const colour = `var(--${each.colour})`;
      const at = each.points.map(([x, y]) => `${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`);
      if (each.dots || at.length === 1) {
        parts.push(...at.map((it) => dot(it, colour)));
      } else if (at.length) {
        const dashes = each.dashes || "none";
        const form = { fill: "none", stroke: colour, "stroke-width": 1.7, "stroke-dasharray": dashes, "stroke-linejoin": "round" };
        parts.push(element("path", { d: "M" + at.join("L"), ...form }));
        if (each.marked && at.length <= MOST_MARKED) parts.push(...at.map((it) => dot(it, colour)));
      }
    }
    for (const [x, text] of marks) {
      const line = element("line", { class: "mark", x1: toX(x), x2: toX(x), y1: TOP, y2: height - BOTTOM });
      line.append(element("title", {}, text));
      parts.push(line);
    }
    this.#svg.setAttribute("aria-label", this.#summary(shown, marks));
    this.#svg.replaceChildren(...parts);
    if (this.#cursor !== null) this.#mark();
  }

  #axes(x0, x1, y0, y1, width, height) {
    const { logarithmic, showX, showY, x, y } = this.#options;
    const parts = [];
    for (const at of logarithmic ? powers(y0, y1) : ticks(y0, y1, 4)) {
      const place = height - BOTTOM - ((at - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
      parts.push(element("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: place, y2: place }));
      parts.push(element("text", { x: LEFT - 6, y: place + 4, "text-anchor": "end" }, showY(logarithmic ? 10 ** at : at)));
    }
    for (const at of ticks(x0, x1, width / 120, showX === duration)) {
      const place = LEFT + ((at - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
      const isLast = place > width - 40;
      const form = { x: isLast ? width - 2 : place, y: height - BOTTOM + 16, "text-anchor": isLast ? "end" : "middle" };
      parts.push(element("text", form, showX(at)));
    }
    parts.push(element("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end" }, x));
    parts.push(element("text", { x: 2, y: height - 3 }, y));
    return parts;
  }

  #keys(shown) {
    const named = shown.length > 1 ? shown : [];
    this.#key.replaceChildren(...named.map((each) => {
      const item = document.createElement("li");
      if (each.dots) {
        const box = document.createElement("span");
        box.className = "box";
        box.style.background = `var(--${each.colour})`;
        item.append(box);
      } else item.append(swatch(each));
      item.append(each.name);
      return item;
    }));
  }

  #summary(shown, marks) {
    const { name, x, showX, showY } = this.#options;
    const lines = shown.filter((each) => each.points.length).map((each) => {
      const [first, last] = [each.points[0], each.points.at(-1)];
      return `${each.name}: ${showY(first[1])} at ${showX(first[0])}, ${showY(last[1])} at ${showX(last[0])} ${x}`;
    });
    const marked = marks.map(([at, text]) => ` At ${showX(at)} ${x}: ${text}.`).join("");
    return `${name}. ${lines.join("; ")}.${marked} Left and right arrow keys read values.`;
  }

  #point(x) {
    this.#cursor = x === null || !this.#view ? null : this.#nearest(x);
    this.#mark();
  }

  #longest() {
    return this.#view.shown.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
  }

  #nearest(x) {
    const points = this.#longest();
    return points.reduce((best, each) => (Math.abs(this.#view.toX(each[0]) - x) < Math.abs(this.#view.toX(best[0]) - x) ? each : best))[0];
  }

  #step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, Escape: null };
    if (!(event.key in moves) || !this.#view) return;
    event.preventDefault();
    const points = this.#longest(), move = moves[event.key];
    if (move === null) this.#cursor = null;
    else {
      const now = this.#cursor === null ? points.length : points.findIndex(([x]) => x >= this.#cursor);
      this.#cursor = points[Math.max(0, Math.min(points.length - 1, (now < 0 ? points.length : now) + move))][0];
    }
    this.#mark();
  }

  #mark() {
    this.#svg.querySelector(".cursor")?.remove();
    if (this.#cursor === null || !this.#view) {
      this.#told.textContent = "";
      return;
    }
    const { shown, toX, height } = this.#view;
    const place = toX(this.#cursor);
    this.#svg.append(element("line", { class: "cursor", x1: place, x2: place, y1: TOP, y2: height - BOTTOM }));
    const { showX, showY, x } = this.#options;
    const texts = shown.filter((each) => each.points.length).map((each) => {
      const near = each.points.reduce((a, b) => (Math.abs(b[0] - this.#cursor) < Math.abs(a[0] - this.#cursor) ? b : a));
      return `${each.name} ${showY(near[1])}`;
    });
    this.#told.textContent = `${showX(this.#cursor)} ${x}: ${texts.join(", ")}`;
  }
}
