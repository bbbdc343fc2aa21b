/** A replica's card: its state, load and KV pages. Created once, then updated. */

import { el } from "../lib/dom.js";
import { count, percent, plural, rate } from "../lib/format.js";
import { PageMap, Sparkline } from "./charts.js";
import { Rates } from "./rates.js";

const SERVING = new Set(["ready", "draining", "stalled"]);

export class ReplicaCard {
  constructor(id) {
    this.rates = new Rates();
    this.pages = new PageMap();
    this.line = new Sparkline("Output tokens a second");
    this.state = el("span", { class: "state" });
    this.model = el("p", { class: "replica-model" });
    this.detail = el("p", { class: "replica-detail" });
    this.kv = el("p", { class: "replica-small" });
    this.small = el("p", { class: "replica-small" });
    this.figures = {
      speed: figure("tok/s"),
      running: figure("running"),
      waiting: figure("waiting"),
      hits: figure("prefix hits"),
      drafts: figure("drafts accepted"),
    };
    const figures = Object.values(this.figures).map((figure) => figure.element);
    this.load = el("div", {}, el("dl", { class: "replica-figures" }, ...figures), this.line.element);
    this.fill = el("div", { class: "replica-fill" }, this.pages.element, this.kv);
    this.element = el(
      "article",
      { class: "replica", "aria-label": `Replica ${id}`, dataset: { replica: id } },
      el("header", {}, el("h3", {}, id), this.state),
      this.model,
      this.detail,
      this.load,
      this.fill,
      this.small,
    );
  }

  /** Update the card; returns the replica's output tokens per second, or NaN. */
  show(replica) {
    const speed = this.rates.update(replica);
    this.state.dataset.state = replica.state;
    this.state.textContent = stateText(replica);
    this.model.textContent = modelText(replica);
    this.detail.textContent = replica.detail ?? "";
    this.detail.hidden = !replica.detail;
    this.load.hidden = !SERVING.has(replica.state);
    this.fill.hidden = replica.state === "failed";
    this.#showLoad(replica, speed);
    this.#showFill(replica);
    this.small.textContent = smallPrint(replica);
    return speed;
  }

  #showLoad(replica, speed) {
    const hits = replica.prefix_queries ? replica.prefix_hits / replica.prefix_queries : NaN;
    this.figures.speed.show(rate(speed));
    this.figures.running.show(count(replica.running));
    this.figures.waiting.show(count(replica.waiting));
    this.figures.hits.show(percent(hits));
    this.figures.drafts.element.hidden = !replica.draft_tokens;
    this.figures.drafts.show(percent(replica.accepted_tokens / replica.draft_tokens));
    this.line.show(this.rates.history);
  }

  #showFill(replica) {
    const loading = replica.state === "loading";
    this.fill.classList.toggle("loading", loading);
    if (loading) this.pages.show(replica.load_progress, "Loaded");
    else this.pages.show(replica.kv_usage, "KV cache in use");
    this.kv.textContent = loading ? "Loading its weights" : kvText(replica);
  }
}

function figure(name) {
  const value = el("dd", {}, "–");
  const element = el("div", {}, el("dt", {}, name), value);
  return { element, show: (text) => (value.textContent = text) };
}

function stateText({ state, load_progress: progress }) {
  if (state === "stalled") return "not responding";
  return state === "loading" && progress > 0 ? `loading, ${percent(progress)}` : state;
}

function modelText({ model, dtype, quantization, max_model_len: length }) {
  return [model, dtype, quantization, `context ${count(length)}`].filter(Boolean).join(" · ");
}

function kvText({ kv_usage: usage, num_blocks: blocks, num_cached_blocks: cached }) {
  if (!blocks) return `KV cache ${percent(usage)} in use`;
  const used = `${percent(usage)} of ${plural(blocks, "block")} in use`;
  return cached === undefined ? used : `${used}, ${count(cached)} findable as cached prefixes`;
}

function smallPrint(replica) {
  const { host, pid, preemptions, steps, last_step_ms: step, drafts } = replica;
  const parts = [];
  if (host) parts.push(`${host}, pid ${pid}`);
  if (steps) parts.push(plural(steps, "step"));
  if (step >= 0.05) parts.push(`last ${step.toFixed(1)} ms`);
  if (drafts) {
    const length = 1 + replica.accepted_tokens / drafts;
    parts.push(`${length.toFixed(1)} tokens a step with drafts`);
  }
  if (preemptions) parts.push(plural(preemptions, "preemption"));
  return parts.join(" · ");
}
