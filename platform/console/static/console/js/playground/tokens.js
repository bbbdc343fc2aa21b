/** An answer token by token: how likely each was, and what else could have stood there. */

import { el, tool } from "../lib/dom.js";

const LEVELS = [0.2, 0.5, 0.9];

export class TokensView {
  #turn;
  #prose;
  #card = el("div", { class: "token-card", role: "tooltip", id: `card-${Math.random().toString(36).slice(2)}`, hidden: true });
  #open = false;

  /** `prose`: what it stands in the place of. */
  constructor(turn, prose) {
    this.#turn = turn;
    this.#prose = prose;
    this.button = tool("scales", "Probabilities of the tokens", () => this.#toggle());
    this.button.setAttribute("aria-pressed", "false");
    this.element = el("div", { class: "tokens", role: "group", "aria-label": "Tokens", hidden: true });
    this.element.addEventListener("pointerover", (event) => this.#point(event.target));
    this.element.addEventListener("focusin", (event) => this.#point(event.target));
    this.element.addEventListener("pointerleave", () => (this.#card.hidden = true));
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  #toggle() {
    this.#open = !this.#open;
    this.button.setAttribute("aria-pressed", String(this.#open));
    this.element.hidden = !this.#open;
    this.#prose.hidden = this.#open;
    const tokens = this.#turn.logprobs.map((token, index) => tokenButton(token, index));
    if (this.#open) this.element.replaceChildren(...tokens, this.#card);
  }

  #point(target) {
    const index = target.dataset?.index;
    if (index === undefined) return;
    const [text, logprob, tops] = this.#turn.logprobs[index];
    const rows = tops.some(([other]) => other === text) ? tops : [[text, logprob], ...tops];
    this.#card.replaceChildren(
      ...rows.map(([other, score]) =>
        el("div", { class: other === text ? "chosen" : "" }, el("span", {}, visible(other)), el("span", {}, percent(score))),
      ),
    );
    this.#card.hidden = false;
    const space = this.element.clientWidth - this.#card.offsetWidth;
    this.#card.style.left = `${Math.max(0, Math.min(space, target.offsetLeft))}px`;
    this.#card.style.top = `${target.offsetTop + target.offsetHeight + 4}px`;
    target.setAttribute("aria-describedby", this.#card.id);
  }

  #key(event) {
    const all = [...this.element.querySelectorAll("[data-index]")];
    const index = all.indexOf(document.activeElement);
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    all[index].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  }
}

function tokenButton([text, logprob], index) {
  const level = LEVELS.filter((edge) => Math.exp(logprob) >= edge).length;
  return el(
    "button",
    { type: "button", class: "token", tabIndex: index ? -1 : 0, dataset: { index, level } },
    visible(text),
  );
}

function visible(text) {
  return text.replaceAll("\n", "⏎\n") || "∅";
}

function percent(logprob) {
  return `${(Math.exp(logprob) * 100).toFixed(1)} %`;
}
