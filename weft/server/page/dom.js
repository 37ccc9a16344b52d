// Elements and figures in words.
//
// Texts become text nodes here. The one other way into the page is markdown.js, which sanitises.

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

/** Tabs with ids `tab-NAME`; `show(name, focus)` makes one current. Arrow keys walk. */
export function tabs(names, show) {
  const current = (name, focus) => {
    for (const each of names) {
      const button = byId(`tab-${each}`);
      button.setAttribute("aria-selected", String(each === name));
      button.tabIndex = each === name ? 0 : -1;
      byId(button.getAttribute("aria-controls")).hidden = each !== name;
      if (focus && each === name) button.focus();
    }
    show(name);
  };
  names.forEach((name, i) => {
    byId(`tab-${name}`).addEventListener("click", () => current(name, false));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) current(names[(i + by + names.length) % names.length], true);
    });
  });
  return current;
}

/** A button that copies what `text()` gives, and says so. */
export function copyButton(text, className = "ghost") {
  const button = el("button", { type: "button", class: className }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* no clipboard without TLS beyond localhost: the old way */ }
  const field = el("textarea", { class: "hidden-label", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** A function that calls `use(loaded)`: at once if `load()` has ended, else when it has. A load that fails is tried again. */
export function lazily(load) {
  let loaded = null, loading = null;
  const start = async () => {
    try {
      loaded = await load();
    } catch { /* the server is away: what needs this stays plain */ }
    loading = null;
  };
  return async (use) => {
    if (loaded === null) await (loading ??= start());
    if (loaded !== null) use(loaded);
  };
}

/** Hand the browser a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export const integer = (value) => Math.round(value).toLocaleString("en");

/** A count in at most four characters and a letter, for axes. */
export function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return value >= 100 || Number.isInteger(value) ? integer(value) : String(+value.toPrecision(2));
}

/** Seconds in words of sensible precision. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.0009995) return `${+(value * 1e6).toPrecision(3)} µs`;
  if (value < 0.9995) return `${+(value * 1e3).toPrecision(3)} ms`;
  return `${+value.toPrecision(3)} s`;
}
