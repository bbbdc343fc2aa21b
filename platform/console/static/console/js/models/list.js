/** The list of models: updates states, load and the summary above. */

import { el } from "../lib/dom.js";
import { count, moment, percent } from "../lib/format.js";
import { reload } from "../lib/reload.js";
import { askOnNews } from "../live/ask.js";

const page = document.querySelector("[data-models]");
const rows = new Map([...(page?.querySelectorAll("[data-model]") ?? [])].map((row) => [row.dataset.model, row]));

function showModel(row, model) {
  const part = (name) => row.querySelector(`[data-${name}]`);
  const state = part("state-of");
  state.dataset.state = model.state;
  const loading = model.state === "loading" && model.load_progress > 0;
  state.textContent = loading ? `loading, ${percent(model.load_progress)}` : model.state;
  part("running").textContent = `${count(model.running)} running`;
  part("waiting").textContent = `${count(model.waiting)} waiting`;
  part("waiting").hidden = !model.waiting;
  const [chat, load] = [part("chat"), part("load")];
  if (chat) chat.hidden = model.state !== "ready";
  if (load) load.hidden = model.loaded;
}

let announced = "";

function showVerdict(box, verdict) {
  if (announced === JSON.stringify(verdict)) return; // screen readers would announce an unchanged text again
  announced = JSON.stringify(verdict);
  const { text, tone, problems } = verdict;
  box.className = `notice verdict-line ${tone}`;
  box.querySelector("strong").textContent = text;
  const list = box.querySelector(".problems");
  list.hidden = !problems.length;
  list.replaceChildren(
    ...problems.map(({ name, url, state, since }) => {
      const time = el("time", { datetime: since }, moment(new Date(since)));
      return el("li", {}, el("a", { href: url }, name), `: ${state} since `, time);
    }),
  );
}

/** Added or removed models need new rows, so the page is reloaded. */
function show({ models, verdict }) {
  if (models.length !== rows.size || models.some(({ name }) => !rows.has(name))) {
    reload();
    return;
  }
  for (const model of models) showModel(rows.get(model.name), model);
  if (rows.size) showVerdict(page.querySelector("[data-verdict]"), verdict);
}

if (page) {
  const topics = page.dataset.followed.split(" ").map((tenant) => ["now", tenant || null]);
  askOnNews(page.dataset.models, topics, { data: show, loggedOut: () => location.reload() });
}
