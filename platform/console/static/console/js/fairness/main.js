/** The charts of fairness: what tenants had, and what each had for its weight. */

import { Chart } from "../lib/chart.js";
import { byId } from "../lib/dom.js";
import { percent, rate } from "../lib/format.js";
import { follow } from "../live/live.js";

const root = document.getElementById("fairness");

if (root) {
  const share = new Chart("Share of all tokens", { format: percent, stacked: true, max: 1 });
  const perWeight = new Chart("Tokens a second per weight of 1", { format: (v) => `${rate(v)}/s` });
  root.append(share.element, perWeight.element);
  let asked = 0;

  const show = ({ at: times, step, seconds, tenants, whole: hasTotal }) => {
    share.element.hidden = !hasTotal; // no shares without the total
    const all = times.map((_, i) => tenants.reduce((sum, { tokens }) => sum + tokens[i], 0));
    share.show(times, step, tenants.map(({ name, tokens }, n) => ({
      name, tone: Math.min(n, 8), values: tokens.map((value, i) => (all[i] ? value / all[i] : null)),
    })));
    perWeight.show(times, step, tenants.filter(({ weight }) => weight).map(({ name, tokens, weight }, n) => ({
      name, tone: Math.min(n, 8), values: tokens.map((value, i) => value / seconds[i] / weight),
    })));
    asked = times.at(-1) + seconds.at(-1);
  };

  const ask = async () => {
    const problem = byId("fairness-problem");
    try {
      const response = await fetch(root.dataset.url, { headers: { Accept: "application/json" } });
      const data = await response.json();
      if (!response.ok) throw new Error(data.error?.message ?? `HTTP ${response.status}.`);
      show(data);
      problem.textContent = "";
    } catch (error) {
      problem.textContent = `Out of date: ${error.message}`;
    }
  };

  ask();
  follow("history", null, ({ until }) => until > asked && ask());
}
