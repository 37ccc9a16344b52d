// The prefix tree: position runs to the right, a row for each branch.
//
//   [ system prompt ◆ ]─┬─[ question A … ◆ ]
//                       └─[ question B ]
//
// A span's width grows with the square root of its length, so that a prompt of 10 tokens can be seen beside one of
// 10,000. Marks inside a span stand at their positions.

import { integer, seconds, svg } from "./dom.js";

const ROW = 42, BAR = 16, GAP = 14, MARGIN = 8, LABEL = 12;

export class Tree {
  /** `describe` is told in words about the node that has the focus. */
  constructor(container, describe) {
    this.container = container;
    this.describe = describe;
    this.focused = null;
    this.drawn = "";
    container.addEventListener("keydown", (event) => this.move(event));
  }

  /** Draw the nodes of a snapshot, and in it the path of `request` (null: none) with what it reused. */
  draw(nodes, numNodes, request) {
    const path = request ? request.path : [];
    this.report = request ? request.report : null;
    const width = this.container.clientWidth;
    const state = JSON.stringify([nodes.map((n) => ({ ...n, idle_ticks: 0, lost_states: n.lost_states.map((l) => l[0]) })), path, this.report, width]);
    this.nodes = nodes;
    if (state === this.drawn) return;
    this.drawn = state;
    const rows = layout(nodes, width);
    this.order = rows.order;
    const matched = new Set(path);
    const picture = svg("svg", { width: rows.width, height: rows.height, role: "presentation" });
    for (const i of rows.order) picture.append(...this.connector(rows.boxes, i));
    this.groups = new Map();
    for (const i of rows.order) {
      const group = this.node(i, rows.boxes[i], matched.has(i));
      this.groups.set(i, group);
      picture.append(group);
    }
    const had = this.container.contains(document.activeElement);
    this.container.replaceChildren(picture);
    if (nodes.length === 0) this.container.append("The cache is empty.");
    else if (numNodes > nodes.length) this.container.append(`The ${nodes.length} latest of ${integer(numNodes)} nodes.`);
    const at = rows.order.find((i) => nodes[i].number === this.focused) ?? rows.order[0];
    if (at !== undefined) this.groups.get(at).setAttribute("tabindex", "0");
    if (had && at !== undefined) this.groups.get(at).focus();
  }

  connector(boxes, i) {
    const box = boxes[i], parent = boxes[this.nodes[i].parent];
    if (!parent) return [];
    const x = parent.x + parent.width, y = parent.y + BAR / 2, mid = x + GAP / 2;
    return [svg("path", { class: "edge", d: `M${x} ${y}H${mid}V${box.y + BAR / 2}H${box.x}` })];
  }

  node(i, box, isMatched) {
    const node = this.nodes[i];
    const group = svg("g", {
      role: "treeitem", tabindex: "-1", "aria-label": words(node), "aria-level": box.level,
      class: "node" + (isMatched ? " matched" : ""), onfocus: () => this.tell(i), onclick: () => this.groups.get(i).focus(),
    });
    const kind = "span" + (node.num_leases ? " leased" : "") + (isMatched ? " match" : "") + (node.parent < 0 ? " root" : "");
    group.append(svg("title", {}, words(node)));
    group.append(svg("rect", { class: kind, x: box.x, y: box.y, width: box.width, height: BAR, rx: 3 }));
    if (isMatched && this.report) group.append(...this.strips(node, box));
    const at = (position) => box.x + (box.width * (position - node.start)) / Math.max(1, node.end - node.start);
    const y = box.y + BAR / 2;
    for (const [position] of node.lost_states) {
      const x = at(position);
      group.append(svg("path", { class: "lost", d: `M${x - 4} ${y - 4}l8 8M${x + 4} ${y - 4}l-8 8` }));
    }
    for (const position of node.states) {
      const x = at(position);
      group.append(svg("path", { class: "state", d: `M${x} ${y - 6}l6 6l-6 6l-6 -6Z` }));
    }
    const label = node.parent < 0 ? "root" : `${integer(node.end - node.start)}`;
    if (box.width > 7 * label.length) {
      group.append(svg("text", { x: box.x + 2, y: box.y - 4, class: "label" }, label));
    }
    return group;
  }

  /** Below a matched span: what the request reused, and what it computed again although the KV was there. */
  strips(node, box) {
    const { num_reused_tokens: reused, num_kv_tokens: kv } = this.report;
    const strip = (className, from, to) => {
      const start = Math.max(node.start, from), end = Math.min(node.end, to);
      if (end <= start) return null;
      const unit = box.width / (node.end - node.start);
      return svg("rect", { class: className, x: box.x + (start - node.start) * unit, y: box.y + BAR + 2, width: (end - start) * unit, height: 4 });
    };
    return [strip("reused", 0, reused), strip("recomputed", reused, kv)].filter((s) => s !== null);
  }

  tell(i) {
    this.focused = this.nodes[i].number;
    for (const group of this.groups.values()) group.setAttribute("tabindex", "-1");
    this.groups.get(i).setAttribute("tabindex", "0");
    this.describe(words(this.nodes[i]), this.nodes[i].text);
  }

  /** Arrow keys walk: up and down by rows, left to the parent, right to the first child. */
  move(event) {
    const at = this.order?.findIndex((i) => this.groups.get(i) === document.activeElement);
    if (at === undefined || at < 0) return;
    const i = this.order[at];
    const to = {
      ArrowDown: this.order[at + 1],
      ArrowUp: this.order[at - 1],
      ArrowLeft: this.nodes[i].parent,
      ArrowRight: this.order.find((j) => this.nodes[j].parent === i),
      Home: this.order[0],
      End: this.order.at(-1),
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.groups.get(to)?.focus();
  }
}

/** Boxes by node, and the order of reading: depth first, older siblings first. */
function layout(nodes, available) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  for (const list of [roots, ...children]) list.sort((a, b) => nodes[a].number - nodes[b].number);
  const natural = nodes.map((node) => (node.parent < 0 ? 40 : 14 + 7 * Math.sqrt(node.end - node.start)));
  const ends = [];
  nodes.forEach((node, i) => { ends[i] = (node.parent < 0 ? MARGIN : ends[node.parent] + GAP) + natural[i]; });
  const widest = Math.max(1, ...ends);
  const scale = Math.min(1.6, Math.max(0.35, (available - 2 * MARGIN) / widest));
  const boxes = [], order = [];
  let row = 0;
  const stack = roots.map((i) => [i, true]).reverse();
  while (stack.length) {
    const [i, isFirst] = stack.pop();
    if (!isFirst) row += 1;
    const parent = boxes[nodes[i].parent];
    if (!parent && order.length) row += 1;
    boxes[i] = {
      x: parent ? parent.x + parent.width + GAP : MARGIN, y: MARGIN + LABEL + row * ROW,
      width: natural[i] * scale, level: parent ? parent.level + 1 : 1,
    };
    order.push(i);
    children[i].map((child, n) => [child, n === 0]).reverse().forEach((entry) => stack.push(entry));
  }
  const right = Math.max(0, ...boxes.map((box) => box.x + box.width));
  return { boxes, order, width: Math.ceil(right + MARGIN), height: order.length ? (row + 1) * ROW + MARGIN : 0 };
}

/** A node in words. */
export function words(node) {
  if (node.parent < 0) return "Root: everything below shares nothing with other roots.";
  const parts = [`Tokens ${integer(node.start)} to ${integer(node.end)} in ${integer(node.num_pages)} pages`];
  if (node.num_leases) parts.push(`leased by ${node.num_leases} running`);
  if (node.states.length) parts.push(`states at ${node.states.map(integer).join(", ")}`);
  for (const [position, age] of node.lost_states) parts.push(`state at ${integer(position)} evicted ${seconds(age)} ago`);
  if (!node.states.length && node.lost_states.length) parts.push("a tombstone: KV without a state");
  parts.push(`last of use ${integer(node.idle_ticks)} lookups ago`);
  return parts.join("; ") + ".";
}
