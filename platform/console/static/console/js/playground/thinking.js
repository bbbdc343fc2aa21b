/** What a model thought before it answered: open while it thinks, folded once it answers. */

import { el } from "../lib/dom.js";
import { duration } from "../lib/format.js";

export class ThinkingView {
  #turn;
  #title = el("summary");
  #text = el("div", { class: "thinking-text", dir: "auto" });
  #since = null;
  #pending = "";

  constructor(turn) {
    this.#turn = turn;
    this.element = el("details", { class: "thinking" }, this.#title, this.#text);
    this.#text.textContent = turn.reasoning ?? "";
    this.#show(false);
  }

  /** More of it; it's drawn with the next `draw`. */
  write(text) {
    if (this.#since === null) {
      this.#since = performance.now();
      this.element.open = true;
    }
    this.#turn.reasoning = (this.#turn.reasoning ?? "") + text;
    this.#pending += text;
    this.#show(true);
  }

  draw() {
    if (this.#pending) this.#text.append(this.#pending);
    this.#pending = "";
  }

  /** The answer begins, or the turn is over. */
  end() {
    this.draw();
    if (this.#since === null) return;
    this.#turn.thoughtFor = performance.now() - this.#since;
    this.#since = null;
    this.element.open = false;
    this.#show(false);
  }

  #show(thinking) {
    const { reasoning, thoughtFor } = this.#turn;
    const title = thoughtFor ? `Thought for ${duration(thoughtFor)}` : "Thoughts";
    this.element.hidden = !reasoning;
    this.element.dataset.state = thinking ? "thinking" : "over";
    this.#title.textContent = thinking ? "Thinking" : title;
  }
}
