// Conversations in this browser's local storage, one entry each, so that two tabs do not overwrite each other's.
//
// A conversation: {id, title, created, updated, parameters: {name: text}, messages}. Messages are those of the API;
// answers also have `reasoning`, `figures`, `cache` and `request`, which are shown and not sent.

import { imagesOf, textOf, withoutImages } from "./pictures.js";

const PREFIX = "weft-chat ";
const TITLE_LENGTH = 60;

export function fresh(parameters) {
  const now = Date.now();
  return { id: `${now.toString(36)}${Math.random().toString(36).slice(2, 8)}`, title: "", created: now, updated: now, parameters, messages: [] };
}

/** All of them, the latest first. What cannot be read is left out. */
export function all() {
  const result = [];
  for (const key of keys()) {
    try {
      const conversation = JSON.parse(localStorage.getItem(key));
      if (Array.isArray(conversation.messages)) result.push(conversation);
    } catch { /* written by another version, or broken */ }
  }
  return result.sort((a, b) => b.updated - a.updated);
}

const keys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));

export const get = (id) => JSON.parse(localStorage.getItem(PREFIX + id) || "null");

/** Keep it. If there is no room its images go first, then the oldest others; false: there is none even then. */
export function save(conversation) {
  conversation.updated = Date.now();
  conversation.title ||= titleOf(conversation);
  let kept = conversation;
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(kept));
      return true;
    } catch {
      if (kept === conversation && conversation.messages.some((message) => imagesOf(message.content).length)) {
        kept = { ...conversation, messages: withoutImages(conversation.messages) };
        continue;
      }
      const oldest = all().filter((other) => other.id !== conversation.id).at(-1);
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

function titleOf({ messages }) {
  const first = messages.find((m) => m.role === "user")?.content;
  const text = textOf(first).replace(/\s+/g, " ").trim() || (imagesOf(first).length ? "An image" : "");
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH - 1)}…` : text;
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

export const removeAll = () => keys().forEach((key) => localStorage.removeItem(key));

/** `changed` is called when another tab keeps or removes one. */
export function listen(changed) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) changed();
  });
}

/** A conversation as Markdown. */
export function asMarkdown({ title, created, parameters, messages }) {
  const parts = [`# ${title}`, `${new Date(created).toISOString()}`];
  if (parameters.system) parts.push("## System", parameters.system);
  for (const message of messages) {
    parts.push(`## ${{ user: "User", assistant: "Assistant", tool: "Tool" }[message.role]}`);
    if (message.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${message.reasoning}\n\n</details>`);
    for (const url of imagesOf(message.content)) parts.push(`![image](${url})`);
    const text = textOf(message.content);
    if (text) parts.push(message.role === "tool" ? fenced(text) : text);
    for (const call of message.tool_calls ?? []) parts.push(`Call of \`${call.function.name}\`:`, fenced(call.function.arguments));
  }
  return `${parts.join("\n\n")}\n`;
}

function fenced(text) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((m) => m[0].length + 1)));
  return `${fence}\n${text}\n${fence}`;
}
