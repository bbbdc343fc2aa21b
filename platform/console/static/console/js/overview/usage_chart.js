/** Usage as a chart: the totals of all days, and a stacked bar per day. The table has the same figures as text. */

import { el, svg } from "../lib/dom.js";
import { compact, count, percent, plural } from "../lib/format.js";

const HEIGHT = 100;
const PARTS = [
  { name: "cached", label: "Prompt, from the cache", of: (day) => day.cached_tokens },
  { name: "prompt", label: "Prompt, computed", of: (day) => day.prompt_tokens - day.cached_tokens },
  { name: "output", label: "Output", of: (day) => day.completion_tokens },
];
const shortDay = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", timeZone: "UTC" });

/** The totals as a list of figures. `daily`: [{requests, prompt_tokens, cached_tokens, completion_tokens}]. */
export function usageSums(daily) {
  const sum = (field) => daily.reduce((total, day) => total + day[field], 0);
  const prompt = sum("prompt_tokens");
  const figures = [
    ["Requests", compact(sum("requests")), count(sum("requests"))],
    ["Prompt tokens", compact(prompt), count(prompt)],
    ["From the cache", percent(prompt ? sum("cached_tokens") / prompt : NaN), ""],
    ["Output tokens", compact(sum("completion_tokens")), count(sum("completion_tokens"))],
  ];
  return figures.map(([name, value, exact]) =>
    el("div", {}, el("dt", {}, name), el("dd", { title: exact || null }, value)),
  );
}

/** The bars and their legend. `days`: dates as "2026-11-21". */
export function usageChart(days, daily) {
  const totals = daily.map((day) => day.prompt_tokens + day.completion_tokens);
  const max = Math.max(...totals, 1);
  const bars = days.map((date, i) => column(date, daily[i], max));
  const peak = totals.indexOf(Math.max(...totals));
  const label = `Tokens a day; the most, ${count(totals[peak])}, on ${nameOf(days[peak])}`;
  return [
    el("p", { class: "chart-top", "aria-hidden": "true" }, compact(max)),
    el("div", { class: "chart-bars", role: "img", "aria-label": label }, ...bars),
    el("ul", { class: "chart-key" }, ...PARTS.map((part) => keyEntry(part))),
  ];
}

function column(date, day, max) {
  let base = HEIGHT;
  const parts = PARTS.map((part) => {
    const height = (part.of(day) / max) * HEIGHT;
    base -= height;
    return svg("rect", { class: part.name, x: 0, y: base, width: 1, height });
  });
  const box = { viewBox: `0 0 1 ${HEIGHT}`, preserveAspectRatio: "none" };
  return el(
    "div",
    { class: "chart-day", title: titleOf(date, day) },
    svg("svg", { ...box, "aria-hidden": "true" }, ...parts),
    el("span", {}, nameOf(date)),
  );
}

function titleOf(date, day) {
  const parts = PARTS.map((part) => `${part.label}: ${count(part.of(day))}`);
  return [nameOf(date), plural(day.requests, "request"), ...parts].join("\n");
}

function nameOf(date) {
  return shortDay.format(new Date(`${date}T00:00:00Z`));
}

function keyEntry({ name, label }) {
  return el("li", { dataset: { part: name } }, label);
}
