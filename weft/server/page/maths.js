// Formulas in answers: $…$, $$…$$, \(…\) and \[…\].
//
// marked finds a formula and shows its source as `code.maths`. KaTeX then replaces the source. KaTeX makes elements, never
// markup, so its output needs no sanitising. It is loaded when the first formula comes.

import { el, lazily } from "./dom.js";

const LONGEST = 5000;

/** No links, images or classes of the author's choice (`trust`), and bounds on sizes and macros. */
const LIMITS = { trust: false, strict: "ignore", maxSize: 20, maxExpand: 300, throwOnError: true };

const DISPLAY = String.raw`\$\$((?:[^$\\]|\\[\s\S])+)\$\$|\\\[((?:[^\\]|\\[^[\]])+)\\\]`;
const DISPLAY_BLOCK = new RegExp(String.raw`^ {0,3}(?:${DISPLAY})[ \t]*(?:\n|$)`);
const DISPLAY_INLINE = new RegExp(`^(?:${DISPLAY})`);
const INLINE = /^(?:\$(?!\s)((?:[^$\\`\n]|\\.)+)(?<!\s)\$(?!\d)|\\\(((?:[^\\]|\\[^()])+)\\\))/;
const AMOUNT = /^[\d.,]+\s+[A-Za-z]{2}/; // "$5 million, or 4 in US$" holds no formula

const tokenOf = (type, found, display) => found && { type, raw: found[0], text: (found[1] ?? found[2]).trim(), display };

const sourceOf = ({ text, display }, escaped) => `<code class="maths${display ? " display" : ""}">${escaped(text)}</code>`;

/** Extensions of marked. `escaped` makes HTML of a text. */
export const extensions = (escaped) => [
  {
    name: "mathsBlock",
    level: "block",
    start: (src) => nearest(src.split("\n\n", 1)[0], /(?:^|\n) {0,3}(?:\$\$|\\\[)/),
    tokenizer: (src) => tokenOf("mathsBlock", DISPLAY_BLOCK.exec(src), true),
    renderer: (token) => `<p>${sourceOf(token, escaped)}</p>`,
  },
  {
    name: "maths",
    level: "inline",
    start: (src) => nearest(src, /(?<![\w$])\$|\\[([]/),
    tokenizer(src) {
      const display = tokenOf("maths", DISPLAY_INLINE.exec(src), true);
      const token = display ?? tokenOf("maths", INLINE.exec(src), false);
      return token && (display || !AMOUNT.test(token.text)) ? token : undefined;
    },
    renderer: (token) => sourceOf(token, escaped),
  },
];

function nearest(src, pattern) {
  const at = src.search(pattern);
  return at < 0 ? undefined : at;
}

const withKatex = lazily(async () => {
  await Promise.all([stylesheet("vendor/katex.css"), import("./vendor/katex.js")]);
  return globalThis.katex;
});

function stylesheet(href) {
  return new Promise((resolve, reject) => {
    document.head.append(el("link", { rel: "stylesheet", href, onload: resolve, onerror: reject }));
  });
}

/** Replace the source of a formula. A formula that KaTeX refuses stays as it was written. */
export function typeset(source) {
  if (source.textContent.length > LONGEST) return;
  withKatex((katex) => {
    const displayMode = source.classList.contains("display");
    try {
      const tree = katex.__renderToDomTree(source.textContent, { ...LIMITS, displayMode });
      renameStyles(tree);
      const formula = el("span", { class: displayMode ? "formula display" : "formula" }, tree.toNode());
      for (const element of formula.querySelectorAll("[data-style]")) element.style.cssText = element.dataset.style;
      source.replaceWith(formula);
    } catch { /* not TeX */ }
  });
}

/** The page's policy forbids style attributes, and allows styles that a script sets. */
function renameStyles({ attributes, children }) {
  if (attributes?.style) {
    attributes["data-style"] = attributes.style;
    delete attributes.style;
  }
  children?.forEach(renameStyles);
}
