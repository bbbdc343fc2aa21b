/** The connection in words, with a way to try again. */

import { el } from "../lib/dom.js";
import { noticeAction } from "./errors.js";

const SHOW_AFTER = 400; // faster reconnections aren't shown

export class ConnectionLine {
  #slot;
  #socket;
  #loginUrl;
  #timer = null;
  #words = null;

  constructor(slot, socket, loginUrl) {
    this.#slot = slot;
    this.#socket = socket;
    this.#loginUrl = loginUrl;
    socket.addEventListener("state", () => this.#changed());
  }

  /** The session is over, whoever noticed it. */
  loggedOut() {
    clearInterval(this.#timer);
    const link = el("a", { href: this.#loginUrl }, "Log in again");
    this.#say("closed", el("span", {}, "Your session has ended."), link);
  }

  #changed() {
    const { state, reason } = this.#socket;
    clearInterval(this.#timer);
    this.#slot.dataset.state = state;
    if (state === "open") {
      this.#slot.replaceChildren();
    } else if (state === "closed") {
      if (reason.code === "logged_out") this.loggedOut();
      else this.#say(state, el("span", {}, reason.message ?? "The server refused the connection."));
    } else if (state === "waiting") {
      this.#timer = setInterval(() => this.#countDown(), SHOW_AFTER);
    }
  }

  #countDown() {
    if (this.#slot.dataset.state !== "waiting" || !this.#words?.isConnected) {
      this.#words = el("span", { "aria-hidden": "true" });
      const again = noticeAction("Try now", () => this.#socket.retryNow());
      // The countdown is only visual; the live region announces once.
      const voice = el("span", { class: "visually-hidden" }, "Connection lost. Trying again.");
      this.#say("waiting", this.#words, again, voice);
    }
    const seconds = Math.ceil((this.#socket.retryAt - Date.now()) / 1000);
    const text = seconds > 0 ? `Connection lost. Trying again in ${seconds} s.` : "Trying again…";
    if (this.#words.textContent !== text) this.#words.textContent = text;
  }

  #say(state, ...children) {
    this.#slot.dataset.state = state;
    this.#slot.replaceChildren(...children);
  }
}
