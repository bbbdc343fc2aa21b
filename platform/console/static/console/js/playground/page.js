/** The parts of the page around the conversation. */

import { byId, el } from "../lib/dom.js";
import { noticeAction } from "./errors.js";

const UNDO_FOR = 10_000;

export class Page {
  #blank = byId("blank");
  #announcer = byId("announcer");
  #toast = byId("toast");
  #timer = null;

  /** Show whether there is no conversation yet. */
  set empty(empty) {
    this.#blank.hidden = !empty;
    this.#blank.inert = false;
    byId("new-conversation").disabled = empty;
  }

  /** Announce a text to screen readers. */
  announce(text) {
    this.#announcer.textContent = text;
  }

  /** Show a message at the bottom, with an undo button. */
  offerUndo(text, undo) {
    const back = () => {
      this.hush();
      undo();
    };
    this.say(text, noticeAction("Undo", back));
  }

  /** Show a message at the bottom that disappears automatically. */
  say(text, ...actions) {
    clearTimeout(this.#timer);
    this.#toast.replaceChildren(el("span", {}, text), ...actions);
    this.#toast.hidden = false;
    this.#timer = setTimeout(() => this.hush(), UNDO_FOR);
  }

  /** Remove the message. */
  hush() {
    clearTimeout(this.#timer);
    this.#toast.hidden = true;
  }
}
