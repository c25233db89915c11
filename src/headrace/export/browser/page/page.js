// The page: runs model.onnx in the browser.

import * as ort from "./ort.wasm.bundle.min.mjs";
import { at, guarded, open, show } from "./panel.js";
import * as tensors from "./tensors.js";

// More threads need shared memory, which a server allows by two headers (COOP and COEP).
ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;

const load = async (name) => {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name} is missing beside this page (${answer.status})`);
  return answer;
};

// Runs the sample, whose answers the trained model has given.
async function check(signature, sample, run) {
  const outputs = await run(Object.fromEntries(signature.inputs.map(({ name }) => [name, sample[`input/${name}`]])));
  const most = Math.max(...outputs.map(({ name, data }) => tensors.difference(data, sample[`output/${name}`].data)));
  at("check").textContent = `Checked in this browser: on ${outputs[0].shape[0]} examples its answers differ by at most ` +
    `${most.toExponential(1)} of the largest value from those of the trained model.`;
}

async function start() {
  const signature = await (await load("signature.json")).json();
  const [model, file] = await Promise.all(["model.onnx", "sample.safetensors"].map(async (name) => (await load(name)).arrayBuffer()));
  const sample = tensors.readSafetensors(file);
  const session = await ort.InferenceSession.create(new Uint8Array(model));
  const run = async (given) => {
    const feeds = {};
    for (const [name, { dtype, shape, data }] of Object.entries(given)) feeds[name] = new ort.Tensor(dtype, data, shape);
    const found = await session.run(feeds);
    return signature.outputs.map(({ name }) => ({ name, shape: found[name].dims, data: found[name].data }));
  };
  await check(signature, sample, run);
  await show(signature, sample, run, (took) => `${took} ms in this browser; nothing was sent anywhere.`);
}

open("Run");
guarded(start);
