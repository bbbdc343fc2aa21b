/** The dialog with the programs for what was just asked. */

import { copyFrom } from "../lib/clipboard.js";
import { ROOT } from "../lib/root.js";
import { snippets } from "./snippets.js";

export class CodeDialog {
  #dialog;
  #request = null;
  #texts = {};
  #name = "curl";

  constructor(dialog, button) {
    this.#dialog = dialog;
    button.addEventListener("click", () => this.#show());
    dialog.querySelector("[data-copy]").addEventListener("click", (event) => {
      copyFrom(event.currentTarget, this.#texts[this.#name]);
    });
    for (const choice of dialog.querySelectorAll("[data-language]")) {
      choice.addEventListener("click", () => this.#choose(choice.dataset.language));
    }
  }

  /** `request`: gives what would be asked now, {model, messages, sampling, ...}, or null. */
  set request(request) {
    this.#request = request;
  }

  #show() {
    const request = this.#request?.();
    this.#texts = request ? snippets(request, new URL(`${ROOT}v1`, location.origin).href) : {};
    this.#choose(this.#name);
    this.#dialog.showModal();
  }

  #choose(name) {
    this.#name = name;
    for (const choice of this.#dialog.querySelectorAll("[data-language]")) {
      choice.setAttribute("aria-pressed", String(choice.dataset.language === name));
    }
    this.#dialog.querySelector("code").textContent = this.#texts[name] ?? "Ask something first.";
  }
}
