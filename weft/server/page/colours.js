// Syntax colours of code in answers, by highlight.js, which is loaded when the first block with a language comes.

import "./vendor/purify.js";
import { lazily } from "./dom.js";

const LONGEST = 20000; // characters: colouring more would make a growing answer stutter

const ALLOWED = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };

const withHighlighter = lazily(async () => (await import("./vendor/highlight.js")).default);

/** Colour an element that holds code. It keeps its text, whatever highlight.js makes of the code. */
export function colour(code, language) {
  const text = code.textContent;
  if (!language || text.length > LONGEST) return;
  withHighlighter((highlighter) => {
    if (!highlighter.getLanguage(language)) return;
    const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
    const coloured = globalThis.DOMPurify.sanitize(value, ALLOWED);
    if (coloured.textContent === text) code.replaceChildren(coloured);
  });
}
