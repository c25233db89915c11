// The page of the server: asks it by the Open Inference Protocol.

import { at, guarded, open, show } from "./panel.js";
import * as tensors from "./tensors.js";

const LONGEST = 600;
const state = { models: [], file: "" };

async function ask(path, body) {
  const headers = at("token").value ? { Authorization: `Bearer ${at("token").value}` } : {};
  const reply = await fetch(path, body === undefined ? { headers } : { method: "POST", headers, body });
  if (reply.status === 401) at("guard").hidden = false;
  if (reply.ok) return reply;
  throw new Error((await reply.json()).error);
}

// A float32 has seven digits; more of them say the same number.
const short = (value) => (Math.fround(Number(value.toPrecision(8))) === Math.fround(value) ? Number(value.toPrecision(8)) : value);

function written({ dtype, data }) {
  const values = Array.from(data, (value) => {
    if (dtype === "bool") return value ? "true" : "false";
    return String(dtype === "float32" ? short(value) : value);
  });
  return `[${values.join(",")}]`;
}

// The request as JSON; by hand, because a whole number above 2^53 would lose digits.
function request(model, given) {
  const inputs = model.inputs.map(({ name, datatype }) =>
    `{"name":${JSON.stringify(name)},"datatype":"${datatype}","shape":${JSON.stringify(given[name].shape)},"data":${written(given[name])}}`);
  return `{"inputs":[${inputs.join(",")}]}`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function showCommand(address, body) {
  const isLong = body.length > LONGEST;
  URL.revokeObjectURL(state.file);
  state.file = isLong ? URL.createObjectURL(new Blob([body], { type: "application/json" })) : "";
  const token = at("token").value ? ' -H "Authorization: Bearer $HEADRACE_SERVE_TOKEN"' : "";
  at("curl").textContent = `curl${token} ${new URL(address, location.href)} -d ${isLong ? "@request.json" : quoted(body)}`;
  at("request").href = state.file;
  at("file").hidden = !isLong;
  at("terminal").hidden = false;
}

async function choose() {
  const model = state.models[at("model").selectedIndex];
  if (!model) return;
  const address = `v2/models/${model.name}`;
  const signature = await (await ask(`${address}/signature.json`)).json();
  const sample = tensors.readSafetensors(await (await ask(`${address}/sample.safetensors`)).arrayBuffer());
  const run = async (given) => {
    const body = request(model, given);
    showCommand(`${address}/infer`, body);
    const found = await (await ask(`${address}/infer`, body)).json();
    return found.outputs.map(({ name, datatype, shape, data }) => ({
      name, shape, data: /INT/.test(datatype) ? data.map(BigInt) : data.map(Number),
    }));
  };
  await show(signature, sample, run, (took) => `answered in ${took} ms`);
}

async function start() {
  state.models = (await (await ask("v2/models")).json()).models;
  at("model").replaceChildren(...state.models.map(({ name }) => new Option(name)));
  await choose();
}

open("Predict");
at("model").onchange = () => guarded(choose);
at("token").onchange = () => guarded(start);
guarded(start);
