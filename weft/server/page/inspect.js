// Inspect: the engine as `/inspect` shows it, once a second while somebody looks.

import { byId, call, el, integer, seconds } from "./dom.js";
import { Steps, timePlot } from "./plots.js";
import { Tree } from "./tree.js";

const INTERVAL_MS = 1000, SPAN_S = 60, MAX_OWN = 32;

const ownIds = new Set(); // requests of this page: the server names them to us
let chosen = null; // id of the chosen request, or its place in the list if the server does not name it
let isVisible = false, isPaused = false, timer = null;
let before = null; // totals of the look before
let rates = []; // {t, prefill, decode} in tokens per second
let tree, steps, latest = null;

/** A request of this page. */
export function own(id) {
  ownIds.add(id);
  if (ownIds.size > MAX_OWN) ownIds.delete(ownIds.values().next().value);
}

/** Look at this request. */
export function choose(id) {
  chosen = id;
  if (latest) draw(latest);
}

export function setVisible(visible) {
  isVisible = visible;
  if (visible) look();
}

async function look() {
  clearTimeout(timer);
  if (!isVisible || document.hidden || isPaused) return;
  try {
    const query = new URLSearchParams([...ownIds].map((id) => ["request", id]));
    const view = await (await call(`/inspect?${query}`)).json();
    remember(view);
    draw(view);
    byId("inspect-state").textContent = `live, ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    before = null;
    byId("inspect-state").textContent = error.message;
  }
  timer = setTimeout(look, INTERVAL_MS);
}

/** Rates are differences between two looks; a restarted engine counts from zero again. */
function remember(view) {
  const { now, totals } = view;
  if (!before) rates = ratesOf(view.steps);
  if (before && now > before.now && totals.num_steps >= before.totals.num_steps) {
    const per = (name) => (totals[name] - before.totals[name]) / (now - before.now);
    rates.push({ t: now, prefill: per("num_prefill_tokens"), decode: per("num_decode_tokens") });
    rates = rates.filter((rate) => rate.t > now - SPAN_S);
  } else if (before && now !== before.now) {
    rates = [];
  }
  before = { now, totals };
}

/** What the latest steps tell of the time before the first look: sums over whole seconds. */
function ratesOf(steps) {
  const sums = new Map();
  for (const { ended, num_prefill_tokens, num_decodes } of steps) {
    const t = Math.ceil(ended);
    const sum = sums.get(t) ?? { t, prefill: 0, decode: 0 };
    sums.set(t, { t, prefill: sum.prefill + num_prefill_tokens, decode: sum.decode + num_decodes });
  }
  return [...sums.values()];
}

function draw(view) {
  latest = view;
  const request = find(view.requests);
  drawTiles(view);
  drawPools(view);
  drawRequests(view.requests, request);
  byId("explanation").textContent = request ? explain(request) : "";
  tree.draw(view.nodes, view.num_nodes, request ?? null);
  steps.draw(view.steps);
  drawPlots(view);
}

const keyOf = (request) => request.request_id ?? `arrived ${request.arrived}`;

const find = (requests) => requests.find((request) => keyOf(request) === chosen);

function drawTiles({ totals, capacity }) {
  const rate = rates.at(-1);
  const share = totals.num_query_tokens ? totals.num_hit_tokens / totals.num_query_tokens : null;
  const tiles = [
    ["running", `${integer(totals.num_running)} of ${integer(capacity.max_num_seqs)}`],
    ["waiting", integer(totals.num_waiting)],
    ["new tokens per second", rate ? integer(rate.decode) : "–"],
    ["prompt tokens reused", share === null ? "–" : `${(100 * share).toFixed(1)} %`],
    ["steps", integer(totals.num_steps)],
    ["preemptions", integer(totals.num_preemptions)],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => el("div", { class: "tile" }, el("b", {}, value), name)));
}

function drawPools(view) {
  const pools = [["KV pages", view.pages, `${view.capacity.page_size} tokens each`]];
  if (view.slots.num_total > 0) pools.push(["State slots", view.slots, "one recurrent state each"]);
  byId("pools").replaceChildren(...pools.map(([name, pool, unit]) => {
    const used = pool.num_total - pool.num_free - pool.num_evictable;
    const text = `${integer(used)} in use, ${integer(pool.num_evictable)} cached, ${integer(pool.num_free)} free; ` +
      `${integer(pool.num_evicted)} evicted so far`;
    const bar = el("div", { class: "pool", role: "img", "aria-label": text });
    for (const [kind, count] of [["used", used], ["cached", pool.num_evictable], ["free", pool.num_free]]) {
      const part = el("div", { class: kind });
      part.style.flexGrow = String(count);
      bar.append(part);
    }
    return el("div", {}, el("h3", {}, `${name} `, el("span", { class: "muted" }, `${integer(pool.num_total)}, ${unit}`)), bar,
      el("p", { class: "muted" }, text));
  }));
}

function drawRequests(requests, selected) {
  const had = document.activeElement?.dataset?.request;
  const rows = [...requests].reverse().map((request) => {
    const key = keyOf(request);
    const button = el("button", {
      class: "request", "aria-pressed": String(request === selected), "data-request": key,
      onclick: () => choose(key === chosen ? null : key),
    },
    el("b", {}, (request.is_own ? "Yours: " : "") + (request.request_id ? short(request.request_id) : "another caller's")),
    ` ${integer(request.num_prompt_tokens)} prompt tokens, ${integer(request.num_cached_tokens)} reused, ` +
      `${integer(request.num_output_tokens)} new; first after ${seconds(request.first_token_s)}; ${request.status}`);
    return button;
  });
  byId("requests").replaceChildren(...rows);
  if (!rows.length) byId("requests").append("No request has come yet.");
  if (had) rows.find((row) => row.dataset.request === had)?.focus();
}

const short = (id) => (id.length > 20 ? `${id.slice(0, 17)}…` : id);

/** What the chosen request found, and why not more. */
function explain(request) {
  if (!request.report) return "It was not scheduled yet.";
  const { num_prompt_tokens: prompt, num_reused_tokens: reused } = request.report;
  const head = reused >= prompt - 1 ? "All that can be reused was." : `Reused ${integer(reused)} of ${integer(prompt)} tokens.`;
  return `${head} ${request.words}.`;
}

function drawPlots(view) {
  const now = view.now;
  const line = (name, className, pick) => ({ name, className, points: rates.map((rate) => [rate.t, pick(rate)]) });
  timePlot(byId("throughput"), [
    line("new tokens/s", "a", (rate) => rate.decode), line("prompt tokens/s", "b", (rate) => rate.prefill),
  ], { now, span: SPAN_S, format: integer, least: 10 });
  const ended = view.requests.filter((r) => r.e2e_s !== null && r.first_token_s !== null);
  const dots = (name, className, pick) => ({ name, className, dots: true, points: ended.map((r) => [r.arrived + r.e2e_s, pick(r)]).filter(([, y]) => y !== null) });
  timePlot(byId("latency"), [
    dots("first token", "a", (r) => r.first_token_s),
    dots("each further token", "b", (r) => (r.num_output_tokens > 1 ? (r.e2e_s - r.first_token_s) / (r.num_output_tokens - 1) : null)),
  ], { now, span: SPAN_S, format: seconds });
}

export function start() {
  tree = new Tree(byId("tree"), (text, content) => {
    byId("node").replaceChildren(text, ...(content ? [el("pre", {}, content)] : []));
  });
  steps = new Steps(byId("steps"), (text) => { byId("step").textContent = text; });
  byId("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    byId("pause").textContent = isPaused ? "Go on" : "Pause";
    if (isPaused) byId("inspect-state").textContent = "paused";
    look();
  });
  document.addEventListener("visibilitychange", look);
  addEventListener("resize", () => { if (latest && isVisible) draw(latest); });
}
