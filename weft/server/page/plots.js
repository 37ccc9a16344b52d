// Lines over time as SVG, with the values under the pointer.

import { el, svg } from "./dom.js";

const HEIGHT = 170, RIGHT = 8, BOTTOM = 20, TOP = 10, CHARACTER = 6.6;

/** A round number at or above `value`. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((m) => m * unit >= value * 0.999) * unit;
}

/** Room that labels need beside an axis. */
export const room = (labels) => 10 + CHARACTER * Math.max(...labels.map((label) => label.length));

export class TimePlot {
  /** `series`: `{name, className, pick}`; `pick` gives a point's value or null. `format`: a value in words. */
  constructor(container, series, format, least = 0) {
    Object.assign(this, { container, series, format, least, pointer: null });
    container.addEventListener("pointermove", (event) => {
      this.pointer = event.clientX - container.getBoundingClientRect().left;
      this.redraw();
    });
    container.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.redraw();
    });
  }

  redraw() {
    if (this.frame) this.draw(this.frame);
  }

  /** `frame`: `{now, span, interval, began, points}`. `points` are intervals by `start`, ascending and without holes in
   * what was measured; a line goes on only between neighbours that have a value. */
  draw(frame) {
    this.frame = frame;
    const { now, span, interval, points } = frame;
    const width = Math.max(240, this.container.clientWidth);
    const values = points.flatMap((p) => this.series.map((s) => s.pick(p))).filter((v) => v !== null);
    const top = ceiling(Math.max(this.least, ...values));
    const ticks = [0, top / 2, top];
    const left = room(ticks.map(this.format));
    const px = (x) => left + ((x - now + span) / span) * (width - left - RIGHT);
    const py = (y) => TOP + (1 - y / top) * (HEIGHT - TOP - BOTTOM);
    const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": this.words(points.at(-1)) });
    this.drawAxes(picture, ticks, { left, width, px, py, now, span });
    const began = px(frame.began);
    if (began > left + 1) picture.append(svg("rect", { class: "unmeasured", x: left, y: TOP, width: Math.min(began, width - RIGHT) - left, height: HEIGHT - TOP - BOTTOM }));
    for (const s of this.series) picture.append(...lines(s, points, interval, px, py));
    const shown = this.under(points, px, interval) ?? points.at(-1);
    if (this.pointer !== null && shown) picture.append(svg("line", { class: "crosshair", x1: px(shown.start), x2: px(shown.start), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.container.replaceChildren(this.legend(shown, now), picture);
  }

  drawAxes(picture, ticks, { left, width, px, py, now, span }) {
    for (const y of ticks) {
      picture.append(svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: py(y), y2: py(y) }));
      picture.append(svg("text", { class: "axis", x: left - 6, y: py(y) + 4, "text-anchor": "end" }, this.format(y)));
    }
    const parts = width < 420 ? 2 : 4;
    for (let i = 0; i <= parts; i += 1) {
      const ago = span * (1 - i / parts);
      const anchor = i === 0 ? "start" : i === parts ? "end" : "middle";
      picture.append(svg("text", { class: "axis", x: px(now - ago), y: HEIGHT - 4, "text-anchor": anchor }, before(ago)));
    }
  }

  under(points, px, interval) {
    if (this.pointer === null) return null;
    const near = points.filter((p) => Math.abs(px(p.start) - this.pointer) <= Math.max(6, px(interval) - px(0)));
    return near.sort((a, b) => Math.abs(px(a.start) - this.pointer) - Math.abs(px(b.start) - this.pointer))[0];
  }

  value(s, point) {
    const value = point ? s.pick(point) : null;
    return value === null ? "–" : this.format(value);
  }

  words(point) {
    return this.series.map((s) => `${s.name} ${this.value(s, point)}`).join(", ");
  }

  legend(point, now) {
    const items = this.series.map((s) => el("li", {},
      svg("svg", { class: "swatch", viewBox: "0 0 12 12" }, svg("circle", { class: `dot ${s.className}`, cx: 6, cy: 6, r: 5 })),
      ` ${s.name} `, el("b", {}, this.value(s, point))));
    if (this.pointer !== null && point) items.push(el("li", {}, before(now - point.start)));
    return el("ul", { class: "legend" }, ...items);
  }
}

/** A path for each run of neighbours with a value; one alone is a dot. */
function lines(s, points, interval, px, py) {
  const runs = [];
  let last = null;
  for (const point of points) {
    const value = s.pick(point);
    if (value === null) continue;
    if (last === null || point.start - last > interval * 1.5) runs.push([]);
    runs.at(-1).push([px(point.start), py(value)]);
    last = point.start;
  }
  return runs.map((run) => (run.length === 1
    ? svg("circle", { class: `dot ${s.className}`, cx: run[0][0], cy: run[0][1], r: 2.5 })
    : svg("path", { class: `line ${s.className}`, d: `M${run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` })));
}

function before(ago) {
  if (ago < 1) return "now";
  return ago >= 120 && ago % 60 === 0 ? `${ago / 60} min ago` : ago >= 600 ? `${Math.round(ago / 60)} min ago` : `${Math.round(ago)} s ago`;
}
