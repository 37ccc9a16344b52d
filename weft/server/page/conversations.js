// The list of conversations beside the chat.

import { byId, el } from "./dom.js";

/** `open` and `remove` are called with a conversation. */
export function drawConversations(conversations, current, isRunning, { open, remove }) {
  const rows = conversations.map((conversation) => {
    const isCurrent = conversation.id === current.id;
    const mark = isRunning(conversation.id) ? el("span", { class: "waiting", "aria-label": "answering" }) : null;
    return el("li", { class: isCurrent ? "current" : "" },
      el("button", {
        type: "button", class: "open", "aria-current": isCurrent ? "true" : null, title: when(conversation.updated),
        onclick: () => open(conversation),
      }, conversation.title || "New chat", mark),
      el("button", { type: "button", class: "ghost delete", "aria-label": `Delete ${conversation.title}`, onclick: () => remove(conversation) }, "✕"));
  });
  byId("conversation-list").replaceChildren(...rows);
  for (const id of ["export-all", "delete-all"]) byId(id).disabled = rows.length === 0;
}

const when = (moment) => new Date(moment).toLocaleString();
