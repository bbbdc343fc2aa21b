/**
 * The model picker: a button that opens a listbox (the ARIA "select-only combobox"), because a
 * native select can't show the models' states.
 */

import { el } from "../lib/dom.js";
import { count } from "../lib/format.js";

const WORDS = {
  ready: "ready",
  loading: "loading",
  draining: "draining",
  failed: "failed",
  stalled: "not responding",
  offline: "no replica",
};

/** Describe a model's state: "loading, 40 %". */
export function stateWords(model) {
  const word = WORDS[model.state] ?? model.state;
  const loading = model.state === "loading" && model.load_progress > 0;
  return loading ? `${word}, ${Math.round(model.load_progress * 100)} %` : word;
}

export class Picker {
  models = [];
  #button;
  #list;
  #value;
  #active = -1;
  #onChange;
  #typed = "";
  #typedAt = 0;

  constructor(button, list, value, onChange) {
    this.#button = button;
    this.#list = list;
    this.#value = value;
    this.#onChange = onChange;
    button.addEventListener("click", () => (this.#open() ? this.#hide() : this.#show()));
    button.addEventListener("keydown", (event) => this.#key(event));
    button.addEventListener("blur", () => this.#hide());
    // Pressing an option must not move the focus from the button before the click event.
    list.addEventListener("mousedown", (event) => event.preventDefault());
    list.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) this.#choose(Number(option.dataset.index));
    });
  }

  /** The chosen model, or undefined if there is none. An adapter is also known as `base:name`. */
  get model() {
    return (
      this.models.find(({ id }) => id === this.#value) ??
      this.models.find(({ id, parent }) => parent && `${parent}:${id}` === this.#value)
    );
  }

  get value() {
    return this.#value;
  }

  /** Choose a model without notifying; the next `update` shows it. */
  set value(id) {
    this.#value = id;
  }

  /** Set the models and their states. If the chosen one was removed, choose the first that is ready. */
  update(models) {
    this.models = models;
    if (!this.model && models.length > 0) {
      const best = models.find((model) => model.state === "ready") ?? models[0];
      this.#value = best.id;
      this.#onChange(best.id);
    }
    this.#render();
  }

  #render() {
    const { model, models } = this;
    const name = el("span", { class: "picker-name" }, model?.id ?? "No model");
    this.#button.replaceChildren(name, ...(model ? [stateBadge(model)] : []));
    this.#button.disabled = models.length === 0;
    // Keep the options if only states change: replacing a pressed one would lose the click.
    const ids = models.map((candidate) => candidate.id).join("\n");
    if (this.#list.dataset.ids !== ids) {
      this.#list.dataset.ids = ids;
      this.#list.replaceChildren(...models.map((_, index) => newOption(this.#list.id, index)));
    }
    for (const [index, candidate] of models.entries()) {
      fillOption(this.#list.children[index], candidate, candidate === model);
    }
    this.#point(Math.min(this.#active, models.length - 1));
  }

  #open() {
    return this.#button.getAttribute("aria-expanded") === "true";
  }

  #show() {
    if (this.models.length === 0) return;
    this.#button.setAttribute("aria-expanded", "true");
    this.#list.hidden = false;
    this.#point(this.models.indexOf(this.model));
  }

  #hide() {
    this.#button.setAttribute("aria-expanded", "false");
    this.#button.removeAttribute("aria-activedescendant");
    this.#list.hidden = true;
    this.#active = -1;
  }

  #choose(index) {
    const model = this.models[index];
    this.#hide();
    if (!model || model === this.model) return;
    this.#value = model.id;
    this.#onChange(model.id);
    this.#render();
  }

  #point(index) {
    this.#active = index;
    for (const [row, option] of [...this.#list.children].entries()) {
      option.classList.toggle("pointed", row === index);
    }
    const option = this.#open() ? this.#list.children[index] : null;
    if (!option) return;
    this.#button.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  }

  #key(event) {
    const last = this.models.length - 1;
    const moves = {
      ArrowDown: Math.min(last, this.#active + 1),
      ArrowUp: Math.max(0, this.#active - 1),
      Home: 0,
      End: last,
    };
    if (event.key in moves) {
      event.preventDefault();
      if (this.#open()) this.#point(moves[event.key]);
      else this.#show();
    } else if ((event.key === "Enter" || event.key === " ") && this.#open()) {
      event.preventDefault();
      this.#choose(this.#active);
    } else if (event.key === "Escape" && this.#open()) {
      event.stopPropagation();
      this.#hide();
    } else if (event.key.length === 1 && event.key !== " " && !event.ctrlKey && !event.metaKey) {
      this.#find(event.key);
    }
  }

  /** Typing moves to the first model whose name starts with the typed text. */
  #find(char) {
    const now = Date.now();
    this.#typed = (now - this.#typedAt > 800 ? "" : this.#typed) + char.toLowerCase();
    this.#typedAt = now;
    const index = this.models.findIndex((model) => model.id.toLowerCase().startsWith(this.#typed));
    if (index < 0) return;
    if (!this.#open()) this.#show();
    this.#point(index);
  }
}

function newOption(list, index) {
  return el(
    "li",
    { id: `${list}-${index}`, role: "option", class: "picker-option", dataset: { index } },
    el("span", { class: "picker-name" }),
    el("span", { class: "state" }),
    el("span", { class: "picker-context" }),
  );
}

function fillOption(option, model, selected) {
  const [name, state, takes] = option.children;
  name.textContent = model.id;
  state.textContent = stateWords(model);
  state.dataset.state = model.state;
  const facts = [model.max_model_len && `${count(model.max_model_len)} tokens`, model.max_images && "pictures"];
  takes.textContent = facts.filter(Boolean).join(", ");
  option.setAttribute("aria-selected", String(selected));
}

function stateBadge(model) {
  return el("span", { class: "state", dataset: { state: model.state } }, stateWords(model));
}
