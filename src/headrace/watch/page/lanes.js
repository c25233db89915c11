// What each worker does, as one lane a worker: in each piece of time the parts of its steps, one above the other.

import { duration } from "./chart.js";

export const PARTS = [
  ["compute", "compute"],
  ["exchange", "exchange"],
  ["update", "update"],
  ["wait", "input"],
  ["other", "wait: between steps"],
];
const LOST = "lost";
const LEFT = 34, AXIS = 18, GAP = 2;

// What the server has told of the lanes, kept up to date.
export class LaneStore {
  width = 0;
  ranks = [];
  bins = new Map();

  take(message, whole, most) {
    if (whole || message.width_s !== this.width) this.bins.clear();
    this.width = message.width_s;
    this.ranks = message.ranks;
    message.bins.forEach((bin, index) => this.bins.set(bin, message.parts[index]));
    if (this.bins.size > most) {
      const last = Math.max(...this.bins.keys());
      for (const bin of this.bins.keys()) if (bin <= last - most) this.bins.delete(bin);
    }
  }
}

export class Lanes {
  #canvas = document.createElement("canvas");
  #told = document.createElement("output");
  #store = new LaneStore();
  #lost = new Map();
  #marks = [];
  #bins = 0;
  #cursor = null;
  #view = null;

  constructor(place) {
    this.#canvas.tabIndex = 0;
    this.#canvas.setAttribute("role", "img");
    place.append(this.#canvas, this.#told);
    new ResizeObserver(() => this.#draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", () => this.#move(null));
    this.#canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  // `lost` maps a rank to the times between its losses and its next starts; `bins` is how many there may be, 0 for all;
  // `marks` are times and texts.
  show(store, lost, bins, marks) {
    this.#store = store;
    this.#lost = lost;
    this.#bins = bins;
    this.#marks = marks;
    this.#draw();
  }

  #draw() {
    const width = this.#canvas.parentElement.clientWidth;
    const { ranks, bins } = this.#store;
    if (width < 80 || !bins.size) return;
    const rows = ranks.map((rank, index) => [rank, index]).sort((a, b) => a[0] - b[0]);
    const lane = rows.length > 24 ? 10 : rows.length > 8 ? 16 : 24;
    const height = rows.length * (lane + GAP) + AXIS;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = width * scale;
    this.#canvas.height = height * scale;
    this.#canvas.style.height = `${height}px`;
    const pen = this.#canvas.getContext("2d");
    pen.scale(scale, scale);
    const last = Math.max(...bins.keys());
    // Of a run that is younger than a minute, what there is.
    const count = Math.min(this.#bins || Infinity, last + 1);
    const first = last + 1 - count;
    const across = (width - LEFT) / count;
    this.#view = { rows, lane, first, last, across, count };
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const colours = PARTS.map(([name]) => colour(name));
    pen.font = "11px system-ui, sans-serif";
    rows.forEach(([rank, index], row) => {
      const top = row * (lane + GAP);
      pen.fillStyle = colour("quiet");
      pen.textAlign = "right";
      if (rows.length <= 24 || row % 4 === 0) pen.fillText(String(rank), LEFT - 8, top + lane / 2 + 4);
      this.#lane(pen, index, top, lane, colours);
      this.#losses(pen, rank, top, lane, colour("bad"));
    });
    this.#lines(pen, height - AXIS, colour("bad"));
    this.#times(pen, width, height, colour("quiet"));
    this.#canvas.setAttribute("aria-label", this.#summary(rows.length));
    if (this.#cursor) this.#tell();
  }

  #lane(pen, index, top, lane, colours) {
    const { first, across } = this.#view;
    for (const [bin, parts] of this.#store.bins) {
      if (bin < first) continue;
      const x = LEFT + (bin - first) * across;
      let y = top + lane;
      for (let part = 0; part < PARTS.length; part += 1) {
        const share = parts[index * PARTS.length + part];
        if (!share) continue;
        const tall = Math.max(0, Math.min((share / 100) * lane, y - top));
        pen.fillStyle = colours[part];
        pen.fillRect(x, y - tall, across + 0.4, tall);
        y -= tall;
      }
    }
  }

  #losses(pen, rank, top, lane, colour) {
    const { first, last, across } = this.#view;
    const width = this.#store.width;
    for (const [from, until] of this.#lost.get(rank) || []) {
      const begin = Math.max(first, from / width), end = Math.min(last + 1, until === null ? Infinity : until / width);
      if (end < begin) continue;
      const x = LEFT + (begin - first) * across, wide = Math.max(2, (end - begin) * across);
      pen.save();
      pen.beginPath();
      pen.rect(x, top, wide, lane);
      pen.clip();
      pen.clearRect(x, top, wide, lane);
      pen.strokeStyle = colour;
      pen.lineWidth = 1.5;
      pen.beginPath();
      for (let at = x - lane; at < x + wide; at += 5) {
        pen.moveTo(at, top + lane);
        pen.lineTo(at + lane, top);
      }
      pen.stroke();
      pen.strokeRect(x, top, wide, lane);
      pen.restore();
    }
  }

  #lines(pen, height, colour) {
    const { first, last, across } = this.#view;
    pen.strokeStyle = colour;
    pen.lineWidth = 1.2;
    pen.setLineDash([4, 3]);
    for (const [time] of this.#marks) {
      const bin = Math.min(last + 1, time / this.#store.width);
      if (bin < first) continue;
      pen.beginPath();
      pen.moveTo(LEFT + (bin - first) * across - 1, 0);
      pen.lineTo(LEFT + (bin - first) * across - 1, height);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  #times(pen, width, height, colour) {
    const { first, count } = this.#view;
    const seconds = this.#store.width;
    pen.fillStyle = colour;
    for (const part of [0, 0.5, 1]) {
      pen.textAlign = ["left", "center", "right"][part * 2];
      const at = (first + part * count) * seconds;
      const text = this.#bins ? (part === 1 ? "now" : `${Math.round((1 - part) * count * seconds)} s ago`) : duration(at);
      pen.fillText(text, LEFT + part * (width - LEFT), height - 4);
    }
  }

  #summary(count) {
    const what = this.#bins ? "the last minute" : "the whole run";
    const marked = this.#marks.map(([time, text]) => ` At ${duration(time)}: ${text}.`).join("");
    return `What ${count} workers did in ${what}.${marked} Arrow keys read one worker's piece of time; the table below has the shares.`;
  }

  #point(event) {
    if (!this.#view) return;
    const { rows, lane, first, last, across } = this.#view;
    const row = Math.floor(event.offsetY / (lane + GAP)), bin = first + Math.floor((event.offsetX - LEFT) / across);
    this.#move(row >= 0 && row < rows.length && bin >= Math.max(0, first) && bin <= last ? { row, back: last - bin } : null);
  }

  #step(event) {
    const moves = { ArrowLeft: [0, 1], ArrowRight: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves) || !this.#view) return;
    event.preventDefault();
    const { rows, first, last } = this.#view;
    const { row, back } = this.#cursor || { row: 0, back: 2 };
    const [down, left] = moves[event.key];
    const inside = (value, most) => Math.max(0, Math.min(most, value));
    this.#move({ row: inside(row + down, rows.length - 1), back: inside(back + left, last - Math.max(0, first)) });
  }

  #move(cursor) {
    this.#cursor = cursor;
    if (cursor) this.#tell();
    else this.#told.textContent = "";
  }

  #tell() {
    const { rows, last } = this.#view;
    const chosen = rows[this.#cursor.row];
    if (!chosen) return;
    const [rank, index] = chosen;
    const bin = last - this.#cursor.back, begin = bin * this.#store.width, end = begin + this.#store.width;
    const isLost = (this.#lost.get(rank) || []).some(([from, until]) => from < end && (until === null || until > begin));
    const parts = this.#store.bins.get(bin) || [];
    const texts = PARTS.map(([, name], part) => [name, parts[index * PARTS.length + part]]);
    const told = texts.filter(([, share]) => share).map(([name, share]) => `${name} ${share} %`);
    const what = told.join(", ") || "nothing told";
    this.#told.textContent = `rank ${rank}, from ${duration(begin)} on: ${isLost ? `${LOST}; ` : ""}${what}`;
  }
}
