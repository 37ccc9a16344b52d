// Calls to the server, and the banner while it cannot be used.

import { byId } from "./dom.js";

const KEY = "weft-key";
const FIRST_WAIT_S = 1, LONGEST_WAIT_S = 8;

let timer = null;
let wait = FIRST_WAIT_S;
let connected = () => {};

export const getKey = () => sessionStorage.getItem(KEY) || "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** `fetch` with the key; an answer that is not 200 becomes an Error with the server's own words. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  const response = await heard(() => fetch(path, { ...options, headers }));
  if (response.ok) return response;
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not one of the server's own errors */ }
  const error = new Error(message);
  error.status = response.status;
  throw error;
}

/** The values of the `data:` events of a response. Throws an Error if it breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await heard(() => reader.read());
    if (done) throw lost("The answer broke off: the server closed the connection.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

/** What `read` gives; if nobody answers any more, the banner says so and tries to connect again. */
async function heard(read) {
  try {
    return await read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw lost("The server cannot be reached.");
  }
}

function lost(message) {
  if (timer === null) again("The server cannot be reached");
  return new Error(message);
}

function banner(message, canRetry) {
  byId("banner-text").textContent = message;
  byId("banner").hidden = !message;
  byId("retry").hidden = !canRetry;
}

function again(reason) {
  clearTimeout(timer);
  banner(`${reason}; trying again in ${wait} s.`, true);
  timer = setTimeout(connect, wait * 1000);
  wait = Math.min(2 * wait, LONGEST_WAIT_S);
}

/** Ask for the model until there is an answer; the listener gets its entry. */
export async function connect() {
  clearTimeout(timer);
  timer = 0; // on its way
  try {
    const models = await (await call("/v1/models")).json();
    timer = null;
    wait = FIRST_WAIT_S;
    banner("");
    connected(models.data[0]);
  } catch (error) {
    if (error.status === 401) {
      timer = null;
      byId("key-box").open = true;
      banner("This server wants an API key.", false);
    } else {
      again(error.status ? `The server cannot be used now: ${error.message}` : "The server cannot be reached");
    }
  }
}

/** `onConnected` gets the model's entry of `/v1/models` whenever the server can be used (again). */
export function start(onConnected) {
  connected = onConnected;
  byId("key").value = getKey();
  byId("retry").addEventListener("click", () => {
    wait = FIRST_WAIT_S;
    connect();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("key-box").open = false;
    connect();
  });
  connect();
}
