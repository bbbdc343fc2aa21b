/** The traffic charts: their filters, the totals of the range, and updates as new data is written. */

import { Chart } from "../lib/chart.js";
import { byId, el } from "../lib/dom.js";
import { compact, count, duration, percent, rate } from "../lib/format.js";

const perSecond = (value) => `${rate(value)}/s`;
const perMinute = (value) => `${rate(value)}/min`;

export class Traffic {
  #url;
  #form = byId("scope");
  #last = null;
  #aborter = null;
  #zoomed = null; // [start, end] of the points that are shown, or null for all
  #data = null;
  #charts = {
    requests: this.#chart("Requests per minute", { format: perMinute }, ""),
    tokens: this.#chart("Tokens per second", { format: perSecond }, ""),
    first: this.#chart("Time to first token", { format: duration }, "-ttft_ms"),
    gaps: this.#chart("Time between tokens", { format: duration }, ""),
    queue: this.#chart("Running and waiting", { format: rate, empty: "No replica ran in this time." }),
    kv: this.#chart("KV blocks", { format: percent, stacked: true, max: 1, empty: "No replica ran in this time." }),
    hits: this.#chart("Prompt tokens from the prefix cache", { format: percent, max: 1 }),
  };

  constructor(url, { failed }) {
    this.#url = url;
    this.failed = failed;
    byId("timelines").replaceChildren(...Object.values(this.#charts).map((chart) => chart.element));
    byId("zoom-reset").addEventListener("click", () => this.#zoom(null));
    this.#form.addEventListener("change", () => this.#changed());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    for (const button of this.#form.querySelectorAll("[data-range]")) {
      button.addEventListener("click", (event) => {
        event.preventDefault();
        this.#press(button);
      });
    }
  }

  /** Create a chart with zoom; with `sort` it links a point to its requests, sorted by this column of their list. */
  #chart(title, options, sort) {
    const open = sort === undefined ? null : (start, end) => this.#open(start, end, sort);
    return new Chart(title, { ...options, open, zoom: (start, end) => this.#zoom([start, end]) });
  }

  /** Show only this time range on all charts; null: all of it. */
  #zoom(span) {
    this.#zoomed = span;
    byId("zoom-reset").hidden = span === null;
    if (this.#data) this.#show(this.#data);
  }

  /** Request the data again. */
  async now() {
    this.#aborter?.abort();
    const aborter = new AbortController();
    this.#aborter = aborter;
    try {
      const response = await fetch(`${this.#url}?${this.#query()}`, {
        signal: aborter.signal,
        headers: { Accept: "application/json" },
      });
      const data = await response.json();
      if (!response.ok) return this.failed(data.error?.message ?? `HTTP ${response.status}.`);
      this.#show(data);
    } catch (error) {
      if (!aborter.signal.aborted) this.failed("The server can't be reached.");
    }
  }

  /** New data was written: request it if the last point of this range may have changed. */
  written(until) {
    if (!this.#last || until - this.#last.asked >= Math.min(60, this.#last.step)) this.now();
  }

  /** The requests of this time, for the same tenant and model; `sort` as the list takes it. */
  #open(start, end, sort = "") {
    const chosen = new FormData(this.#form);
    const query = new URLSearchParams({ since: start, until: end });
    for (const name of ["tenant", "model"]) if (chosen.get(name)) query.set(name, chosen.get(name));
    if (!chosen.get("tenant")) query.set("all", "yes");
    if (sort) query.set("sort", sort);
    location.assign(`${this.#form.dataset.requests}?${query}`);
  }

  #press(button) {
    for (const choice of this.#form.querySelectorAll("[data-range]")) {
      choice.setAttribute("aria-pressed", String(choice === button));
    }
    this.#changed();
  }

  #changed() {
    this.#data = null;
    this.#zoom(null);
    history.replaceState(null, "", `?${this.#query()}`);
    this.now();
  }

  #query() {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(this.#form)) if (value) query.set(name, value);
    query.set("range", this.#form.querySelector('[aria-pressed="true"]').dataset.range);
    return query.toString();
  }

  #show(all) {
    this.#last = { step: all.step, asked: all.at.at(-1) + all.seconds.at(-1) };
    this.#data = all;
    const data = this.#zoomed ? within(all, this.#zoomed) : all;
    const { at: times, step, seconds, sums } = data;
    const ratesOf = (name, per) => sums[name].map((value, i) => (value / seconds[i]) * per);
    const chart = this.#charts;
    const grouped = data.groups.length > 0;
    const groups = (what, per) =>
      data.groups.map((group, i) => ({
        name: group.name,
        tone: Math.min(i, 8),
        values: group[what].map((value, n) => (value / seconds[n]) * per),
      }));
    chart.requests.show(times, step, grouped ? groups("requests", 60) : [
      { name: "ended", tone: 0, values: ratesOf("requests", 60) },
      { name: "failed", tone: "error", values: ratesOf("errors", 60) },
      { name: "refused", tone: 1, values: ratesOf("refused", 60) },
    ]);
    chart.tokens.show(times, step, grouped ? groups("tokens", 1) : [
      { name: "in", tone: 1, values: ratesOf("prompt_tokens", 1) },
      { name: "out", tone: 0, values: ratesOf("completion_tokens", 1) },
    ]);
    chart.first.show(times, step, spread(data.first_token));
    chart.gaps.show(times, step, spread(data.gaps));
    this.#showPools(times, step, data.pools);
    const hits = sums.prompt_tokens.map((all, i) => (all ? sums.cached_tokens[i] / all : null));
    chart.hits.show(times, step, [{ name: "found in the cache", tone: 3, values: hits }]);
    this.#showSums(sums);
  }

  #showPools(times, step, pools) {
    const share = (name) => pools[name].map((value, i) => (pools.blocks[i] ? value / pools.blocks[i] : null));
    const active = share("active_blocks");
    // Only operators receive figures of the cache.
    const cached = pools.cached_blocks ? share("cached_blocks") : active.map(() => 0);
    this.#charts.queue.show(times, step, [
      { name: "running", tone: 3, values: pools.running },
      { name: "waiting", tone: 1, values: pools.waiting },
    ]);
    this.#charts.kv.show(times, step, [
      { name: "in use", tone: 0, values: active },
      ...(pools.cached_blocks ? [{ name: "cached", tone: 7, values: cached }] : []),
      { name: pools.cached_blocks ? "empty" : "not in use", tone: "empty", values: active.map((used, i) => (used === null ? null : Math.max(0, 1 - used - cached[i]))) },
    ]);
  }

  #showSums(sums) {
    const sum = (name) => sums[name].reduce((total, value) => total + value, 0);
    const prompt = sum("prompt_tokens");
    const figures = [
      ["Requests", sum("requests")],
      ["Failed", sum("errors")],
      ["Refused by limits", sum("refused")],
      ["Tokens in", prompt],
      ["Tokens out", sum("completion_tokens")],
    ].map(([name, value]) => figure(name, compact(value), count(value)));
    figures.push(figure("From the cache", percent(prompt ? sum("cached_tokens") / prompt : NaN)));
    byId("traffic-sums").replaceChildren(...figures);
  }
}

/** The data of points from `start` to `end`; all arrays in it that have a value per point are cut. */
function within(data, [start, end]) {
  const { length } = data.at;
  const first = data.at.findIndex((second) => second >= start);
  const last = data.at.findLastIndex((second) => second <= end);
  if (first < 0 || last < first) return data; // the zoomed range is no longer in the data
  const cut = (value) => {
    if (Array.isArray(value)) {
      const isSeries = value.length === length && !value.some((part) => part && typeof part === "object");
      return isSeries ? value.slice(first, last + 1) : value.map(cut);
    }
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, cut(part)]));
    return value;
  };
  return cut(data);
}

function figure(name, value, exact = null) {
  return el("div", {}, el("dt", {}, name), el("dd", { title: exact }, value));
}

function spread({ p50, p95, p99 }) {
  return [
    { name: "median", tone: 0, values: p50 },
    { name: "95th percentile", tone: 1, values: p95 },
    { name: "99th percentile", tone: 2, values: p99 },
  ];
}
