// What a model wrote, as Markdown.
//
// marked makes HTML of it, with raw HTML shown as text; DOMPurify lets only the elements below through; images become
// links, so that nothing is fetched. Formulas and colours come later, from maths.js and colours.js.

import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";
import { colour } from "./colours.js";
import { copyButton, el } from "./dom.js";
import { extensions, typeset } from "./maths.js";

const ALLOWED = {
  ALLOWED_TAGS: ("a blockquote br code del em h1 h2 h3 h4 h5 h6 hr input li ol p pre strong table tbody td th thead tr ul")
    .split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align", "type", "checked", "disabled"], // no addresses, so the line above is not for them
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: extensions(escaped),
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

/** Fills an element, and changes only the blocks that changed: an answer may grow for long. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.blocks = []; // {raw, nodes}
  }

  set(text) {
    const tokens = marked.lexer(text);
    let same = 0;
    while (same < this.blocks.length && same < tokens.length && this.blocks[same].raw === tokens[same].raw) same += 1;
    for (const block of this.blocks.splice(same)) block.nodes.forEach((node) => node.remove());
    for (const token of tokens.slice(same)) {
      const nodes = rendered(token);
      this.element.append(...nodes);
      this.blocks.push({ raw: token.raw, nodes });
    }
  }
}

function rendered(token) {
  const fragment = globalThis.DOMPurify.sanitize(marked.parser([token]), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) box.type = "checkbox";
  for (const table of fragment.querySelectorAll("table")) wrap(table, el("div", { class: "scroll" }));
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = pre.firstElementChild?.className.replace("language-", "") ?? "";
    wrap(pre, el("div", { class: "code" }, el("div", { class: "code-bar" }, el("span", {}, language), copyButton(() => pre.textContent))));
    if (pre.firstElementChild) colour(pre.firstElementChild, language);
  }
  fragment.querySelectorAll("code.maths").forEach(typeset);
  return [...fragment.childNodes].filter((node) => node.nodeType !== Node.TEXT_NODE || node.data.trim());
}

function wrap(element, box) {
  element.replaceWith(box);
  box.append(element);
}
