// `node node.mjs FOLDER FILE...`: runs a browser folder's model by onnxruntime-web on examples in safetensors files;
// prints the largest difference of any output, relative to the largest value of that output in that file.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { join, resolve } from "node:path";

const [folder, ...files] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(resolve(folder, name)));
const ort = await load("ort.wasm.bundle.min.mjs");
const tensors = await load("tensors.js");
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmBinary = readFileSync(join(folder, "ort-wasm-simd-threaded.wasm"));
const signature = JSON.parse(readFileSync(join(folder, "signature.json")));
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(join(folder, "model.onnx"))));
let most = 0;
for (const path of files) {
  const file = readFileSync(path);
  const examples = tensors.readSafetensors(file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength));
  const feeds = {};
  for (const { name } of signature.inputs) {
    const { dtype, shape, data } = examples[`input/${name}`];
    feeds[name] = new ort.Tensor(dtype, data, shape);
  }
  const found = await session.run(feeds);
  for (const { name, dtype } of signature.outputs) {
    const got = found[name].data, wanted = examples[`output/${name}`].data;
    if (got.length !== wanted.length) throw new Error(`${name}: ${got.length} values, expected ${wanted.length}`);
    // Whole numbers are the same or not: the share that differs counts.
    const apart = dtype.startsWith("float")
      ? tensors.difference(got, wanted)
      : wanted.filter((value, place) => value !== got[place]).length / wanted.length;
    if (!(apart <= most)) most = apart;
  }
}
console.log(most);
