// The latest steps: tokens above (padding on top), duration below, both on a root scale. Arrow keys choose one.

import { byId, compact, el, integer, seconds, svg } from "./dom.js";
import { ceiling, room } from "./plots.js";

const HEIGHT = 190, MIDDLE = 116, BOTTOM = HEIGHT - 6, WIDEST_BAR = 16;

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
    if (!steps.length) {
      this.container.replaceChildren();
      this.describe("No step has run yet.");
      return;
    }
    const width = Math.max(240, this.container.clientWidth);
    const most = ceiling(Math.max(...steps.map((s) => tokens(s) + s.num_padding_tokens)));
    const longest = ceiling(Math.max(...steps.map((s) => s.seconds)));
    const left = room([`${compact(most)} tokens`, seconds(longest)]);
    const wide = Math.min(WIDEST_BAR, (width - left - 6) / steps.length);
    const picture = svg("svg", { width, height: HEIGHT, role: "presentation" });
    const up = (n) => MIDDLE - Math.sqrt(n / most) * (MIDDLE - 14);
    const down = (s) => Math.max(1, Math.sqrt(s / longest) * (BOTTOM - MIDDLE - 6));
    for (const n of [most / 4, most]) this.rule(picture, left, width, up(n), `${compact(n)} tokens`);
    for (const s of [longest / 4, longest]) this.rule(picture, left, width, MIDDLE + 6 + down(s), seconds(s));
    const chosen = steps.find((s) => s.step === this.chosen) ?? steps.at(-1);
    steps.forEach((s, i) => picture.append(this.bar(s, left + i * wide, wide, up, down, s === chosen)));
    this.container.setAttribute("tabindex", "0");
    this.container.setAttribute("role", "group");
    this.container.setAttribute("aria-label", "Steps; the arrow keys choose one");
    this.container.replaceChildren(legend(steps), picture);
    this.describe(stepWords(chosen));
  }

  rule(picture, left, width, y, label) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - 6, y1: y, y2: y }));
    picture.append(svg("text", { class: "axis", x: left - 6, y: y + 4, "text-anchor": "end" }, label));
  }

  bar(s, x, wide, up, down, isChosen) {
    const width = Math.max(1, wide - 1), y = up(tokens(s)), padded = up(tokens(s) + s.num_padding_tokens);
    const choose = () => {
      this.chosen = s.step;
      this.draw(this.steps);
    };
    return svg("g", { class: isChosen ? "bar chosen" : "bar", onclick: choose },
      svg("title", {}, stepWords(s)),
      svg("rect", { class: "hit", x, y: 0, width: wide, height: HEIGHT }),
      svg("rect", { class: "padding", x, y: padded, width, height: y - padded }),
      svg("rect", { class: `mode-${s.mode}`, x, y, width, height: MIDDLE - y }),
      svg("rect", { class: "time", x, y: MIDDLE + 6, width, height: down(s.seconds) }));
  }
}

const tokens = (s) => s.num_decodes + s.num_prefill_tokens;

const MODES = { NONE: "eager", PIECEWISE: "piecewise graphs", FULL: "one full graph" };

/** The colours that occur in these steps. */
function legend(steps) {
  const modes = Object.keys(MODES).filter((mode) => steps.some((s) => s.mode === mode)).map((mode) => [`mode-${mode}`, MODES[mode]]);
  const padding = steps.some((s) => s.num_padding_tokens) ? [["padding", "padding"]] : [];
  const item = ([className, name]) => el("li", {},
    svg("svg", { class: "swatch", viewBox: "0 0 12 12" }, svg("rect", { class: className, width: 12, height: 12 })), ` ${name}`);
  return el("ul", { class: "legend" }, ...[...modes, ...padding, ["time", "duration"]].map(item));
}

function stepWords(s) {
  const parts = [];
  if (s.num_prefill_tokens) parts.push(`${integer(s.num_prefill_tokens)} prompt tokens`);
  if (s.num_decodes) parts.push(`${integer(s.num_decodes)} decoding`);
  if (s.num_padding_tokens) parts.push(`${integer(s.num_padding_tokens)} of padding`);
  return `Step ${integer(s.step)}: ${parts.join(", ")}; ${MODES[s.mode] ?? s.mode}; ${seconds(s.seconds)}.`;
}

/** Steps drawn in `#steps` and told in `#step`. */
export const makeSteps = () => new Steps(byId("steps"), (text) => { byId("step").textContent = text; });
