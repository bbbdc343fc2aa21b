/** Thumbs below an answer, stored with its request; a negative one may include a comment. */

import { byId, el, tool } from "../lib/dom.js";
import { send } from "./server.js";

/** The request's record is written about a second after its end. */
const RETRY_AFTER_MS = 1500;
const MAX_COMMENT_CHARS = 2000;

export class FeedbackView {
  #turn;
  #good = null;

  constructor(turn) {
    this.#turn = turn;
    this.good = tool("good", "Good answer", () => this.#choose(true));
    this.bad = tool("bad", "Bad answer", () => this.#choose(false));
    this.comment = el("input", { class: "input", maxLength: MAX_COMMENT_CHARS, placeholder: "What was wrong? Enter sends", "aria-label": "What was wrong", hidden: true });
    this.comment.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.#send(false, this.comment.value.trim()).then(() => (this.comment.hidden = true));
    });
    this.element = el("span", { class: "feedback" }, this.comment, this.good, this.bad);
    this.show();
  }

  /** Only an answer whose request has finished can be rated. */
  show() {
    this.element.hidden = !this.#turn.stats?.request;
    this.good.setAttribute("aria-pressed", String(this.#good === true));
    this.bad.setAttribute("aria-pressed", String(this.#good === false));
  }

  async #choose(good) {
    const chosen = this.#good === good ? null : good;
    if (!(await this.#send(chosen))) return;
    this.comment.hidden = chosen !== false;
    if (chosen === false) this.comment.focus();
  }

  async #send(good, comment = "", again = true) {
    const url = byId("playground").dataset.feedbackUrl.replace("REQUEST", encodeURIComponent(this.#turn.stats.request));
    try {
      await send("POST", url, { good, comment });
    } catch (error) {
      if (again) {
        await new Promise((resolve) => setTimeout(resolve, RETRY_AFTER_MS));
        return this.#send(good, comment, false);
      }
      this.element.title = `The feedback was not kept: ${error.message}`;
      return false;
    }
    this.#good = good;
    this.show();
    return true;
  }
}
