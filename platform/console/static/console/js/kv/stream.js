/** The KV map's socket: selects what to show, forwards frames, and reconnects when the connection is lost. */

const SLOWEST_MS = 15_000;
const FINAL = { 4401: "Log in again.", 4403: "This page may not open the map.", 4404: "This replica is gone." };

export class Stream {
  #path;
  #subscription;
  #on;
  #socket = null;
  #pause = 500;

  /** `subscription`: {replica, tenant}. `on`: {frame(frame), state(word, live)}. */
  constructor(path, subscription, on) {
    this.#path = path;
    this.#subscription = subscription;
    this.#on = on;
    document.addEventListener("visibilitychange", () => this.#followVisibility());
    this.#followVisibility();
  }

  /** While the page is hidden, its replica needn't publish blocks. */
  #followVisibility() {
    if (document.hidden) {
      this.#socket?.close(1000);
      this.#socket = null;
    } else if (!this.#socket) this.#open();
  }

  #open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}${this.#path}`);
    this.#socket = socket;
    socket.addEventListener("open", () => socket.send(JSON.stringify(this.#subscription)));
    socket.addEventListener("message", (event) => {
      this.#pause = 500;
      this.#on.state("Live", true);
      this.#on.frame(JSON.parse(event.data));
    });
    socket.addEventListener("close", (event) => this.#closed(socket, event.code));
  }

  #closed(socket, code) {
    if (socket !== this.#socket) return;
    this.#socket = null;
    this.#on.state(FINAL[code] ?? "Connection lost; trying again", false);
    if (code in FINAL && code !== 4404) return;
    setTimeout(() => this.#followVisibility(), this.#pause * (0.5 + Math.random() / 2));
    this.#pause = Math.min(SLOWEST_MS, this.#pause * 2);
  }
}
