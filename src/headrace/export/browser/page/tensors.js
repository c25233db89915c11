// From what a user gives to tensors, and from tensors to answers. Nothing here touches the page.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, int16: Int16Array,
  int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};
const SAFETENSORS = { F32: "float32", F64: "float64", I64: "int64", I32: "int32", I16: "int16", I8: "int8", U8: "uint8", BOOL: "bool" };
const UNKNOWN = "\ufffd";

export const size = (shape) => shape.reduce((product, length) => product * length, 1);

export function arrayOf(dtype, values) {
  const Type = ARRAYS[dtype];
  if (!Type) throw new Error(`this page cannot make tensors of type ${dtype}`);
  return dtype === "int64" ? Type.from(values, (value) => BigInt(value)) : Type.from(values, Number);
}

// Whether the model takes a certain number of examples, and no other.
export const isFixed = (form) => form.shape.length === 0 || form.shape[0] >= 0;

// The shape of one example, or of as many as the model takes; -1 where any length will do.
export const one = (form) => (isFixed(form) ? form.shape : [1, ...form.shape.slice(1)]);

// How an input is given: an image, a text, or numbers.
export function kindOf(form, labels) {
  const shape = form.shape;
  if (form.dtype.startsWith("float") && shape.length === 4 && shape[0] < 2 && (shape[1] === 1 || shape[1] === 3) && shape[2] > 0 && shape[3] > 0) return "image";
  // Labels that are fewer than the tokens name something else: the classes of a text.
  if (form.dtype.startsWith("int") && shape.length === 2 && shape[0] < 2 && labels.length > (form.high?.[0] ?? 0)) return "text";
  return "numbers";
}

// Reads sample.safetensors: name to {dtype, shape, data}.
export function readSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const found = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const Type = ARRAYS[SAFETENSORS[dtype]];
    if (Type) found[name] = { dtype: SAFETENSORS[dtype], shape, data: new Type(buffer.slice(8 + length + begin, 8 + length + end)) };
  }
  return found;
}

// One example of a batch; the whole of it where the model takes no other number.
export function example({ dtype, shape, data }, index, form) {
  if (isFixed(form)) return { dtype, shape, data };
  const length = size(shape.slice(1));
  return { dtype, shape: [1, ...shape.slice(1)], data: data.slice(index * length, (index + 1) * length) };
}

const low = (form, channel) => form.low[Math.min(channel, form.low.length - 1)] ?? 0;
const high = (form, channel) => form.high[Math.min(channel, form.high.length - 1)] ?? 1;

// Pixels of a canvas, as large as the model wants them, in the range of the values that the model was checked with.
export function imageTensor(rgba, form, inverted) {
  const [, channels, height, width] = form.shape;
  const data = new Float64Array(channels * height * width);
  for (let place = 0; place < height * width; place++) {
    const [r, g, b] = rgba.subarray(4 * place, 4 * place + 3);
    const pixels = channels === 1 ? [0.299 * r + 0.587 * g + 0.114 * b] : [r, g, b];
    pixels.forEach((pixel, channel) => {
      const part = (inverted ? 255 - pixel : pixel) / 255;
      data[channel * height * width + place] = low(form, channel) + part * (high(form, channel) - low(form, channel));
    });
  }
  return { dtype: form.dtype, shape: [1, channels, height, width], data: arrayOf(form.dtype, data) };
}

// The other way, to show an example: RGBA.
export function imagePixels(tensor, form) {
  const [, channels, height, width] = tensor.shape;
  const rgba = new Uint8ClampedArray(4 * height * width);
  for (let place = 0; place < height * width; place++) {
    for (let colour = 0; colour < 3; colour++) {
      const channel = Math.min(colour, channels - 1);
      const range = high(form, channel) - low(form, channel) || 1;
      rgba[4 * place + colour] = Math.round((255 * (tensor.data[channel * height * width + place] - low(form, channel))) / range);
    }
    rgba[4 * place + 3] = 255;
  }
  return rgba;
}

// The indices of a text: at each place the longest label that fits.
export function encode(text, labels) {
  const longest = labels.reduce((most, label) => Math.max(most, label.length), 0);
  const index = new Map(labels.map((label, place) => [label, place]));
  const found = [];
  for (let place = 0; place < text.length; ) {
    let length = Math.min(longest, text.length - place);
    while (length > 0 && !index.has(text.slice(place, place + length))) length--;
    if (length === 0 && !index.has(UNKNOWN)) {
      throw new Error(`the model does not know ${JSON.stringify(text[place])}, character ${place + 1} of the text`);
    }
    found.push(index.get(length ? text.slice(place, place + length) : UNKNOWN));
    place += Math.max(length, 1);
  }
  return found;
}

export const decode = (indices, labels) => Array.from(indices, (index) => labels[Number(index)] ?? UNKNOWN).join("");

// Text to a tensor; where the model takes one length only, the last tokens count.
export function textTensor(text, form, labels) {
  let indices = encode(text, labels);
  const wanted = form.shape[1];
  if (wanted > 0 && indices.length < wanted) throw new Error(`the model takes ${wanted} tokens, and the text has ${indices.length}`);
  if (wanted > 0) indices = indices.slice(-wanted);
  if (indices.length < 2) throw new Error("the text is too short: give two characters at least");
  return { dtype: form.dtype, shape: [1, indices.length], data: arrayOf(form.dtype, indices) };
}

// Numbers to a tensor, with any separators; the free dimensions after the first take what is given.
export function numbersTensor(text, form) {
  const words = text.split(/[\s,;[\]]+/).filter(Boolean);
  const values = words.map(Number);
  const wrong = values.findIndex(Number.isNaN);
  if (wrong >= 0) throw new Error(`number ${wrong + 1} of ${form.name} is not a number`);
  const wanted = one(form);
  const known = size(wanted.filter((length) => length >= 0));
  const free = wanted.filter((length) => length < 0).length;
  const fits = free === 0 ? values.length === known : free === 1 && values.length > 0 && values.length % known === 0;
  if (!fits) throw new Error(`${form.name} takes ${free ? "a multiple of " : ""}${known} numbers, got ${values.length}`);
  const shape = wanted.map((length) => (length < 0 ? values.length / known : length));
  return { dtype: form.dtype, shape, data: exact(words, form) };
}

// Numbers of a type that holds them: digits beyond 2^53 are kept, and nothing wraps around or is cut.
function exact(words, form) {
  const values = words.map((word) => (/^[+-]?\d+$/.test(word) ? BigInt(word) : Number(word)));
  const isWhole = !form.dtype.startsWith("float");
  const fails = (place) => {
    throw new Error(`number ${place + 1} of ${form.name} is ${words[place]}, which ${form.dtype} does not hold`);
  };
  if (isWhole) values.forEach((value, place) => typeof value === "bigint" || Number.isInteger(value) || fails(place));
  const data = arrayOf(form.dtype, values);
  const most = form.dtype === "bool" ? 1 : Infinity;
  values.forEach((value, place) => {
    // A float is rounded, and does not become infinite.
    const held = isWhole ? data[place] == value && data[place] <= most : Number.isFinite(data[place]);
    if (!held) fails(place);
  });
  return data;
}

// The largest values of a row, with their indices, largest first.
export function largest(values, count) {
  return Array.from(values, (value, index) => ({ value: Number(value), index }))
    .sort((one, other) => other.value - one.value)
    .slice(0, count);
}

// Relative to the largest value, as headrace measures it.
export function difference(found, wanted) {
  let most = 0, scale = Number.MIN_VALUE;
  for (let place = 0; place < wanted.length; place++) {
    const distance = Math.abs(Number(found[place]) - Number(wanted[place]));
    if (Number.isNaN(distance)) return NaN;
    most = Math.max(most, distance);
    scale = Math.max(scale, Math.abs(Number(wanted[place])));
  }
  return most / scale;
}
