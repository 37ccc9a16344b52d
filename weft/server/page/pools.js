// KV pages and recurrent-state slots: in use, kept for reuse, free. The tiers below the device have pools of their own.

import { el, integer } from "./dom.js";

const MIB = 2 ** 20;

/** A pool below the device. Nothing in it is in use for long. */
const below = (total, kept, evicted) => ({ num_total: total, num_free: total - kept, num_evictable: kept, num_evicted: evicted });

export function drawPools(container, { pages, slots, capacity, totals }) {
  const pools = [["KV pages", pages, `pages of ${capacity.page_size} tokens`]];
  if (slots.num_total > 0) pools.push(["State slots", slots, "slots for one recurrent state each"]);
  if (totals.host_pages) {
    pools.push(["Host memory, KV", below(totals.host_pages, totals.host_pages_in_use, totals.num_host_evicted_pages), `pages of ${capacity.page_size} tokens`]);
  }
  if (totals.host_states) {
    pools.push(["Host memory, states", below(totals.host_states, totals.host_states_in_use, totals.num_host_evicted_states), "states"]);
  }
  if (totals.disk_max_bytes) {
    const [most, kept] = [totals.disk_max_bytes, totals.disk_bytes].map((bytes) => Math.round(bytes / MIB));
    pools.push(["Files", below(most, kept, totals.num_disk_evictions), "MiB"]);
  }
  container.replaceChildren(...pools.map(([name, pool, unit]) => drawPool(name, pool, unit)));
}

function drawPool(name, pool, unit) {
  const used = pool.num_total - pool.num_free - pool.num_evictable;
  const parts = [
    ["used", "in use", used], ["cached", "cached, free when needed", pool.num_evictable], ["free", "free", pool.num_free],
  ];
  const share = (count) => `${((100 * count) / Math.max(1, pool.num_total)).toFixed(0)} %`;
  const bar = el("div", { class: "pool", role: "img", "aria-label": parts.map(([, words, count]) => `${integer(count)} ${words}`).join(", ") });
  for (const [kind, , count] of parts) {
    const part = el("div", { class: kind });
    part.style.flexGrow = String(count);
    bar.append(part);
  }
  const legend = parts.map(([kind, words, count]) => el("li", {}, el("span", { class: `key ${kind}` }), ` ${words} `, el("b", {}, integer(count))));
  legend.push(el("li", {}, "evicted so far ", el("b", {}, integer(pool.num_evicted))));
  return el("div", {}, el("h3", {}, `${name}: ${share(used)} in use `, el("span", { class: "muted" }, `${integer(pool.num_total)} ${unit}`)),
    bar, el("ul", { class: "legend" }, ...legend));
}
