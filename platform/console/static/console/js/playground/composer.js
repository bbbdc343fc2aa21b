/** The input at the bottom: grows with its text, sends with Enter, and turns into a stop button. */

import { icon } from "../lib/dom.js";

const TALLEST = 320; // pixels

export class Composer {
  #area;
  #button;
  #attachments;
  #busy = false;
  #blocked = "";
  #handlers;

  /** `handlers`: `send(text, images)` (false keeps the text), `stop()`, `editLast()`. */
  constructor(form, attachments, handlers) {
    this.#area = form.querySelector("textarea");
    this.#button = form.querySelector("[data-send]");
    this.#attachments = attachments;
    this.#handlers = handlers;
    attachments.addEventListener("changed", () => this.#changed());
    form.addEventListener("submit", (event) => this.#submit(event));
    this.#area.addEventListener("input", () => this.#changed());
    this.#area.addEventListener("keydown", (event) => this.#key(event));
    this.#changed();
  }

  focus() {
    this.#area.focus();
  }

  get text() {
    return this.#area.value.trim();
  }

  /** Fill the field, so that the user can review and send it. */
  setText(text) {
    this.#area.value = text;
    this.#changed();
    this.focus();
  }

  /** Whether an answer is streaming: the button then stops it. */
  set busy(busy) {
    this.#busy = busy;
    this.#changed();
  }

  /** The reason why nothing can be sent now, or "". */
  set blocked(reason) {
    this.#blocked = reason;
    this.#changed();
  }

  #changed() {
    const area = this.#area;
    area.style.height = "auto";
    area.style.height = `${Math.min(TALLEST, area.scrollHeight)}px`;
    const label = this.#busy ? "Stop" : "Send";
    if (this.#button.getAttribute("aria-label") !== label) {
      this.#button.setAttribute("aria-label", label);
      this.#button.title = this.#busy ? "Stop (Esc)" : "Send (Enter)";
      this.#button.replaceChildren(icon(this.#busy ? "stop" : "send"));
      this.#button.dataset.busy = String(this.#busy);
    }
    this.#button.disabled = !this.#busy && !this.#sendable;
  }

  get #sendable() {
    const hasContent = this.#area.value.trim() || !this.#attachments.empty;
    return hasContent && !this.#blocked && !this.#attachments.problem;
  }

  #submit(event) {
    event.preventDefault();
    if (this.#busy) {
      this.#handlers.stop();
      return;
    }
    const text = this.#area.value.trim();
    if (!this.#sendable || this.#handlers.send(text, this.#attachments.images) === false) return;
    this.#area.value = "";
    this.#attachments.clear();
  }

  #key(event) {
    // While an input method is composing, Enter selects a word.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.#busy) this.#area.form.requestSubmit();
    } else if (event.key === "ArrowUp" && !this.#area.value) {
      event.preventDefault();
      this.#handlers.editLast();
    }
  }
}
