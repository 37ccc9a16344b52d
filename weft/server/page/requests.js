// The engine's latest requests.

import { el, integer } from "./dom.js";

/** Its id, or, if the server does not name it to us, the moment of its arrival. */
export const keyOf = (request) => request.request_id ?? `arrived ${request.arrived}`;

export const find = (requests, key) => requests.find((request) => keyOf(request) === key);

const TOKENS = [
  ["prompt", (r) => r.num_prompt_tokens],
  ["reused", (r) => r.num_cached_tokens],
  ["output", (r) => r.num_output_tokens],
];

const DURATIONS = [
  ["queued", (r) => r.queue_s],
  ["TTFT", (r) => r.first_token_s],
  ["per token", perToken],
  ["whole", (r) => r.e2e_s],
];

/** A table of the requests of a snapshot, the latest first; `choose` is called with a key. */
export function drawRequests(container, { now, replica, requests }, chosen, choose) {
  const had = document.activeElement?.dataset?.request;
  const began = clock(now, replica);
  const columns = [
    ["arrived", "", (r) => new Date(began + r.arrived * 1000).toLocaleTimeString()],
    ["age", "", (r) => age(now - r.arrived)],
    ["status", "", (r) => r.status],
    ...TOKENS.map(([name, pick]) => [name, "", (r) => integer(pick(r))]),
    ...DURATIONS.map(([name, pick]) => [name, ...inOneUnit(requests.map(pick), pick)]),
  ];
  const rows = [...requests].reverse().map((request) => {
    const key = keyOf(request);
    const button = el("button", {
      class: "request", "aria-pressed": String(key === chosen), "data-request": key, title: request.request_id, onclick: () => choose(key),
    }, (request.is_own ? "Yours: " : "") + (request.request_id ? short(request.request_id) : "another caller's"));
    return el("tr", { class: key === chosen ? "chosen" : null }, el("td", {}, button), ...columns.map(([, , show]) => el("td", {}, show(request))));
  });
  if (!rows.length) {
    container.replaceChildren("No request has come yet.");
    return;
  }
  const head = [["request", ""], ...columns].map(([name, unit]) => el("th", { scope: "col" }, name, unit && el("span", { class: "unit" }, ` ${unit}`)));
  container.replaceChildren(el("table", { class: "figures-table" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
  if (had) [...container.querySelectorAll("button")].find((button) => button.dataset.request === had)?.focus();
}

const starts = new Map(); // replica -> when its clock was 0

/** The moment, in milliseconds, at which the engine's clock was 0. Looks arrive late, never early: the least is right. */
function clock(now, replica) {
  const start = Math.min(starts.get(replica) ?? Infinity, Date.now() - now * 1000);
  starts.set(replica, start);
  return start;
}

/** Minutes and seconds, with hours if there are some. */
function age(value) {
  const whole = Math.max(0, Math.floor(value)), minutes = Math.floor(whole / 60);
  const two = (n) => String(n).padStart(2, "0");
  return minutes < 60 ? `${minutes}:${two(whole % 60)}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(whole % 60)}`;
}

/** The unit of a column of seconds, and a function that shows a row's value in it: all with the same number of decimals. */
function inOneUnit(values, pick) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  const middle = known[Math.floor(known.length / 2)] ?? 1;
  const [unit, scale] = middle < 0.001 ? ["µs", 1e6] : middle < 1 ? ["ms", 1e3] : ["s", 1];
  const decimals = middle * scale < 10 ? 2 : middle * scale < 100 ? 1 : 0;
  const format = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return [unit, (row) => (pick(row) === null ? "–" : (pick(row) * scale).toLocaleString("en", format))];
}

const short = (id) => (id.length > 18 ? `${id.slice(0, 17)}…` : id);

function perToken(r) {
  return r.e2e_s !== null && r.num_output_tokens > 1 ? (r.e2e_s - r.first_token_s) / (r.num_output_tokens - 1) : null;
}

/** What a request found in the prefix cache, and why not more. */
export function explain(request) {
  if (!request.report) return "It was not scheduled yet.";
  const { num_prompt_tokens: prompt, num_reused_tokens: reused } = request.report;
  const head = reused >= prompt - 1 ? "All that can be reused was." : `Reused ${integer(reused)} of ${integer(prompt)} tokens.`;
  return `${head} ${request.words}.`;
}
