/** The WebSocket: open while there are subscriptions, reopened after growing pauses. */

import { ROOT } from "../lib/root.js";

const PATH = `${ROOT}ws/console/`;
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;
const PING_EVERY = 25_000;
const FINAL_CODES = new Set([4401, 4403]);

export class Socket {
  #handlers;
  #socket = null;
  #keys = [];
  #pause = FIRST_PAUSE;
  #timer = null;
  #ping = null;
  #isFinal = false;

  /** `handlers`: `frame(frame)`, `state(state)`. */
  constructor(handlers) {
    this.#handlers = handlers;
    addEventListener("online", () => this.#soon(0));
  }

  /** Replace the subscriptions with these keys. */
  want(keys) {
    this.#keys = keys;
    if (!keys.length) this.#close();
    else if (this.#socket?.readyState === WebSocket.OPEN) this.#send();
    else this.#soon(0);
  }

  #soon(wait) {
    clearTimeout(this.#timer);
    if (this.#socket || this.#isFinal || !this.#keys.length) return;
    this.#timer = setTimeout(() => this.#open(), wait);
  }

  #open() {
    const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${PATH}`);
    this.#socket = socket;
    socket.addEventListener("open", () => {
      this.#send();
      this.#ping = setInterval(() => socket.send('{"type":"ping"}'), PING_EVERY);
    });
    socket.addEventListener("message", ({ data }) => this.#receive(JSON.parse(data)));
    socket.addEventListener("close", ({ code }) => this.#closed(socket, code));
  }

  #receive(frame) {
    if (frame.type === "data") {
      this.#pause = FIRST_PAUSE;
      this.#handlers.state("live");
    }
    this.#handlers.frame(frame);
  }

  #send() {
    const topics = this.#keys.map((key) => JSON.parse(key));
    this.#socket.send(JSON.stringify({ type: "want", topics }));
  }

  #closed(socket, code) {
    if (this.#socket !== socket) return; // it was replaced by a newer socket, whose pings continue
    clearInterval(this.#ping);
    this.#socket = null;
    this.#isFinal = FINAL_CODES.has(code);
    this.#handlers.state(this.#isFinal ? "ended" : "lost");
    this.#soon(this.#pause * (0.5 + Math.random() / 2));
    this.#pause = Math.min(LONGEST_PAUSE, this.#pause * 2);
  }

  #close() {
    clearTimeout(this.#timer);
    clearInterval(this.#ping);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }
}
