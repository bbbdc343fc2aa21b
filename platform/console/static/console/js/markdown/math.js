/** A formula: its source at first, then MathML, which needs no inline styles (Content-Security-Policy). */

import { el } from "../lib/dom.js";

const KATEX = new URL("../../vendor/katex/katex.mjs", import.meta.url);
const OPTIONS = { output: "mathml", trust: false, strict: "ignore", maxSize: 20, maxExpand: 200, throwOnError: true };

let library = null;

export class MathView {
  #tex;
  #display;
  #source;

  constructor({ tex, source, display }) {
    this.#tex = tex;
    this.#display = display;
    this.#source = source;
    this.element = el("span", { class: display ? "math display" : "math", dir: "ltr" }, source);
    if (display) this.element.tabIndex = 0;
    if (display) this.element.setAttribute("role", "group");
    if (display) this.element.setAttribute("aria-label", "Formula");
    this.#draw();
  }

  fits({ tex, display, source }) {
    return tex === this.#tex && source === this.#source && display === this.#display;
  }

  update() {}

  async #draw() {
    try {
      library ??= import(KATEX);
      const katex = (await library).default;
      const holder = el("span");
      katex.render(this.#tex, holder, { ...OPTIONS, displayMode: this.#display });
      this.element.replaceChildren(...holder.childNodes);
    } catch (error) {
      this.element.classList.add("unread"); // KaTeX can't parse it: keep the source
      if (!library) console.warn("Formulas can't be drawn:", error);
    }
  }
}
