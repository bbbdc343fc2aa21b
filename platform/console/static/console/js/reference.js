/** The API reference: search for operations, open them by URL, and send them with the user's key. */

import { copyFrom } from "./lib/clipboard.js";
import { el } from "./lib/dom.js";
import { HTTP_SNIPPETS } from "./lib/http_snippets.js";
import { ROOT } from "./lib/root.js";
import { send } from "./playground/server.js";

const MAX_CHARS = 200_000; // of an answer that's shown

/* -- opening the operation in the URL -- */

function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named?.localName !== "details") return;
  named.open = true;
  named.scrollIntoView();
}

addEventListener("hashchange", openNamed);
openNamed();

/* -- search -- */

const find = document.getElementById("find");
find.closest("[hidden]").hidden = false;
find.addEventListener("input", () => {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const group of document.querySelectorAll("[data-group]")) {
    let any = false;
    for (const operation of group.querySelectorAll("details.operation")) {
      const text = `${operation.querySelector("summary").textContent} ${group.querySelector("h2").textContent}`;
      operation.hidden = !words.every((word) => text.toLowerCase().includes(word));
      any ||= !operation.hidden;
    }
    group.hidden = !any;
  }
});

/* -- examples in languages other than curl, built from the form that sends the operation -- */

function addressOf(form) {
  const { path } = form.closest("details").dataset;
  return ROOT + path.slice(1).replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(form.elements[name].value));
}

function addLanguages(operation) {
  const [figure, form] = [operation.querySelector("[data-example]"), operation.querySelector("form.try")];
  const head = figure?.querySelector("figcaption > span");
  if (!form || !head) return;
  const code = figure.querySelector("code");
  const curl = code.textContent;
  const choices = ["curl", ...Object.keys(HTTP_SNIPPETS)].map((language) => {
    const click = () => {
      const body = form.querySelector("[data-body]")?.value;
      const request = { method: operation.dataset.method.toUpperCase(), url: location.origin + addressOf(form), body };
      code.textContent = HTTP_SNIPPETS[language]?.(request) ?? curl;
      for (const option of choices) option.setAttribute("aria-pressed", String(option === choice));
    };
    const choice = el("button", { type: "button", "aria-pressed": String(language === "curl"), on: { click } }, language);
    return choice;
  });
  head.replaceWith(el("span", { class: "choices", role: "group", "aria-label": "Language" }, ...choices));
}

/* -- a key for this session -- */

const KEY_LIFETIME_MS = 3_600_000;

async function createKey(button, field, status) {
  button.disabled = true;
  try {
    const expires = new Date(Date.now() + KEY_LIFETIME_MS);
    const body = { name: "API reference", expires_at: expires.toISOString() };
    const { secret, prefix } = await send("POST", button.dataset.keys, body);
    field.value = secret;
    status.textContent = `${prefix} works until ${expires.toLocaleTimeString()}.`;
  } catch (error) {
    button.disabled = false;
    if (error.code === "recent_authentication_required") {
      status.replaceChildren(el("a", { href: button.dataset.again }, "Prove who you are"), ", then create the key again.");
    } else status.textContent = error.message;
  }
}

document.querySelector("[data-keys]")?.addEventListener("click", ({ target }) => {
  createKey(target, document.getElementById("key"), keyField.querySelector("[role=status]"));
});

/* -- copying and sending -- */

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-example] [data-copy]");
  if (button) copyFrom(button, button.closest("figure").querySelector("code").textContent);
});

const keyField = document.querySelector(".try-key");

document.addEventListener(
  "toggle",
  (event) => {
    const form = event.target.querySelector?.("form.try");
    if (!form || !event.target.open) return;
    if (form.hidden) addLanguages(event.target);
    form.hidden = false;
    keyField.hidden = false;
    form.prepend(keyField); // one field for all: it goes to the operation that was opened last
  },
  true,
);

let running = null;

document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form.try");
  if (!form) return;
  event.preventDefault();
  running?.abort();
  running = new AbortController();
  const { method } = form.closest("details").dataset;
  const state = form.querySelector(".try-state");
  const log = form.querySelector(".log");
  const body = form.querySelector("[data-body]")?.value;
  const address = addressOf(form);
  const headers = { Authorization: `Bearer ${keyField.querySelector("input").value.trim()}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  log.hidden = true;
  log.textContent = "";
  state.textContent = "Sent…";
  try {
    const request = { method: method.toUpperCase(), headers, body, signal: running.signal, credentials: "omit" };
    const response = await fetch(address, request);
    state.textContent = `${response.status} ${response.statusText}`;
    log.hidden = false;
    await show(response, log);
  } catch (error) {
    if (error.name !== "AbortError") state.textContent = `The request could not be sent: ${error.message}`;
  }
});

async function show(response, log) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    text += value;
    if (text.length > MAX_CHARS) {
      await reader.cancel();
      text = `${text.slice(0, MAX_CHARS)}\n… cut off here.`;
      break;
    }
    log.textContent = text;
  }
  log.textContent = pretty(text);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // a stream, or no JSON at all
  }
}
