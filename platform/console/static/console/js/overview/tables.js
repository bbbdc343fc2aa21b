/** The tables of models and of usage. */

import { el } from "../lib/dom.js";
import { count, percent, rate } from "../lib/format.js";
import { dayBars } from "./charts.js";

const end = (text) => el("td", { class: "end" }, text);

/** A model's row. `load`: {running, waiting, speed} of its replicas together. */
export function modelRow(model, load) {
  const { state, load_progress: progress } = model;
  const words = { offline: "no replica", stalled: "not responding" }[state] ?? state;
  const text = state === "loading" && progress > 0 ? `${words}, ${percent(progress)}` : words;
  return el(
    "tr",
    { dataset: { model: model.id } },
    el("th", { scope: "row" }, model.id),
    el("td", {}, el("span", { class: "state", dataset: { state } }, text)),
    end(count(model.max_model_len ?? NaN)),
    end(count(model.replicas)),
    end(count(load.running)),
    end(count(load.waiting)),
    end(rate(load.speed)),
  );
}

/** A row of the usage table. */
export function usageRow(days, row) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, row.tenant),
    el("td", { class: "name" }, row.model),
    end(count(row.requests)),
    end(count(row.prompt_tokens)),
    end(percent(row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : NaN)),
    end(count(row.completion_tokens)),
    el("td", {}, dayBars(days, row.by_day)),
  );
}
