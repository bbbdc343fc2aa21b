/**
 * A WebSocket that stays open: it reconnects with growing pauses, detects a dead connection by
 * unanswered pings, and knows the close codes after which reconnecting is pointless.
 *
 * Events: "state" whenever `state` changes ("connecting", "open", "waiting", "closed"); "frame" with
 * the parsed frame as `detail`; "down" when an open connection is lost.
 */

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;
const PING_EVERY = 20_000;
const PONG_WITHIN = 10_000;

/** Close codes that a new connection would only get again. */
const FINAL = {
  4401: { code: "logged_out", message: "Your session has ended. Log in again." },
  4403: { code: "foreign_origin", message: "The server refuses connections from this address." },
};

export class PlaygroundSocket extends EventTarget {
  state = "connecting";
  reason = null; // {code, message} when closed for good
  retryAt = 0;

  #url;
  #socket = null;
  #failures = 0;
  #retry = null;
  #ping = null;
  #pong = null;
  #refusal = null; // the server's last error that belonged to no request

  constructor(path) {
    super();
    const url = new URL(path, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    this.#url = url.href;
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.retryNow();
    });
  }

  connect() {
    clearTimeout(this.#retry);
    this.#set("connecting");
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    this.#refusal = null;
    socket.addEventListener("open", () => this.#opened(socket));
    socket.addEventListener("message", (event) => this.#received(socket, event.data));
    socket.addEventListener("close", (event) => this.#closed(socket, event));
  }

  /** Send a frame; return whether it was sent, which needs an open connection. */
  send(frame) {
    if (this.state !== "open") return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  /** Reconnect now instead of waiting for the end of the pause. */
  retryNow() {
    if (this.state === "waiting") this.connect();
  }

  #set(state) {
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }

  #opened(socket) {
    if (socket !== this.#socket) return;
    this.#failures = 0;
    this.#ping = setInterval(() => this.#sendPing(), PING_EVERY);
    this.#set("open");
  }

  #received(socket, data) {
    if (socket !== this.#socket) return;
    clearTimeout(this.#pong);
    let frame;
    try {
      frame = JSON.parse(data);
    } catch (error) {
      console.error("A frame that isn't JSON:", error);
      return;
    }
    if (frame.type === "error" && frame.id == null) this.#refusal = frame.error;
    if (frame.type !== "pong") this.dispatchEvent(new CustomEvent("frame", { detail: frame }));
  }

  #sendPing() {
    this.send({ type: "ping" });
    clearTimeout(this.#pong);
    // A dead connection (a suspended laptop, a lost route) may never be closed.
    this.#pong = setTimeout(() => this.#closed(this.#socket, { code: 1006 }), PONG_WITHIN);
  }

  #closed(socket, { code }) {
    if (socket !== this.#socket) return;
    const wasOpen = this.state === "open";
    clearInterval(this.#ping);
    clearTimeout(this.#pong);
    this.#socket = null;
    socket.close();
    // The server may send the reason before it closes, for example that the user has no tenant.
    this.reason = FINAL[code] ? (this.#refusal ?? FINAL[code]) : null;
    if (this.reason) this.#set("closed");
    else this.#waitAndRetry();
    if (wasOpen) this.dispatchEvent(new CustomEvent("down", { detail: { code } }));
  }

  #waitAndRetry() {
    const pause = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** this.#failures);
    const wait = pause * (0.5 + Math.random() / 2); // jitter, so that clients don't reconnect all at once
    this.#failures += 1;
    this.retryAt = Date.now() + wait;
    this.#retry = setTimeout(() => this.connect(), wait);
    this.#set("waiting");
  }
}
