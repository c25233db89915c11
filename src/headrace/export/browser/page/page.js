// The page: shows the inputs of signature.json, runs model.onnx in the browser, shows the answer.

import * as ort from "./ort.wasm.bundle.min.mjs";
import * as tensors from "./tensors.js";

// More threads need shared memory, which a server allows by two headers (COOP and COEP).
ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;

const SHOWN = 5, CONTINUED = 60;
const at = (id) => document.getElementById(id);
const state = { signature: null, session: null, sample: {}, fields: [], next: 0 };

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made) made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const load = async (name) => {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name} is missing beside this page (${answer.status})`);
  return answer;
};

function imageField(form) {
  const [, channels, height, width] = form.shape;
  const canvas = element("canvas", { width, height, className: "picture" });
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
  const take = async (file) => {
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
  canvas.addEventListener("dragover", (event) => event.preventDefault());
  canvas.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) guarded(() => take(event.dataTransfer.files[0]));
  });
  const box = element("div", { className: "image" }, canvas, element("div", {},
    element("p", {}, element("label", { htmlFor: choose.id }, `Image for ${form.name}`), choose),
    element("p", {}, inverted, element("label", { htmlFor: inverted.id }, " invert light and dark")),
    element("p", { className: "quiet" }, `Scaled to ${width} × ${height}, ${channels === 1 ? "grey" : "RGB"}.`)));
  return {
    form, box,
    tensor() {
      if (!given) throw new Error("choose an image first, or take an example");
      return given;
    },
    show(tensor) {
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
  const shape = form.shape.slice(1).map((length) => (length < 0 ? "any" : length)).join(" × ") || "1";
  const box = element("div", {}, element("label", { htmlFor: area.id }, `${form.name}: ${form.dtype}, ${shape}`), area);
  return {
    form, box,
    tensor: () => tensors.numbersTensor(area.value, form),
    show: (tensor) => { area.value = Array.from(tensor.data, (value) => String(value)).join(" "); },
  };
}

async function run(given) {
  const feeds = {};
  for (const [name, { dtype, shape, data }] of Object.entries(given)) feeds[name] = new ort.Tensor(dtype, data, shape);
  const found = await state.session.run(feeds);
  return state.signature.outputs.map(({ name }) => ({ name, shape: found[name].dims, data: found[name].data }));
}

const compute = () => run(Object.fromEntries(state.fields.map((field) => [field.form.name, field.tensor()])));

// Of a sequence the last place counts: what comes next.
function lastRow({ shape, data }, count) {
  return tensors.largest(data.slice(data.length - shape[shape.length - 1]), count);
}

const shown = (value) => (value === null ? "not finite" : Number.isInteger(value) ? String(value) : value.toPrecision(4));
const named = (label) => (/^\s*$/.test(label) ? JSON.stringify(label) : label);

function bars(output) {
  const { labels, task } = state.signature;
  const rows = lastRow(output, SHOWN);
  const most = Math.max(...rows.map(({ value }) => Math.abs(value)), Number.MIN_VALUE);
  // Shares of 1 are shown on their own scale.
  const scale = /^(multiclass|language_model)/.test(task) ? 1 : most;
  const heading = output.shape.length === 3 ? "what comes next" : output.name;
  return element("table", {}, element("caption", {}, heading), element("tbody", {}, ...rows.map(({ value, index }) =>
    element("tr", {},
      element("th", { scope: "row" }, named(labels[index] ?? `class ${index}`)),
      element("td", {}, element("meter", { min: 0, max: scale, value: Math.max(0, value) })),
      element("td", { className: "number" }, shown(value))))));
}

function view(output) {
  const wide = output.shape.length >= 2 && output.shape[output.shape.length - 1] > 1;
  const whole = typeof output.data[0] === "bigint";
  if (wide && !whole && output.shape.length <= 3) return bars(output);
  const values = Array.from(output.data.slice(0, 100), (value) => {
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
  at("time").textContent = `${took.toFixed(1)} ms in this browser; nothing was sent anywhere.`;
}

async function guarded(action) {
  at("error").textContent = "";
  try {
    await action();
  } catch (error) {
    at("answer").replaceChildren();
    at("time").textContent = "";
    at("error").textContent = error.message;
  }
}

async function showExample() {
  const count = tensorsOf("input/")[0].shape[0];
  for (const field of state.fields) field.show(tensors.example(state.sample[`input/${field.form.name}`], state.next % count));
  state.next++;
  await answer();
}

const tensorsOf = (prefix) => Object.keys(state.sample).filter((name) => name.startsWith(prefix)).map((name) => state.sample[name]);

// Runs the sample, whose answers the trained model has given.
async function check() {
  const outputs = await run(Object.fromEntries(state.signature.inputs.map(({ name }) => [name, state.sample[`input/${name}`]])));
  const most = Math.max(...outputs.map(({ name, data }) => tensors.difference(data, state.sample[`output/${name}`].data)));
  at("check").textContent = `Checked in this browser: on ${outputs[0].shape[0]} examples its answers differ by at most ` +
    `${most.toExponential(1)} of the largest value from those of the trained model.`;
}

function describe(signature) {
  document.title = signature.name;
  at("name").textContent = signature.name;
  const metrics = Object.entries(signature.metrics).map(([name, value]) => `${name} ${shown(value)}`);
  const facts = [signature.task, signature.strategy && `trained under ${signature.strategy}`, ...metrics];
  at("facts").textContent = facts.filter(Boolean).join(" · ");
  at("notes").replaceChildren(...signature.notes.map((note) => element("li", {}, note)));
}

async function start() {
  const signature = await (await load("signature.json")).json();
  state.signature = signature;
  describe(signature);
  const [model, sample] = await Promise.all(["model.onnx", "sample.safetensors"].map(async (name) => (await load(name)).arrayBuffer()));
  state.sample = tensors.readSafetensors(sample);
  state.session = await ort.InferenceSession.create(new Uint8Array(model));
  const makers = { image: imageField, text: textField, numbers: numbersField };
  state.fields = signature.inputs.map((form) => makers[tensors.kindOf(form, signature.labels)](form, signature.labels));
  at("inputs").replaceChildren(...state.fields.map(({ box }) => box));
  await check();
  at("run").disabled = at("example").disabled = false;
  at("run").addEventListener("click", () => guarded(answer));
  at("example").addEventListener("click", () => guarded(showExample));
  await showExample();
}

guarded(start);
