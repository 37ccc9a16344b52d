// Chat: conversations over /v1/chat/completions, streamed.

import { call, events } from "./connection.js";
import { byId, copyButton, download, el } from "./dom.js";
import { Answer } from "./answer.js";
import { own } from "./inspect.js";
import * as parameters from "./parameters.js";
import { drawConversations } from "./conversations.js";
import { allowPictures, contentOf, drawImages, imagesOf, startPictures, takeAttached, textOf } from "./pictures.js";
import * as store from "./store.js";
import { follow } from "./follow.js";
import { drawWelcome } from "./welcome.js";

let current = null; // the conversation that is shown
let card = null; // the model, as `/v1/models` describes it
const running = new Map(); // id of a conversation -> {conversation, answer, controller} on its way
const views = new WeakMap(); // message -> its Answer, so that folds stay open
let showRequest = () => {};
let log = null;

/** The request's body. Throws an Error in words if the tools are not JSON. */
function body(messages) {
  const { system, fields } = parameters.request();
  const sent = messages.map(({ role, content, tool_calls, tool_call_id }) => ({ role, content, tool_calls, tool_call_id }));
  return {
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    stream: true,
    stream_options: { include_usage: true },
    ...fields,
  };
}

/** Ask for an answer to the conversation as it stands. */
async function respond() {
  const conversation = current; // another may be shown before the answer has ended
  const answer = new Answer(showRequest);
  const controller = new AbortController();
  running.set(conversation.id, { conversation, answer, controller });
  views.set(answer.message, answer);
  keep(conversation);
  draw();
  log.toEnd();
  let note = "", failure = "";
  try {
    const options = { method: "POST", body: JSON.stringify(body(conversation.messages)), signal: controller.signal };
    options.headers = { "Content-Type": "application/json" };
    for await (const chunk of events(await call("/v1/chat/completions", options))) {
      answer.take(chunk);
      own(chunk.id);
    }
  } catch (error) {
    if (controller.signal.aborted) note = "Stopped.";
    else failure = error.message;
  }
  answer.close(note);
  running.delete(conversation.id);
  const { content, reasoning, tool_calls } = answer.message;
  if (content || reasoning || tool_calls) conversation.messages.push(answer.message);
  keep(conversation);
  if (conversation === current) draw(failure || (conversation.messages.at(-1) !== answer.message && note));
}

function keep(conversation) {
  if (removed.has(conversation.id)) return;
  const isKept = store.save(conversation);
  byId("title").title = isKept ? "" : "This browser's storage is full: the conversation is not kept.";
}

const removed = new Set(); // while their answers were on the way

// -- drawing ----------------------------------------------------------------------------------------------------------

/** The shown conversation from its messages; `failure`: why the last one has no (whole) answer. */
function draw(failure = "") {
  const run = running.get(current.id);
  const elements = current.messages.map((message, i) => drawMessage(message, i));
  if (run) elements.push(run.answer.element);
  else if (failure || unanswered()) elements.push(drawFailure(failure || "No answer yet."));
  if (!elements.length) elements.push(drawWelcome(card, send));
  byId("messages").replaceChildren(...elements);
  byId("title").textContent = current.title || "New chat";
  byId("export-menu").classList.toggle("absent", current.messages.length === 0);
  byId("send").hidden = Boolean(run);
  byId("stop").hidden = !run;
  byId("log").setAttribute("aria-busy", String(Boolean(run)));
  drawList();
}

const unanswered = () => ["user", "tool"].includes(current.messages.at(-1)?.role);

function drawMessage(message, i) {
  if (message.role === "user") return drawQuestion(message, i);
  if (message.role === "tool") return el("pre", { class: "result", "aria-label": "Result" }, message.content);
  const answer = views.get(message) ?? new Answer(showRequest, message);
  views.set(message, answer);
  if (message.request) own(message.request);
  const isLast = i === current.messages.length - 1;
  answer.drawFoot(button("Regenerate", () => redo(i)));
  answer.after.replaceChildren(...(message.tool_calls && isLast ? [resultsForm(message.tool_calls)] : []));
  return answer.element;
}

const button = (name, onclick) => el("button", { type: "button", class: "ghost", onclick }, name);

function drawQuestion(message, i) {
  const element = el("article", { class: "message user", "aria-label": "You" },
    drawImages(message.content),
    textOf(message.content) ? el("div", { class: "content" }, textOf(message.content)) : null,
    el("div", { class: "actions" }, copyButton(() => textOf(message.content)), button("Edit", () => element.replaceWith(editor(message, i)))));
  return element;
}

function drawFailure(words) {
  return el("div", { class: "message failure" }, el("p", { class: "error" }, words), button("Try again", () => redo(current.messages.length - (unanswered() ? 0 : 1))));
}

/** A question that is being changed; sending it replaces what came after it. */
function editor(message, i) {
  const field = el("textarea", { "aria-label": "Your message", rows: Math.min(12, textOf(message.content).split("\n").length + 1) });
  field.value = textOf(message.content);
  const form = el("form", { class: "message editor" }, field,
    el("div", { class: "row" }, el("button", { class: "primary" }, "Send"), button("Cancel", () => draw()),
      el("span", { class: "muted" }, i < current.messages.length - 1 ? "What follows is replaced." : "")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const images = imagesOf(message.content);
    if (!(field.value.trim() || images.length) || running.has(current.id)) return;
    current.messages.splice(i, Infinity, { role: "user", content: contentOf(field.value, images) });
    respond();
  });
  setTimeout(() => field.focus());
  return form;
}

/** Answer anew from message `i` on; what came after it goes. */
function redo(i) {
  if (running.has(current.id)) return;
  const later = current.messages.slice(i + 1).some((m) => m.role === "user");
  if (later && !confirm("Regenerate this answer? What follows it is removed.")) return;
  current.messages.splice(i);
  respond();
}

/** Fields for what the called functions give. */
function resultsForm(calls) {
  const fields = calls.map((c) => el("textarea", { rows: 2, "aria-label": `Result of ${c.function.name}` }));
  const labels = calls.map((c, i) => el("label", {}, `Result of ${c.function.name}`, fields[i]));
  const form = el("form", { class: "results" }, ...labels, el("button", {}, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running.has(current.id)) return;
    calls.forEach((c, i) => current.messages.push({ role: "tool", tool_call_id: c.id, content: fields[i].value }));
    respond();
  });
  setTimeout(() => fields[0].focus());
  return form;
}

// -- conversations ----------------------------------------------------------------------------------------------------

function drawList() {
  drawConversations(store.all(), current, (id) => running.has(id), { open, remove });
}

function open(conversation) {
  current = running.get(conversation.id)?.conversation ?? conversation;
  parameters.show(current.parameters);
  setListing(false);
  draw();
  log.toEnd();
}

/** On a phone the list covers the chat while it is open. */
function setListing(isOpen) {
  byId("chat").classList.toggle("listing", isOpen);
  byId("column").inert = isOpen;
  byId("show-conversations").setAttribute("aria-expanded", String(isOpen));
}

const openFresh = () => {
  open(store.fresh({ ...current?.parameters }));
  byId("message").focus();
};

function remove(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  removed.add(conversation.id);
  running.get(conversation.id)?.controller.abort();
  store.remove(conversation.id);
  if (conversation.id === current.id) openFresh();
  else drawList();
}

function removeAll() {
  if (!confirm("Delete all conversations of this browser?")) return;
  for (const conversation of store.all()) removed.add(conversation.id);
  for (const { controller } of running.values()) controller.abort();
  store.removeAll();
  openFresh();
}

/** Another tab changed what is kept; an answer on its way here goes on and is kept when it ends. */
function changedElsewhere() {
  const kept = store.get(current.id);
  if (!running.has(current.id) && kept && kept.updated > current.updated) open(kept);
  else drawList();
}

const fileName = () => `weft-${new Date(current.created).toISOString().slice(0, 16).replaceAll(":", "")}`;

// -- the composer -----------------------------------------------------------------------------------------------------

/** Send what was written. */
function submit() {
  const field = byId("message");
  if (running.has(current.id) || !send(field.value)) return;
  field.value = "";
  grow();
}

/** Send a text with the attached images; false if there is nothing to send. */
function send(text) {
  const images = takeAttached();
  if (!text.trim() && !images.length) return false;
  current.messages.push({ role: "user", content: contentOf(text, images) });
  respond();
  return true;
}

const stop = () => running.get(current.id)?.controller.abort();

function grow() {
  const field = byId("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** The server can be used (again), with this model. */
export function setModel(model) {
  card = model;
  parameters.setModel(model);
  allowPictures(model.weft.images);
  if (byId("welcome")) draw();
}

/** `show` is called with a request's id to look at it. */
export function start(show) {
  showRequest = show;
  log = follow(byId("log"), byId("messages"), byId("to-latest"));
  parameters.start((values) => {
    current.parameters = values;
    if (current.messages.length) keep(current);
  });
  const on = (id, event, action) => byId(id).addEventListener(event, action);
  on("composer", "submit", (event) => {
    event.preventDefault();
    submit();
  });
  on("message", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  on("message", "input", grow);
  on("chat", "keydown", (event) => {
    if (event.key !== "Escape") return;
    if (byId("chat").classList.contains("listing")) {
      setListing(false);
      byId("show-conversations").focus();
    } else {
      stop();
    }
  });
  on("stop", "click", stop);
  on("new-chat", "click", openFresh);
  on("delete-all", "click", removeAll);
  on("show-conversations", "click", () => {
    setListing(true);
    byId("new-chat").focus();
  });
  on("scrim", "click", () => setListing(false));
  on("export-markdown", "click", () => download(`${fileName()}.md`, "text/markdown", store.asMarkdown(current)));
  on("export-json", "click", () => download(`${fileName()}.json`, "application/json", JSON.stringify(current, null, 2)));
  on("export-all", "click", () => download("weft-conversations.json", "application/json", JSON.stringify(store.all(), null, 2)));
  matchMedia("(max-width: 46rem)").addEventListener("change", () => setListing(false)); // style.css has the same width
  startPictures();
  store.listen(changedElsewhere);
  open(store.all()[0] ?? store.fresh({}));
}
