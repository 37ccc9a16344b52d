// Plots as SVG: lines and dots over time, and bars of steps.

import { el, integer, seconds, svg } from "./dom.js";

const HEIGHT = 150, LEFT = 52, BOTTOM = 18, TOP = 8;

/** A round number at or above `value`. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((m) => m * unit >= value * 0.999) * unit;
}

/** Lines (or dots) of `series`: `{name, className, points: [[x, y]], dots}`, over the last `span` seconds up to `now`. */
export function timePlot(container, series, { now, span, format, least = 0 }) {
  const width = Math.max(240, container.clientWidth);
  const inside = series.map((s) => ({ ...s, points: s.points.filter(([x]) => x > now - span) }));
  const top = ceiling(Math.max(least, ...inside.flatMap((s) => s.points.map(([, y]) => y))));
  const px = (x) => LEFT + ((x - now + span) / span) * (width - LEFT - 6);
  const py = (y) => TOP + (1 - y / top) * (HEIGHT - TOP - BOTTOM);
  const label = inside.map((s) => `${s.name} ${s.points.length ? format(s.points.at(-1)[1]) : "–"}`).join(", ");
  const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": label });
  for (const y of [0, top / 2, top]) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - 6, y1: py(y), y2: py(y) }));
    picture.append(svg("text", { class: "axis", x: LEFT - 5, y: py(y) + 4, "text-anchor": "end" }, format(y)));
  }
  picture.append(svg("text", { class: "axis", x: LEFT, y: HEIGHT - 4 }, `${span} s ago`));
  picture.append(svg("text", { class: "axis", x: width - 6, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  for (const s of inside) {
    if (s.dots) {
      for (const [x, y] of s.points) picture.append(svg("circle", { class: `dot ${s.className}`, cx: px(x), cy: py(y), r: 3 }));
    } else if (s.points.length) {
      picture.append(svg("path", { class: `line ${s.className}`, d: "M" + s.points.map(([x, y]) => `${px(x)} ${py(y)}`).join("L") }));
    }
  }
  container.replaceChildren(legend(inside, format), picture);
}

function legend(series, format) {
  return el("ul", { class: "legend" }, ...series.map((s) => el("li", {},
    svg("svg", { class: "swatch", viewBox: "0 0 12 12" }, svg("circle", { class: `dot ${s.className}`, cx: 6, cy: 6, r: 5 })),
    ` ${s.name} `, el("b", {}, s.points.length ? format(s.points.at(-1)[1]) : "–"))));
}

/** The latest steps: tokens above (padding on top), time below, both on a root scale. Arrow keys choose one. */
export class Steps {
  constructor(container, describe) {
    this.container = container;
    this.describe = describe;
    this.chosen = null; // number of a step; null: the latest
    container.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        event.preventDefault();
        this.move(event.key === "ArrowRight" ? 1 : -1);
      }
    });
  }

  move(by) {
    const at = this.steps.findIndex((s) => s.step === this.chosen);
    const to = (at < 0 ? this.steps.length - 1 : at) + by;
    this.chosen = to >= this.steps.length - 1 ? null : this.steps[Math.max(0, to)].step;
    this.draw(this.steps);
  }

  draw(steps) {
    this.steps = steps;
    const width = Math.max(240, this.container.clientWidth);
    const height = 170, middle = 100, bottom = height - 16;
    const tokens = (s) => s.num_decodes + s.num_prefill_tokens;
    const most = Math.max(1, ...steps.map((s) => tokens(s) + s.num_padding_tokens));
    const longest = ceiling(Math.max(0, ...steps.map((s) => s.seconds)));
    const tall = (n) => Math.sqrt(n / most) * (middle - 14);
    const step = Math.min(16, (width - LEFT - 6) / Math.max(1, steps.length));
    const picture = svg("svg", { width, height, role: "presentation" });
    const chosen = steps.find((s) => s.step === this.chosen) ?? steps.at(-1);
    steps.forEach((s, i) => {
      const x = LEFT + i * step, w = Math.max(1, step - 1), y = middle - tall(tokens(s));
      const padded = middle - tall(tokens(s) + s.num_padding_tokens);
      const time = Math.max(1, Math.sqrt(s.seconds / longest) * (bottom - middle - 4));
      picture.append(svg("g", { class: s === chosen ? "bar chosen" : "bar", onclick: () => { this.chosen = s.step; this.draw(this.steps); } },
        svg("title", {}, stepWords(s)),
        svg("rect", { class: "hit", x, y: 0, width: step, height: bottom }),
        svg("rect", { class: "padding", x, y: padded, width: w, height: y - padded }),
        svg("rect", { class: `mode-${s.mode}`, x, y, width: w, height: middle - y }),
        svg("rect", { class: "time", x, y: middle + 4, width: w, height: time })));
    });
    picture.append(svg("text", { class: "axis", x: LEFT - 5, y: 20, "text-anchor": "end" }, integer(most)));
    picture.append(svg("text", { class: "axis", x: LEFT - 5, y: middle, "text-anchor": "end" }, "tokens"));
    picture.append(svg("text", { class: "axis", x: LEFT - 5, y: middle + 16, "text-anchor": "end" }, "time"));
    picture.append(svg("text", { class: "axis", x: LEFT - 5, y: bottom, "text-anchor": "end" }, seconds(longest)));
    this.container.setAttribute("tabindex", "0");
    this.container.setAttribute("role", "group");
    this.container.setAttribute("aria-label", "Steps; the arrow keys choose one");
    this.container.replaceChildren(picture);
    this.describe(chosen ? stepWords(chosen) : "No step has run yet.");
  }
}

const MODES = { NONE: "eager", PIECEWISE: "piecewise graphs", FULL: "one full graph" };

function stepWords(s) {
  const parts = [];
  if (s.num_prefill_tokens) parts.push(`${integer(s.num_prefill_tokens)} prompt tokens`);
  if (s.num_decodes) parts.push(`${integer(s.num_decodes)} decoding`);
  if (s.num_padding_tokens) parts.push(`${integer(s.num_padding_tokens)} of padding`);
  return `Step ${integer(s.step)}: ${parts.join(", ")}; ${MODES[s.mode] ?? s.mode}; ${seconds(s.seconds)}.`;
}
