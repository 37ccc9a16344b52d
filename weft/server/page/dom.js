// Elements, and calls to the server.
//
// Texts become text nodes here and nowhere else: nothing that a model or a caller wrote is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick`), and children (elements or texts). */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const KEY = "weft-key";

export const getKey = () => sessionStorage.getItem(KEY) || "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** `fetch` with the key; an answer that is not 200 becomes an Error with the server's own words. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not one of the server's own errors */ }
  const error = new Error(message);
  error.status = response.status;
  throw error;
}

export const integer = (value) => Math.round(value).toLocaleString("en");

/** Seconds in words of sensible precision. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : 1)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}
