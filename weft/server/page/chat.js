// Chat: one conversation over /v1/chat/completions, streamed.

import { byId, call, el, integer, seconds } from "./dom.js";
import { own } from "./inspect.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "priority"];

let messages = [];
let running = null; // AbortController of the answer on its way
let showRequest = () => {};

/** The request's body. Throws an Error in words if the tools are not JSON. */
function body() {
  const system = byId("p-system").value.trim();
  const result = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    const value = byId(`p-${name}`).value;
    if (value !== "") result[name] = Number(value);
  }
  const thinking = byId("p-thinking").value;
  if (thinking) result.chat_template_kwargs = { enable_thinking: thinking === "true" };
  const tools = byId("p-tools").value.trim();
  if (tools) {
    try {
      result.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools are not JSON: ${error.message}`);
    }
  }
  return result;
}

/** The values of the `data:` events of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

/** An answer as it grows: reasoning fold, content, tool calls, a line of figures. */
class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.began = performance.now();
    this.firstToken = null;
    this.usage = null;
    this.cache = null;
    this.id = null;
    this.finish = null;
    this.text = el("div", { class: "content" });
    this.thought = el("div", { class: "content" });
    this.fold = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.tools = el("div", { class: "tools" });
    this.figures = el("p", { class: "figures muted" });
    this.element = el("article", { class: "message assistant", "aria-label": "Answer" },
      this.fold, this.text, this.tools, this.figures);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.id = chunk.id;
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.weft) this.cache = chunk.weft.prompts[0].cache;
    for (const choice of chunk.choices) {
      this.firstToken ??= performance.now();
      this.finish = choice.finish_reason || this.finish;
      this.add(choice.delta);
    }
  }

  add(delta) {
    if (delta.reasoning) {
      this.reasoning += delta.reasoning;
      this.thought.append(delta.reasoning);
      this.fold.hidden = false;
    }
    if (delta.content) {
      this.content += delta.content;
      this.text.append(delta.content);
    }
    for (const part of delta.tool_calls || []) this.addCall(part);
  }

  addCall(part) {
    const known = this.calls[part.index];
    if (known) {
      known.function.arguments += part.function.arguments || "";
      known.output.textContent = known.function.arguments;
      return;
    }
    const output = el("pre", {}, part.function.arguments || "");
    this.calls[part.index] = { id: part.id, function: { ...part.function }, output };
    this.tools.append(el("details", { class: "tool", open: true }, el("summary", {}, `Call of ${part.function.name}`), output));
  }

  /** The figures under an answer that has ended. */
  close(note) {
    const parts = [];
    const now = performance.now();
    if (this.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.usage;
      parts.push(`${integer(prompt_tokens)} prompt tokens, ${integer(prompt_tokens_details.cached_tokens)} reused`);
      const time = (now - this.firstToken) / 1000;
      parts.push(`${integer(completion_tokens)} new` + (time > 0.01 ? ` at ${integer(completion_tokens / time)} tok/s` : ""));
    }
    if (this.firstToken !== null) parts.push(`first after ${seconds((this.firstToken - this.began) / 1000)}`);
    if (this.finish === "length") parts.push("cut at the token limit");
    if (note) parts.push(note);
    this.figures.textContent = parts.join(" · ");
    if (this.cache) {
      this.figures.append(el("br"), this.cache, " ",
        el("button", { type: "button", class: "link", onclick: () => showRequest(this.id) }, "Show in Inspect"));
    }
  }

  /** As a message of the conversation that goes on. */
  message() {
    const result = { role: "assistant", content: this.content };
    if (this.calls.length) {
      result.tool_calls = this.calls.map((c) => ({ id: c.id, type: "function", function: c.function }));
    }
    return result;
  }
}

function addToLog(element) {
  byId("hint")?.remove();
  const log = byId("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  log.append(element);
  if (follows) log.scrollTop = log.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("log").setAttribute("aria-busy", String(controller !== null));
}

/** A question that was refused is no part of the conversation; it can be changed and sent again. */
function takeBack() {
  if (messages.at(-1)?.role === "user") byId("message").value ||= messages.pop().content;
}

/** Ask for an answer to the conversation as it stands. */
async function respond() {
  let request;
  try {
    request = body();
  } catch (error) {
    addToLog(el("p", { class: "message error" }, error.message));
    takeBack();
    return;
  }
  const mine = messages; // a new chat meanwhile must not get this answer
  const answer = new Answer();
  const controller = new AbortController();
  setRunning(controller);
  addToLog(answer.element);
  let note = "";
  try {
    const options = { method: "POST", body: JSON.stringify(request), signal: controller.signal };
    options.headers = { "Content-Type": "application/json" };
    const log = byId("log");
    for await (const chunk of events(await call("/v1/chat/completions", options))) {
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      answer.take(chunk);
      own(answer.id);
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (controller.signal.aborted) note = "stopped";
    else answer.element.append(el("p", { class: "error" }, error.message));
    if (messages === mine && !note && !answer.content) takeBack();
  }
  answer.close(note);
  if (answer.content || answer.calls.length) mine.push(answer.message());
  if (running === controller) setRunning(null);
  if (messages === mine && answer.calls.length && !note) askForResults(answer);
}

/** Fields for what the called functions give. */
function askForResults(answer) {
  const fields = answer.calls.map((c) => el("textarea", { rows: 2, "aria-label": `Result of ${c.function.name}` }));
  const labels = answer.calls.map((c, i) => el("label", {}, `Result of ${c.function.name}`, fields[i]));
  const form = el("form", { class: "results" }, ...labels, el("button", {}, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    answer.calls.forEach((c, i) => messages.push({ role: "tool", tool_call_id: c.id, content: fields[i].value }));
    form.replaceWith(...answer.calls.map((c, i) => el("pre", { class: "result" }, fields[i].value)));
    respond();
  });
  answer.element.append(form);
  fields[0].focus();
  form.scrollIntoView({ block: "nearest" });
}

function send() {
  const text = byId("message").value;
  if (!text.trim() || running) return;
  byId("message").value = "";
  messages.push({ role: "user", content: text });
  addToLog(el("article", { class: "message user", "aria-label": "You" }, el("div", { class: "content" }, text)));
  byId("log").scrollTop = byId("log").scrollHeight;
  respond();
}

const stop = () => running?.abort();

function clear() {
  stop();
  messages = [];
  byId("log").replaceChildren();
  byId("message").focus();
}

/** `show` is called with a request's id to look at it. */
export function start(show) {
  showRequest = show;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
}
