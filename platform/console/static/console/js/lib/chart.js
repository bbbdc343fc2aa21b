/**
 * A chart over time: lines or stacked areas. The pointer or the arrow keys read the values of a
 * point; missing values leave a gap.
 */

import { el, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 120;

export class Chart {
  #times = [];
  #series = [];
  #step = 60;
  #max = 1;
  #index = null;
  #drawn = false; // whether the last press of a pointer selected a time

  /**
   * `format`: a value as text. `stacked`: areas. `max`: the top, where it's known. `open(start, end)`: shows what is behind a point.
   * `zoom(start, end)`: the reader has drawn over this time.
   */
  constructor(title, { format, stacked = false, max = null, empty = "No data in this time.", open = null, zoom = null }) {
    this.format = format;
    this.stacked = stacked;
    this.fixed = max;
    this.empty = empty;
    this.top = el("span", { class: "chart-max" });
    this.when = el("span", { class: "chart-when" });
    this.plot = svg("g");
    this.middle = el("span", { class: "chart-middle", "aria-hidden": "true" });
    const grid = [0.25, 0.5, 0.75].map((share) => svg("line", { class: "chart-grid", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT, "vector-effect": "non-scaling-stroke" }));
    this.cursor = svg("line", { class: "chart-cursor", y1: 0, y2: HEIGHT, "vector-effect": "non-scaling-stroke" });
    this.selection = svg("rect", { class: "chart-selection", y: 0, height: HEIGHT, width: 0 });
    this.picture = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...grid,
      this.plot,
      this.selection,
      this.cursor,
    );
    this.legend = el("ul", { class: "chart-legend" });
    this.ends = el("p", { class: "chart-ends", "aria-hidden": "true" }, el("span"), el("span"));
    const area = el("div", { class: "chart-area", tabIndex: 0, role: "group", "aria-label": `${title}: read points with the arrow keys${open ? ", Enter shows the requests behind one" : ""}` }, this.picture, this.middle);
    area.addEventListener("pointermove", (event) => this.#point(event));
    area.addEventListener("pointerleave", () => this.#read(null));
    area.addEventListener("blur", () => this.#read(null));
    area.addEventListener("keydown", (event) => this.#key(event));
    if (zoom) this.#selectBy(area, zoom);
    if (open) area.addEventListener("click", () => this.#drawn || this.#open(open));
    if (open) area.addEventListener("keydown", (event) => event.key === "Enter" && this.#open(open));
    this.element = el(
      "figure",
      { class: "timeline" },
      el("figcaption", {}, el("h3", {}, title), this.top),
      area,
      this.ends,
      this.legend,
      this.when,
    );
  }

  /** `times`: seconds since 1970 of each point; `series`: [{name, values, tone}]. */
  show(times, step, series) {
    this.#times = times;
    this.#step = step;
    this.#series = series;
    this.#max = this.fixed ?? niceTop(this.#highest());
    const nothing = !series.some(({ values }) => values.some((value) => value));
    this.element.classList.toggle("nothing-yet", nothing);
    this.top.textContent = nothing ? this.empty : this.format(this.#max);
    this.middle.textContent = nothing ? "" : this.format(this.#max / 2);
    this.plot.replaceChildren(...(this.stacked ? this.#areas() : this.#lines()));
    const [first, last] = this.ends.children;
    first.textContent = moment(times[0], step);
    last.textContent = moment(times.at(-1), step);
    this.#read(this.#index);
  }

  #highest() {
    if (!this.stacked) return Math.max(0, ...this.#series.flatMap(({ values }) => values.map((v) => v ?? 0)));
    return Math.max(0, ...this.#times.map((_, i) => this.#series.reduce((sum, { values }) => sum + (values[i] ?? 0), 0)));
  }

  #x(index) {
    return ((index / Math.max(1, this.#times.length - 1)) * WIDTH).toFixed(1);
  }

  #y(value) {
    return (HEIGHT - (value / this.#max) * (HEIGHT - 2)).toFixed(1);
  }

  #lines() {
    return this.#series.map(({ values, tone }) => {
      let path = "";
      values.forEach((value, i) => {
        if (value === null) return;
        path += `${path && values[i - 1] !== null && i > 0 ? "L" : "M"}${this.#x(i)} ${this.#y(value)}`;
        if ((values[i + 1] ?? null) === null && (i === 0 || values[i - 1] === null)) path += "h0.1";
      });
      return svg("path", { class: `line tone-${tone}`, d: path, "vector-effect": "non-scaling-stroke" });
    });
  }

  #areas() {
    let below = this.#times.map(() => 0);
    return this.#series.map(({ values, tone }) => {
      const above = below.map((base, i) => base + (values[i] ?? 0));
      const up = above.map((value, i) => `${this.#x(i)} ${this.#y(value)}`);
      const down = below.map((value, i) => `${this.#x(i)} ${this.#y(value)}`).reverse();
      below = above;
      return svg("path", { class: `area tone-${tone}`, d: `M${[...up, ...down].join("L")}Z` });
    });
  }

  #point(event) {
    const box = this.picture.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    this.#read(Math.round(Math.min(1, Math.max(0, share)) * (this.#times.length - 1)));
  }

  /** Dragging the pointer over the chart zooms in; clicking doesn't. */
  #selectBy(area, zoom) {
    let from = null;
    const select = (end) => {
      const [low, high] = from === null ? [0, 0] : [Math.min(from, end), Math.max(from, end)];
      this.selection.setAttribute("x", this.#x(low));
      this.selection.setAttribute("width", this.#x(high) - this.#x(low));
      return [low, high];
    };
    area.addEventListener("pointerdown", (event) => {
      this.#drawn = false;
      if (event.button !== 0 || event.pointerType === "touch") return; // a finger scrolls
      from = this.#index;
      area.setPointerCapture(event.pointerId);
    });
    area.addEventListener("pointermove", () => from !== null && select(this.#index));
    area.addEventListener("pointerup", () => {
      if (from === null) return;
      const [low, high] = select(this.#index ?? from);
      from = null;
      select(0);
      this.#drawn = high - low > 1;
      if (this.#drawn) zoom(this.#times[low], this.#times[high]);
    });
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const last = this.#times.length - 1;
    this.#read(Math.min(last, Math.max(0, (this.#index ?? last) + move)));
    this.when.setAttribute("role", "status");
  }

  #open(open) {
    if (this.#index === null) return;
    const start = this.#times[this.#index];
    open(start, start + this.#step);
  }

  #read(index) {
    this.#index = index;
    const visibleIndex = index ?? this.#times.length - 1;
    this.cursor.classList.toggle("shown", index !== null);
    this.cursor.setAttribute("x1", this.#x(visibleIndex));
    this.cursor.setAttribute("x2", this.#x(visibleIndex));
    this.legend.replaceChildren(
      ...this.#series.map(({ name, values, tone }) => {
        const value = values[visibleIndex] ?? null;
        return el("li", { class: `tone-${tone}` }, `${name} `, el("b", {}, value === null ? "–" : this.format(value)));
      }),
    );
    this.when.textContent = index === null ? "" : moment(this.#times[index], this.#step, true);
  }
}

/** Round up to 1, 2 or 5 times a power of ten. */
function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999) * power;
}

function moment(seconds, step, full = false) {
  if (!seconds) return "";
  const days = step >= 3600 || full;
  return new Intl.DateTimeFormat("en-GB", {
    ...(days ? { day: "numeric", month: "short" } : {}),
    ...(step < 43_200 || full ? { hour: "2-digit", minute: "2-digit" } : {}),
    ...(step < 60 ? { second: "2-digit" } : {}),
  }).format(new Date(seconds * 1000));
}
