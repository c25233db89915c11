// A model's inputs as fields of the page, and its answers as bars. How the model is run is up to the page.

import * as tensors from "./tensors.js";

const SHOWN = 5, CONTINUED = 60, PAD = 280, PEN = PAD / 12;
const state = { signature: null, sample: {}, run: null, took: null, fields: [], next: 0 };

export const at = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made) made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// The two columns of a page, which are the same for every model.
export function open(verb) {
  const button = (id, text) => element("button", { id, type: "button", disabled: true }, text);
  const section = (name, ...parts) => element("section", { "aria-label": name }, element("h2", {}, name), ...parts);
  at("panel").append(
    section("Input",
      element("div", { id: "inputs" }, element("p", {}, "Loading the model…")),
      element("p", {}, button("run", verb), " ", button("example", "Take an example"))),
    section("Answer",
      element("p", { id: "error", role: "alert" }),
      element("div", { id: "answer", "aria-live": "polite" }),
      element("p", { id: "time", className: "quiet" })));
}

export async function guarded(action) {
  at("error").textContent = "";
  try {
    await action();
  } catch (error) {
    at("answer").replaceChildren();
    at("time").textContent = "";
    at("error").textContent = error.message;
  }
}

// What a mouse or a finger draws: light on dark, as handwritten digits are stored.
function drawingPad(canvas, drawn) {
  const pad = new OffscreenCanvas(PAD, PAD), pen = pad.getContext("2d");
  let last = null, isDrawing = false;
  const clear = () => { pen.fillStyle = "black"; pen.fillRect(0, 0, PAD, PAD); };
  const line = (event) => {
    const box = canvas.getBoundingClientRect();
    const here = [((event.clientX - box.left) / box.width) * PAD, ((event.clientY - box.top) / box.height) * PAD];
    Object.assign(pen, { strokeStyle: "white", lineWidth: PEN, lineCap: "round" });
    pen.beginPath();
    pen.moveTo(...(last ?? here));
    pen.lineTo(...here);
    pen.stroke();
    last = here;
    drawn(pad, false);
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (!isDrawing) clear();
    isDrawing = true;
    canvas.setPointerCapture(event.pointerId);
    line(event);
  });
  canvas.addEventListener("pointermove", (event) => last && line(event));
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => {
      if (last) drawn(pad, true);
      last = null;
    });
  }
  return {
    clear() {
      clear();
      isDrawing = true;
      drawn(pad, true);
    },
    // The next stroke begins on an empty pad.
    leave: () => { isDrawing = false; },
  };
}

function imageField(form) {
  const [, channels, height, width] = form.shape;
  const canvas = element("canvas", { width, height, className: "picture", role: "img", "aria-label": `${form.name} as the model sees it` });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const choose = element("input", { type: "file", accept: "image/*", id: `in-${form.name}` });
  const inverted = element("input", { type: "checkbox", id: `invert-${form.name}` });
  let image = null, given = null;
  const draw = () => {
    if (!image) return;
    context.fillStyle = "white";
    context.fillRect(0, 0, width, height);
    const scale = Math.min(width / image.width, height / image.height);
    const [w, h] = [image.width * scale, image.height * scale];
    context.imageSmoothingQuality = "high";
    context.drawImage(image, (width - w) / 2, (height - h) / 2, w, h);
    given = tensors.imageTensor(context.getImageData(0, 0, width, height).data, form, inverted.checked);
    context.putImageData(new ImageData(tensors.imagePixels(given, form), width, height), 0, 0);
  };
  const pad = channels === 1 ? drawingPad(canvas, (drawn, isWhole) => {
    image = drawn;
    draw();
    if (isWhole) guarded(answer);
  }) : null;
  const take = async (file) => {
    pad?.leave();
    try {
      image = await createImageBitmap(file);
    } catch {
      throw new Error(`${file.name} is not an image that this browser can read`);
    }
    draw();
    await answer();
  };
  choose.addEventListener("change", () => choose.files[0] && guarded(() => take(choose.files[0])));
  inverted.addEventListener("change", () => image && guarded(async () => { draw(); await answer(); }));
  const ways = [
    element("p", {}, element("label", { htmlFor: choose.id }, `Image for ${form.name}`), choose),
    element("p", {}, inverted, element("label", { htmlFor: inverted.id }, " invert light and dark")),
    element("p", { className: "quiet" }, `${pad ? "Draw on the picture, or drop" : "Drop"} an image here. Scaled to ` +
      `${width} × ${height}, ${channels === 1 ? "grey" : "RGB"}.`),
  ];
  if (pad) {
    const clear = element("button", { type: "button", onclick: pad.clear }, "Clear");
    canvas.classList.add("pad");
    ways.push(element("p", {}, clear));
  }
  const box = element("div", { className: "image" }, canvas, element("div", {}, ...ways));
  box.addEventListener("dragover", (event) => event.preventDefault());
  box.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) guarded(() => take(event.dataTransfer.files[0]));
  });
  return {
    form, box,
    tensor() {
      if (!given) throw new Error("choose an image first, or take an example");
      return given;
    },
    show(tensor) {
      pad?.leave();
      image = null;
      given = tensor;
      context.putImageData(new ImageData(tensors.imagePixels(tensor, form), width, height), 0, 0);
    },
  };
}

function textField(form, labels) {
  const area = element("textarea", { rows: 5, id: `in-${form.name}`, spellcheck: false });
  const more = element("button", { type: "button" }, "Continue the text");
  const grow = async () => {
    for (let count = 0; count < CONTINUED; count++) {
      const outputs = await compute();
      const [best] = lastRow(outputs[0], 1);
      area.value += labels[best.index] ?? "";
    }
    await answer();
  };
  more.addEventListener("click", () => guarded(grow));
  const continues = state.signature.outputs[0].shape.length === 3;
  const box = element("div", {},
    element("label", { htmlFor: area.id }, `Text for ${form.name}`), area, ...(continues ? [more] : []));
  return {
    form, box,
    tensor: () => tensors.textTensor(area.value, form, labels),
    show: (tensor) => { area.value = tensors.decode(tensor.data, labels); },
  };
}

function numbersField(form) {
  const area = element("textarea", { rows: 4, id: `in-${form.name}`, spellcheck: false });
  const shape = tensors.one(form).map((length) => (length < 0 ? "any" : length)).join(" × ");
  const box = element("div", {}, element("label", { htmlFor: area.id }, `${form.name}: ${form.dtype}, ${shape}`), area);
  return {
    form, box,
    tensor: () => tensors.numbersTensor(area.value, form),
    show: (tensor) => { area.value = Array.from(tensor.data, (value) => String(value)).join(" "); },
  };
}

const compute = () => state.run(Object.fromEntries(state.fields.map((field) => [field.form.name, field.tensor()])));

// Of a sequence the last place counts: what comes next.
function lastRow({ shape, data }, count) {
  return tensors.largest(data.slice(data.length - shape[shape.length - 1]), count);
}

export const shown = (value) => (value === null ? "not finite" : Number.isInteger(value) ? String(value) : value.toPrecision(4));
const named = (label) => (/^\s*$/.test(label) ? JSON.stringify(label) : label);

function bars(output) {
  const { labels, task } = state.signature;
  const rows = lastRow(output, SHOWN);
  const most = Math.max(...rows.map(({ value }) => Math.abs(value)), Number.MIN_VALUE);
  // Shares of 1 are shown on their own scale.
  const scale = /^(multiclass|language_model)/.test(task) ? 1 : most;
  const heading = output.shape.length === 3 ? "what comes next" : output.name;
  return element("table", {}, element("caption", {}, heading), element("tbody", {}, ...rows.map(({ value, index }) => {
    const label = named(labels[index] ?? `class ${index}`);
    return element("tr", {},
      element("th", { scope: "row" }, label),
      element("td", {}, element("meter", { min: 0, max: scale, value: Math.max(0, value), "aria-label": label })),
      element("td", { className: "number" }, shown(value)));
  })));
}

function view(output) {
  const { shape, data } = output;
  const wide = shape.length >= 2 && shape[shape.length - 1] > 1 && (shape[0] === 1 || shape.length === 3);
  const whole = typeof data[0] === "bigint";
  if (wide && !whole && shape.length <= 3) return bars(output);
  const values = Array.from(data.slice(0, 100), (value) => {
    const label = whole ? state.signature.labels[Number(value)] : undefined;
    return label ?? shown(Number(value));
  });
  return element("p", {}, element("strong", {}, `${output.name}: `), values.join(", "));
}

async function answer() {
  const start = performance.now();
  const outputs = await compute();
  const took = performance.now() - start;
  at("answer").replaceChildren(...outputs.map(view));
  at("time").textContent = state.took(took.toFixed(1));
}

async function showExample() {
  const examples = Object.keys(state.sample).filter((name) => name.startsWith("input/")).map((name) => state.sample[name]);
  const count = tensors.isFixed(state.fields[0].form) ? 1 : examples[0].shape[0];
  for (const field of state.fields) {
    field.show(tensors.example(state.sample[`input/${field.form.name}`], state.next % count, field.form));
  }
  state.next++;
  await answer();
}

function describe(signature) {
  at("name").textContent = document.title = signature.name;
  const metrics = Object.entries(signature.metrics).map(([name, value]) => `${name} ${shown(value)}`);
  const facts = [signature.task, signature.strategy && `trained under ${signature.strategy}`, ...metrics];
  at("facts").textContent = facts.filter(Boolean).join(" · ");
  at("notes").replaceChildren(...signature.notes.map((note) => element("li", {}, note)));
}

// Shows a model with an example of its sample. `run` takes tensors by name and returns the outputs, a list of {name,
// shape, data}; `took` returns what is said of the milliseconds.
export async function show(signature, sample, run, took) {
  Object.assign(state, { signature, sample, run, took, next: 0 });
  describe(signature);
  const makers = { image: imageField, text: textField, numbers: numbersField };
  state.fields = signature.inputs.map((form) => makers[tensors.kindOf(form, signature.labels)](form, signature.labels));
  at("inputs").replaceChildren(...state.fields.map(({ box }) => box));
  at("run").disabled = at("example").disabled = false;
  at("run").onclick = () => guarded(answer);
  at("example").onclick = () => guarded(showExample);
  await showExample();
}
