/** A model's page: its replicas' load phases, and their logs as they grow. */

import { el } from "../lib/dom.js";
import { percent, size } from "../lib/format.js";
import { Poll } from "../lib/poll.js";
import { reload } from "../lib/reload.js";
import { askOnNews } from "../live/ask.js";

const page = document.querySelector("[data-model-page]");
/** Maximum number of log lines shown; older ones are dropped. */
const MAX_LINES = 2000;

function phaseText({ phase, bytes_done: done, bytes_total: total }) {
  return total ? `${phase}: ${size(done)} of ${size(total)}` : phase;
}

function part(sheet, name) {
  return sheet.querySelector(`[data-part="${name}"]`);
}

function setText(node, text) {
  node.textContent = text;
  node.hidden = !text;
}

function showReplica(sheet, replica) {
  const state = part(sheet, "state");
  state.textContent = replica.state;
  state.dataset.state = replica.state;
  setText(part(sheet, "phase"), replica.state === "loading" ? phaseText(replica) : "");
  setText(part(sheet, "detail"), replica.detail);
  const bar = part(sheet, "bar");
  bar.hidden = replica.state !== "loading";
  // Without a byte count, show the share of loaded layers.
  const { bytes_total: total, bytes_done: done, load_progress: layers } = replica;
  const share = total ? done / total : layers;
  bar.value = Math.round(100 * share);
  bar.setAttribute("aria-valuetext", phaseText(replica) || percent(share));
}

/** A change to one of these states reloads the page, because other actions become available. */
const steady = new Set(["ready", "sleeping", "unloaded", "offline", "idle", "failed"]);
const benchmark = document.querySelector("[data-open-benchmark]")?.dataset.openBenchmark ?? "";
let previousState = page?.querySelector("[data-state-of]").dataset.state;

function show(model) {
  const state = page.querySelector("[data-state-of]");
  state.textContent = model.state;
  state.dataset.state = model.state;
  const replicas = model.detail ?? [];
  let missing = false;
  for (const replica of replicas) {
    const sheet = document.querySelector(`[data-replica="${CSS.escape(replica.id)}"]`);
    if (sheet) showReplica(sheet, replica);
    else missing = true;
  }
  const settled = model.state !== previousState && steady.has(model.state);
  const measured = model.benchmark !== undefined && model.benchmark !== benchmark;
  if (missing || settled || measured) reload();
}

if (page) {
  const topics = page.dataset.followed.split(" ").map((tenant) => ["now", tenant || null]);
  askOnNews(page.dataset.modelPage, topics, { data: show, loggedOut: () => location.reload() });
}

const clock = new Intl.DateTimeFormat("en", { timeStyle: "medium", hourCycle: "h23" });

for (const details of document.querySelectorAll("[data-log-of]")) {
  const lines = details.querySelector("pre");
  let last = "";
  let poll = null;
  const append = ({ lines: entries }) => {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    if (!last) lines.replaceChildren(...(entries.length ? [] : ["The log is empty."]));
    for (const { id, at: seconds, text } of entries) {
      if (!last) lines.replaceChildren();
      last = id;
      const time = el("span", { class: "log-at" }, clock.format(new Date(seconds * 1000)));
      lines.append(el("span", { class: "log-line" }, time, ` ${text}\n`));
    }
    while (lines.childElementCount > MAX_LINES) lines.firstElementChild.remove();
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  };
  const address = () => {
    const url = new URL(page.dataset.log, location.href);
    url.searchParams.set("replica", details.dataset.logOf);
    if (last) url.searchParams.set("after", last);
    return url.href;
  };
  const follow = () => {
    if (!details.open || poll) return;
    const wait = () => (details.open ? 1000 : 30_000);
    poll = new Poll(address, wait, {
      data: append,
      failed: (message) => last || lines.replaceChildren(message),
      loggedOut: () => location.reload(),
    });
    poll.now();
  };
  details.addEventListener("toggle", follow);
  follow(); // it may have been opened before this script was loaded
}
