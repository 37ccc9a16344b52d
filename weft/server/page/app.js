// The frame of the page: tabs, the API key, the model's name.

import { byId, tabs } from "./dom.js";
import * as connection from "./connection.js";
import * as chat from "./chat.js";
import * as inspect from "./inspect.js";

const current = tabs(["chat", "inspect"], (name) => {
  if (!location.hash.startsWith(`#${name}`)) history.replaceState(null, "", `#${name}`);
  inspect.setVisible(name === "inspect");
  if (name === "chat") byId("log").scrollTop = byId("log").scrollHeight; // hidden elements forget where they were
});

inspect.start();
chat.start((requestId) => {
  current("inspect", true);
  inspect.choose(requestId);
});
const show = () => current(location.hash.startsWith("#inspect") ? "inspect" : "chat");
window.addEventListener("hashchange", show);
show();
connection.start((model) => {
  byId("model").textContent = model.id;
  chat.setModel(model);
  inspect.look();
});
