/** Presets: prompts and settings that the members of a tenant share. */

import { el } from "../lib/dom.js";
import { send } from "./server.js";

const MAX_STARTERS = 5;

export class Presets {
  #url;
  #tenants;
  #handlers;
  #select;
  #form;
  #delete;
  #status;
  #starters;
  #presets = [];
  #confirmed = false; // whether the delete button was pressed once

  /**
   * `root`: a select, a form that saves, a button that deletes. `starters`: the list on an empty page.
   * `handlers`: `current()` gives {prompt, options} of the page; `apply({prompt, options})`.
   */
  constructor(root, starters, url, tenants, handlers) {
    this.#url = url;
    this.#tenants = tenants;
    this.#handlers = handlers;
    this.#select = root.querySelector("select");
    this.#form = root.querySelector("form");
    this.#delete = root.querySelector("[data-delete]");
    this.#status = root.querySelector("[role=status]");
    this.#starters = starters;
    this.#select.addEventListener("change", () => this.#apply(this.#select.value));
    this.#delete.addEventListener("click", () => this.#remove());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#save();
    });
  }

  /** List the presets of the chosen tenant. */
  async load(chosen = "") {
    try {
      const { presets } = await send("GET", this.#tenants.address(this.#url));
      this.#show(presets, chosen);
    } catch (error) {
      this.#status.textContent = `The presets can't be listed: ${error.message}`;
    }
  }

  #show(presets, chosen) {
    this.#presets = presets;
    const none = el("option", { value: "" }, presets.length ? "Choose a preset" : "No presets yet");
    this.#select.replaceChildren(none, ...presets.map(({ id, name }) => el("option", { value: id }, name)));
    this.#select.disabled = presets.length === 0;
    this.#choose(chosen);
    const prompts = presets.filter(({ prompt }) => prompt).slice(0, MAX_STARTERS);
    const starter = ({ id, name }) => el("button", { type: "button", class: "starter", on: { click: () => this.#apply(id) } }, name);
    this.#starters.replaceChildren(...prompts.map((preset) => el("li", {}, starter(preset))));
    this.#starters.hidden = prompts.length === 0;
  }

  get #chosen() {
    return this.#presets.find(({ id }) => id === this.#select.value);
  }

  #choose(id) {
    this.#select.value = id;
    this.#confirmed = false;
    this.#delete.textContent = "Delete this preset";
    this.#delete.hidden = !this.#chosen?.may_change;
  }

  #apply(id) {
    this.#choose(id);
    const preset = this.#chosen;
    if (!preset) return;
    this.#handlers.apply(preset);
    this.#form.elements.name.value = preset.name;
    this.#status.textContent = "";
  }

  async #save() {
    const { name, prompt, options } = this.#form.elements;
    const current = this.#handlers.current();
    const body = {
      name: name.value,
      prompt: prompt.checked ? current.prompt : "",
      options: options.checked ? current.options : {},
    };
    try {
      const preset = await send("POST", this.#tenants.address(this.#url), body);
      await this.load(preset.id);
      this.#status.textContent = `Saved for all members of ${this.#tenants.value}.`;
    } catch (error) {
      this.#status.textContent = error.message;
    }
  }

  async #remove() {
    const { id, name } = this.#chosen;
    if (!this.#confirmed) {
      this.#confirmed = true;
      this.#delete.textContent = "Delete for all members";
      return;
    }
    try {
      await send("DELETE", `${this.#url}/${id}`);
      await this.load();
      this.#status.textContent = `${name} was deleted.`;
    } catch (error) {
      this.#status.textContent = error.message;
    }
  }
}
