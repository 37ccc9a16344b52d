// Images of questions: dropped, pasted or chosen, kept as data URLs in the messages' content parts.

import { byId, el } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LONGEST = 2048, LARGEST = 1 << 20; // pixels of a side, and bytes: what is larger is sent as a smaller copy

let attached = []; // data URLs, of the message that is being written
let isAllowed = false; // the model reads images

export const textOf = (content) => (typeof content === "string" ? content : (content ?? []).filter((part) => part.type === "text").map((part) => part.text).join(""));

export const imagesOf = (content) => (Array.isArray(content) ? content.filter((part) => part.type === "image_url").map((part) => part.image_url.url) : []);

/** A message's content: its images before its text. */
export function contentOf(text, images) {
  if (!images.length) return text;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...(text.trim() ? [{ type: "text", text }] : [])];
}

/** Messages without the bytes of their images, for a storage that has no room. */
export const withoutImages = (messages) => messages.map((message) => (imagesOf(message.content).length ? { ...message, content: textOf(message.content) || "(an image, not kept)" } : message));

export function drawImages(content) {
  const images = imagesOf(content);
  if (!images.length) return null;
  return el("div", { class: "pictures" }, ...images.map((src, i) => el("img", { src, alt: `Image ${i + 1} of ${images.length}` })));
}

/** The images of the message that is being written; it has none then. */
export function takeAttached() {
  const taken = attached;
  attached = [];
  drawAttached();
  return taken;
}

/** Offer to attach images, or not: not every model reads them. */
export function allowPictures(allowed) {
  isAllowed = allowed;
  byId("attach").hidden = !allowed;
}

function drawAttached(complaint = "") {
  const rows = attached.map((src, i) => el("li", {}, el("img", { src, alt: `Image ${i + 1}` }),
    el("button", {
      type: "button", class: "ghost", "aria-label": `Remove image ${i + 1}`,
      onclick: () => {
        attached.splice(i, 1);
        drawAttached();
        byId("message").focus();
      },
    }, "✕")));
  byId("attached").replaceChildren(...rows);
  byId("attached").hidden = !rows.length;
  byId("attach-problem").textContent = complaint;
}

async function attach(files) {
  if (!isAllowed) {
    drawAttached("This model reads text only.");
    return;
  }
  const problems = [];
  for (const file of files) {
    try {
      if (!KINDS.includes(file.type)) throw new Error("it is no PNG, JPEG, WebP or GIF");
      attached.push(await dataUrl(file));
    } catch (error) {
      problems.push(`${file.name || "What you gave"} cannot be attached: ${error.message || "it cannot be read"}.`);
    }
  }
  drawAttached(problems.join(" "));
}

/** The file as it is, or a smaller copy. */
async function dataUrl(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(image.width, image.height));
  if (scale === 1 && file.size <= LARGEST) return readAsUrl(file);
  const canvas = el("canvas", { width: Math.max(1, Math.round(image.width * scale)), height: Math.max(1, Math.round(image.height * scale)) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/webp", 0.9);
}

function readAsUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");

export function startPictures() {
  byId("attach").addEventListener("click", () => byId("attach-file").click());
  byId("attach-file").addEventListener("change", async () => {
    await attach(byId("attach-file").files);
    byId("attach-file").value = "";
    byId("message").focus();
  });
  byId("message").addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    attach([...event.clipboardData.files]);
  });
  const chat = byId("chat");
  for (const name of ["dragenter", "dragover"]) {
    chat.addEventListener(name, (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      chat.classList.add("dropping");
    });
  }
  chat.addEventListener("dragleave", (event) => {
    if (!chat.contains(event.relatedTarget)) chat.classList.remove("dropping");
  });
  chat.addEventListener("drop", (event) => {
    chat.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
}
