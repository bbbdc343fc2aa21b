/** What the next request has beside its message: a chip each, which removes it. */

import { el } from "../lib/dom.js";

const TEXTS = { system: "System prompt", tools: "Tools", schema: "Answer schema" };
const SHORT = 24; // characters of a value

export class ActiveSettings {
  #root;
  #conversation;
  #onRemove;

  /** `onRemove`: called after a value was removed from the conversation. */
  constructor(root, conversation, onRemove) {
    this.#root = root;
    this.#conversation = conversation;
    this.#onRemove = onRemove;
    conversation.addEventListener("changed", () => this.#show());
    this.#show();
  }

  #show() {
    const { settings } = this.#conversation;
    const chips = Object.entries(TEXTS)
      .filter(([name]) => this.#conversation[name].trim())
      .map(([name, label]) => this.#chip(label, () => (this.#conversation[name] = "")));
    for (const server of this.#conversation.servers) {
      const remove = () => (this.#conversation.servers = this.#conversation.servers.filter((name) => name !== server));
      chips.push(this.#chip(`Tools of ${server}`, remove));
    }
    for (const [name, value] of Object.entries(settings)) {
      const label = name === "probabilities" ? "Token probabilities" : `${name} ${shortened(value)}`;
      chips.push(
        this.#chip(label, () => {
          const { [name]: _, ...rest } = this.#conversation.settings;
          this.#conversation.settings = rest;
        }),
      );
    }
    this.#root.replaceChildren(...chips);
  }

  #chip(label, remove) {
    const click = () => {
      remove();
      this.#conversation.changed();
      this.#onRemove();
    };
    return el("button", { type: "button", class: "chip", title: "Remove this setting", on: { click } }, `${label} ×`);
  }
}

function shortened(value) {
  const line = String(value).replaceAll("\n", ", ");
  return line.length > SHORT ? `${line.slice(0, SHORT)}…` : line;
}
