// The first screen of a conversation: the model, what it can do, and examples to click.

import { el, integer } from "./dom.js";

const EXAMPLES = [
  "Compare TCP and UDP in a table.",
  "Write a Python function that merges two sorted lists, and explain it.",
  "Derive the formula for the roots of a quadratic equation.",
  "Plan a week of dinners for two that share their ingredients.",
];

const BUNDLED_EXAMPLES = [
  "What is 633 - 128?",
  "Tom fills 5 bags with 12 apples each and gives 8 apples away. How many apples does he have left?",
  "What can you do?",
  "What is Weft?",
];

const ABILITIES = [
  ["images", "Images", "Drop, paste or choose pictures"],
  ["tools", "Tools", "Functions that you describe under Parameters"],
  ["reasoning", "Reasoning", "Thoughts are folded above the answer"],
  ["structured_outputs", "Structured output", "JSON schemas, regular expressions and grammars, over the API"],
];

/** `card`: the entry of `/v1/models`, or null before the server answered. `ask` sends a text. */
export function drawWelcome(card, ask) {
  const hint = el("p", { class: "muted keys" }, "Enter sends, Shift+Enter starts a line, Escape stops an answer.");
  if (card === null) return el("div", { id: "welcome" }, hint);
  const chips = ABILITIES.filter(([name]) => card.weft[name]).map(([, title, meaning]) => el("li", { title: meaning }, title));
  if (!card.weft.images) chips.unshift(el("li", {}, "Text"));
  const examples = card.root.endsWith("weft-mini") ? BUNDLED_EXAMPLES : EXAMPLES;
  return el("div", { id: "welcome" },
    el("img", { src: "icon.svg", alt: "", width: 48, height: 48 }),
    el("h3", {}, card.id),
    el("p", { class: "muted" }, `${integer(card.max_model_len)} tokens of context`),
    el("ul", { class: "chips", "aria-label": "Abilities" }, ...chips),
    el("div", { class: "examples", role: "group", "aria-label": "Examples" },
      ...examples.map((text) => el("button", { type: "button", onclick: () => ask(text) }, text))),
    hint);
}
