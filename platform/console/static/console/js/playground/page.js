/** The parts of the page around the conversation. */

import { byId, el } from "../lib/dom.js";
import { noticeAction } from "./errors.js";

const UNDO_FOR = 10_000;

export class Page {
  #blank = byId("blank");
  #announcer = byId("announcer");
  #toast = byId("toast");
  #timer = null;

  /** Whether there's no conversation yet. */
  set empty(empty) {
    this.#blank.hidden = !empty;
    this.#blank.inert = false;
    byId("new-conversation").disabled = empty;
  }

  /** Say something to those who listen to the page. */
  announce(text) {
    this.#announcer.textContent = text;
  }

  /** A word at the bottom, with a way back. */
  offerUndo(text, undo) {
    const back = () => {
      this.hush();
      undo();
    };
    this.say(text, noticeAction("Undo", back));
  }

  /** A word at the bottom that goes away by itself. */
  say(text, ...actions) {
    clearTimeout(this.#timer);
    this.#toast.replaceChildren(el("span", {}, text), ...actions);
    this.#toast.hidden = false;
    this.#timer = setTimeout(() => this.hush(), UNDO_FOR);
  }

  /** Take the word back. */
  hush() {
    clearTimeout(this.#timer);
    this.#toast.hidden = true;
  }
}
