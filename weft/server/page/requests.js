// The engine's latest requests.

import { el, integer, seconds } from "./dom.js";

/** Its id, or, if the server does not name it to us, the moment of its arrival. */
export const keyOf = (request) => request.request_id ?? `arrived ${request.arrived}`;

export const find = (requests, key) => requests.find((request) => keyOf(request) === key);

const COLUMNS = [
  ["status", (r) => r.status],
  ["prompt", (r) => integer(r.num_prompt_tokens)],
  ["reused", (r) => integer(r.num_cached_tokens)],
  ["output", (r) => integer(r.num_output_tokens)],
  ["queued", (r) => seconds(r.queue_s)],
  ["TTFT", (r) => seconds(r.first_token_s)],
  ["per token", (r) => seconds(perToken(r))],
  ["whole", (r) => seconds(r.e2e_s)],
];

/** A table of them, the latest first; `choose` is called with a key. */
export function drawRequests(container, requests, chosen, choose) {
  const had = document.activeElement?.dataset?.request;
  const rows = [...requests].reverse().map((request) => {
    const key = keyOf(request);
    const button = el("button", {
      class: "request", "aria-pressed": String(key === chosen), "data-request": key, title: request.request_id, onclick: () => choose(key),
    }, (request.is_own ? "Yours: " : "") + (request.request_id ? short(request.request_id) : "another caller's"));
    return el("tr", { class: key === chosen ? "chosen" : null }, el("td", {}, button), ...COLUMNS.map(([, show]) => el("td", {}, show(request))));
  });
  if (!rows.length) {
    container.replaceChildren("No request has come yet.");
    return;
  }
  const head = ["request", ...COLUMNS.map(([name]) => name)].map((name) => el("th", { scope: "col" }, name));
  container.replaceChildren(el("table", { class: "figures-table" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
  if (had) [...container.querySelectorAll("button")].find((button) => button.dataset.request === had)?.focus();
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
