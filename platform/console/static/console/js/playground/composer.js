/** The field at the bottom: it grows with its text, sends with Enter, and turns into a stop button. */

import { icon } from "../lib/dom.js";

const TALLEST = 320; // pixels

export class Composer {
  #area;
  #button;
  #busy = false;
  #blocked = "";
  #handlers;

  /** `handlers`: `send(text)` (false keeps the text), `stop()`, `editLast()`. */
  constructor(form, handlers) {
    this.#area = form.querySelector("textarea");
    this.#button = form.querySelector("[data-send]");
    this.#handlers = handlers;
    form.addEventListener("submit", (event) => this.#submit(event));
    this.#area.addEventListener("input", () => this.#changed());
    this.#area.addEventListener("keydown", (event) => this.#key(event));
    this.#changed();
  }

  focus() {
    this.#area.focus();
  }

  /** Fill the field, for the reader to look over and send. */
  put(text) {
    this.#area.value = text;
    this.#changed();
    this.focus();
  }

  /** Whether an answer is being written: then the button stops it. */
  set busy(busy) {
    this.#busy = busy;
    this.#changed();
  }

  /** Why nothing can be sent now, or "". */
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
    const idle = !area.value.trim() || Boolean(this.#blocked);
    this.#button.disabled = !this.#busy && idle;
  }

  #submit(event) {
    event.preventDefault();
    if (this.#busy) {
      this.#handlers.stop();
      return;
    }
    const text = this.#area.value.trim();
    if (!text || this.#blocked || this.#handlers.send(text) === false) return;
    this.#area.value = "";
    this.#changed();
  }

  #key(event) {
    // While an input method composes, Enter chooses a word.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.#busy) this.#area.form.requestSubmit();
    } else if (event.key === "ArrowUp" && !this.#area.value) {
      event.preventDefault();
      this.#handlers.editLast();
    }
  }
}
