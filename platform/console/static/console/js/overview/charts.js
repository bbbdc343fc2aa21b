/** Three small charts: pages of a KV pool, a line of recent rates, bars of days. */

import { svg } from "../lib/dom.js";
import { count, percent } from "../lib/format.js";

const PAGES = 48;

/** A fraction as a row of filled pages: the used part of the KV pool, or the loaded part of a model. */
export class PageMap {
  constructor() {
    this.element = svg("svg", {
      class: "page-map",
      viewBox: `0 0 ${PAGES * 10 - 3} 12`,
      preserveAspectRatio: "none",
      role: "meter",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    });
    for (let i = 0; i < PAGES; i += 1) {
      this.element.append(svg("rect", { x: i * 10, y: 0, width: 7, height: 12 }));
    }
  }

  /** `share` of the pages in [0, 1]; `label` describes it. */
  show(share, label) {
    const inked = share > 0 ? Math.max(1, Math.round(share * PAGES)) : 0;
    for (const [index, rect] of [...this.element.children].entries()) {
      rect.classList.toggle("inked", index < inked);
    }
    this.element.setAttribute("aria-label", label);
    this.element.setAttribute("aria-valuenow", String(Math.round(share * 100)));
    this.element.setAttribute("aria-valuetext", percent(share));
  }
}

/** A line of the last values, scaled to the largest. */
export class Sparkline {
  constructor(label) {
    this.line = svg("polyline", { "vector-effect": "non-scaling-stroke" });
    this.element = svg(
      "svg",
      { class: "sparkline", viewBox: "0 0 59 20", preserveAspectRatio: "none", role: "img" },
      this.line,
    );
    this.label = label;
  }

  show(values) {
    const max = Math.max(...values, 1);
    const shift = 60 - values.length;
    const points = values.map((value, i) => `${shift + i},${(19 - (value / max) * 18).toFixed(2)}`);
    this.line.setAttribute("points", points.join(" "));
    const peak = values.length ? `, at most ${count(max)}` : "";
    this.element.setAttribute("aria-label", `${this.label}, the last minutes${peak}`);
  }
}

/** One bar per day. */
export function dayBars(days, values) {
  const max = Math.max(...values, 1);
  const bars = values.map((value, i) => {
    const height = value > 0 ? Math.max(1, (value / max) * 20) : 0.6;
    const bar = svg("rect", { x: i * 8, y: 20 - height, width: 6, height });
    if (value > 0) bar.classList.add("inked");
    bar.append(svg("title", {}, `${days[i]}: ${count(value)} tokens`));
    return bar;
  });
  const label = `Tokens a day, at most ${count(Math.max(...values))}`;
  const box = `0 0 ${values.length * 8 - 2} 20`;
  return svg("svg", { class: "day-bars", viewBox: box, role: "img", "aria-label": label }, ...bars);
}
