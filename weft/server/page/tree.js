// The prefix tree as rows that fold. Positions run to the right on one scale for all rows, so that a branch begins below
// the place where it leaves its parent:
//
//   ▾ 0–210      [ system prompt ◆ ]
//     ▸ 210–480                     [ question A … ◆ ]
//       210–300                     [ question B ]
//
// The scale is a root of the position: a prompt of 10 tokens can be seen beside one of 10,000.

import { byId, compact, el, integer, seconds, svg } from "./dom.js";

const BAR = 14, LANE = 28, TOP = 5, INDENT = 14, DEEPEST_INDENT = 10;
const AXIS = 22, ROOM = 44; // height of the axis, and pixels between its labels

export class Tree {
  /** `describe` is told about the node that has the focus: words, and its text if there is one. `count` hears how many are shown. */
  constructor(container, describe, count) {
    Object.assign(this, { container, describe, count, nodes: [], folds: new Map(), query: "", focused: null, drawn: "", mustReveal: false });
    container.addEventListener("keydown", (event) => this.move(event));
  }

  /** Unfold the path of the chosen request at the next drawing. */
  reveal() {
    this.mustReveal = true;
    this.drawn = "";
  }

  search(query) {
    this.query = query.trim().toLowerCase();
    this.redraw();
  }

  unfoldAll() {
    for (const node of this.nodes) this.folds.set(node.number, false);
    this.redraw();
  }

  /** As in the beginning: roots and what begins there. */
  foldAll() {
    this.folds.clear();
    this.redraw();
  }

  fold(i, isFolded) {
    this.folds.set(this.nodes[i].number, isFolded);
    this.redraw();
  }

  redraw() {
    this.drawn = "";
    if (this.snapshot) this.draw(...this.snapshot);
  }

  /** Draw the nodes of a snapshot, and in it the path of `request` (null: none) with what it reused. */
  draw(nodes, numNodes, request) {
    this.snapshot = [nodes, numNodes, request];
    const path = request ? request.path : [], report = request ? request.report : null;
    const width = this.container.clientWidth;
    const state = JSON.stringify([nodes.map((n) => ({ ...n, idle_ticks: 0, lost_states: n.lost_states.map((l) => l[0]) })), path, report, width]);
    if (state === this.drawn) return;
    this.drawn = state;
    Object.assign(this, { nodes, report, path: new Set(path) });
    this.children = childrenOf(nodes);
    if (this.mustReveal && path.length) {
      for (const i of path.slice(0, -1)) this.folds.set(nodes[i].number, false);
      this.mustReveal = false;
    }
    this.matches = this.query ? new Set(nodes.flatMap((n, i) => (`${words(n)} ${n.text ?? ""}`.toLowerCase().includes(this.query) ? [i] : []))) : null;
    this.order = this.visible();
    this.drawRows(numNodes);
  }

  /** Indices of the rows to show, in the order of reading. A search shows what matches and the way to it. */
  visible() {
    const wanted = this.matches && new Set();
    for (const match of this.matches ?? []) {
      for (let i = match; i >= 0 && !wanted.has(i); i = this.nodes[i].parent) wanted.add(i);
    }
    const order = [], stack = [...this.children.roots].reverse();
    while (stack.length) {
      const i = stack.pop();
      if (wanted && !wanted.has(i)) continue;
      order.push(i);
      if (wanted || !this.isFolded(i)) stack.push(...[...this.children.of[i]].reverse());
    }
    return order;
  }

  isFolded(i) {
    return this.folds.get(this.nodes[i].number) ?? this.nodes[i].parent >= 0;
  }

  drawRows(numNodes) {
    const had = this.container.contains(document.activeElement);
    this.rows = new Map(this.order.map((i) => [i, el("div", {})]));
    const lane = el("span", { class: "lane" });
    const axis = el("div", { class: "tree-axis", "aria-hidden": "true" }, el("span", { class: "name" }, "tokens"), lane);
    this.container.replaceChildren(axis, ...this.rows.values()); // the lanes' width is known once a row is there
    const last = Math.max(1, ...this.nodes.map((n) => n.end));
    lane.append(this.axis(last, lane.clientWidth));
    for (const i of this.order) this.fillRow(i, last);
    if (!this.nodes.length) this.container.replaceChildren("The cache is empty.");
    const total = integer(numNodes) + (numNodes > this.nodes.length ? `, of which the ${this.nodes.length} latest are listed` : "");
    this.count(`${this.matches ? `${integer(this.matches.size)} found, ` : ""}${integer(this.order.length)} shown of ${total}.`);
    const at = this.order.find((i) => this.nodes[i].number === this.focused) ?? this.order[0];
    if (at !== undefined) this.rows.get(at).tabIndex = 0;
    if (had && at !== undefined) this.rows.get(at).focus();
  }

  fillRow(i, last) {
    const node = this.nodes[i], row = this.rows.get(i), level = levelOf(this.nodes, i);
    const branches = this.children.of[i].length, isOpen = this.matches ? true : !this.isFolded(i);
    const attributes = {
      role: "treeitem", "aria-level": level + 1, "aria-label": words(node), tabindex: -1,
      "aria-expanded": branches ? String(isOpen) : null,
      class: `node${this.path.has(i) ? " matched" : ""}${this.matches?.has(i) ? " found" : ""}`,
    };
    for (const [name, value] of Object.entries(attributes)) if (value !== null) row.setAttribute(name, value);
    row.addEventListener("focus", () => this.tell(i));
    row.addEventListener("click", () => {
      row.focus();
      if (branches && !this.matches) this.fold(i, isOpen);
    });
    const name = el("span", { class: "name" }, el("span", { class: "twisty" }, branches ? (isOpen ? "▾" : "▸") : ""), title(node),
      branches && !isOpen ? el("span", { class: "muted" }, ` +${integer(this.below(i))}`) : null);
    name.style.paddingLeft = `${INDENT * Math.min(level, DEEPEST_INDENT)}px`;
    const lane = el("span", { class: "lane" });
    row.append(name, lane, node.text ? el("span", { class: "text" }, node.text) : "");
    lane.append(this.lane(i, last, lane.clientWidth));
  }

  /** Positions on the lanes' scale: 0, the end of the longest prompt, and round ones between. */
  axis(last, width) {
    const picture = svg("svg", { width, height: AXIS, role: "presentation" });
    const mark = (position, anchor) => {
      const x = place(position, last, width);
      picture.append(svg("line", { class: "tick", x1: x, x2: x, y1: AXIS - 4, y2: AXIS }));
      picture.append(svg("text", { class: "axis", x, y: AXIS - 7, "text-anchor": anchor }, compact(position)));
    };
    mark(0, "start");
    mark(last, "end");
    let right = place(last, last, width);
    for (const position of roundBelow(last)) {
      const x = place(position, last, width);
      if (x > right - ROOM || x < ROOM) continue;
      mark(position, "middle");
      right = x;
    }
    return picture;
  }

  below(i) {
    return this.children.of[i].reduce((sum, child) => sum + 1 + this.below(child), 0);
  }

  lane(i, last, width) {
    const node = this.nodes[i];
    const at = (position) => place(position, last, width);
    const picture = svg("svg", { width, height: LANE, role: "presentation" });
    if (node.parent < 0) return picture;
    const box = (className, from, to, y, height) => svg("rect", { class: className, x: at(from), y, width: Math.max(2, at(to) - at(from)), height, rx: 2 });
    const kind = `span${node.num_leases ? " leased" : ""}${this.path.has(i) ? " match" : ""}`;
    picture.append(box(kind, node.start, node.end, TOP, BAR));
    for (const [start, length] of node.media) picture.append(box("image", start, start + length, TOP, BAR));
    if (this.path.has(i) && this.report) {
      const { num_reused_tokens: reused, num_kv_tokens: kv } = this.report;
      for (const [className, from, to] of [["reused", 0, reused], ["recomputed", reused, kv]]) {
        const start = Math.max(node.start, from), end = Math.min(node.end, to);
        if (end > start) picture.append(box(className, start, end, TOP + BAR + 2, 4));
      }
    }
    const y = TOP + BAR / 2;
    const isBelow = (position) => node.states_below.includes(position);
    for (const [position] of node.lost_states.filter(([position]) => !isBelow(position))) picture.append(svg("path", { class: "lost", d: `M${at(position) - 4} ${y - 4}l8 8m0 -8l-8 8` }));
    for (const position of node.states_below.filter((position) => !node.states.includes(position))) {
      picture.append(svg("path", { class: "state below", d: `M${at(position)} ${y - 6}l6 6l-6 6l-6 -6Z` }));
    }
    for (const position of node.states) picture.append(svg("path", { class: "state", d: `M${at(position)} ${y - 6}l6 6l-6 6l-6 -6Z` }));
    return picture;
  }

  tell(i) {
    this.focused = this.nodes[i].number;
    for (const row of this.rows.values()) row.tabIndex = -1;
    this.rows.get(i).tabIndex = 0;
    this.describe(words(this.nodes[i]), this.nodes[i].text);
  }

  /** Arrow keys: up and down by rows; right unfolds, then goes to the first child; left folds, then goes to the parent. */
  move(event) {
    const at = this.order?.findIndex((i) => this.rows.get(i) === document.activeElement) ?? -1;
    if (at < 0) return;
    const i = this.order[at], branches = this.children.of[i];
    const canFold = branches.length > 0 && !this.matches;
    const to = {
      ArrowDown: () => this.order[at + 1],
      ArrowUp: () => this.order[at - 1],
      ArrowRight: () => (canFold && this.isFolded(i) ? this.fold(i, false) : branches[0]),
      ArrowLeft: () => (canFold && !this.isFolded(i) ? this.fold(i, true) : this.nodes[i].parent),
      Enter: () => canFold && this.fold(i, !this.isFolded(i)),
      Home: () => this.order[0],
      End: () => this.order.at(-1),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.rows.get(to())?.focus();
  }
}

/** Where a position lies on a lane. */
const place = (position, last, width) => 6 + Math.sqrt(position / last) * (width - 12);

/** 1, 2 and 5 times the powers of ten below `last`, falling. */
function roundBelow(last) {
  const found = [];
  for (let unit = 10 ** Math.floor(Math.log10(last)); unit >= 10; unit /= 10) found.push(5 * unit, 2 * unit, unit);
  return found.filter((position) => position < last);
}

function childrenOf(nodes) {
  const of = nodes.map(() => []), roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : of[node.parent]).push(i));
  for (const list of [roots, ...of]) list.sort((a, b) => nodes[a].number - nodes[b].number);
  return { of, roots };
}

function levelOf(nodes, i) {
  let level = 0;
  for (let at = nodes[i].parent; at >= 0; at = nodes[at].parent) level += 1;
  return level;
}

const title = (node) => (node.parent < 0 ? "root" : `${integer(node.start)}–${integer(node.end)}`);

/** A node in words. */
function words(node) {
  if (node.parent < 0) return "Root: what is below shares nothing with other roots.";
  const parts = [`Tokens ${integer(node.start)} to ${integer(node.end)} in ${integer(node.num_pages)} pages`];
  for (const [start, length, name] of node.media) parts.push(`image ${name} at ${integer(start)} to ${integer(start + length)}`);
  if (node.num_leases) parts.push(`leased by ${node.num_leases} running`);
  if (node.states.length) parts.push(`states at ${node.states.map(integer).join(", ")}`);
  for (const [position, age] of node.lost_states) {
    const where = node.states_below.includes(position) ? ", in the tier below" : "";
    parts.push(`state at ${integer(position)} evicted ${seconds(age)} ago${where}`);
  }
  if (node.num_pages_below) parts.push(`${integer(node.num_pages_below)} pages in the tier below too`);
  if (!node.states.length && node.lost_states.length) parts.push("a tombstone: KV without a state");
  parts.push(`last of use ${integer(node.idle_ticks)} lookups ago`);
  return `${parts.join("; ")}.`;
}

/** The tree with its search, its buttons and the line below that tells of a node. */
export function makeTree() {
  const tree = new Tree(byId("tree"), (text, content) => {
    byId("node").replaceChildren(text, ...(content ? [el("pre", {}, content)] : []));
  }, (text) => { byId("tree-count").textContent = text; });
  byId("tree-search").addEventListener("input", () => tree.search(byId("tree-search").value));
  byId("unfold").addEventListener("click", () => tree.unfoldAll());
  byId("fold").addEventListener("click", () => tree.foldAll());
  return tree;
}
