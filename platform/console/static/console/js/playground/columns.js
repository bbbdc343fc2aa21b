/** The models that answer: one picker per model, above the answers. */

import { el, tool } from "../lib/dom.js";
import { Picker } from "./picker.js";

/** Maximum number of concurrent answers of a page's socket (`MAX_RUNNING_ANSWERS`). */
const MAX_COLUMNS = 4;

export class ModelColumns {
  pickers = [];
  #root;
  #add;
  #onChange;
  #models = [];

  /** `root` contains the first picker. `values`: model ids. `onChange(values)`: the user chose models. */
  constructor(root, add, values, onChange) {
    this.#root = root;
    this.#add = add;
    this.#onChange = onChange;
    const [button, list] = root.querySelectorAll("[role=combobox], [role=listbox]");
    this.pickers.push(this.#picker(button, list, values[0]));
    this.values = values;
    add.addEventListener("click", () => this.#compare());
  }

  /** Ids of the chosen models. */
  get values() {
    return this.pickers.map(({ value }) => value);
  }

  /** Choose models without notifying. */
  set values(values) {
    while (this.pickers.length > Math.max(1, values.length)) this.#removeLast();
    while (this.pickers.length < Math.min(MAX_COLUMNS, values.length)) this.#append(values[this.pickers.length]);
    for (const [index, picker] of this.pickers.entries()) picker.value = values[index];
    this.update(this.#models); // only now: replacing a removed model reports all values
  }

  /** The chosen models that exist. */
  get models() {
    return this.pickers.map(({ model }) => model).filter(Boolean);
  }

  /** Set the models and their states. */
  update(models) {
    this.#models = models;
    for (const picker of this.pickers) picker.update(models);
    this.#show();
  }

  #picker(button, list, value) {
    return new Picker(button, list, value, () => this.#onChange(this.values));
  }

  #append(value) {
    const number = this.pickers.length + 1;
    const id = `model-${number}`;
    const list = el("ul", { id: `${id}-list`, class: "picker-list", role: "listbox", "aria-label": `Models ${number}`, hidden: true });
    const button = el("button", {
      type: "button",
      id,
      class: "picker-button",
      role: "combobox",
      "aria-haspopup": "listbox",
      "aria-expanded": "false",
      "aria-controls": list.id,
      "aria-label": `Model ${number}`,
    });
    const remove = tool("close", `Remove model ${number}`, () => this.#remove(picker));
    this.#root.append(el("div", { class: "picker" }, button, list, remove));
    const picker = this.#picker(button, list, value);
    this.pickers.push(picker);
  }

  #removeLast() {
    this.pickers.pop();
    this.#root.lastElementChild.remove();
  }

  /** Columns are numbered, so removing one moves the later values up and removes the last column. */
  #remove(picker) {
    this.values = this.values.filter((_, index) => this.pickers[index] !== picker);
    this.#onChange(this.values);
    this.#add.focus();
  }

  /** Add a column with a model that isn't chosen yet. */
  #compare() {
    const chosen = this.values;
    const other = this.#models.find(({ id, state }) => state === "ready" && !chosen.includes(id)) ?? this.#models.find(({ id }) => !chosen.includes(id));
    this.values = [...chosen, other?.id ?? chosen[0]];
    this.#onChange(this.values);
    this.#root.querySelector(".picker:last-child button").focus();
  }

  #show() {
    const several = this.pickers.length > 1;
    this.#root.toggleAttribute("data-several", several);
    this.#root.closest(".desk").toggleAttribute("data-compares", several);
    this.#add.disabled = this.#models.length === 0 || this.pickers.length === MAX_COLUMNS;
  }
}
