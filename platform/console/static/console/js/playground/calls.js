/** The calls that a model made: the reader says what the tools would have returned, and asks on. */

import { el } from "../lib/dom.js";

export class CallsView {
  #turn;
  #onResults;
  #shown = [];

  constructor(turn, onResults) {
    this.#turn = turn;
    this.#onResults = onResults;
    this.element = el("form", { class: "calls", hidden: true });
    this.element.addEventListener("submit", (event) => this.#submit(event));
  }

  /** Bring it up to date with the turn. */
  show() {
    const { calls = [], state } = this.#turn;
    this.element.hidden = calls.length === 0;
    while (this.#shown.length < calls.length) this.#add(calls[this.#shown.length]);
    for (const [index, { code, area }] of this.#shown.entries()) {
      code.textContent = `${calls[index].name}(${calls[index].arguments})`;
      area.value ||= calls[index].result ?? "";
      area.disabled = state === "streaming";
    }
    if (this.#send) this.#send.disabled = state === "streaming";
  }

  #send = null;

  #add(call) {
    const code = el("code");
    const area = el("textarea", { class: "input mono", rows: 2, placeholder: "What the tool returns" });
    area.setAttribute("aria-label", `Result of ${call.name}`);
    this.#shown.push({ code, area });
    const block = el("div", { class: "call" }, el("pre", { tabIndex: 0, role: "group", "aria-label": "Call" }, code), area);
    if (!this.#send) {
      this.#send = el("button", { type: "submit", class: "button small" }, "Send results");
      this.element.append(this.#send);
    }
    this.element.insertBefore(block, this.#send);
  }

  #submit(event) {
    event.preventDefault();
    for (const [index, { area }] of this.#shown.entries()) {
      this.#turn.calls[index].result = area.value;
    }
    this.#onResults();
  }
}
