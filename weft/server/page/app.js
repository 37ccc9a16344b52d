// The frame of the page: tabs, the API key, the model's name.

import { byId, call, getKey, setKey } from "./dom.js";
import * as chat from "./chat.js";
import * as inspect from "./inspect.js";

const TABS = ["chat", "inspect"];

function show(name, focus = false) {
  for (const tab of TABS) {
    const button = byId(`tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === name));
    button.tabIndex = tab === name ? 0 : -1;
    byId(tab).hidden = tab !== name;
    if (focus && tab === name) button.focus();
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  inspect.setVisible(name === "inspect");
  if (name === "chat") byId("log").scrollTop = byId("log").scrollHeight; // hidden elements forget where they were
}

for (const tab of TABS) {
  byId(`tab-${tab}`).addEventListener("click", () => show(tab));
  byId(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") show(TABS[1 - TABS.indexOf(tab)], true);
  });
}

export function banner(message) {
  byId("banner").textContent = message || "";
  byId("banner").hidden = !message;
}

async function connect() {
  try {
    const models = await (await call("/v1/models")).json();
    byId("model").textContent = models.data[0].id;
    banner("");
  } catch (error) {
    if (error.status === 401) {
      byId("key-box").open = true;
      banner("This server wants an API key.");
    } else {
      banner(`The server cannot be used now: ${error.message}`);
      setTimeout(connect, 2000);
    }
  }
}

byId("key").value = getKey();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key-box").open = false;
  connect();
});

chat.start((requestId) => {
  inspect.choose(requestId);
  show("inspect", true);
});
inspect.start();
show(location.hash === "#inspect" ? "inspect" : "chat");
connect();
