// Inspect: the engine as `/inspect` shows it, once a second while somebody looks.

import { call } from "./connection.js";
import { byId, compact, el, integer, seconds, tabs } from "./dom.js";
import { TimePlot } from "./plots.js";
import { drawPools } from "./pools.js";
import { drawRequests, explain, find } from "./requests.js";
import { makeSteps } from "./steps.js";
import { makeTree } from "./tree.js";

const INTERVAL_MS = 1000, MAX_OWN = 64;
const PARTS = ["throughput", "latency", "requests", "cache"];

const ownIds = new Set(); // requests of this browser: the server names them to us
let chosen = null; // key of the chosen request
let replica = null; // number of the replica to look into; null: the first one that is up
let part = PARTS[0];
let isVisible = false, isPaused = false, timer = null, latest = null;
let plots, steps, tree, showPart;

/** A request of this page. The latest ones are the last to go. */
export function own(id) {
  ownIds.delete(id);
  ownIds.add(id);
  if (ownIds.size > MAX_OWN) ownIds.delete(ownIds.values().next().value);
}

/** Look at this request. */
export function choose(id, name = "cache") {
  chosen = id;
  if (id !== null) own(id);
  tree.reveal();
  showPart(name);
  look();
}

export function setVisible(visible) {
  isVisible = visible;
  if (visible) showPart(part);
  look();
}

export async function look() {
  clearTimeout(timer);
  if (!isVisible || document.hidden || isPaused) return;
  try {
    const query = new URLSearchParams([...ownIds].map((id) => ["request", id]));
    query.set("history", byId("span").value);
    if (replica !== null) query.set("replica", replica);
    latest = await (await call(`/inspect?${query}`)).json();
    draw();
    byId("inspect-state").textContent = `live, ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    byId("inspect-state").textContent = error.message;
    if (error.status === 404 || error.status === 409) replica = null; // the chosen one is gone
  }
  clearTimeout(timer);
  timer = setTimeout(look, INTERVAL_MS);
}

/** The history's points with zeros where nothing happened, and nulls where nothing was measured. */
function frameOf({ now, history }) {
  const { interval_s: interval, span_s: span, began } = history;
  const measured = new Map(history.points.map((p) => [p.start, p]));
  const points = [];
  const first = Math.max(Math.floor(began / interval), Math.ceil((now - span) / interval)) * interval;
  for (let start = first; start <= now - interval; start += interval) points.push(measured.get(start) ?? { start, ...NOTHING });
  return { now, span, interval, began, points };
}

const NOTHING = { prefill: 0, decode: 0, running: 0, waiting: 0, responses: {}, accepted_length: null, first_token: null, inter_token: null };

function draw() {
  if (!latest) return;
  const request = find(latest.requests, chosen);
  const frame = frameOf(latest);
  drawTiles(latest, frame);
  drawReplicas(latest);
  drawChosen(request);
  if (part === "throughput") {
    plots.throughput.draw(frame);
    plots.load.draw(frame);
    byId("speculation").hidden = !latest.totals.spec_decode_num_drafts;
    if (latest.totals.spec_decode_num_drafts) plots.accepted.draw(frame);
    steps.draw(latest.steps);
  } else if (part === "latency") {
    drawPercentiles(latest.history);
    for (const name of ["firstToken", "interToken", "responses"]) plots[name].draw(frame);
  } else if (part === "requests") {
    drawRequests(byId("requests"), latest, chosen, (key) => choose(key === chosen ? null : key, "requests"));
  } else {
    drawPools(byId("pools"), latest);
    tree.draw(latest.nodes, latest.num_nodes, request ?? null);
    byId("no-texts").hidden = latest.is_admin || latest.num_nodes === 0;
  }
}

function drawTiles({ totals, capacity, history, replicas, replica: shown }, frame) {
  const atMost = replicas.find((r) => r.replica === shown)?.max_num_seqs ?? capacity.max_num_seqs;
  const share = totals.num_query_tokens ? totals.num_hit_tokens / totals.num_query_tokens : null;
  const { failed = 0, broken = 0, overloaded = 0 } = history.responses;
  const now = frame.points.at(-1);
  const tiles = [
    ["running", `${integer(totals.num_running)} of ${integer(atMost)}`, "always"],
    ["waiting", integer(totals.num_waiting)],
    ["output tok/s", now ? compact(now.decode) : "–", "always"],
    ["prompt tok/s", now ? compact(now.prefill) : "–"],
    ["TTFT, median", seconds(history.first_token?.[0])],
    ["ITL, median", seconds(history.inter_token?.[0])],
    ["prompt reused", share === null ? "–" : `${(100 * share).toFixed(1)} %`],
    ["preemptions", integer(totals.num_preemptions)],
    ["429, full", integer(overloaded), "bad"],
    ["errors", integer(failed + broken), "bad"],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, kind = ""]) => {
    const isIdle = ["0", "–"].includes(value) && kind !== "always"; // not shown on a phone
    return el("div", { class: `tile ${isIdle ? "idle" : kind}` }, el("b", {}, value), name);
  }));
}

/** One row for each replica behind the server; requests, steps, cache and the first tiles are those of the pressed one. */
function drawReplicas({ replicas, replica: shown }) {
  byId("replicas").hidden = replicas.length === 0;
  const head = ["Replica", "state", "open", "running", "waiting", "prompt reused", "restarts"];
  const reused = (r) => r.num_query_tokens ? `${(100 * r.num_hit_tokens / r.num_query_tokens).toFixed(1)} %` : "–";
  const focused = document.activeElement.id;
  const name = (r) => el("button", { id: `replica-${r.replica}`, class: "ghost", "aria-pressed": String(r.replica === shown),
    disabled: !["up", "behind", "draining"].includes(r.state), onclick: () => lookInto(r.replica) }, `Replica ${r.replica}`);
  const row = (r) => el("tr", {}, el("th", { scope: "row" }, name(r)),
    ...[r.state, integer(r.num_open), integer(r.num_running), integer(r.num_waiting), reused(r), integer(r.num_restarts)]
      .map((text) => el("td", {}, text)));
  byId("replicas").replaceChildren(el("table", { class: "figures-table" },
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...replicas.map(row))));
  if (focused.startsWith("replica-")) byId(focused)?.focus(); // the table is a new one
}

function lookInto(number) {
  replica = number;
  look();
}

function drawChosen(request) {
  byId("chosen").hidden = chosen === null || !["requests", "cache"].includes(part);
  byId("to-tree").hidden = part === "cache" || !request;
  byId("explanation").textContent = request ? explain(request)
    : "The engine does not know this request any more: it remembers the 32 latest ones.";
}

function drawPercentiles({ first_token, inter_token, num_first_tokens, num_inter_tokens }) {
  const row = (name, values, count) => el("tr", {}, el("th", { scope: "row" }, name),
    ...[0, 1, 2].map((i) => el("td", {}, seconds(values?.[i]))), el("td", {}, integer(count)));
  const head = ["", "p50", "p90", "p99", "measured"].map((name) => el("th", { scope: "col" }, name));
  byId("percentiles").replaceChildren(el("table", { class: "figures-table" }, el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, row("Time to first token", first_token, num_first_tokens), row("Inter-token latency", inter_token, num_inter_tokens))));
}

function makePlots() {
  const line = (name, className, pick) => ({ name, className, pick });
  const percentiles = (field) => [["p50", "a", 0], ["p90", "b", 1], ["p99", "c", 2]]
    .map(([name, className, i]) => line(name, className, (p) => p[field]?.[i] ?? null));
  const count = (kind) => (p) => p.responses[kind] ?? 0;
  plots = {
    throughput: new TimePlot(byId("throughput"), [line("output", "a", (p) => p.decode), line("prompt", "b", (p) => p.prefill)], compact, 10),
    load: new TimePlot(byId("load"), [line("running", "a", (p) => p.running), line("waiting", "c", (p) => p.waiting)], compact, 2),
    accepted: new TimePlot(byId("accepted"), [line("accepted length", "a", (p) => p.accepted_length)], (value) => value.toFixed(2), 2),
    firstToken: new TimePlot(byId("first-token"), percentiles("first_token"), seconds),
    interToken: new TimePlot(byId("inter-token"), percentiles("inter_token"), seconds),
    responses: new TimePlot(byId("responses"), [line("answered", "a", count("ok")), line("refused (4xx)", "b", count("refused")),
      line("queue full (429)", "c", count("overloaded")), line("failed (5xx)", "d", count("failed")), line("broken", "e", count("broken"))], compact, 2),
  };
}

export function start() {
  const fromHash = location.hash.replace("#inspect/", "");
  if (PARTS.includes(fromHash)) part = fromHash;
  makePlots();
  steps = makeSteps();
  tree = makeTree();
  showPart = tabs(PARTS, (name) => {
    part = name;
    if (isVisible) history.replaceState(null, "", `#inspect/${name}`);
    draw();
  });
  byId("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    byId("pause").textContent = isPaused ? "Go on" : "Pause";
    if (isPaused) byId("inspect-state").textContent = "paused";
    look();
  });
  byId("span").addEventListener("change", look);
  byId("forget").addEventListener("click", () => choose(null, part));
  byId("to-tree").addEventListener("click", () => choose(chosen, "cache"));
  document.addEventListener("visibilitychange", look);
  addEventListener("resize", () => { if (isVisible) draw(); });
}

