// The fields above the composer: how an answer is sampled.

import { byId, integer } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "priority"];
const TEXTS = ["system", "tools", "thinking"];
const field = (name) => byId(`p-${name}`);

/** Say what holds where a field is empty, and hide what the model cannot do. */
export function setModel({ max_model_len: context, weft }) {
  const { temperature, top_p, top_k, max_tokens } = weft.defaults;
  const defaults = {
    temperature: temperature === 0 ? "0, greedy" : temperature,
    top_p: top_p === 1 ? "1, off" : top_p,
    top_k: top_k === 0 ? "0, off" : top_k,
    max_tokens: max_tokens ?? `up to ${integer(context)}`,
    seed: "random",
    priority: 0,
  };
  for (const [name, value] of Object.entries(defaults)) field(name).placeholder = value;
  field("tools").parentElement.hidden = !weft.tools;
  field("thinking").parentElement.hidden = !weft.thinking_switch;
}

/** As texts by name; what is empty is left out. */
function values() {
  const given = [...NUMBERS, ...TEXTS].map((name) => [name, field(name).value.trim()]);
  return Object.fromEntries(given.filter(([, value]) => value !== ""));
}

/** What a request says: `{system, fields}`. Throws an Error in words if the tools are not JSON. */
export function request() {
  const given = values();
  const fields = {};
  for (const name of NUMBERS) if (name in given) fields[name] = Number(given[name]);
  if (given.thinking) fields.chat_template_kwargs = { enable_thinking: given.thinking === "true" };
  if (given.tools) {
    try {
      fields.tools = JSON.parse(given.tools);
    } catch (error) {
      throw new Error(`Tools are not JSON: ${error.message}`);
    }
  }
  return { system: given.system, fields };
}

export function show(given) {
  for (const name of [...NUMBERS, ...TEXTS]) field(name).value = given[name] ?? "";
  count();
}

function count() {
  const given = Object.keys(values()).length;
  byId("parameters-set").textContent = given ? `${given} set` : "";
}

/** `changed` gets the values when one has changed. */
export function start(changed) {
  byId("parameters").addEventListener("input", () => {
    count();
    changed(values());
  });
}
