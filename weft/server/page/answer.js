// An answer as it grows, or as it was kept: reasoning fold, Markdown, tool calls, figures.

import { copyButton, el, integer, seconds, svg } from "./dom.js";
import { Markdown } from "./markdown.js";

const RENDER_MS = 40;

const infoIcon = () => svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
  svg("circle", { class: "stroke", cx: 8, cy: 8, r: 6.5 }), svg("path", { class: "stroke", d: "M8 7.2V11.2M8 4.6V5.2" }));

export class Answer {
  /** `message`: a kept one; `show` is called with a request's id to look at it in Inspect. */
  constructor(show, message = { role: "assistant", content: "" }) {
    this.message = message;
    this.show = show;
    this.began = performance.now();
    this.firstToken = this.usage = this.finish = this.timer = null;
    this.text = el("div", { class: "content markdown" });
    this.markdown = new Markdown(this.text);
    this.thought = el("div", { class: "content" });
    this.fold = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.tools = el("div", { class: "tools" });
    this.waiting = el("span", { class: "waiting", role: "status", "aria-label": "Waiting for the answer" });
    this.note = el("p", { class: "note muted" });
    this.actions = el("div", { class: "actions" });
    this.about = el("div", { class: "about muted", hidden: true });
    this.mark = el("button", { type: "button", class: "ghost mark", title: "About this answer", "aria-label": "About this answer", "aria-expanded": "false", onclick: () => this.unfold() }, infoIcon());
    this.after = el("div");
    this.element = el("article", { class: "message assistant", "aria-label": "Answer" },
      this.fold, this.text, this.tools, this.waiting, this.note, this.actions, this.about, this.after);
    this.render();
    for (const call of message.tool_calls ?? []) this.drawCall(call);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.message.request = chunk.id;
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.weft) this.message.cache = chunk.weft.prompts[0].cache;
    for (const choice of chunk.choices) {
      this.firstToken ??= performance.now();
      this.finish = choice.finish_reason || this.finish;
      this.add(choice.delta);
    }
  }

  add(delta) {
    if (delta.reasoning) this.message.reasoning = (this.message.reasoning ?? "") + delta.reasoning;
    if (delta.content) this.message.content += delta.content;
    for (const part of delta.tool_calls || []) this.addCall(part);
    this.timer ??= setTimeout(() => this.render(), RENDER_MS);
  }

  render() {
    this.timer = null;
    const { content, reasoning } = this.message;
    if (reasoning && this.thought.textContent !== reasoning) {
      this.thought.textContent = reasoning;
      this.fold.hidden = false;
    }
    this.markdown.set(content ?? "");
    this.waiting.hidden = Boolean(content);
  }

  addCall(part) {
    this.message.tool_calls ??= [];
    const known = this.message.tool_calls[part.index];
    if (known) {
      known.function.arguments += part.function.arguments || "";
      this.tools.children[part.index].querySelector("pre").textContent = known.function.arguments;
      return;
    }
    const { name, arguments: given } = part.function;
    const call = { id: part.id, type: "function", function: { name, arguments: given || "" } };
    this.message.tool_calls[part.index] = call;
    this.drawCall(call);
  }

  drawCall(call) {
    this.tools.append(el("details", { class: "tool", open: true },
      el("summary", {}, `Call of ${call.function.name}`), el("pre", {}, call.function.arguments)));
  }

  /** The answer has ended; `note` says how, if not by itself. */
  close(note) {
    clearTimeout(this.timer);
    this.render();
    this.message.figures = this.words();
    this.message.note = [this.finish === "length" ? "Cut at the token limit." : "", note].join(" ").trim();
  }

  words() {
    const parts = [];
    if (this.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.usage;
      parts.push(`${integer(prompt_tokens)} prompt tokens, ${integer(prompt_tokens_details?.cached_tokens ?? 0)} of them reused`);
      const time = (performance.now() - this.firstToken) / 1000;
      parts.push(`${integer(completion_tokens)} new tokens` + (time > 0.01 ? ` at ${integer(completion_tokens / time)} per second` : ""));
    }
    if (this.firstToken !== null) parts.push(`first token after ${seconds((this.firstToken - this.began) / 1000)}`);
    return parts.join(" · ");
  }

  /** What stands below an answer that has ended; `actions`: further buttons. */
  drawFoot(...actions) {
    const { figures, note, cache, request, content } = this.message;
    this.waiting.hidden = true;
    this.note.textContent = note ?? "";
    const lines = [...(figures ? figures.split(" · ") : []), ...(cache ? [`Cache: ${cache}.`] : [])].map((line) => el("li", {}, line));
    const look = el("button", { type: "button", class: "look", onclick: () => this.show(request) }, "Show in Inspect");
    this.about.replaceChildren(el("ul", {}, ...lines), ...(request ? [look] : []));
    this.actions.replaceChildren(...(content ? [copyButton(() => content)] : []), ...actions, ...(lines.length || request ? [this.mark] : []));
  }

  /** Show or hide the figures of the answer and what the cache did for it. */
  unfold() {
    this.about.hidden = !this.about.hidden;
    this.mark.setAttribute("aria-expanded", String(!this.about.hidden));
  }
}
